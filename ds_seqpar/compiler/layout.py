"""Which tokens a rank holds: a list of runs, by the named layouts. Pure integers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .tiling import tiling


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


def paired(ranks: int, rank: int, strips: int = 1) -> tuple[int, int]:
    """The two of 2 A chunks that a rank of A = `strips` T (T - 1) / 2 holds: see `Tiling`."""
    return tiling(ranks, strips).owned[rank]


def pairs(seq: int, ranks: int, rank: int, strips: int = 1) -> Runs:
    """A rank holds a chunk of one block and one of a later block. For `strips` T (T - 1) / 2 ranks only."""
    size = seq // (2 * ranks)
    return tuple(Run(chunk * size, 1, size) for chunk in paired(ranks, rank, strips))


def dealt(layout: str, tokens: int, ranks: int, rank: int) -> Runs:
    """The runs of a named layout for any number of tokens: ranks' shares differ by one token at most."""
    first, end = tokens * rank // ranks, tokens * (rank + 1) // ranks
    if layout in STRIPS:  # an empty run is a block, too
        chunks = paired(ranks, rank, STRIPS[layout])
        ends = [(tokens * c // (2 * ranks), tokens * (c + 1) // (2 * ranks)) for c in chunks]
        return tuple(Run(low, 1, high - low) for low, high in ends)
    if layout == "striped":
        runs = [Run(rank, ranks, len(range(rank, tokens, ranks)))]
    elif layout == "contiguous":
        runs = [Run(first, 1, end - first)]
    else:  # from the outermost tokens inwards, half of a rank's in front
        low, high = (first + 1) // 2, (end + 1) // 2
        runs = [Run(low, 1, high - low), Run(tokens - end // 2, 1, end // 2 - first // 2)]
    return tuple(run for run in runs if run.length)


# "balanced" is zigzag where a sequence is one document; documents it deals as compiler.balance does
LAYOUTS: dict[str, Callable[[int, int, int], Runs]] = {
    "balanced": zigzag,
    "contiguous": contiguous,
    "striped": striped,
    "zigzag": zigzag,
}
# and those that not every number of ranks has: for the schedules that name them
STRIPS = {"pairs": 1, "pairs2": 2, "pairs4": 4, "pairs8": 8}
NAMED: dict[str, Callable[[int, int, int], Runs]] = {
    **LAYOUTS,
    **{name: functools.partial(pairs, strips=strips) for name, strips in STRIPS.items()},
}
# blocks that a rank holds, each a run of its own; elsewhere all that it holds is one block
PARTS = dict.fromkeys(STRIPS, 2)


def multiple(layout: str, size: int, ulysses: int) -> int:
    """A sequence length must be a multiple of this: P, for two chunks a rank lcm(2A, P)."""
    return math.lcm(2 * size // ulysses, size) if layout in ("zigzag", "balanced", *PARTS) else size


def join(groups: Iterable[Runs]) -> Runs:
    """The runs of several blocks in the one order that gathered blocks are kept in: by position."""
    return tuple(sorted(run for runs in groups for run in runs))
