"""Tiles joined to calls of a kernel that has windows, and segments, of its own.

What is visible of neighbouring rows is joined to regions. In a region both ends of a row's columns stand still or move,
by one column a row, as a window's edges do. Regions of one window, one after the other, are one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .tiles import Line, Segments, Tile

GAP = 512  # rows or columns without a pair that a call may have between two regions: they cost less than a launch
OPEN = 8  # calls that a region may still join


class _Region(NamedTuple):
    """Rows [q0, q1); the first sees columns [a0, b0), the last [a1, b1). Going down, the left end first stands, then it
    moves on by one a row to a1. The right end moves on by one a row up to b1, and then stands."""

    q0: int
    q1: int
    a0: int
    a1: int
    b0: int
    b1: int

    @property
    def rows(self) -> int:
        return self.q1 - self.q0

    @property
    def columns(self) -> int:
        return self.b1 - self.a0

    @property
    def left(self) -> int:
        """As in `Segments`; -1 where the edge hides nothing."""
        return -1 if self.a0 == self.a1 else self.b1 - self.a1 - 1

    @property
    def right(self) -> int:
        return -1 if self.b0 == self.b1 else self.rows - 1 - (self.b1 - self.b0)

    def seen(self, row: int) -> tuple[int, int]:
        return max(self.a0, self.a1 - (self.q1 - 1 - row)), min(self.b1, self.b0 + row - self.q0)

    def followed(self, line: Line) -> _Region | None:
        """With the line's rows; None where that is no region."""
        a1, b1 = line.at(line.q1 - 1)
        found = _Region(self.q0, line.q1, self.a0, a1, self.b0, b1)
        same = found.seen(self.q1 - 1) == (self.a1, self.b1) and found.seen(line.q0) == (line.a, line.b)
        return found if same else None

    def allowed(self, windows: int) -> bool:
        """Whether a kernel takes the window. PyTorch and flash-attn take a distance of all columns for no limit, and no
        limit on the right beside one on the left for a distance of all columns."""
        if windows == 1:
            return self.right <= 0 and (self.left < 0 or self.right == 0)
        return self.right < self.columns and (self.left < 0 or self.right >= 0 or self.rows <= self.columns)


def joined(tiles: Sequence[Tile], windows: int, segments: bool) -> Iterator[Tile]:
    """Calls that make the same pairs visible. windows, segments: as in `cuts.Takes`."""
    calls: list[_Call] = []
    for region in sorted(_regions(tiles, windows)):
        if not region.allowed(windows):
            yield from _turned(region)
        elif not any(call.take(region) for call in (calls[-OPEN:] if segments else ())):
            calls.append(_Call(region))
    yield from (call.tile() for call in calls)


def _turned(region: _Region) -> Iterator[Tile]:
    """One whose left edge moves while its right one stands, for a kernel that needs a causal edge: it is one in reverse
    order of rows and columns."""
    q0, q1, a0, _, _, b1 = region
    yield Tile(q0, q1, a0, a0 + region.rows, "upper")
    if b1 > a0 + region.rows:
        yield Tile(q0, q1, a0 + region.rows, b1, "full")


def _regions(tiles: Sequence[Tile], windows: int) -> Iterator[_Region]:
    growing: list[_Region] = []
    for row, lines in _side_by_side([line for tile in tiles for line in _lines(tile)]):
        yield from (region for region in growing if region.q1 < row)
        growing = [region for region in growing if region.q1 == row]
        for line in lines:
            for index, region in enumerate(growing):
                longer = region.followed(line)
                if longer and longer.allowed(windows):
                    growing[index] = longer
                    break
            else:
                a1, b1 = line.at(line.q1 - 1)
                growing.append(_Region(line.q0, line.q1, line.a, a1, line.b, b1))
    yield from growing


def _lines(tile: Tile) -> Iterator[Line]:
    """What a tile's rows see, in pieces with straight edges."""
    q0, q1, k0, k1 = tile[:4]
    rows, columns = q1 - q0, k1 - k0
    a_moves = int(tile.kind in ("upper", "band"))
    first = {"causal": 1, "band": tile.width}.get(tile.kind, columns)  # how many columns the first row sees
    moving = min(rows, columns - first + 1) if tile.kind in ("causal", "band") else 0
    if moving:
        yield Line(q0, q0 + moving, k0, a_moves, k0 + first, 1)
    if moving < rows:
        yield Line(q0 + moving, q1, k0 + a_moves * moving, a_moves, k1, 0)


def _side_by_side(lines: list[Line]) -> Iterator[tuple[int, list[Line]]]:
    """From each row on at which a line begins or ends: the lines up to the next such row, neighbours as one."""
    lines = sorted(lines)
    rows = sorted({line.q0 for line in lines} | {line.q1 for line in lines})
    held: list[Line] = []
    begun = 0
    for row, end in itertools.pairwise(rows):
        held = [line for line in held if line.q1 > row]
        while begun < len(lines) and lines[begun].q0 == row:
            held.append(lines[begun])
            begun += 1
        found: list[Line] = []
        for a, b, a_moves, b_moves in sorted((*line.at(row), line.a_moves, line.b_moves) for line in held):
            before = found[-1] if found else None
            if before and before.b == a and (before.b_moves == a_moves or end == row + 1):
                found[-1] = before._replace(b=b, b_moves=b_moves)
            else:
                found.append(Line(row, end, a, a_moves, b, b_moves))
        yield row, found


class _Call:
    """Regions of one window, each after the rows and columns of the one before it."""

    def __init__(self, region: _Region) -> None:
        self.regions, self.left, self.right = [region], region.left, region.right
        self.free = _free(region)

    def take(self, region: _Region) -> bool:
        """Adds the region, where it can join. Returns whether it could."""
        last = self.regions[-1]
        if not (0 <= region.q0 - last.q1 <= GAP and 0 <= region.a0 - last.b1 <= GAP):
            return False
        left, right = max(self.left, region.left), max(self.right, region.right)
        if min(self.left, region.left) not in (-1, left) or min(self.right, region.right) not in (-1, right):
            return False
        more = _free(region)
        free = max(self.free[0], more[0]), max(self.free[1], more[1])
        # an edge must hide nothing of regions without one; no right edge beside a left one: see `allowed`
        hides = 0 <= left < free[0] or 0 <= right < free[1]
        if hides or (left >= 0 > right and any(one.rows > one.columns for one in (*self.regions, region))):
            return False
        self.regions.append(region)
        self.left, self.right, self.free = left, right, free
        return True

    def tile(self) -> Tile:
        first, last = self.regions[0], self.regions[-1]
        pairs = [*itertools.pairwise(self.regions)]
        steps = {(after.q0 - before.q0, after.a0 - before.a0) for before, after in pairs}
        if len(steps) < 2 and len({(region.rows, region.columns) for region in self.regions}) == 1:
            one = self.alone(Tile(first.q0, first.q1, first.a0, first.b1, "full"))
            for step in steps:
                one = one._replace(groups=len(self.regions), q_step=step[0], k_step=step[1])
            return one
        rows, columns = [first.rows], [first.columns]
        for before, region in pairs:
            gaps = region.q0 - before.q1, region.a0 - before.b1
            rows += [gaps[0]] * bool(gaps[0]) + [0] * bool(gaps[1]) + [region.rows]
            columns += [0] * bool(gaps[0]) + [gaps[1]] * bool(gaps[1]) + [region.columns]
        segments = Segments(tuple(rows), tuple(columns), self.left, self.right)
        return Tile(first.q0, last.q1, first.a0, last.b1, "segments", segments=segments)

    def alone(self, one: Tile) -> Tile:
        """A full tile, with the window of this call."""
        rows, columns = one.q1 - one.q0, one.k1 - one.k0
        if self.left < 0 and (self.right < 0 or (self.right == 0 and rows == columns)):
            return one if self.right < 0 else one._replace(kind="causal")
        return one._replace(kind="segments", segments=Segments((rows,), (columns,), self.left, self.right))


def _free(region: _Region) -> tuple[int, int]:
    """The distances from which on an edge hides nothing of it, where it has none."""
    return (region.columns - 1 if region.left < 0 else 0), (region.rows - 1 if region.right < 0 else 0)
