"""The visible part of a product (query tokens by key tokens) as tiles, computed without a dense mask.

Keys in ascending order of position form a chain. Each query row sees an interval [a, b) of a chain's columns. From one
row of a query run to the next, each end of the interval either stays in place or moves by one column. If the query and
key runs have different steps, an end may jump by several columns.

A piece is a range of rows in which each end of the interval either stays in place in all rows or moves in all rows. If
both ends stay in place, the piece is a full tile. If both ends move, the piece is a band. If only b moves, the piece is
a causal tile plus a full tile of the columns that all its rows see. If only `a` moves, the piece is an upper tile plus
a full tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from ..sharding.layout import Runs
from ..sharding.masks import END, FULL, Level, Mask, Triple, between

# number of result elements merged at a time; for large results, a 16th of the result if that is more
MERGED_AT_ONCE = 1 << 18


class Segments(NamedTuple):
    """Consecutive blocks of one launch.

    Block b has rows[b] query rows and columns[b] key columns; either number may be 0. In a block of m rows and n
    columns, row i sees column j if -left <= j - i - (n - m) <= right. Distances are therefore measured from the
    diagonal that ends in the lower right corner. A limit of -1 means no limit.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    left: int = -1
    right: int = -1

    @property
    def pairs(self) -> int:
        """The number of visible (query, key) pairs."""
        return sum(self._pairs(m, n) for m, n in zip(self.rows, self.columns, strict=True))

    def _pairs(self, m: int, n: int) -> int:
        """Return the number of visible pairs in a block of m rows and n columns."""
        end = m * n if self.right < 0 else _clamped_sum(m, n, n - m + self.right + 1)
        return end - (0 if self.left < 0 else _clamped_sum(m, n, n - m - self.left))


def _clamped_sum(rows: int, limit: int, first: int) -> int:
    """Return the sum of first + i, clamped to [0, limit], over all rows i."""
    return sum(
        sign * (_sum_below(rows + start) - _sum_below(start)) for sign, start in ((1, first), (-1, first - limit))
    )


def _sum_below(x: int) -> int:
    """Return the sum of the integers from 0 to x - 1."""
    return x * (x - 1) // 2 if x > 0 else 0


class Rows(NamedTuple):
    """A set of rows or columns that consists of `groups` groups of `size` consecutive rows each."""

    start: int  # the first row
    size: int
    groups: int = 1
    step: int = 0  # distance between the first rows of consecutive groups

    def of(self, x: Any) -> Any:
        """Return a view of a tensor (B, n, ...) that contains only these rows.

        The view has the shape (B, size, ...) for one group, and (B, groups, size, ...) for several groups.
        """
        if self.size == x.shape[1]:
            return x
        if self.groups == 1:
            return x.narrow(1, self.start, self.size)
        return x.narrow(1, self.start, self.end - self.start).unfold(1, self.size, self.step).movedim(-1, 2)

    @property
    def end(self) -> int:
        """The row after the last row."""
        return self.start + self.step * (self.groups - 1) + self.size

    def all_of(self, tokens: int) -> bool:
        """Return whether the groups cover all of `tokens` rows exactly once."""
        return self.size * self.groups == tokens == self.end - self.start

    def apart(self) -> Iterator[tuple[slice, Rows]]:
        """Split overlapping groups into slices without repeated rows.

        Yields:
            (slice within each group, rows of the slice in all groups).
        """
        step = self.step if self.groups > 1 else self.size
        for first in range(0, self.size, step):
            last = min(self.size, first + step)
            yield slice(first, last), Rows(self.start + first, last - first, self.groups, self.step)


class Tile(NamedTuple):
    """The product of query rows [q0, q1) and key columns [k0, k1).

    The kind determines which columns k0 + j are visible to row q0 + i:

    - full: all columns.
    - causal: columns with j <= i. The diagonal begins in the upper left corner, so all rows starting at i = k1 - k0 - 1
      see all columns.
    - upper: columns with j >= i. An upper tile has as many rows as columns.
    - band: columns with i <= j < i + width. A band has rows + width - 1 columns; with fewer columns, the last rows see
      fewer than `width`.
    - segments: the columns described by `segments` (see `launches`).
    """

    q0: int
    q1: int
    k0: int
    k1: int
    kind: Literal["full", "causal", "upper", "band", "segments"]
    width: int = 0  # width of a band
    groups: int = 1  # number of equal tiles
    q_step: int = 0  # distance in rows between groups
    k_step: int = 0  # distance in columns between groups
    segments: Segments | None = None

    @property
    def sides(self) -> tuple[Rows, Rows]:
        """The rows and the columns."""
        return (
            Rows(self.q0, self.q1 - self.q0, self.groups, self.q_step),
            Rows(self.k0, self.k1 - self.k0, self.groups, self.k_step),
        )

    @property
    def pairs(self) -> int:
        """The number of visible (query, key) pairs."""
        rows, columns = self.q1 - self.q0, self.k1 - self.k0
        if self.segments:
            return self.groups * self.segments.pairs
        if self.kind == "band":
            missing = rows + self.width - 1 - columns  # number of columns by which the band is too short
            return self.groups * (rows * self.width - missing * (missing + 1) // 2)
        if self.kind == "full":
            return self.groups * rows * columns
        square = min(rows, columns)
        return self.groups * (square * (square + 1) // 2 + max(0, rows - columns) * columns)


class Piece(NamedTuple):
    """Rows [q0, q1), in which row q0 + i sees columns [a + i * a_moves, b + i * b_moves)."""

    q0: int
    q1: int
    a: int
    a_moves: int  # 0 or 1
    b: int
    b_moves: int  # 0 or 1

    def at(self, row: int) -> tuple[int, int]:
        """Return the interval [a, b) of columns that a row sees."""
        down = row - self.q0
        return self.a + down * self.a_moves, self.b + down * self.b_moves


def tiles(q: Runs, kv: Runs, mask: Mask, square: bool = False) -> tuple[Tile, ...]:
    """Return tiles that exactly cover the visible part of a product of q rows and kv columns.

    Each visible pair is in exactly one tile, and no tile contains an invisible pair. Rows and columns are numbered in
    the order of the runs.

    Args:
        square: Whether all causal tiles must be square. Kernels that align a causal mask to the lower right corner
            require square tiles.
    """
    if mask.full:
        tile = Tile(0, sum(run.length for run in q), 0, sum(run.length for run in kv), "full")
        return (tile,) if tile.pairs else ()
    queries = [(run.start, run.step, run.length) for run in q if run.length]
    cover: list[Tile] = []
    for column, chain in _chains(kv):
        pieces: list[Piece] = []
        row = 0
        for run in queries:
            if mask.prefix:  # queries in the prefix see exactly the prefix
                _, subrun = between(run, 0, mask.prefix)
                columns, keys = _keys_between(chain, 0, 0, mask.prefix)
                if subrun[2] > 0 and keys:
                    _append(pieces, row, subrun, column + columns, keys, FULL)
                rows, subrun = between(run, mask.prefix, END)
                if subrun[2] > 0:
                    _append(pieces, row + rows, subrun, column, chain, mask)
            elif not mask.documents:
                _append(pieces, row, run, column, chain, mask)
            else:
                _append_blocks(pieces, row, run, column, chain, mask.own, mask)
            row += run[2]
        if pieces:
            _cover(pieces, square, cover)
        for level in mask.ancestors:
            pieces, row = [], 0
            for run in queries:
                _append_blocks(pieces, row, run, column, chain, level, FULL)
                row += run[2]
            _cover(pieces, square, cover)
    return tuple(cover)


def _chains(kv: Runs) -> list[tuple[int, list[Triple]]]:
    """Group the key runs into chains, and return each chain with the index of its first column.

    A new chain begins if a run starts before the previous run's next position. In a single chain, a query row could be
    the first row to see a key in each of two runs, so the edge would move by two columns.
    """
    chains: list[tuple[int, list[Triple]]] = []
    column, next_position = 0, None
    for run in kv:
        start, step, length = run.start, run.step, run.length
        if not length:
            continue
        if next_position is not None and next_position <= start:
            chains[-1][1].append((start, step, length))
        else:
            chains.append((column, [(start, step, length)]))
        column += length
        next_position = start + step * length
    return chains


def _append_blocks(
    pieces: list[Piece], row: int, q: Triple, column: int, chain: list[Triple], level: Level, mask: Mask
) -> None:
    """Append the pieces in which a query run sees a chain's keys within the blocks of a level."""
    (start, step, length), (key, key_step, count) = q, chain[-1]
    index = columns = 0
    ends = (start, start + step * (length - 1)), (chain[0][0], key + key_step * (count - 1))
    for k0, k1, q0, q1 in level.between(*ends):
        rows, subrun = between(q, q0, q1)
        while chain[index][0] + chain[index][1] * chain[index][2] <= k0 and index + 1 < len(chain):
            columns += chain[index][2]
            index += 1
        before, keys = _keys_between(chain, index, k0, k1)
        if subrun[2] > 0 and keys:
            _append(pieces, row + rows, subrun, column + columns + before, keys, mask)


def _keys_between(chain: list[Triple], index: int, lo: int, hi: int) -> tuple[int, list[Triple]]:
    """Return the number of a chain's tokens before `lo`, counted from run `index` onward, and the chain's part in [lo,
    hi).
    """
    column = 0
    keys: list[Triple] = []
    while index < len(chain) and chain[index][0] < hi:
        before, subrun = between(chain[index], lo, hi)
        if subrun[2] > 0:
            if not keys:
                column += before
            keys.append(subrun)
        elif not keys:
            column += chain[index][2]
        index += 1
    return column, keys


def _append(pieces: list[Piece], row: int, q: Triple, column: int, keys: list[Triple], mask: Mask) -> None:
    """Append the pieces in which a query run sees keys of one document, given in position order."""
    if mask.blocks:
        for rows, part, span, its in mask.parts(q):
            before, seen = _keys_between(keys, 0, *span)
            if seen:
                _append(pieces, row + rows, part, column + before, seen, its)
        return
    start, step, length = q
    key, key_step, count = keys[-1]
    after = mask.right
    if after is not None and start + after + step * (length - 1) < keys[0][0]:
        return
    if mask.window and start - mask.window >= key + key_step * (count - 1):
        return
    # Every row sees all keys. Under a causal edge, a row before the first would see them too, so the edge does not
    # move.
    if not mask.window and (after is None or key + key_step * (count - 1) <= start + after - step):
        _join(pieces, Piece(row, row + length, column, 0, column + sum(run[2] for run in keys), 0))
        return
    left = _edge(q, keys, 1 - mask.window) if mask.window else [(0, 0, 0)]
    right = [(0, sum(run[2] for run in keys), 0)] if after is None else _edge(q, keys, 1 + after)
    for q0, q1, a, a_moves, b, b_moves in _both(left, right, length):
        if a_moves > b_moves:
            q1 = min(q1, q0 + b - a)  # later rows see no columns
        if a < b:
            _join(pieces, Piece(row + q0, row + q1, column + a, a_moves, column + b, b_moves))


def _edge(q: Triple, keys: list[Triple], shift: int) -> list[tuple[int, int, int]]:
    """For each row of a run, return the number of keys before the row's position plus `shift`.

    The result is a list of linear segments (first row, count in the first row, moves), in which the count grows by
    `moves` (0 or 1) per row. A moving segment begins with the first row whose count exceeds the previous row's count.
    """
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
    """Append a segment, or replace the last segment if both begin with the same row."""
    if edge[-1][0] == row:
        edge.pop()
    edge.append((row, count, moves))


def _both(left: list, right: list, length: int) -> Iterator[Piece]:
    """Split the rows into pieces in which both edges are linear."""
    i = j = row = 0
    while row < length:
        left_end = left[i + 1][0] if i + 1 < len(left) else length
        right_end = right[j + 1][0] if j + 1 < len(right) else length
        end = min(left_end, right_end)
        (a_row, a, a_moves), (b_row, b, b_moves) = left[i], right[j]
        yield Piece(row, end, a + a_moves * (row - a_row), a_moves, b + b_moves * (row - b_row), b_moves)
        i += end == left_end
        j += end == right_end
        row = end


def _join(pieces: list[Piece], piece: Piece) -> None:
    """Append a piece, or extend the last piece if both edges continue without a break.

    A piece with a single row can be merged with both kinds of edges, those that stay and those that move.
    """
    if pieces:
        q0, q1, a, a_moves, b, b_moves = pieces[-1]
        if q1 - q0 == 1:
            a_moves, b_moves = piece.a_moves, piece.b_moves
        continues = (q1, a + a_moves * (q1 - q0), b + b_moves * (q1 - q0)) == (piece.q0, piece.a, piece.b)
        if continues and (piece.q1 - q1 == 1 or (a_moves, b_moves) == (piece.a_moves, piece.b_moves)):
            pieces[-1] = Piece(q0, piece.q1, a, a_moves, b, b_moves)
            return
    pieces.append(piece)


def _cover(pieces: list[Piece], square: bool, cover: list[Tile]) -> None:
    """Append the tiles that cover the pieces of one chain."""
    rectangle = -1  # index in `cover` of the last full tile
    joined = -1  # index of a piece already covered by the previous piece's tiles

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


def _sees_all_along(piece: Piece, row: int, a: int, b: int) -> bool:
    """Return whether a piece begins with `row` and every row in the piece sees exactly [a, b)."""
    flat = piece.q1 - piece.q0 == 1 or not (piece.a_moves or piece.b_moves)
    return flat and (piece.q0, piece.a, piece.b) == (row, a, b)
