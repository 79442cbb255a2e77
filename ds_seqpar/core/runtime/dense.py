"""The differences between forward and backward of a walk: the inner tensors, and the computation of a product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..compiler.tiles.tiles import Tile
from .buffers import Tensors, sum_dtype
from .kernels import Kernel
from .kernels.accumulate import AT_ONCE, Accumulator, Softmax, Sum, backward, forward, fused

ALL = slice(None)  # rows
PIECE = 1024  # tokens of a head that a CPU computes at once
FEW = 256  # for fewer tokens several heads are computed at once: a call for each would cost more than its computation


class Operands(NamedTuple):
    """The operands of a head chunk, in both directions."""

    kernel: Kernel
    scale: float
    q: Tensor  # (B, n, Hq, D)
    kv: Tensors  # the operator's tensors of keys, (B, m, Hkv, width)
    parameters: Sequence[Tensor] = ()  # the operator's, of these heads
    v_dim: int = 0  # the width of out, which may have zeros behind it


class Forward:
    """The products of one head chunk: forward of q (B, n, Hq, D), k and v (B, m, Hkv, D). Tensors have their tokens on
    dim 1. The results are out, like q, and lse (B, n, Hq) in accum_dtype."""

    def __init__(self, operands: Operands) -> None:
        self.kernel, self.scale, self.q, self.kv, *_ = operands
        self.device, self.dtype = self.q.device, self.q.dtype

    def local(self, kind: str, rows: slice, for_message: bool = False) -> Tensors:
        """Return some rows of this rank's tensors of an operand.

        Args:
            kind: The operand, "q" or "kv".
            rows: Rows of the tensors, `ALL` for all.
            for_message: Whether they are sent. A message has the fields listed in `compiler.program.shape`.
        """
        return _take_rows(self.kv if kind == "kv" else (self.q,), rows)

    def accumulator(self, kind: str, make: Callable[[], Tensors]) -> Accumulator:
        """Return an empty accumulator.

        Args:
            kind: The kind of result.
            make: Returns the tensors that the accumulator uses once it must be in accum_dtype.
        """
        return Softmax(make)

    def product(
        self, q: Tensors, kv: Tensors, q_slot: int, launches: Sequence[Tile], results: list[Accumulator]
    ) -> None:
        """Add a product to the accumulators.

        Args:
            q: The tensors of the query operand.
            kv: The tensors of the key/value operand.
            q_slot: The slot of `q`.
            launches: The kernel launches of the product.
            results: The accumulators.
        """
        forward(self.kernel, q[0], kv[0], kv[1], launches, self.scale, results[0])

    def finish(self, results: list[Accumulator]) -> Tensors:
        """Return the results in the dtype of q."""
        return results[0].finish(self.dtype, None)

    def empty_results(self) -> dict[str, Tensors]:
        """Return uninitialized tensors for the results of `finish`, by kind, on a rank with several blocks."""
        out, lse = self.q.shape, self.q.shape[:-1]
        return {"out": (self.q.new_empty(out), self.q.new_empty(lse, dtype=sum_dtype(self.dtype)))}

    def forget(self, slot: int) -> None:
        """Drop values computed from the unit in a slot, which now receives another unit."""


class Backward(Forward):
    """Backward of `Forward`, given the output's gradient do and forward's out and lse. The results are dq, dk and dv.

    A query block that is sent has delta = rowsum(do * out) instead of out, which is 1/D of out's size (BurstAttention,
    section 3.1). Kernels read out, so for a block that was received or gathered `out_with_rowsum` makes one from delta.
    For local tensors the true out is used, unless `out` is delta (B, n, H).
    """

    def __init__(self, operands: Operands, do: Tensor, out: Tensor, lse: Tensor) -> None:
        super().__init__(operands)
        self.do, self.out, self.lse = do, out, lse
        self.out_of_slot = dict[int, Tensor]()  # the out of the q in a slot

    def local(self, kind: str, rows: slice, for_message: bool = False) -> Tensors:
        if kind == "kv":
            return _take_rows(self.kv, rows)
        q, do, lse, out = _take_rows((self.q, self.do, self.lse, self.out), rows)
        return q, do, lse, rowsum(do, out, lse.dtype) if for_message and not is_delta(out) else out

    def accumulator(self, kind: str, make: Callable[[], Tensors]) -> Accumulator:
        return Sum(make)

    def product(
        self, q: Tensors, kv: Tensors, q_slot: int, launches: Sequence[Tile], results: list[Accumulator]
    ) -> None:
        if q_slot not in self.out_of_slot:
            self.out_of_slot[q_slot] = out_with_rowsum(q[1], q[3]) if is_delta(q[3]) else q[3]
        dq, dkv = results
        backward(self.kernel, q[1], q[0], kv[0], kv[1], self.out_of_slot[q_slot], q[2], launches, self.scale, dq, dkv)

    def forget(self, slot: int) -> None:
        self.out_of_slot.pop(slot, None)

    def parameter_gradients(self) -> Tensors:
        """Return the gradients of the operator's parameters, once all products are computed."""
        return ()

    def finish(self, results: list[Accumulator]) -> Tensors:
        dq, dkv = results
        return *dq.finish(self.dtype), *dkv.finish(*[self.dtype] * len(self.kv))

    def empty_results(self) -> dict[str, Tensors]:
        return {"dq": (self.q.new_empty(self.q.shape),), "dkv": tuple(x.new_empty(x.shape) for x in self.kv)}


def _take_rows(tensors: Tensors, rows: slice) -> Tensors:
    return tensors if rows == ALL else tuple(x[:, rows] for x in tensors)


def is_delta(out: Tensor) -> bool:
    """Return whether this is delta (B, n, H) instead of out (B, n, H, D)."""
    return out.dim() == 3


def rowsum(do: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Return delta (B, n, H), the sum of do * out over head_dim, in `dtype`. Torch computes it piece by piece, so that
    no whole tensor is copied to that dtype."""
    if ops := fused(do):
        return ops.rowsum(do, out)
    pieces = _pieces(do)
    if pieces is None:
        return (do.to(dtype) * out).sum(-1)
    delta = do.new_empty(do.shape[:3], dtype=dtype)
    for piece in pieces:
        delta[piece] = (do[piece].to(dtype) * out[piece]).sum(-1)
    return delta


def out_with_rowsum(do: Tensor, delta: Tensor) -> Tensor:
    """Return a substitute for out whose rowsum with do is delta: do * delta / |do|^2, and 0 where do is 0. A backward
    kernel computes nothing but this rowsum from out. do is divided by its row's maximum first, since |do|^2 underflows
    in fp32.

    Args:
        do: (B, n, H, D).
        delta: (B, n, H) in accum_dtype.

    Returns:
        (B, n, H, D) in do's dtype.
    """
    if ops := fused(do):
        return ops.out_with_rowsum(do, delta)
    pieces = _pieces(do)
    if pieces is None:
        return _out_with_rowsum(do, delta).to(do.dtype)
    out = torch.empty_like(do)
    for piece in pieces:
        out[piece] = _out_with_rowsum(do[piece], delta[piece])
    return out


def _pieces(x: Tensor) -> Iterator[tuple[slice, ...]] | None:
    """Return indices that cut x (B, n, H, D) into pieces to compute at once; None if that is all of x. A piece has
    tokens of one head on a CPU, or of several heads if there are few tokens, and tokens of all heads on a device.
    """
    batch, tokens, heads, width = x.shape
    if not x.is_cpu:
        if x.numel() <= AT_ONCE:
            return None
        size, at_once = max(1, AT_ONCE // (batch * heads * width)), heads
    else:
        if tokens * heads <= PIECE:
            return None
        size, at_once = PIECE, max(1, FEW // max(1, tokens))
    return (
        (slice(None), slice(start, start + size), slice(head, head + at_once))
        for start in range(0, tokens, size)
        for head in range(0, heads, at_once)
    )


def _out_with_rowsum(do: Tensor, delta: Tensor) -> Tensor:
    maximum = torch.linalg.vector_norm(do, torch.inf, -1, keepdim=True, dtype=delta.dtype)
    maximum = torch.where(maximum > 0, maximum, 1.0)
    unit = do / maximum  # its greatest element is 1, or all are 0
    square = unit.square().sum(-1, keepdim=True).clamp_min_(1.0)
    return unit.mul_(delta[..., None].div(maximum).div_(square))


# ---- the common part of keys
#
# A bias of the keys (Qwen2) adds the same q . c to every score of a row, and to its lse. A merge weights a block's out
# by exp(lse_b - lse), where the kernel has rounded lse_b by up to |lse| / 2^24. Backward computes p = exp(s - lse) from
# the scores. So a block b of keys has the weight W_b there, the sum of its p, and W_b (1 + e_b) in out, with e_b up to
# that rounding. Then delta = do . out is not the mean of dp by p, and a row of ds = p (dp - delta) sums to about
# -sum_b W_b e_b (do . out_b) in place of 0; dq = ds K has c times that. (One call for whole rows has no such error: a
# rounded lse scales its row of p, and with it a sum that is 0.)
#
# No merge can compute e_b, since kernels return no more digits of lse_b. But softmax does not change if one number is
# subtracted from all scores of a row. So all ranks subtract the same c from their keys, in fp32: the lse of K - c is
# without q . c. Out, dk and dv stay the same, and so does dq = ds (K - c), since rows of ds sum to 0. With a sink they
# sum to its weight times delta, so backward adds c times that. A softcap bounds scores, so nothing is subtracted.
#
# Only those elements of head_dim are subtracted in which the keys' mean is greater than their standard deviation. So
# keys without a bias stay the same, bit by bit. After RoPE these are the elements that rotate slowly.


def moments(k: Tensor) -> Tensor:
    """Return the moments of a rank's keys (B, n, H, D), as one vector (2 * H * D + 1,): the sum for each head and
    element of head_dim, then the sums of squares, then the number B * n of keys.
    """
    count = k.new_full((1,), k.shape[0] * k.shape[1])
    squares = torch.linalg.vector_norm(k, dim=(0, 1)).square()
    return torch.cat([k.sum((0, 1)).flatten(), squares.flatten(), count])


def common_part(moments_of_ranks: Tensor, heads: int) -> Tensor:
    """Return the common part (H, D) of the keys of all ranks.

    It is 0 in elements whose mean is at most their standard deviation, and where a key is not finite.

    Args:
        moments_of_ranks: (ranks, 2 * H * D + 1), the `moments` of each rank, in the same order on all ranks, so that
            the result is bitwise the same.
        heads: H, the number of key/value heads.
    """
    *sums, count = moments_of_ranks.sum(0).split([moments_of_ranks.shape[1] // 2, moments_of_ranks.shape[1] // 2, 1])
    total, squares = (x.view(heads, -1) for x in sums)
    return torch.where(2 * total.square() > count * squares, total / count, 0.0)


def of_query_heads(common: Tensor, heads: int) -> Tensor:
    """Repeat the common part (H, D) of key/value heads for each of `heads` query heads: (heads, D)."""
    return common.repeat_interleave(heads // common.shape[0], dim=0)


def offsets(q: Tensor, common: Tensor, scale: float) -> Tensor:
    """Return what the common part (Hkv, D) adds to each row's scores and lse, for q (B, n, Hq, D), as (B, n, Hq)."""
    return torch.einsum("bnhd,hd->bnh", q, of_query_heads(common, q.shape[2]) * scale)
