"""Kernels that know one block, made to run tiles of all kinds into running results.

A running result is empty; or narrow: the kernel's own tensors, adopted as they came; or wide (fp32, fp64 for fp64) once
a second result is added to it. Every tensor has its tokens on dim 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from ...compiler.tiles import Tile
from ..merge import in_pieces, merge_
from .base import Kernel

Tensors = tuple[Tensor, ...]
INF = float("inf")


class Rows(NamedTuple):
    """`groups` groups of `size` neighbouring tokens, the first token of each `step` after that of the one before."""

    start: int
    size: int
    groups: int = 1
    step: int = 0

    def of(self, x: Tensor) -> Tensor:
        """A view: (B, n, ...) -> (B, size, ...), or (B, groups, size, ...) for several groups."""
        if self.size == x.shape[1]:
            return x
        if self.groups == 1:
            return x.narrow(1, self.start, self.size)
        held = x.narrow(1, self.start, self.step * (self.groups - 1) + self.size)
        return held.unfold(1, self.size, self.step).movedim(-1, 2)

    def all_of(self, tokens: int) -> bool:
        return self.size * self.groups == tokens


class Running:
    """The running result of one block: tensors that start as `blank`.

    make: gives uninitialised wide tensors, in the place that the result is sent from; called once at most, and only
    where they are needed.
    """

    blank: tuple[float, float] = (0.0, 0.0)

    def __init__(self, make: Callable[[], Tensors]) -> None:
        self._make = make
        self._held: Tensors | None = None
        self._rows: Rows | None = None  # what is held is of those rows only
        self._placed = False  # whether what is held is in a place that `make` or a peer's message gave

    @property
    def held(self) -> Tensors | None:
        """The tensors as they are now; None while empty."""
        return self._held

    def add(self, new: Tensors, rows: Rows, of: int) -> None:
        """A kernel's tensors for those rows of `of`, (B, size, ...), or (B, groups, size, ...) for several groups. Kept
        as they are where they are the first; they may be changed."""
        if self._held is None and rows.groups == 1:
            self._held, self._rows = new, None if rows.all_of(of) else rows
        elif self._held is None and rows.all_of(of):
            self._held = tuple(x.flatten(1, 2) for x in new)
        else:
            self._combine(tuple(map(rows.of, self._settled())), new)

    def absorb(self, *arrived: Tensor) -> None:
        """Another rank's part for all rows, given away: where it is wide, what is held here is added to it there."""
        if self._held is None:
            self._held, self._placed = arrived, True
        elif self._is_wide(arrived):
            into = arrived if self._rows is None else tuple(map(self._rows.of, arrived))
            self._combine(into, self._held)
            self._held, self._rows, self._placed = arrived, None, True
        else:
            self._combine(self._settled(), arrived)

    def merge(self, *arrived: Tensor) -> None:
        """The same, but added to what is held here: what arrived is needed for something else."""
        self._combine(self._settled(), arrived)

    def placed(self) -> Tensors:
        """The wide tensors, in the place that they are sent from."""
        held = self._settled()
        if not self._placed:
            self._move(None)
        return self._held or held

    def copy_into(self, targets: Tensors) -> None:
        """Ends as those tensors, in their dtype."""
        for target, x in zip(targets, self._settled(), strict=True):
            target.copy_(x)

    def finish(self, *dtypes: torch.dtype | None) -> Tensors:
        """The tensors in those dtypes (None: as they are), contiguous, in memory of their own; blank where nothing was
        added. Nothing is cast or copied that is a kernel's own result and in that dtype."""
        held = list(self._held if self._held is not None and self._rows is None else self._settled())
        self._held = None
        return tuple(_own(held.pop(0), dtype, self._placed) for dtype in dtypes)  # each freed before the next

    def _settled(self) -> Tensors:
        """All rows, wide."""
        if self._held is None or self._rows is not None or not self._is_wide(self._held):
            self._move(self._rows)
        return self._held or ()

    def _move(self, rows: Rows | None) -> None:
        """What is held goes where `make` says."""
        made, held = self._make(), self._held
        for index, x in enumerate(made):
            if held is None:
                x.fill_(self.blank[index])
            elif rows is None:
                x.copy_(held[index])
            else:
                end = rows.start + rows.size
                x.narrow(1, 0, rows.start).fill_(self.blank[index])
                x.narrow(1, end, x.shape[1] - end).fill_(self.blank[index])
                rows.of(x).copy_(held[index])
        self._held, self._rows, self._placed = made, None, True

    def _is_wide(self, tensors: Tensors) -> bool:
        return tensors[0].dtype in (torch.float32, torch.float64)

    def _combine(self, into: Tensors, new: Tensors) -> None:
        raise NotImplementedError


class Softmax(Running):
    """The running (out, lse) of one block of queries: out (B, n, H, D) in any dtype, lse (B, n, H) always wide."""

    blank = (0.0, -INF)

    def _combine(self, into: Tensors, new: Tensors) -> None:
        merge_(*into, *new)


class Sum(Running):
    """The running gradients of one block: (dq,), or (dk, dv)."""

    def _combine(self, into: Tensors, new: Tensors) -> None:
        for x, part in zip(into, new, strict=True):
            in_pieces(torch.Tensor.add_, x, part)


def _own(x: Tensor, dtype: torch.dtype | None, copy: bool) -> Tensor:
    """copy: an op's results must share no memory, and those in one message do."""
    if copy or dtype not in (None, x.dtype):
        return x.to(dtype or x.dtype, memory_format=torch.contiguous_format, copy=copy)
    return x.contiguous()


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
    if rows.groups > 1:
        found = found.flatten(0, 1)
    return found.flip(1) if upper else found


def _give(x: Tensor, rows: Rows, upper: bool) -> Tensor:
    """A result for what `_take` took, in the order and shape of the rows."""
    if upper:
        x = x.flip(1)
    return x.unflatten(0, (-1, rows.groups)) if rows.groups > 1 else x


class Accumulating(Kernel, Protocol):
    """A kernel that runs tiles of every kind itself and adds to running results where they lie. One that lacks these
    is run a tile at a time, by `forward` and `backward`, which have the meaning of the arguments."""

    def forward_tiles(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], scale: float, into: Running
    ) -> None: ...

    def backward_tiles(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        tiles: Sequence[Tile], scale: float, dq: Running, dkv: Running,
    ) -> None: ...  # fmt: skip


def _accumulates(kernel: Kernel) -> TypeGuard[Accumulating]:
    return hasattr(kernel, "forward_tiles")


def forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], scale: float, into: Running
) -> None:
    """Adds what the tiles make visible to `into`, a `Softmax`. q (B, Sq, Hq, D); k and v (B, Sk, Hkv, D), strided as
    they like but for a last dimension without gaps. A kernel that is `Accumulating` is given all tiles at once."""
    if _accumulates(kernel):
        kernel.forward_tiles(q, k, v, tiles, scale, into)
        return
    for tile in tiles:
        for call in _calls(tile, kernel.square):
            into.add(_attend(kernel, q, k, v, call, scale), call.rows, q.shape[1])


def _attend(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, call: _Call, scale: float) -> Tensors:
    rows, columns, kind = call
    upper = kind == "upper"
    operands = (_take(q, rows, upper), _take(k, columns, upper), _take(v, columns, upper))
    found = kernel.forward(*operands, kind != "full", scale)
    del operands  # copies, where they are in reverse order
    return tuple(_give(x, rows, upper) for x in found)


def backward(
    kernel: Kernel, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    tiles: Sequence[Tile], scale: float, dq: Running, dkv: Running,
) -> None:  # fmt: skip
    """Adds the tiles' part of the gradients to the `Sum`s dq (dq,) and dkv (dk, dv). do and out as q, lse (B, Sq, Hq)
    wide: out and lse are those of the whole rows, not of these tiles. A kernel that is `Accumulating` is given all at
    once."""
    if _accumulates(kernel):
        kernel.backward_tiles(do, q, k, v, out, lse, tiles, scale, dq, dkv)
        return
    for tile in tiles:
        for call in _calls(tile, kernel.square):
            _add_gradients(kernel, (do, q, k, v, out, lse), call, scale, dq, dkv)


def _add_gradients(kernel: Kernel, operands: Tensors, call: _Call, scale: float, dq: Running, dkv: Running) -> None:
    rows, columns, kind = call
    upper = kind == "upper"
    sides = (rows, rows, columns, columns, rows, rows)
    do, q, k, v, out, lse = [_take(x, side, upper) for x, side in zip(operands, sides, strict=True)]
    grads = kernel.backward(do, q, k, v, out, lse, kind != "full", scale)
    del do, q, k, v, out, lse
    dq.add((_give(grads[0], rows, upper),), rows, operands[1].shape[1])
    dkv.add(tuple(_give(x, columns, upper) for x in grads[1:]), columns, operands[2].shape[1])
