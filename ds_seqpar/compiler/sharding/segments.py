"""Runs of a sequence that are cut where documents begin, for layers whose tokens depend on a state before them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ...errors import ConfigError
from .layout import Run, Runs, owned
from .shards import Shards, UnevenShards, runs_of_sp_rank


class Segment(NamedTuple):
    """Consecutive tokens of one document on one rank."""

    length: int
    enters: int | None  # the number of its run among all ranks', if the document began in an earlier run
    leaves: int | None  # the number of its run, if it is the last segment there


@dataclasses.dataclass(frozen=True)
class Segments:
    """The runs of all ranks, numbered in order of position, and the segments of each rank's tokens in order."""

    runs: tuple[Run, ...]
    numbers: tuple[tuple[int, ...], ...]  # of each rank: the numbers of its runs
    starts: tuple[int, ...]  # the positions at which documents begin
    of_rank: tuple[tuple[Segment, ...], ...]

    @property
    def continues(self) -> bool:
        """Whether any document goes on from one run to the next."""
        return any(segment.enters is not None for segments in self.of_rank for segment in segments)

    def reach(self, tokens: int | None = None) -> int:
        """Return how many runs before its own a run's tokens depend on.

        Args:
            tokens: On how many tokens of its document before it a token depends; None: on all.
        """
        most = 0
        for number, run in enumerate(self.runs):
            start = self.starts[bisect_right(self.starts, run.start) - 1]
            first = start if tokens is None else max(start, run.start - tokens)
            if first < run.start:
                most = max(most, number - bisect_right(self.runs, first, key=lambda run: run.start) + 1)
        return most

    @property
    def most_runs(self) -> int:
        """The most runs of a rank."""
        return max(map(len, self.numbers))

    @functools.cached_property
    def shards(self) -> tuple[UnevenShards, UnevenShards]:
        """The runs as tokens of a plan, numbered in order of position and in the reverse order."""
        return UnevenShards(self._as_tokens(False)), UnevenShards(self._as_tokens(True))

    @functools.cached_property
    def blocks(self) -> tuple[UnevenShards, UnevenShards]:
        """The same with a block for each run, as many on each rank."""
        count = max(2, self.most_runs)
        of_order = [
            UnevenShards([x[n : n + 1] for x in self._as_tokens(reverse) for n in range(count)], blocks_per_rank=count)
            for reverse in (False, True)
        ]
        return of_order[0], of_order[1]

    def _as_tokens(self, reverse: bool) -> list[Runs]:
        last = len(self.runs) - 1
        if reverse:
            return [tuple(Run(last - number, 1, 1) for number in reversed(numbers)) for numbers in self.numbers]
        return [tuple(Run(number, 1, 1) for number in numbers) for numbers in self.numbers]


@functools.lru_cache(maxsize=64)
def segments_of(shards: Shards, documents: tuple[int, ...], ulysses_size: int | None) -> Segments:
    """Return the segments of all ranks.

    Args:
        shards: The tokens of each CP rank.
        documents: The positions at which documents begin; () for one document.
        ulysses_size: Cut the tokens of the SP ranks, which are so many for each CP rank; None: those of the CP ranks.

    Raises:
        ConfigError: A rank's tokens are not consecutive.
    """
    if ulysses_size is None:
        ranks = [shards.runs("q", owned(rank, shards.blocks_per_rank)) for rank in range(shards.size)]
    else:
        ranks = [runs_of_sp_rank(shards, "q", ulysses_size, rank) for rank in range(shards.size * ulysses_size)]
    ranks = [_joined(runs) for runs in ranks]
    runs = tuple(sorted(run for runs in ranks for run in runs))
    number_of = {run: number for number, run in enumerate(runs)}
    numbers = tuple(tuple(number_of[run] for run in runs) for runs in ranks)
    starts = documents or (0,)
    of_rank = tuple(tuple(x for run in runs for x in _cut(run, number_of[run], starts)) for runs in ranks)
    return Segments(runs, numbers, starts, of_rank)


def _joined(runs: Runs) -> Runs:
    """Return the runs with neighbors joined."""
    joined: list[Run] = []
    for run in runs:
        if run.length > 1 and run.step != 1:
            raise ConfigError(
                "layers with a state need ranks that hold consecutive tokens; got tokens "
                f"{run.step} apart, set layout to balanced, or ulysses to size so that ranks exchange heads"
            )
        if not run.length:
            continue
        if joined and joined[-1].last + 1 == run.start:
            joined[-1] = Run(joined[-1].start, 1, joined[-1].length + run.length)
        else:
            joined.append(Run(run.start, 1, run.length))
    return tuple(joined)


def _cut(run: Run, number: int, starts: Sequence[int]) -> list[Segment]:
    end = run.start + run.length
    inside = starts[bisect_left(starts, run.start) : bisect_left(starts, end)]
    continues = not inside or inside[0] > run.start
    borders = [*([run.start] if continues else []), *inside, end]
    segments = [Segment(b - a, None, None) for a, b in itertools.pairwise(borders)]
    if continues:
        segments[0] = segments[0]._replace(enters=number)
    segments[-1] = segments[-1]._replace(leaves=number)
    return segments
