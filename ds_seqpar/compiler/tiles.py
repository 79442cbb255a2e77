"""The visible part of (query tokens x key tokens) as tiles, without a dense mask.

Keys that stand in position order are a chain. A query row sees an interval [a, b) of a chain's columns. Along the rows
of one query run both ends are piecewise linear: they stand still, or move on by one column a row. (Where the steps of
the query and key runs differ, every row is a piece.) The four kinds of tile are the four ways to be linear.
Where both ends stand a tile is full, and where both move a band. Where b moves it is causal, beside a full rectangle.
Where a moves it is upper, beside one too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Literal, NamedTuple

from .layout import Runs
from .masks import END, Mask, Triple, between

PIECE = 1 << 18  # elements of results that are merged at a time; of a large result a 16th of it, where that is more


class Segments(NamedTuple):
    """Blocks of one launch, one after the other: block b has rows[b] query rows and columns[b] key columns; either may
    be 0. In a block of m rows and n columns row i sees column j where -left <= j - i - (n - m) <= right. So a distance
    is counted from the diagonal that ends in the lower right corner. -1 is no limit."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    left: int = -1
    right: int = -1

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs."""
        return sum(self._pairs(m, n) for m, n in zip(self.rows, self.columns, strict=True))

    def _pairs(self, m: int, n: int) -> int:
        """Visible pairs of a block of m rows and n columns."""
        end = m * n if self.right < 0 else _clamped(m, n, n - m + self.right + 1)
        return end - (0 if self.left < 0 else _clamped(m, n, n - m - self.left))


def _clamped(rows: int, most: int, first: int) -> int:
    """The sum of first + i over the rows i, each between 0 and most."""
    return sum(sign * (_below(rows + start) - _below(start)) for sign, start in ((1, first), (-1, first - most)))


def _below(x: int) -> int:
    """The sum of the numbers from 0 up to x - 1."""
    return x * (x - 1) // 2 if x > 0 else 0


class Tile(NamedTuple):
    """Query rows [q0, q1) against key columns [k0, k1). By kind, row q0 + i sees column k0 + j

    full: always
    causal: where j <= i; aligned top-left, so from i = k1 - k0 - 1 on all of them
    upper: where j >= i; always square
    band: where i <= j < i + width; it has rows + width - 1 columns, or fewer
    segments: where its `segments` say so, see `cuts`

    groups: how many such tiles there are, each q_step rows and k_step columns after the one before.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    kind: Literal["full", "causal", "upper", "band", "segments"]
    width: int = 0
    groups: int = 1
    q_step: int = 0
    k_step: int = 0
    segments: Segments | None = None

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs."""
        rows, columns = self.q1 - self.q0, self.k1 - self.k0
        if self.segments:
            return self.groups * self.segments.pairs
        if self.kind == "band":
            missing = rows + self.width - 1 - columns  # columns of the band
            return self.groups * (rows * self.width - missing * (missing + 1) // 2)
        if self.kind == "full":
            return self.groups * rows * columns
        square = min(rows, columns)
        return self.groups * (square * (square + 1) // 2 + max(0, rows - columns) * columns)


class Line(NamedTuple):
    """Rows [q0, q1): row q0 + i sees columns [a + i * a_moves, b + i * b_moves)."""

    q0: int
    q1: int
    a: int
    a_moves: int
    b: int
    b_moves: int

    def at(self, row: int) -> tuple[int, int]:
        """The columns [a, b) that a row sees."""
        down = row - self.q0
        return self.a + down * self.a_moves, self.b + down * self.b_moves


def tiles(q: Runs, kv: Runs, mask: Mask, square: bool = False) -> tuple[Tile, ...]:
    """The tiles that cover exactly the visible part of (q rows x kv columns): a visible pair lies in one tile, another
    pair in none. Rows and columns are numbered in the order of the runs.

    square: give only square causal tiles (for kernels that align a causal mask to the lower right corner).
    """
    if mask.full:
        tile = Tile(0, sum(run.length for run in q), 0, sum(run.length for run in kv), "full")
        return (tile,) if tile.pairs else ()
    queries = [(run.start, run.step, run.length) for run in q if run.length]
    cover: list[Tile] = []
    for column, chain in _chains(kv):
        pieces: list[Line] = []
        row = 0
        for run in queries:
            if not mask.documents:
                _append(pieces, row, run, column, chain, mask)
            else:
                for rows, part, columns, keys in _in_documents(run, chain, mask.documents):
                    _append(pieces, row + rows, part, column + columns, keys, mask)
            row += run[2]
        if pieces:
            _cover(pieces, square, cover)
    return tuple(cover)


def _chains(kv: Runs) -> list[tuple[int, list[Triple]]]:
    """Cuts runs into chains, each with its first column. A run that starts before the next step of the one before it
    begins a chain of its own: a query of that step could see both at once."""
    chains: list[tuple[int, list[Triple]]] = []
    column, free = 0, None
    for run in kv:
        start, step, length = run.start, run.step, run.length
        if not length:
            continue
        if free is not None and free <= start:
            chains[-1][1].append((start, step, length))
        else:
            chains.append((column, [(start, step, length)]))
        column += length
        free = start + step * length
    return chains


def _in_documents(
    q: Triple, chain: list[Triple], documents: tuple[int, ...]
) -> Iterator[tuple[int, Triple, int, list[Triple]]]:
    """The parts of a query run and a chain that lie in one document, for each document with some of both. Gives the
    part's first row and itself, the first column of the chain's part and itself."""
    start, step, length = chain[-1]
    last = min(q[0] + q[1] * (q[2] - 1), start + step * (length - 1))
    begin = bisect_right(documents, max(q[0], chain[0][0])) - 1
    index = column = 0
    for document in range(begin, bisect_right(documents, last)):
        lo = documents[document]
        hi = documents[document + 1] if document + 1 < len(documents) else END
        rows, part = between(q, lo, hi)
        while chain[index][0] + chain[index][1] * chain[index][2] <= lo and index + 1 < len(chain):
            column += chain[index][2]
            index += 1
        columns, keys = _keys_between(chain, index, lo, hi)
        if part[2] > 0 and keys:
            yield rows, part, column + columns, keys


def _keys_between(chain: list[Triple], index: int, lo: int, hi: int) -> tuple[int, list[Triple]]:
    """The part of a chain from run `index` on in [lo, hi), and how many tokens from there on lie before."""
    column = 0
    keys: list[Triple] = []
    while index < len(chain) and chain[index][0] < hi:
        before, part = between(chain[index], lo, hi)
        if part[2] > 0:
            if not keys:
                column += before
            keys.append(part)
        elif not keys:
            column += chain[index][2]
        index += 1
    return column, keys


def _append(pieces: list[Line], row: int, q: Triple, column: int, keys: list[Triple], mask: Mask) -> None:
    """Appends what the rows of one query run see of keys in position order, all of one document."""
    start, step, length = q
    key, key_step, count = keys[-1]
    if mask.causal and start + step * (length - 1) < keys[0][0]:
        return
    if mask.window and start - mask.window >= key + key_step * (count - 1):
        return
    if not mask.window and (not mask.causal or key + key_step * (count - 1) <= start - step):  # before it moves on
        _join(pieces, Line(row, row + length, column, 0, column + sum(run[2] for run in keys), 0))
        return
    left = _edge(q, keys, 1 - mask.window) if mask.window else [(0, 0, 0)]
    right = _edge(q, keys, 1) if mask.causal else [(0, sum(run[2] for run in keys), 0)]
    for q0, q1, a, a_moves, b, b_moves in _both(left, right, length):
        if a_moves > b_moves:
            q1 = min(q1, q0 + b - a)  # rows from there on are past all the columns
        if a < b:
            _join(pieces, Line(row + q0, row + q1, column + a, a_moves, column + b, b_moves))


def _edge(q: Triple, keys: list[Triple], shift: int) -> list[tuple[int, int, int]]:
    """How many of the keys lie before position p + shift, for the rows of a run: (row, count, moves) of each linear
    stretch. A stretch that moves on begins with the row that counts one more than the row before it."""
    start, step, length = q
    start += shift
    edge, count = [(0, 0, 0)], 0
    for key, key_step, keys_here in keys:
        first = (key - start) // step + 1
        if first >= length:
            break
        if key_step == step:
            end = first + keys_here
            if end > 0:
                _put(edge, max(first, 0), count + 1 + max(-first, 0), 1)
            count += keys_here
            if end < length:
                _put(edge, max(end, 0), count, 0)
        else:
            for position in range(key, key + key_step * keys_here, key_step):
                row = (position - start) // step + 1
                if row >= length:
                    break
                count += 1
                _put(edge, max(row, 0), count, 0)
    return edge


def _put(edge: list[tuple[int, int, int]], row: int, count: int, moves: int) -> None:
    """Appends a stretch, in place of the last one where that begins with the same row."""
    if edge[-1][0] == row:
        edge.pop()
    edge.append((row, count, moves))


def _both(left: list, right: list, length: int) -> Iterator[Line]:
    """Cuts the rows into pieces in which both edges are linear."""
    i = j = row = 0
    while row < length:
        left_end = left[i + 1][0] if i + 1 < len(left) else length
        right_end = right[j + 1][0] if j + 1 < len(right) else length
        end = min(left_end, right_end)
        (a_row, a, a_moves), (b_row, b, b_moves) = left[i], right[j]
        yield Line(row, end, a + a_moves * (row - a_row), a_moves, b + b_moves * (row - b_row), b_moves)
        i += end == left_end
        j += end == right_end
        row = end


def _join(pieces: list[Line], piece: Line) -> None:
    """Appends a piece, or lengthens the last one where the piece continues its edges. To a single row any edges do."""
    if pieces:
        q0, q1, a, a_moves, b, b_moves = pieces[-1]
        if q1 - q0 == 1:
            a_moves, b_moves = piece.a_moves, piece.b_moves
        continues = (q1, a + a_moves * (q1 - q0), b + b_moves * (q1 - q0)) == (piece.q0, piece.a, piece.b)
        if continues and (piece.q1 - q1 == 1 or (a_moves, b_moves) == (piece.a_moves, piece.b_moves)):
            pieces[-1] = Line(q0, piece.q1, a, a_moves, b, b_moves)
            return
    pieces.append(piece)


def _cover(pieces: list[Line], square: bool, cover: list[Tile]) -> None:
    """Appends the tiles of the pieces of one chain."""
    rectangle, joined = -1, -1  # index of the last full tile; index of a piece that a tile of the one before has

    def full(q0: int, q1: int, k0: int, k1: int) -> None:
        nonlocal rectangle
        if k0 == k1:
            return
        if rectangle >= 0 and cover[rectangle][1:4] == (q0, k0, k1):
            cover[rectangle] = cover[rectangle]._replace(q1=q1)
        else:
            rectangle = len(cover)
            cover.append(Tile(q0, q1, k0, k1, "full"))

    for index, (q0, q1, a, a_moves, b, b_moves) in enumerate(pieces):
        rows = q1 - q0
        if rows == 1 or not (a_moves or b_moves):
            if index != joined:
                full(q0, q1, a, b)
        elif a_moves and b_moves:
            cover.append(Tile(q0, q1, a, b + rows - 1, "band", b - a))
        elif a_moves:
            cover.append(Tile(q0, q1, a, a + rows, "upper"))
            full(q0, q1, a + rows, b)
        else:
            end = q1
            if not square and index + 1 < len(pieces) and _sees_all_along(pieces[index + 1], q1, a, b + rows - 1):
                end, joined = pieces[index + 1].q1, index + 1
            full(q0, end, a, b - 1)
            cover.append(Tile(q0, end, b - 1, b - 1 + rows, "causal"))


def _sees_all_along(piece: Line, row: int, a: int, b: int) -> bool:
    """Whether a piece that begins with that row sees [a, b) in each of its rows."""
    flat = piece.q1 - piece.q0 == 1 or not (piece.a_moves or piece.b_moves)
    return flat and (piece.q0, piece.a, piece.b) == (row, a, b)
