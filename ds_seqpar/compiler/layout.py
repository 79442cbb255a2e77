"""Which tokens a rank holds: a list of runs, by the named layouts; `register` takes others. Pure integers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..errors import ConfigError


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
Dealing = Callable[[int, int, int], Runs]  # tokens, ranks, rank


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


def dealt_contiguous(tokens: int, ranks: int, rank: int) -> Runs:
    first, end = _share(tokens, ranks, rank)
    return _some(Run(first, 1, end - first))


def dealt_zigzag(tokens: int, ranks: int, rank: int) -> Runs:
    """From the outermost tokens inwards, half of a rank's in front."""
    first, end = _share(tokens, ranks, rank)
    low, high = (first + 1) // 2, (end + 1) // 2
    return _some(Run(low, 1, high - low), Run(tokens - end // 2, 1, end // 2 - first // 2))


def dealt_striped(tokens: int, ranks: int, rank: int) -> Runs:
    return _some(Run(rank, ranks, len(range(rank, tokens, ranks))))


def _share(tokens: int, ranks: int, rank: int) -> tuple[int, int]:
    return tokens * rank // ranks, tokens * (rank + 1) // ranks


def _some(*runs: Run) -> Runs:
    return tuple(run for run in runs if run.length)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Layout:
    """How a sequence is dealt to ranks.

    name: what settings call it. runs(tokens, ranks, rank): what a rank holds of a sequence whose length is a multiple
    of ranks * chunks. dealt(tokens, ranks, rank): the same for any length; ranks' shares differ by one token at most.
    chunks: equal parts that a rank's tokens are cut into. parts: blocks that a rank holds, each a run of its own, also
    where it is empty; with 1 all that it holds is one block.
    """

    name: str
    runs: Dealing
    dealt: Dealing
    chunks: int = 1
    parts: int = 1


# those that every number of ranks has. "balanced" is zigzag where a sequence is one document; documents it deals as
# compiler.balance does
COMMON = (
    Layout(name="balanced", runs=zigzag, dealt=dealt_zigzag, chunks=2),
    Layout(name="contiguous", runs=contiguous, dealt=dealt_contiguous),
    Layout(name="striped", runs=striped, dealt=dealt_striped),
    Layout(name="zigzag", runs=zigzag, dealt=dealt_zigzag, chunks=2),
)
LAYOUTS = {layout.name: layout for layout in COMMON}  # and those that schedules bring with them


def register(*layouts: Layout) -> None:
    """Raises ConfigError where a name is taken."""
    if taken := [layout.name for layout in layouts if layout.name in ("auto", *LAYOUTS)]:
        raise ConfigError(f"a layout needs a name of its own; got {', '.join(taken)}, rename it")
    LAYOUTS.update((layout.name, layout) for layout in layouts)


def remove(*layouts: Layout) -> None:
    for layout in layouts:
        del LAYOUTS[layout.name]


def dealt(layout: str, tokens: int, ranks: int, rank: int) -> Runs:
    """The runs of a named layout for any number of tokens."""
    return LAYOUTS[layout].dealt(tokens, ranks, rank)


def multiple(layout: str, size: int, ulysses: int) -> int:
    """A sequence length must be a multiple of this: P, for two chunks a rank lcm(2A, P)."""
    return math.lcm(LAYOUTS[layout].chunks * size // ulysses, size)


def join(groups: Iterable[Runs]) -> Runs:
    """The runs of several blocks in the one order that gathered blocks are kept in: by position."""
    return tuple(sorted(run for runs in groups for run in runs))
