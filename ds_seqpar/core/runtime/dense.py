"""The tensors and computations that differ between the forward and backward passes."""

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
PIECE = 1024  # number of tokens of a head that a CPU processes at once
FEW = 256  # below this number of tokens, several heads are processed at once to amortize the overhead of a call


class Operands(NamedTuple):
    """A head chunk's operands, in both directions."""

    kernel: Kernel
    scale: float
    q: Tensor  # (B, n, Hq, D)
    kv: Tensors  # the operator's key/value tensors, (B, m, Hkv, width)
    parameters: Sequence[Tensor] = ()  # the operator's parameters for these heads
    v_dim: int = 0  # width of out without zero padding


class Forward:
    """The forward products for one head chunk, computed from q (B, n, Hq, D) and from k and v (B, m, Hkv, D).

    The token dimension of all tensors is dim 1. The results are out, shaped like q, and lse (B, n, Hq) in accum_dtype.
    """

    def __init__(self, operands: Operands) -> None:
        self.kernel, self.scale, self.q, self.kv, *_ = operands
        self.device, self.dtype = self.q.device, self.q.dtype

    def local(self, kind: str, rows: slice, for_message: bool = False) -> Tensors:
        """Return the given rows of this rank's tensors for an operand.

        Args:
            kind: The operand, "q" or "kv".
            rows: Rows of the tensors; `ALL` for all rows.
            for_message: Whether the tensors are sent. A message has the fields listed in `compiler.program.shape`.
        """
        return _take_rows(self.kv if kind == "kv" else (self.q,), rows)

    def accumulator(self, kind: str, make: Callable[[], Tensors]) -> Accumulator:
        """Return an empty accumulator.

        Args:
            kind: The kind of result.
            make: Function that returns tensors for results in accum_dtype. `make` is called when the tensors are first
                needed.
        """
        return Softmax(make)

    def product(
        self, q: Tensors, kv: Tensors, q_slot: int, launches: Sequence[Tile], results: list[Accumulator]
    ) -> None:
        """Add a product to the accumulators.

        Args:
            q: Tensors of the query operand.
            kv: Tensors of the key/value operand.
            q_slot: Slot of `q`.
            launches: Kernel launches of the product.
            results: The accumulators.
        """
        forward(self.kernel, q[0], kv[0], kv[1], launches, self.scale, results[0])

    def finish(self, results: list[Accumulator]) -> Tensors:
        """Return the results in the dtype of q."""
        return results[0].finish(self.dtype, None)

    def empty_results(self) -> dict[str, Tensors]:
        """Return uninitialized tensors for the results of `finish`, by kind. Ranks with several blocks use these
        tensors.
        """
        out, lse = self.q.shape, self.q.shape[:-1]
        return {"out": (self.q.new_empty(out), self.q.new_empty(lse, dtype=sum_dtype(self.dtype)))}

    def forget(self, slot: int) -> None:
        """Drop the values computed from a slot's unit, before the slot receives another unit."""


class Backward(Forward):
    """The backward pass of `Forward`, given the output's gradient `do` and the forward results out and lse. The results
    are dq, dk and dv.

    A query block is sent with delta = rowsum(do * out) instead of out, because delta has 1/D of out's size
    (BurstAttention, section 3.1). Kernels need `out`, so `out_with_rowsum` computes a substitute from a received or
    gathered block's delta. Local tensors use the true `out`, unless `out` is delta (B, n, H).
    """

    def __init__(self, operands: Operands, do: Tensor, out: Tensor, lse: Tensor) -> None:
        super().__init__(operands)
        self.do, self.out, self.lse = do, out, lse
        self.out_of_slot = dict[int, Tensor]()  # maps a slot to the out of the query block in the slot

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
        """Return the gradients of the operator's parameters after all products have been computed."""
        return ()

    def finish(self, results: list[Accumulator]) -> Tensors:
        dq, dkv = results
        return *dq.finish(self.dtype), *dkv.finish(*[self.dtype] * len(self.kv))

    def empty_results(self) -> dict[str, Tensors]:
        return {"dq": (self.q.new_empty(self.q.shape),), "dkv": tuple(x.new_empty(x.shape) for x in self.kv)}


def _take_rows(tensors: Tensors, rows: slice) -> Tensors:
    return tensors if rows == ALL else tuple(x[:, rows] for x in tensors)


def is_delta(out: Tensor) -> bool:
    """Return whether `out` is delta (B, n, H) instead of out (B, n, H, D)."""
    return out.dim() == 3


def rowsum(do: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Return delta (B, n, H), the sum of `do * out` over head_dim, in `dtype`.

    Without a fused op, the sum is computed piece by piece, so that no whole tensor is copied to `dtype`.
    """
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
    """Return a substitute for `out` that has the same rowsum: `do * delta / |do|^2`, or 0 in rows in which `do` is 0.

    A backward kernel uses `out` only to compute the rowsum of `do * out`. Each row of `do` is first divided by its
    maximum, since `|do|^2` can underflow in fp32.

    Args:
        do: (B, n, H, D).
        delta: (B, n, H) in accum_dtype.

    Returns:
        (B, n, H, D) in the dtype of `do`.
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
    """Return indices that split x (B, n, H, D) into pieces to process one at a time, or None if no split is needed.

    On a CPU, a piece contains tokens for one head, or for several heads if there are few tokens. On a device, a piece
    contains tokens for all heads.
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
    unit = do / maximum  # the maximum of |unit| is 1, or 0 if do is 0
    square = unit.square().sum(-1, keepdim=True).clamp_min_(1.0)
    return unit.mul_(delta[..., None].div(maximum).div_(square))


# ---- the common part of keys  A key bias c (Qwen2) adds the same q . c to every score of a row, and to the row's lse.
# A merge weights a block's out by exp(lse_b - lse), where the kernel has rounded lse_b by up to |lse| / 2^24. Backward
# computes p = exp(s - lse) from the scores. In backward, a block b of keys therefore has the weight W_b, the sum of its
# p. In out, the block has the weight W_b (1 + e_b), where |e_b| is at most the rounding error. As a result, delta = do
# . out is not the mean of dp weighted by p, and a row of ds = p (dp - delta) sums to about -sum_b W_b e_b (do . out_b)
# instead of 0. The error of dq = ds K is c times this sum. (A single call for whole rows has no such error: a rounded
# lse only scales a row of p, so the row of ds still sums to 0.)  No merge can compute e_b, since kernels do not return
# more digits of lse_b. But softmax does not change if the same number is subtracted from all scores of a row. All ranks
# therefore subtract the same c from their keys in fp32, so that the lse of K - c does not contain q . c. The tensors
# out, dk and dv do not change, and neither does dq = ds (K - c), since rows of ds sum to 0. With a sink, a row of ds
# sums to the sink's weight times delta, so backward adds c times this sum to dq. With a softcap, scores are bounded, so
# nothing is subtracted.  The subtraction covers only elements of head_dim in which the keys' absolute mean exceeds
# their standard deviation, so keys without a bias stay bitwise unchanged. After RoPE, the subtracted elements are those
# that rotate slowly.


def moments(k: Tensor) -> Tensor:
    """Return the moments of a rank's keys (B, n, H, D) as a vector (2 * H * D + 1,).

    The vector contains the sums over keys for all heads and elements of head_dim, followed by the sums of squares and
    the number B * n of keys.
    """
    count = k.new_full((1,), k.shape[0] * k.shape[1])
    squares = torch.linalg.vector_norm(k, dim=(0, 1)).square()
    return torch.cat([k.sum((0, 1)).flatten(), squares.flatten(), count])


def common_part(moments_of_ranks: Tensor, heads: int) -> Tensor:
    """Return the common part (H, D) of the keys of all ranks.

    The common part is 0 for elements whose absolute mean is at most their standard deviation, and for elements in which
    some key is not finite.

    Args:
        moments_of_ranks: The `moments` of each rank, as (ranks, 2 * H * D + 1). The order is the same on all ranks, so
            the result is bitwise identical on all ranks.
        heads: Number H of key/value heads.
    """
    *sums, count = moments_of_ranks.sum(0).split([moments_of_ranks.shape[1] // 2, moments_of_ranks.shape[1] // 2, 1])
    total, squares = (x.view(heads, -1) for x in sums)
    return torch.where(2 * total.square() > count * squares, total / count, 0.0)


def of_query_heads(common: Tensor, heads: int) -> Tensor:
    """Repeat the common part (H, D) of key/value heads for their query heads, and return (heads, D)."""
    return common.repeat_interleave(heads // common.shape[0], dim=0)


def offsets(q: Tensor, common: Tensor, scale: float) -> Tensor:
    """Return the amount (B, n, Hq) by which the common part (Hkv, D) shifts each row's scores and lse, for q (B, n, Hq,
    D).
    """
    return torch.einsum("bnhd,hd->bnh", q, of_query_heads(common, q.shape[2]) * scale)
