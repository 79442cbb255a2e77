"""What differs between the two directions of a walk: the caller's own tensors, and what a product is."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..compiler.tiles import Tile
from .buffers import Tensors, wide
from .kernels import Kernel
from .kernels.accumulate import Running, Softmax, Sum, backward, forward

PIECE = 1024  # tokens of a head
ALL = slice(None)  # rows
FEW = 256  # tokens of a head for which others are taken with it: calls would cost more than what they compute


class Work(abc.ABC):
    """Every tensor has its tokens on dim 1."""

    def __init__(self, kernel: Kernel, scale: float, q: Tensor) -> None:
        self.kernel, self.scale, self.device, self.dtype = kernel, scale, q.device, q.dtype

    @abc.abstractmethod
    def own(self, kind: str, rows: slice, travels: bool = False) -> Tensors:
        """Some rows of the caller's tensors of an operand; travels: all its fields in `compiler.shape`, as a message
        has them."""

    @abc.abstractmethod
    def running(self, kind: str, make: Callable[[], Tensors]) -> Running:
        """An empty running result. make: gives the tensors that it has once it must be wide."""

    @abc.abstractmethod
    def product(self, q: Tensors, kv: Tensors, q_slot: int, calls: Sequence[Tile], results: list[Running]) -> None:
        """Adds a product to the running results. q_slot: where q is."""

    @abc.abstractmethod
    def finish(self, results: list[Running]) -> Tensors:
        """The results in the dtype of q."""

    @abc.abstractmethod
    def whole(self) -> dict[str, Tensors]:
        """What `finish` returns, uninitialised, by kind: for results of several blocks."""

    def forget(self, slot: int) -> None:  # noqa: B027
        """Gives up what was made of the unit in a slot, which now gets another."""


class Forward(Work):
    """q (B, n, Hq, D), k and v (B, m, Hkv, D). Ends with (out as q, lse (B, n, Hq) wide)."""

    def __init__(self, kernel: Kernel, scale: float, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().__init__(kernel, scale, q)
        self.operands = {"q": (q,), "kv": (k, v)}

    def own(self, kind: str, rows: slice, travels: bool = False) -> Tensors:
        return _cut(self.operands[kind], rows)

    def running(self, kind: str, make: Callable[[], Tensors]) -> Running:
        return Softmax(make)

    def product(self, q: Tensors, kv: Tensors, q_slot: int, calls: Sequence[Tile], results: list[Running]) -> None:
        forward(self.kernel, q[0], kv[0], kv[1], calls, self.scale, results[0])

    def finish(self, results: list[Running]) -> Tensors:
        return results[0].finish(self.dtype, None)

    def whole(self) -> dict[str, Tensors]:
        (q,) = self.operands["q"]
        return {"out": (q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=wide(q.dtype)))}


class Backward(Work):
    """The same with the output's gradient do, and what forward gave: out, lse. Ends with (dq, dk, dv).

    A query block that travels brings delta = rowsum(do * out), a D-th of out's size (BurstAttention, section 3.1).
    Kernels want out, so one is made from delta for a block that has travelled or was gathered. For the caller's own
    tensors the true out is used, unless they come with delta (B, n, H) in its place.
    """

    def __init__(
        self, kernel: Kernel, scale: float, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        super().__init__(kernel, scale, q)
        self.q, self.kv, self.do, self.lse = q, (k, v), do, lse
        self.out, self.outs = out, dict[int, Tensor]()  # outs: by slot

    def own(self, kind: str, rows: slice, travels: bool = False) -> Tensors:
        if kind == "kv":
            return _cut(self.kv, rows)
        q, do, lse, out = _cut((self.q, self.do, self.lse, self.out), rows)
        return q, do, lse, rowsum(do, out, lse.dtype) if travels and out.dim() == q.dim() else out

    def running(self, kind: str, make: Callable[[], Tensors]) -> Running:
        return Sum(make)

    def product(self, q: Tensors, kv: Tensors, q_slot: int, calls: Sequence[Tile], results: list[Running]) -> None:
        if q_slot not in self.outs:
            self.outs[q_slot] = q[3] if q[3].dim() == q[1].dim() else project(q[1], q[3])
        dq, dkv = results
        backward(self.kernel, q[1], q[0], kv[0], kv[1], self.outs[q_slot], q[2], calls, self.scale, dq, dkv)

    def forget(self, slot: int) -> None:
        self.outs.pop(slot, None)

    def finish(self, results: list[Running]) -> Tensors:
        dq, dkv = results
        return *dq.finish(self.dtype), *dkv.finish(self.dtype, self.dtype)

    def whole(self) -> dict[str, Tensors]:
        return {"dq": (self.q.new_empty(self.q.shape),), "dkv": tuple(x.new_empty(x.shape) for x in self.kv)}


def _cut(tensors: Tensors, rows: slice) -> Tensors:
    return tensors if rows == ALL else tuple(x[:, rows] for x in tensors)


def rowsum(do: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """delta (B, n, H): the sum of do * out over head_dim, in `dtype`; piece by piece, without a wide copy of both."""
    if do[0].numel() <= PIECE * do.shape[3]:
        return (do.to(dtype) * out).sum(-1)
    found = do.new_empty(do.shape[:3], dtype=dtype)
    for piece in _pieces(do):
        found[piece] = (do[piece].to(dtype) * out[piece]).sum(-1)
    return found


def project(do: Tensor, delta: Tensor) -> Tensor:
    """An output whose rowsum with do is delta: do * delta / |do|^2, and 0 where do is 0.

    That rowsum is all that a backward kernel reads of out. do is divided by its row's maximum first, since |do|^2
    underflows in fp32. do (B, n, H, D), delta (B, n, H) wide; returns do's dtype.
    """
    if do[0].numel() <= PIECE * do.shape[3]:
        return _project(do, delta).to(do.dtype)
    found = torch.empty_like(do)
    for piece in _pieces(do):
        found[piece] = _project(do[piece], delta[piece])
    return found


def _pieces(x: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Of (B, n, H, ...): some tokens of a head at a time, or of several heads where tokens are few."""
    together = max(1, FEW // max(1, x.shape[1]))
    for start in range(0, x.shape[1], PIECE):
        for head in range(0, x.shape[2], together):
            yield slice(None), slice(start, start + PIECE), slice(head, head + together)


def _project(do: Tensor, delta: Tensor) -> Tensor:
    top = torch.linalg.vector_norm(do, torch.inf, -1, keepdim=True, dtype=delta.dtype)
    top = torch.where(top > 0, top, 1.0)
    unit = do / top  # its greatest element is 1, or all are 0
    square = unit.square().sum(-1, keepdim=True).clamp_min_(1.0)
    return unit.mul_(delta[..., None].div(top).div_(square))
