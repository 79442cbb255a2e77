"""What differs between the two directions of a walk: the inner tensors, and what a product computes."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..compiler.sharding.masks import Mask
from ..compiler.sharding.shards import Shards, UnevenShards
from ..compiler.tiles.tiles import Tile
from .buffers import Tensors, sum_dtype
from .kernels import Kernel
from .kernels.accumulate import Accumulator, Softmax, Sum, backward, forward

ALL = slice(None)  # rows
PIECE = 1024  # tokens of a head that are computed at once
FEW = 256  # below so many tokens several heads are computed at once: calls would cost more than what they compute


class Work(abc.ABC):
    """The products of one head chunk in one direction. Every tensor has its tokens on dim 1. "Wide" is fp32, or fp64
    for fp64."""

    def __init__(self, kernel: Kernel, scale: float, q: Tensor) -> None:
        self.kernel, self.scale, self.device, self.dtype = kernel, scale, q.device, q.dtype

    @abc.abstractmethod
    def local(self, kind: str, rows: slice, travels: bool = False) -> Tensors:
        """Some rows of this rank's tensors of an operand. travels: whether they are for a message, which has the fields
        that `compiler.shape` lists."""

    @abc.abstractmethod
    def accumulator(self, kind: str, make: Callable[[], Tensors]) -> Accumulator:
        """An empty accumulator. make: gives the tensors that it has once it must be in accum_dtype."""

    @abc.abstractmethod
    def product(self, q: Tensors, kv: Tensors, q_slot: int, calls: Sequence[Tile], results: list[Accumulator]) -> None:
        """Adds a product to the accumulators. q_slot: the slot of q. calls: the kernel calls of the product."""

    @abc.abstractmethod
    def finish(self, results: list[Accumulator]) -> Tensors:
        """The results in the dtype of q."""

    @abc.abstractmethod
    def empty_results(self) -> dict[str, Tensors]:
        """Uninitialised tensors for what `finish` returns, by kind: for a rank with several blocks."""

    def forget(self, slot: int) -> None:  # noqa: B027
        """Drops what was computed from the unit in a slot, which now gets another unit."""


class Forward(Work):
    """Forward of q (B, n, Hq, D), k and v (B, m, Hkv, D). The result is out as q, and lse (B, n, Hq), in
    accum_dtype."""

    def __init__(self, kernel: Kernel, scale: float, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().__init__(kernel, scale, q)
        self.operands = {"q": (q,), "kv": (k, v)}

    def local(self, kind: str, rows: slice, travels: bool = False) -> Tensors:
        return _take_rows(self.operands[kind], rows)

    def accumulator(self, kind: str, make: Callable[[], Tensors]) -> Accumulator:
        return Softmax(make)

    def product(self, q: Tensors, kv: Tensors, q_slot: int, calls: Sequence[Tile], results: list[Accumulator]) -> None:
        forward(self.kernel, q[0], kv[0], kv[1], calls, self.scale, results[0])

    def finish(self, results: list[Accumulator]) -> Tensors:
        return results[0].finish(self.dtype, None)

    def empty_results(self) -> dict[str, Tensors]:
        (q,) = self.operands["q"]
        return {"out": (q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=sum_dtype(q.dtype)))}


class Backward(Work):
    """Backward of the same, with the output's gradient do and forward's out and lse. The result is dq, dk and dv.

    A query block that travels brings delta = rowsum(do * out), a D-th of out's size (BurstAttention, section 3.1).
    Kernels read out, so for a block that has travelled or was gathered `out_with_rowsum` makes one from delta. For own
    tensors the true out is used, unless delta (B, n, H) is given in its place.
    """

    def __init__(
        self, kernel: Kernel, scale: float, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        super().__init__(kernel, scale, q)
        self.q, self.kv, self.do, self.lse = q, (k, v), do, lse
        self.out, self.out_of_slot = out, dict[int, Tensor]()  # out_of_slot: the out of the q in a slot

    def local(self, kind: str, rows: slice, travels: bool = False) -> Tensors:
        if kind == "kv":
            return _take_rows(self.kv, rows)
        q, do, lse, out = _take_rows((self.q, self.do, self.lse, self.out), rows)
        return q, do, lse, rowsum(do, out, lse.dtype) if travels and out.dim() == q.dim() else out

    def accumulator(self, kind: str, make: Callable[[], Tensors]) -> Accumulator:
        return Sum(make)

    def product(self, q: Tensors, kv: Tensors, q_slot: int, calls: Sequence[Tile], results: list[Accumulator]) -> None:
        if q_slot not in self.out_of_slot:
            self.out_of_slot[q_slot] = q[3] if q[3].dim() == q[1].dim() else out_with_rowsum(q[1], q[3])
        dq, dkv = results
        backward(self.kernel, q[1], q[0], kv[0], kv[1], self.out_of_slot[q_slot], q[2], calls, self.scale, dq, dkv)

    def forget(self, slot: int) -> None:
        self.out_of_slot.pop(slot, None)

    def finish(self, results: list[Accumulator]) -> Tensors:
        dq, dkv = results
        return *dq.finish(self.dtype), *dkv.finish(self.dtype, self.dtype)

    def empty_results(self) -> dict[str, Tensors]:
        return {"dq": (self.q.new_empty(self.q.shape),), "dkv": tuple(x.new_empty(x.shape) for x in self.kv)}


def _take_rows(tensors: Tensors, rows: slice) -> Tensors:
    return tensors if rows == ALL else tuple(x[:, rows] for x in tensors)


def rowsum(do: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """delta (B, n, H): the sum of do * out over head_dim, in `dtype`. It goes piece by piece, so that no whole tensor
    is copied to that dtype."""
    if do[0].numel() <= PIECE * do.shape[3]:
        return (do.to(dtype) * out).sum(-1)
    delta = do.new_empty(do.shape[:3], dtype=dtype)
    for piece in _pieces(do):
        delta[piece] = (do[piece].to(dtype) * out[piece]).sum(-1)
    return delta


def out_with_rowsum(do: Tensor, delta: Tensor) -> Tensor:
    """A tensor whose rowsum with do is delta, to stand for out: do * delta / |do|^2, and 0 where do is 0.

    That rowsum is all that a backward kernel computes from out. do is divided by its row's maximum first, since |do|^2
    underflows in fp32. do (B, n, H, D), delta (B, n, H) in accum_dtype; returns do's dtype.
    """
    if do[0].numel() <= PIECE * do.shape[3]:
        return _out_with_rowsum(do, delta).to(do.dtype)
    out = torch.empty_like(do)
    for piece in _pieces(do):
        out[piece] = _out_with_rowsum(do[piece], delta[piece])
    return out


def _pieces(x: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Indices that cut x (B, n, H, ...) into some tokens of one head, or of several heads where tokens are few."""
    heads = max(1, FEW // max(1, x.shape[1]))
    for start in range(0, x.shape[1], PIECE):
        for head in range(0, x.shape[2], heads):
            yield slice(None), slice(start, start + PIECE), slice(head, head + heads)


def _out_with_rowsum(do: Tensor, delta: Tensor) -> Tensor:
    top = torch.linalg.vector_norm(do, torch.inf, -1, keepdim=True, dtype=delta.dtype)
    top = torch.where(top > 0, top, 1.0)
    unit = do / top  # its greatest element is 1, or all are 0
    square = unit.square().sum(-1, keepdim=True).clamp_min_(1.0)
    return unit.mul_(delta[..., None].div(top).div_(square))


# ---- the common part of keys
#
# A bias of the keys (Qwen2) adds the same q . c to every score of a row, and to its lse. A merge weighs a block's out
# by exp(lse_b - lse), where the kernel has rounded lse_b by up to |lse| / 2^24. Backward computes p = exp(s - lse) from
# the scores. So a block b of keys has the weight W_b there, the sum of its p, and W_b (1 + e_b) in out, with e_b up to
# that rounding. Then delta = do . out is not the mean of dp by p, and a row of ds = p (dp - delta) sums to about
# -sum_b W_b e_b (do . out_b) in place of 0; dq = ds K has c times that. (One call for whole rows has no such error: a
# rounded lse scales its row of p, and with it a sum that is 0.)
#
# No merge can know e_b: kernels return nothing else of lse_b. But softmax does not change where one number is taken off
# all scores of a row. So all ranks take the same c off their keys, in fp32: an lse of K - c is without q . c. Out, dk
# and dv stay what they are, and so does dq = ds (K - c), since rows of ds sum to 0. Beside a sink they sum to its
# weight times delta, so backward adds c times that. A softcap bounds scores: nothing is taken off.
#
# Only elements of head_dim count in which the keys' mean is greater than their spread. So keys without a bias stay as
# they are, bit by bit. After RoPE these are the elements that turn slowly.


def takes_common_off(dtype: torch.dtype, softcap: float, cp_ranks: int, mask: Mask, shards: Shards | None) -> bool:
    """Whether a common part is taken off: in fp32, where results of a row may be merged. They are among several inner
    ranks, and where a product has several tiles. The same on all ranks."""
    whole = cp_ranks == 1 and mask.scale_free and not isinstance(shards, UnevenShards)
    return dtype == torch.float32 and not softcap and not whole


def moments(k: Tensor) -> Tensor:
    """Of each head and element of a rank's keys (B, n, H, D): sums, sums of squares, and how many there are, in one
    dimension."""
    count = k.new_full((1,), k.shape[0] * k.shape[1])
    squares = torch.linalg.vector_norm(k, dim=(0, 1)).square()
    return torch.cat([k.sum((0, 1)).flatten(), squares.flatten(), count])


def common_part(parts: Tensor, heads: int) -> Tensor:
    """The common part (H, D) of the keys of all ranks. parts (ranks, elements): the `moments` of each, in one order on
    all ranks, so that all get the same bits. It is 0 in elements whose mean is at most their standard deviation, and
    where a key is not finite."""
    *sums, count = parts.sum(0).split([parts.shape[1] // 2, parts.shape[1] // 2, 1])
    total, squares = (x.view(heads, -1) for x in sums)
    return torch.where(2 * total.square() > count * squares, total / count, 0.0)


def of_query_heads(common: Tensor, heads: int) -> Tensor:
    """The common part (H, D) of key heads for each of `heads` query heads, (heads, D)."""
    return common.repeat_interleave(heads // common.shape[0], dim=0)


def offsets(q: Tensor, common: Tensor, scale: float) -> Tensor:
    """What the common part (Hkv, D) adds to the scores of each row of q (B, n, Hq, D), and to its lse: (B, n, Hq)."""
    return torch.einsum("bnhd,hd->bnh", q, of_query_heads(common, q.shape[2]) * scale)
