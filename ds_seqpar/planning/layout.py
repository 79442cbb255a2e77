"""Which tokens a rank holds, and which part of (query tokens x key tokens) a mask leaves visible. Pure integers.

A rank's tokens are a list of runs. Nothing here builds a dense mask: with keys in position order a query sees a prefix
of them, so visibility is the length of that prefix, a piecewise linear function of the query row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True, order=True)
class Run:
    """Tokens start, start + step, ...: `length` of them."""

    start: int
    step: int
    length: int

    @property
    def last(self) -> int:
        return self.start + self.step * (self.length - 1)

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.step * self.length, self.step)


Runs = tuple[Run, ...]


def contiguous(seq: int, ranks: int, rank: int) -> Runs:
    """Rank r holds the r-th of `ranks` equal slices."""
    size = seq // ranks
    return (Run(rank * size, 1, size),)


def zigzag(seq: int, ranks: int, rank: int) -> Runs:
    """Rank r holds chunks r and 2A-1-r of 2A: the same causal work for every rank in every ring step."""
    size = seq // (2 * ranks)
    return Run(rank * size, 1, size), Run((2 * ranks - 1 - rank) * size, 1, size)


def striped(seq: int, ranks: int, rank: int) -> Runs:
    """Rank r holds every A-th token from r (Striped Attention, section 3.1)."""
    return (Run(rank, ranks, seq // ranks),)


LAYOUTS: dict[str, Callable[[int, int, int], Runs]] = {
    "contiguous": contiguous,
    "striped": striped,
    "zigzag": zigzag,
}


def multiple(layout: str, size: int, ulysses: int) -> int:
    """A sequence length must be a multiple of this: P, for zigzag lcm(2A, P)."""
    return math.lcm(2 * size // ulysses, size) if layout == "zigzag" else size


def positions(layout: str, seq: int, size: int, ulysses: int, index: int) -> list[int]:
    """Global positions of the tokens of SP rank `index` = u + U * inner, in the order it holds them.

    An inner rank's token list is cut in order into U equal parts, one a Ulysses member, so that after the all-to-all
    the inner rank holds its runs again.
    """
    inner, member = index // ulysses, index % ulysses
    held = [p for run in LAYOUTS[layout](seq, size // ulysses, inner) for p in run.positions]
    part = len(held) // ulysses
    return held[member * part : (member + 1) * part]


def join(groups: Iterable[Runs]) -> Runs:
    """The runs of several blocks in the one order that gathered blocks are kept in: by position."""
    return tuple(sorted(run for runs in groups for run in runs))


@dataclasses.dataclass(frozen=True)
class Tile:
    """One kernel call: query rows [q0, q1) against key columns [k0, k1), full or causal.

    Causal is top-left: row q0 + i sees columns k0 .. k0 + i, and all of them from i = k1 - k0 - 1 on.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool

    @property
    def products(self) -> int:
        """Visible (query, key) pairs."""
        rows, cols = self.q1 - self.q0, self.k1 - self.k0
        if not self.causal:
            return rows * cols
        square = min(rows, cols)
        return square * (square + 1) // 2 + max(0, rows - cols) * cols


@functools.lru_cache(maxsize=4096)
def visible(q: Runs, kv: Runs, causal: bool, square: bool = False) -> tuple[Tile, ...]:
    """The kernel calls that cover exactly the visible part of (q rows x kv columns).

    square: give only square causal tiles (for kernels that align a causal mask to the lower right corner).
    """
    rows, columns = _length(q), _length(kv)
    if not causal:
        return (Tile(0, rows, 0, columns, False),)
    tiles = []
    for offset, chain in _chains(kv):
        for tile in _lower(_prefix(q, chain), square):
            tiles.append(dataclasses.replace(tile, k0=tile.k0 + offset, k1=tile.k1 + offset))
    return tuple(tiles)


def _length(runs: Runs) -> int:
    return sum(run.length for run in runs)


def _chains(kv: Runs) -> list[tuple[int, list[Run]]]:
    """Cuts runs into stretches that are in position order as they stand, with each stretch's first column. A run that
    starts before the next step of the one before it is cut off too: a query of that step could see both at once."""
    chains: list[tuple[int, list[Run]]] = []
    column = 0
    for run in kv:
        if chains and chains[-1][1][-1].last + chains[-1][1][-1].step <= run.start:
            chains[-1][1].append(run)
        else:
            chains.append((column, [run]))
        column += run.length
    return chains


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """Rows [q0, q1): row i sees the first `seen` columns (slope 0), or `seen + i - q0` of them (slope 1)."""

    q0: int
    q1: int
    seen: int
    slope: int


def _prefix(q: Runs, kv: list[Run]) -> list[_Stretch]:
    """How many of kv (in position order) each row of q sees: flat and slope-1 stretches, neighbours merged."""
    stretches: list[_Stretch] = []
    row = 0
    for run in q:
        for piece in _prefix_of_run(run, kv):
            piece = dataclasses.replace(piece, q0=piece.q0 + row, q1=piece.q1 + row)
            before = stretches[-1] if stretches else None
            continued = before and before.seen + before.slope * (before.q1 - before.q0)
            if before and before.slope == piece.slope and continued == piece.seen:
                stretches[-1] = dataclasses.replace(before, q1=piece.q1)
            else:
                stretches.append(piece)
        row += run.length
    return stretches


def _prefix_of_run(q: Run, kv: list[Run]) -> list[_Stretch]:
    """The same for one run. Equal steps give slope 1 where q passes along a kv run; unequal ones go row by row."""
    pieces, row, seen = [], 0, 0

    def reach(end: int, slope: int) -> None:
        nonlocal row, seen
        end = min(max(end, row), q.length)
        if end > row:
            pieces.append(_Stretch(row, end, seen + slope, slope))
            row, seen = end, seen + slope * (end - row)

    for run in kv:
        if run.step == q.step:
            first = -((q.start - run.start) // q.step)  # the row that is the first to see the run's first token
            hidden = max(0, -first)  # columns that even row 0 sees
            reach(first, 0)
            if row < q.length:
                seen += min(hidden, run.length)
                reach(first + run.length, 1)
        else:
            for position in run.positions:
                reach(-((q.start - position) // q.step), 0)
                seen += row < q.length
    reach(q.length, 0)
    return pieces


def _lower(stretches: list[_Stretch], square: bool) -> list[Tile]:
    """Stretches as full rectangles and causal tiles. A slope-1 stretch with `seen` columns at its first row is a full
    rectangle of the seen - 1 before and a causal square; a flat stretch that goes on from it may join the square."""
    tiles: list[Tile] = []

    def full(q0: int, q1: int, columns: int) -> None:
        if columns == 0 or q0 == q1:
            return
        if tiles and not tiles[-1].causal and tiles[-1].q1 == q0 and tiles[-1].k1 == columns:
            tiles[-1] = dataclasses.replace(tiles[-1], q1=q1)
        else:
            tiles.append(Tile(q0, q1, 0, columns, False))

    for index, piece in enumerate(stretches):
        if piece.slope == 0:
            if square or index == 0 or stretches[index - 1].slope == 0 or not _continues(stretches[index - 1], piece):
                full(piece.q0, piece.q1, piece.seen)
            continue
        end = piece.q1
        after = stretches[index + 1] if index + 1 < len(stretches) else None
        if after and not square and after.slope == 0 and _continues(piece, after):
            end = after.q1
        base = piece.seen - 1
        full(piece.q0, end, base)
        causal = Tile(piece.q0, end, base, base + piece.q1 - piece.q0, True)
        tiles.insert(len(tiles) - (1 if base else 0), causal)  # keep the rectangle last, so that a next one can join it
    return tiles


def _continues(slope: _Stretch, flat: _Stretch) -> bool:
    return flat.seen == slope.seen + (slope.q1 - slope.q0) - 1
