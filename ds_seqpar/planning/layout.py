"""Which tokens a rank holds: a list of runs, by the named layouts. Pure integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Run(NamedTuple):
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


def pair_of(rank: int) -> tuple[int, int]:
    """The rank-th of the pairs (i, j), 0 <= j < i: (1, 0), (2, 0), (2, 1), (3, 0) ... The first T (T - 1) / 2 of them
    have i < T, so that of T (T - 1) / 2 itself is (T, 0)."""
    i = (1 + math.isqrt(1 + 8 * rank)) // 2
    return i, rank - i * (i - 1) // 2


def paired(ranks: int, rank: int) -> tuple[int, int]:
    """The two of 2 A chunks that rank (i, j) of A = T (T - 1) / 2 holds, where T blocks of T - 1 chunks each are the
    sequence: one of block j, of which the ranks (., j) hold the last T - 1 - j in falling order; one of block i, of
    which the ranks (i, .) hold the first i in rising order."""
    (blocks, _), (i, j) = pair_of(ranks), pair_of(rank)
    return j * blocks + blocks - 1 - i, i * (blocks - 1) + j


def pairs(seq: int, ranks: int, rank: int) -> Runs:
    """Rank (i, j) holds a chunk of block j and one of block i. For T (T - 1) / 2 ranks only."""
    size = seq // (2 * ranks)
    return tuple(Run(chunk * size, 1, size) for chunk in paired(ranks, rank))


def dealt(layout: str, tokens: int, ranks: int, rank: int) -> Runs:
    """The runs of a named layout for any number of tokens: ranks' shares differ by one token at most."""
    first, end = tokens * rank // ranks, tokens * (rank + 1) // ranks
    if PARTS.get(layout, 1) > 1:  # an empty run is a block, too
        ends = [(tokens * c // (2 * ranks), tokens * (c + 1) // (2 * ranks)) for c in paired(ranks, rank)]
        return tuple(Run(low, 1, high - low) for low, high in ends)
    if layout == "striped":
        runs = [Run(rank, ranks, len(range(rank, tokens, ranks)))]
    elif layout == "contiguous":
        runs = [Run(first, 1, end - first)]
    else:  # from the outermost tokens inwards, half of a rank's in front
        low, high = (first + 1) // 2, (end + 1) // 2
        runs = [Run(low, 1, high - low), Run(tokens - end // 2, 1, end // 2 - first // 2)]
    return tuple(run for run in runs if run.length)


# "balanced" is zigzag where a sequence is one document; documents it deals as planning.balance does
LAYOUTS: dict[str, Callable[[int, int, int], Runs]] = {
    "balanced": zigzag,
    "contiguous": contiguous,
    "striped": striped,
    "zigzag": zigzag,
}
# and those that not every number of ranks has: for the schedules that name them
NAMED = {**LAYOUTS, "pairs": pairs}
PARTS = {"pairs": 2}  # blocks that a rank holds, each a run of its own; elsewhere all that it holds is one block


def multiple(layout: str, size: int, ulysses: int) -> int:
    """A sequence length must be a multiple of this: P, for two chunks a rank lcm(2A, P)."""
    return math.lcm(2 * size // ulysses, size) if layout in ("zigzag", "balanced", *PARTS) else size


def join(groups: Iterable[Runs]) -> Runs:
    """The runs of several blocks in the one order that gathered blocks are kept in: by position."""
    return tuple(sorted(run for runs in groups for run in runs))
