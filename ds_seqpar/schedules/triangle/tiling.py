"""Tiling of the causal half of attention, with one tile per rank.

A `Tiling` determines the chunks that each rank owns, and the ranks with which each rank exchanges chunks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from ...base.errors import ConfigError


def pair_of(rank: int) -> tuple[int, int]:
    """Return pair number `rank` in the list of pairs (i, j) with 0 <= j < i: (1, 0), (2, 0), (2, 1), (3, 0) ...

    The first T (T - 1) / 2 pairs have i < T, so pair number T (T - 1) / 2 is (T, 0).
    """
    i = (1 + math.isqrt(1 + 8 * rank)) // 2
    return i, rank - i * (i - 1) // 2


class Stop(NamedTuple):
    """Stop on a group's route, at which a chunk starts."""

    chunk: int
    rank: int | None  # member at the stop; None if the chunk's owner does not belong to the group


class Tiling:
    """Tiles for a sequence with T blocks, R = `strips` strips per block, and T - 1 chunks per strip.

    Each of the A = R T (T - 1) / 2 ranks owns two chunks.

    Rank R (i (i - 1) / 2 + j) + p, with j < i < T, computes attention from q in strip p of block i to k/v in block j.
    The rank belongs to the row of strip (i, p), which is strip number R i + p, and to the column of block j. In strip
    (i, p), the rank owns chunk j. The first i chunks of the strip are called early. In some strip of block j, the rank
    also owns a late chunk, at position j or later. Every chunk has two numbers: its `place` in the sequence and its
    number in the plan. The number in the plan is `2 * rank` for a late chunk and `2 * rank + 1` for an early chunk.

    Products inside a block belong to no tile. Products of a strip's early chunks and of late queries add no traffic in
    the row or column. The remaining products inside a block form the staircase, which consists of a strip's early
    queries with k/v from earlier strips in the same block. Ranks in the row take some of the k/v chunks (`fetched`), as
    long as the chunks cost no more than about one query. The other k/v chunks are left to ranks in the block's column,
    which take the query instead (`lent`).
    """

    def __init__(self, ranks: int, strips: int) -> None:
        self.ranks, self.strips, (self.blocks, more) = ranks, strips, pair_of(ranks // strips)
        if more or ranks % strips:
            raise ConfigError(f"tiles of {strips} strips need {strips} times T (T - 1) / 2 ranks; got {ranks}")
        self.long = self.blocks - 1  # number of chunks per strip
        self.lent: dict[tuple[int, int], int] = {}  # (strip, chunk in the strip) -> rank
        self.left = self._left()
        self.owned = [(0, 0)] * ranks  # places of each rank's late chunk and early chunk
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
        """Return the ranks in a block's rows that belong to one column."""
        first = self.strips * (block * (block - 1) // 2 + column)
        return range(first, first + self.strips)

    def groups(self) -> list[tuple[str, int]]:
        """Return the (side, number) key for every strip and every block."""
        counts = {"q": self.blocks * self.strips, "kv": self.blocks}
        return [(side, number) for side, count in counts.items() for number in range(count)]

    def group(self, side: str, number: int) -> list[int]:
        """Return the ranks in a row (side q) or a column (side kv)."""
        return self.row(number) if side == "q" else self.column(number)

    def length(self, side: str) -> int:
        """Return the number of chunks in a strip (side q) or a block (side kv)."""
        return self.long if side == "q" else self.long * self.strips

    def members(self, side: str, number: int) -> list[int]:
        """Return the chunks of a strip or a block, in order of place."""
        length = self.length(side)
        return self.chunks[number * length : (number + 1) * length]

    def route(self, side: str, number: int) -> list[Stop]:
        """Return a group's route. Each chunk starts at a stop and moves to the next stop in every turn.

        Outside chunks are spread evenly between the members' chunks, so that the results of all members travel equally
        far. The route of a group without members is empty.
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
        """Return the number of k/v chunks that the row of a strip takes from earlier strips of the block.

        The row takes the first chunks, at most 2, 6 or 12 per rank for 2, 4 or 8 strips. If no column can take the
        other chunks, the row takes all chunks. A query and its result cost as much as R k/v chunks if R queries share a
        key. A few more chunks balance the work better. Chunk n is sent to rank n % i of the row.
        """
        block, before = strip // self.strips, strip % self.strips * self.long
        return min(before, 3 * self.strips // 4 * 2 * block) if block < self.long else before

    def _left(self) -> list[int]:
        """Lend queries, and return twice the number of chunk products that each rank has on the diagonal and the
        staircase.

        The products of a rank's late queries are not counted. Queries with the most products are lent first. They are
        lent to the ranks in the column that have the fewest products.
        """
        work = [0] * self.ranks
        for rank in range(self.ranks):
            block, strip, column = self.tile(rank)
            work[rank] = 2 * (block - column) - 1 + 2 * block * len(self.fetches(rank))
        for block in range(1, self.long):
            free: list[int] = []
            for strip in reversed(range(block * self.strips, (block + 1) * self.strips)):
                others = strip % self.strips * self.long - self.fetched(strip)  # chunks that the row does not take
                for chunk in range(block if others else 0):
                    free = free or sorted(self.column(block), key=lambda rank: (work[rank], rank))
                    rank = self.lent[strip, chunk] = free.pop(0)
                    work[rank] += 2 * others
        return work

    def fetches(self, rank: int) -> range:
        """Return the k/v chunks that a rank in a row takes, numbered within the block."""
        block, strip, column = self.tile(rank)
        return range(column, self.fetched(block * self.strips + strip), block)

    def _own(self, block: int) -> None:
        """Set the chunks that the ranks in a column own.

        The rank with the least work owns the latest chunk, which sees the most keys.
        """
        places = [n for n in range(self.length("kv")) if n % self.long >= block]
        ranks = sorted(self.column(block), key=lambda rank: (-self.left[rank], -rank))
        for rank, place in zip(ranks, places, strict=True):
            i, strip, _ = self.tile(rank)
            early = (i * self.strips + strip) * self.long + block
            self.owned[rank] = block * self.length("kv") + place, early

    def stairs(self, side: str, number: int) -> Iterator[tuple[int, list[int]]]:
        """Yield each staircase chunk of a group, with the ranks outside the group's route that take it.

        A chunk's ranks are in order. Each k/v chunk is taken by one rank in each row that needs it.
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
        """Yield a rank's products on the staircase as (q chunk, k/v chunk)."""
        i, p, j = self.tile(rank)
        kv = self.members("kv", i)
        for q in self.members("q", i * self.strips + p)[:i]:
            yield from ((q, kv[n]) for n in self.fetches(rank))
        kv = self.members("kv", j)
        for strip, n in self.lent_to(rank):
            q, before = self.members("q", strip)[n], strip % self.strips * self.long
            yield from ((q, chunk) for chunk in kv[self.fetched(strip) : before])

    def lent_to(self, rank: int) -> list[tuple[int, int]]:
        """Return (strip, chunk in the strip) for each query that is lent to a rank."""
        return [query for query, taker in self.lent.items() if taker == rank]


@functools.lru_cache(maxsize=64)
def tiling(ranks: int, strips: int) -> Tiling:
    return Tiling(ranks, strips)
