"""Runs of consecutive tokens, cut at document starts, for layers with a recurrent state."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ..base.errors import ConfigError
from ..core.compiler.sharding.layout import Run, Runs, owned
from ..core.compiler.sharding.shards import Shards, runs_of_sp_rank

COLUMNS = 2**16  # number of keys whose index scores are compared at a time; the results of several blocks are merged


class Segment(NamedTuple):
    """Consecutive tokens of one document on one rank."""

    length: int
    enters: int | None  # index of the segment's run among all runs, if the document began in an earlier run
    leaves: int | None  # index of the segment's run, if this is the last segment of the run


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """All ranks' runs, numbered in order of position, and the segments of each rank's tokens in order."""

    runs: tuple[Run, ...]
    numbers: tuple[tuple[int, ...], ...]  # indices of each rank's runs
    starts: tuple[int, ...]  # start positions of documents
    of_rank: tuple[tuple[Segment, ...], ...]

    @property
    def continues(self) -> bool:
        """Whether any document continues from one run to the next."""
        return any(segment.enters is not None for segments in self.of_rank for segment in segments)

    def reach(self, tokens: int | None = None) -> int:
        """Return the maximum number of previous runs on which a run's tokens depend.

        Args:
            tokens: Number of previous tokens of the same document on which a token depends, or None for all.
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
        """Maximum number of runs per rank."""
        return max(map(len, self.numbers))

    @functools.cached_property
    def places(self) -> list[tuple[int, int]]:
        """The (rank, index among the rank's runs) of each run."""
        place_of = {
            number: (rank, place) for rank, runs in enumerate(self.numbers) for place, number in enumerate(runs)
        }
        return [place_of[number] for number in range(len(self.runs))]


@functools.lru_cache(maxsize=256)
def partners(segments: Segments, rank: int, reach: int) -> tuple[list[int], list[int]]:
    """Return the ranks on whose runs this rank's runs depend, and the ranks whose runs depend on this rank's runs.

    Args:
        segments: The runs of all ranks.
        rank: The rank.
        reach: Maximum number of previous runs on which a run depends.
    """

    def depends(runs: Sequence[int], others: Sequence[int]) -> bool:
        return any(0 < number - other <= reach for number in runs for other in others)

    mine, others = segments.numbers[rank], [x for x in enumerate(segments.numbers) if x[0] != rank]
    return [x for x, runs in others if depends(mine, runs)], [x for x, runs in others if depends(runs, mine)]


RUNS = 2  # maximum number of runs per rank for passing states from run to run
AT_ONCE = 2**21  # maximum size in bytes of states and maps that are received all at once


def go_in_order(reach: int, runs: int, run_bytes: float) -> bool:
    """Return whether states are passed from run to run, rather than all at once.

    Args:
        reach: Maximum number of previous runs on which a run depends.
        runs: Maximum number of runs per rank.
        run_bytes: The size in bytes of a run's state and map.
    """
    return runs <= RUNS and reach > 1 and reach * run_bytes > AT_ONCE


def received_bytes(reach: int, runs: int, state: float, transition: float) -> float:
    """Return the maximum number of bytes that any rank receives in one direction.

    Args:
        reach: See `go_in_order`.
        runs: See `go_in_order`.
        state: The size in bytes of a run's state.
        transition: The size in bytes of a run's map.
    """
    return runs * state if go_in_order(reach, runs, state + transition) else reach * (state + transition)


@functools.lru_cache(maxsize=64)
def segments_of(shards: Shards, documents: tuple[int, ...], ulysses_size: int | None) -> Segments:
    """Return the segments of all ranks.

    Args:
        shards: The tokens of each CP rank.
        documents: Start positions of documents; () for a single document.
        ulysses_size: Number of SP ranks per CP rank, to return segments per SP rank, or None for segments per CP rank.

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
    """Join adjacent runs."""
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
