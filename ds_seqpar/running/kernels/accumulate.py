"""Kernels that know one block, made to run tiles of all kinds into running results.

A running result is empty; or narrow: the kernel's own tensors, adopted as they came; or wide (fp32, fp64 for fp64) once
a second result is added to it. Every tensor has its tokens on dim 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...planning.tiles import Tile
from ..merge import in_pieces, merge_
from .base import Kernel

Tensors = tuple[Tensor, ...]
INF = float("inf")


class Rows(NamedTuple):
    """`count` groups of `size` neighbouring tokens, the first token of each `step` after that of the one before."""

    start: int
    size: int
    count: int = 1
    step: int = 0

    def of(self, x: Tensor) -> Tensor:
        """A view: (B, n, ...) -> (B, size, ...), or (B, count, size, ...) for several groups."""
        if self.count == 1:
            return x.narrow(1, self.start, self.size)
        held = x.narrow(1, self.start, self.step * (self.count - 1) + self.size)
        return held.unfold(1, self.size, self.step).movedim(-1, 2)

    def all_of(self, tokens: int) -> bool:
        return self.size * self.count == tokens


class _Running:
    """What the running results have in common: tensors that `make` makes wide and that start as `blank`."""

    blank: tuple[float, ...] = ()

    def __init__(self, make: Callable[[], Tensors]) -> None:
        self._make = make
        self._held: Tensors | None = None

    @property
    def held(self) -> Tensors | None:
        """The tensors as they are now; None while empty."""
        return self._held

    def _combine(self, into: Tensors, new: Tensors) -> None:
        raise NotImplementedError

    def _blank(self, index: int) -> float:
        return self.blank[index] if self.blank else 0.0

    def _wide(self, tensors: Tensors) -> bool:
        return tensors[0].dtype in (torch.float32, torch.float64)

    def _add(self, new: Tensors, rows: Rows, of: int) -> None:
        if self._held is None:
            self._begin(new, rows, of)
        else:
            self._widen()
            self._combine(tuple(map(rows.of, self._held)), new)

    def _begin(self, new: Tensors, rows: Rows, of: int) -> None:
        if rows.all_of(of):
            self._held = new if rows.count == 1 else tuple(x.flatten(1, 2) for x in new)
            return
        self._held = self._make()
        for index, (x, part) in enumerate(zip(self._held, new, strict=True)):
            if rows.count == 1:
                end = rows.start + rows.size
                x.narrow(1, 0, rows.start).fill_(self._blank(index))
                x.narrow(1, end, of - end).fill_(self._blank(index))
            else:
                x.fill_(self._blank(index))
            rows.of(x).copy_(part)

    def _widen(self) -> None:
        if not self._wide(self._held):
            wide = self._make()
            for x, narrow in zip(wide, self._held, strict=True):
                x.copy_(narrow)
            self._held = wide

    def _absorb(self, new: Tensors) -> None:
        if self._held is None:
            self._held = new
        elif self._wide(new) and not self._wide(self._held):
            self._combine(new, self._held)
            self._held = new
        else:
            self._widen()
            self._combine(self._held, new)

    def _finish(self, dtypes: Iterator[torch.dtype | None]) -> Tensors:
        if self._held is None:
            self._held = self._make()
            for index, x in enumerate(self._held):
                x.fill_(self._blank(index))
        held, self._held = list(self._held), None
        return tuple(_contiguous(held.pop(0), next(dtypes)) for _ in range(len(held)))  # each freed before the next


class Softmax(_Running):
    """The running (out, lse) of one block of queries.

    make: gives uninitialised wide buffers, out (B, n, H, D) and lse (B, n, H); called once, and only where they are
    needed. lse is always wide, out may be in any dtype.
    """

    blank = (0.0, -INF)

    def add(self, out: Tensor, lse: Tensor, rows: Rows, of: int) -> None:
        """What a kernel found for those rows of `of`: out (B, size, H, D) and lse (B, size, H), or with a dimension
        `count` before `size`. Kept as it is where it is the first and for all rows; it may be changed."""
        self._add((out, lse), rows, of)

    def absorb(self, out: Tensor, lse: Tensor) -> None:
        """Another rank's partial result for all rows, given away: it may be kept, and changed."""
        self._absorb((out, lse))

    def finish(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out in that dtype, lse), both contiguous, and lets go of them. A row that nothing has touched is 0, -inf."""
        out, lse = self._finish(iter((dtype, None)))
        return out, lse

    def _combine(self, into: Tensors, new: Tensors) -> None:
        merge_(*into, *new)


class Sum(_Running):
    """The running gradients of one block: (dq,), or (dk, dv). make: gives uninitialised wide buffers for them."""

    def add(self, grads: Tensors, rows: Rows, of: int) -> None:
        """A kernel's gradients for those rows of `of`; as `Softmax.add`."""
        self._add(grads, rows, of)

    def absorb(self, *grads: Tensor) -> None:
        """Another rank's part for all rows, given away: it may be kept, and changed."""
        self._absorb(grads)

    def finish(self, dtype: torch.dtype) -> Tensors:
        """The gradients in that dtype, contiguous, and lets go of them; 0 where nothing was added."""
        return self._finish(itertools.repeat(dtype))

    def _combine(self, into: Tensors, new: Tensors) -> None:
        for x, part in zip(into, new, strict=True):
            in_pieces(torch.Tensor.add_, x, part)


def _contiguous(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or x.dtype == dtype:
        return x.contiguous()
    return x.to(dtype, memory_format=torch.contiguous_format)


# ---- tiles as calls of a kernel that knows full and causal blocks


class _Call(NamedTuple):
    """kind: full, causal, or upper: causal with rows and columns in reverse order."""

    rows: Rows
    columns: Rows
    kind: str


def _calls(tile: Tile, square: bool) -> Iterator[_Call]:
    """square: a causal call must be; rows that see all of its columns are then a call of their own."""
    q0, q1, k0, k1, kind, width = tile
    if kind != "band":
        end = min(q1, q0 + k1 - k0) if square and kind == "causal" else q1
        yield _Call(Rows(q0, end - q0), Rows(k0, k1 - k0), kind)
        if end < q1:
            yield _Call(Rows(end, q1 - end), Rows(k0, k1 - k0), "full")
        return
    count, rest = divmod(q1 - q0, width)
    if count:
        yield from _squares(q0, k0, width, width, count)
        q0, k0 = q0 + count * width, k0 + count * width
    if rest:
        yield from _squares(q0, k0, rest, width, 1)


def _squares(q0: int, k0: int, rows: int, width: int, count: int) -> Iterator[_Call]:
    """`count` bands of so many rows (at most their width), one after the other: each row sees the end of its square
    from the diagonal on, what is between, and the beginning of the square after that up to before the diagonal."""

    def part(start: int, size: int) -> Rows:
        return Rows(start, size, count, rows if count > 1 else 0)

    yield _Call(part(q0, rows), part(k0, rows), "upper" if rows > 1 else "full")
    if width > rows:
        yield _Call(part(q0, rows), part(k0 + rows, width - rows), "full")
    if rows > 1:
        yield _Call(part(q0 + 1, rows - 1), part(k0 + width, rows - 1), "causal")


def _take(x: Tensor, rows: Rows, upper: bool) -> Tensor:
    """Those rows with the groups as part of the batch, in reverse order for upper. A view where it can be one."""
    found = rows.of(x)
    if rows.count > 1:
        found = found.flatten(0, 1)
    return found.flip(1) if upper else found


def _give(x: Tensor, rows: Rows, upper: bool) -> Tensor:
    """A result for what `_take` took, in the order and shape of the rows."""
    if upper:
        x = x.flip(1)
    return x.unflatten(0, (-1, rows.count)) if rows.count > 1 else x


def forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], scale: float, into: Softmax
) -> None:
    """Adds what the tiles make visible to `into`. q (B, Sq, Hq, D); k and v (B, Sk, Hkv, D), strided as they like but
    for a last dimension without gaps. A kernel that is `Accumulating` is given all tiles at once."""
    if hasattr(kernel, "forward_tiles"):
        kernel.forward_tiles(q, k, v, tiles, scale, into)
        return
    for tile in tiles:
        for call in _calls(tile, kernel.square):
            into.add(*_attend(kernel, q, k, v, call, scale), call.rows, q.shape[1])


def _attend(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, call: _Call, scale: float) -> Tensors:
    rows, columns, kind = call
    upper = kind == "upper"
    operands = (_take(q, rows, upper), _take(k, columns, upper), _take(v, columns, upper))
    found = kernel.forward(*operands, kind != "full", scale)
    return tuple(_give(x, rows, upper) for x in found)


def backward(
    kernel: Kernel, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    tiles: Sequence[Tile], scale: float, dq: Sum, dkv: Sum,
) -> None:  # fmt: skip
    """Adds the tiles' part of the gradients to dq (dq,) and dkv (dk, dv). do and out as q, lse (B, Sq, Hq) wide: out
    and lse are those of the whole rows, not of these tiles. A kernel that is `Accumulating` is given all at once."""
    if hasattr(kernel, "backward_tiles"):
        kernel.backward_tiles(do, q, k, v, out, lse, tiles, scale, dq, dkv)
        return
    for tile in tiles:
        for call in _calls(tile, kernel.square):
            _add_gradients(kernel, (do, q, k, v, out, lse), call, scale, dq, dkv)


def _add_gradients(kernel: Kernel, operands: Tensors, call: _Call, scale: float, dq: Sum, dkv: Sum) -> None:
    rows, columns, kind = call
    upper = kind == "upper"
    sides = (rows, rows, columns, columns, rows, rows)
    taken = [_take(x, side, upper) for x, side in zip(operands, sides, strict=True)]
    grads = kernel.backward(*taken, kind != "full", scale)
    del taken
    dq.add((_give(grads[0], rows, upper),), rows, operands[1].shape[1])
    dkv.add(tuple(_give(x, columns, upper) for x in grads[1:]), columns, operands[2].shape[1])
