"""The causal half of attention as tiles, one for each rank: the chunks that a rank owns, and the ranks that it works
with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from ...base.errors import ConfigError


def pair_of(rank: int) -> tuple[int, int]:
    """Return the rank-th of the pairs (i, j), 0 <= j < i: (1, 0), (2, 0), (2, 1), (3, 0) ...

    The first T (T - 1) / 2 of them have i < T, so that of T (T - 1) / 2 itself is (T, 0).
    """
    i = (1 + math.isqrt(1 + 8 * rank)) // 2
    return i, rank - i * (i - 1) // 2


class Stop(NamedTuple):
    """A stop on the route of a group, where a chunk starts."""

    chunk: int
    rank: int | None  # the member here; None where the chunk's owner is outside of the group


class Tiling:
    """The tiles of a sequence of T blocks of R = `strips` strips of T - 1 chunks.

    There are two chunks for each of A = R T (T - 1) / 2 ranks.

    Rank R (i (i - 1) / 2 + j) + p, j < i < T, computes q of strip p of block i with k/v of block j. It is in the row of
    strip (i, p), which is number R i + p, and in the column of block j. Of strip (i, p) it owns chunk j, an early one:
    the first i are early. Of some strip of block j it owns a late one, at j or after. Chunks have two numbers: their
    `place` in the sequence, and that of the plan, 2 rank for a late one and 2 rank + 1 for an early one.

    Products inside a block are not in any tile. Products of one strip's early chunks, or of late queries, cost a row or
    column no bytes. The rest is the staircase: early queries of a strip with k/v of the strips before it in its block.
    A rank of the row takes some of these k/v chunks (`fetched`), up to about the cost of a query. The others are left
    to ranks of the block's column, which take the query instead (`lent`).
    """

    def __init__(self, ranks: int, strips: int) -> None:
        self.ranks, self.strips, (self.blocks, more) = ranks, strips, pair_of(ranks // strips)
        if more or ranks % strips:
            raise ConfigError(f"tiles of {strips} strips need {strips} times T (T - 1) / 2 ranks; got {ranks}")
        self.long = self.blocks - 1  # chunks of a strip
        self.lent: dict[tuple[int, int], int] = {}  # (strip, chunk in it) -> rank
        self.left = self._left()
        self.owned = [(0, 0)] * ranks  # of each rank the places of its late and of its early chunk
        for block in range(self.long):
            self._own(block)
        self.place = [place for both in self.owned for place in both]
        self.chunks = sorted(range(2 * ranks), key=self.place.__getitem__)

    def tile(self, rank: int) -> tuple[int, int, int]:
        """Return the tile (i, p, j) that a rank computes."""
        pair, strip = divmod(rank, self.strips)
        block, column = pair_of(pair)
        return block, strip, column

    def row(self, strip: int) -> list[int]:
        """Return the ranks that need all q of a strip."""
        block, number = divmod(strip, self.strips)
        return [self.strips * (block * (block - 1) // 2 + j) + number for j in range(block)]

    def column(self, block: int) -> list[int]:
        """Return the ranks that need all k/v of a block."""
        return sorted(rank for i in range(block + 1, self.blocks) for rank in self._of(i, block))

    def _of(self, block: int, column: int) -> range:
        """Return the ranks of a block's rows in one column."""
        first = self.strips * (block * (block - 1) // 2 + column)
        return range(first, first + self.strips)

    def groups(self) -> list[tuple[str, int]]:
        """Return (side, number) of every strip, and of every block."""
        counts = {"q": self.blocks * self.strips, "kv": self.blocks}
        return [(side, number) for side, count in counts.items() for number in range(count)]

    def group(self, side: str, number: int) -> list[int]:
        """Return the ranks of a row (side q) or of a column (side kv)."""
        return self.row(number) if side == "q" else self.column(number)

    def length(self, side: str) -> int:
        """Return the number of chunks of a strip, or of a block."""
        return self.long if side == "q" else self.long * self.strips

    def members(self, side: str, number: int) -> list[int]:
        """Return the chunks of a strip or a block, by place."""
        length = self.length(side)
        return self.chunks[number * length : (number + 1) * length]

    def route(self, side: str, number: int) -> list[Stop]:
        """Return a group's route: each chunk starts at a stop and moves on by one stop a turn.

        Outside chunks are spread evenly between the members' chunks, so that all members' results travel equally far.
        The route is empty without members.
        """
        chunks, ranks = self.members(side, number), set(self.group(side, number))
        members = [chunk for chunk in chunks if chunk // 2 in ranks]
        foreign = iter([chunk for chunk in chunks if chunk // 2 not in ranks])
        at = {number * len(chunks) // len(members): chunk for number, chunk in enumerate(members)}
        return [
            Stop(at[n], at[n] // 2) if n in at else Stop(next(foreign), None)
            for n in range(len(chunks) * bool(members))
        ]

    # ---- the staircase

    def fetched(self, strip: int) -> int:
        """Return the number of k/v chunks before a strip, in its block, that the row takes. They are the first ones, at
        most 2, 6 or 12 per rank for 2, 4 or 8 strips. If no column can take the others, the row takes all. A query with
        its result costs as much as R k/v chunks if R queries share a key; a few more balance the work better. The n-th
        chunk goes to the row's rank n % i.
        """
        block, before = strip // self.strips, strip % self.strips * self.long
        return min(before, 3 * self.strips // 4 * 2 * block) if block < self.long else before

    def _left(self) -> list[int]:
        """Lend queries, and return twice the number of chunk products of each rank on the diagonal and the staircase.

        The products of its late queries are not counted. Queries with the most products are lent first, to the ranks of
        the column that have the fewest.
        """
        work = [0] * self.ranks
        for rank in range(self.ranks):
            block, strip, column = self.tile(rank)
            work[rank] = 2 * (block - column) - 1 + 2 * block * len(self.fetches(rank))
        for block in range(1, self.long):
            free: list[int] = []
            for strip in reversed(range(block * self.strips, (block + 1) * self.strips)):
                others = strip % self.strips * self.long - self.fetched(strip)  # that the row does not take
                for chunk in range(block if others else 0):
                    free = free or sorted(self.column(block), key=lambda rank: (work[rank], rank))
                    rank = self.lent[strip, chunk] = free.pop(0)
                    work[rank] += 2 * others
        return work

    def fetches(self, rank: int) -> range:
        """Return the k/v chunks that a rank of a row takes, by their number in the block."""
        block, strip, column = self.tile(rank)
        return range(column, self.fetched(block * self.strips + strip), block)

    def _own(self, block: int) -> None:
        """Set the chunks that a column's ranks own.

        The rank with the least to do owns the latest, which sees the most.
        """
        places = [n for n in range(self.length("kv")) if n % self.long >= block]
        ranks = sorted(self.column(block), key=lambda rank: (-self.left[rank], -rank))
        for rank, place in zip(ranks, places, strict=True):
            i, strip, _ = self.tile(rank)
            early = (i * self.strips + strip) * self.long + block
            self.owned[rank] = block * self.length("kv") + place, early

    def stairs(self, side: str, number: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (chunk, ranks in order): the ranks outside a group's route that take the chunk for the staircase.

        A chunk of k/v has one in each row that takes it.
        """
        chunks = self.members(side, number)
        if side == "q":
            yield from ((chunk, [self.lent[number, n]]) for n, chunk in enumerate(chunks) if (number, n) in self.lent)
            return
        strips = range(number * self.strips, (number + 1) * self.strips)
        for n, chunk in enumerate(chunks):
            rows = [strip for strip in strips if n < self.fetched(strip)]
            if rows:
                yield chunk, [self.row(strip)[n % number] for strip in rows]

    def staircase(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield a rank's products of the staircase, as (q chunk, k/v chunk)."""
        i, p, j = self.tile(rank)
        kv = self.members("kv", i)
        for q in self.members("q", i * self.strips + p)[:i]:
            yield from ((q, kv[n]) for n in self.fetches(rank))
        kv = self.members("kv", j)
        for strip, n in self.lent_to(rank):
            q, before = self.members("q", strip)[n], strip % self.strips * self.long
            yield from ((q, chunk) for chunk in kv[self.fetched(strip) : before])

    def lent_to(self, rank: int) -> list[tuple[int, int]]:
        """Return (strip, chunk in it) of the queries that a rank of a column takes."""
        return [query for query, taker in self.lent.items() if taker == rank]


@functools.lru_cache(maxsize=64)
def tiling(ranks: int, strips: int) -> Tiling:
    return Tiling(ranks, strips)
