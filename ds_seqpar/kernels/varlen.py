"""Join tiles into launches of a kernel that supports windows and segments.

Adjacent rows are joined into regions. From one row of a region to the next, each end of the visible columns either
stays or moves by one column, like the edge of a window. Consecutive regions with the same window form one launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..core.compiler.tiles.tiles import Piece, Segments, Tile

# maximum number of rows or columns between two regions of a launch; computing the gap is cheaper than another launch
MAX_GAP = 512
OPEN_LAUNCHES = 8  # number of recent launches that a region may join


class _Region(NamedTuple):
    """Rows [q0, q1). The first row sees columns [a0, b0), and the last row sees columns [a1, b1).

    From row to row, the left end first stays, and then moves by one column per row until it reaches a1. The right end
    moves by one column per row until it reaches b1, and then stays.
    """

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
        """The window distance to the left, as in `Segments`, or -1 if the left edge hides nothing."""
        return -1 if self.a0 == self.a1 else self.b1 - self.a1 - 1

    @property
    def right(self) -> int:
        """The window distance to the right, or -1 if the right edge hides nothing."""
        return -1 if self.b0 == self.b1 else self.rows - 1 - (self.b1 - self.b0)

    def visible(self, row: int) -> tuple[int, int]:
        """Return the columns [a, b) that a row sees."""
        return max(self.a0, self.a1 - (self.q1 - 1 - row)), min(self.b1, self.b0 + row - self.q0)

    def extended(self, piece: Piece) -> _Region | None:
        """Return the region extended by the piece's rows, or None if the result is not a region."""
        a1, b1 = piece.at(piece.q1 - 1)
        longer = _Region(self.q0, piece.q1, self.a0, a1, self.b0, b1)
        same = longer.visible(self.q1 - 1) == (self.a1, self.b1) and longer.visible(piece.q0) == (piece.a, piece.b)
        return longer if same else None

    def allowed(self, windows: int) -> bool:
        """Return whether a kernel supports the region's window. For `windows`, see `KernelSupport`.

        PyTorch and flash-attn interpret a distance that spans all columns as unlimited. If there is a left limit, both
        libraries interpret a missing right limit as a distance that spans all columns.
        """
        if windows == 1:
            return self.right <= 0 and (self.left < 0 or self.right == 0)
        return self.right < self.columns and (self.left < 0 or self.right >= 0 or self.rows <= self.columns)


def joined(tiles: Sequence[Tile], windows: int, segments: bool) -> Iterator[Tile]:
    """Return launches that make the same pairs visible as the tiles. For the arguments, see `KernelSupport`."""
    launches: list[_Launch] = []
    for region in sorted(_regions(tiles, windows)):
        if not region.allowed(windows):
            yield from _upper(region)
        elif not any(launch.join(region) for launch in (launches[-OPEN_LAUNCHES:] if segments else ())):
            launches.append(_Launch(region))
    yield from (launch.tile() for launch in launches)


def _upper(region: _Region) -> Iterator[Tile]:
    """Yield the tiles of a region with a moving left edge and a fixed right edge.

    The tiles are for kernels that require a causal edge. If rows and columns are reversed, the left edge is causal.
    """
    q0, q1, a0, _, _, b1 = region
    yield Tile(q0, q1, a0, a0 + region.rows, "upper")
    if b1 > a0 + region.rows:
        yield Tile(q0, q1, a0 + region.rows, b1, "full")


def _regions(tiles: Sequence[Tile], windows: int) -> Iterator[_Region]:
    """Yield the visible part of all tiles as regions, each extended as far as the kernel's windows allow."""
    growing: list[_Region] = []
    for row, pieces in _side_by_side([piece for tile in tiles for piece in _pieces(tile)]):
        yield from (region for region in growing if region.q1 < row)
        growing = [region for region in growing if region.q1 == row]
        for piece in pieces:
            for index, region in enumerate(growing):
                longer = region.extended(piece)
                if longer and longer.allowed(windows):
                    growing[index] = longer
                    break
            else:
                a1, b1 = piece.at(piece.q1 - 1)
                growing.append(_Region(piece.q0, piece.q1, piece.a, a1, piece.b, b1))
    yield from growing


def _pieces(tile: Tile) -> Iterator[Piece]:
    """Yield the visible columns of a tile in pieces with straight edges."""
    q0, q1, k0, k1 = tile[:4]
    rows, columns = q1 - q0, k1 - k0
    a_moves = int(tile.kind in ("upper", "band"))
    first = {"causal": 1, "band": tile.width}.get(tile.kind, columns)  # number of visible columns in the first row
    moving = min(rows, columns - first + 1) if tile.kind in ("causal", "band") else 0
    if moving:
        yield Piece(q0, q0 + moving, k0, a_moves, k0 + first, 1)
    if moving < rows:
        yield Piece(q0 + moving, q1, k0 + a_moves * moving, a_moves, k1, 0)


def _side_by_side(pieces: list[Piece]) -> Iterator[tuple[int, list[Piece]]]:
    """Cut all pieces at each row in which any piece begins or ends.

    Yield (row, pieces from this row to the next cut), after joining adjacent pieces.
    """
    pieces = sorted(pieces)
    rows = sorted({piece.q0 for piece in pieces} | {piece.q1 for piece in pieces})
    active: list[Piece] = []
    next_piece = 0
    for row, end in itertools.pairwise(rows):
        active = [piece for piece in active if piece.q1 > row]
        while next_piece < len(pieces) and pieces[next_piece].q0 == row:
            active.append(pieces[next_piece])
            next_piece += 1
        cut: list[Piece] = []
        for a, b, a_moves, b_moves in sorted((*piece.at(row), piece.a_moves, piece.b_moves) for piece in active):
            left = cut[-1] if cut else None
            if left and left.b == a and (left.b_moves == a_moves or end == row + 1):
                cut[-1] = left._replace(b=b, b_moves=b_moves)
            else:
                cut.append(Piece(row, end, a, a_moves, b, b_moves))
        yield row, cut


class _Launch:
    """Regions with the same window. The rows and columns of each region come after those of the previous region."""

    def __init__(self, region: _Region) -> None:
        self.regions, self.left, self.right = [region], region.left, region.right
        self.min_distances = _min_distances(region)

    def join(self, region: _Region) -> bool:
        """Add the region if a single window describes all regions correctly. Return whether the region was added."""
        last = self.regions[-1]
        if not (0 <= region.q0 - last.q1 <= MAX_GAP and 0 <= region.a0 - last.b1 <= MAX_GAP):
            return False
        left, right = max(self.left, region.left), max(self.right, region.right)
        if min(self.left, region.left) not in (-1, left) or min(self.right, region.right) not in (-1, right):
            return False
        needed = _min_distances(region)
        distances = max(self.min_distances[0], needed[0]), max(self.min_distances[1], needed[1])
        # an edge must hide nothing in regions without that edge; for a left edge without a right edge, see `allowed`
        hides = 0 <= left < distances[0] or 0 <= right < distances[1]
        if hides or (left >= 0 > right and any(member.rows > member.columns for member in (*self.regions, region))):
            return False
        self.regions.append(region)
        self.left, self.right, self.min_distances = left, right, distances
        return True

    def tile(self) -> Tile:
        """Return the launch as a tile.

        The tile has groups if all regions are equal and evenly spaced, and otherwise segments that include the gaps.
        """
        first, last = self.regions[0], self.regions[-1]
        pairs = [*itertools.pairwise(self.regions)]
        steps = {(after.q0 - before.q0, after.a0 - before.a0) for before, after in pairs}
        if len(steps) < 2 and len({(region.rows, region.columns) for region in self.regions}) == 1:
            tile = self.windowed(Tile(first.q0, first.q1, first.a0, first.b1, "full"))
            for step in steps:
                tile = tile._replace(groups=len(self.regions), q_step=step[0], k_step=step[1])
            return tile
        rows, columns = [first.rows], [first.columns]
        for before, region in pairs:
            gaps = region.q0 - before.q1, region.a0 - before.b1
            rows += [gaps[0]] * bool(gaps[0]) + [0] * bool(gaps[1]) + [region.rows]
            columns += [0] * bool(gaps[0]) + [gaps[1]] * bool(gaps[1]) + [region.columns]
        segments = Segments(tuple(rows), tuple(columns), self.left, self.right)
        return Tile(first.q0, last.q1, first.a0, last.b1, "segments", segments=segments)

    def windowed(self, tile: Tile) -> Tile:
        """Return a full tile that has this launch's window."""
        rows, columns = tile.q1 - tile.q0, tile.k1 - tile.k0
        if self.left < 0 and (self.right < 0 or (self.right == 0 and rows == columns)):
            return tile if self.right < 0 else tile._replace(kind="causal")
        return tile._replace(kind="segments", segments=Segments((rows,), (columns,), self.left, self.right))


def _min_distances(region: _Region) -> tuple[int, int]:
    """Return the minimum (left, right) window distances that hide nothing, with 0 for an edge that the region has."""
    return (region.columns - 1 if region.left < 0 else 0), (region.rows - 1 if region.right < 0 else 0)
