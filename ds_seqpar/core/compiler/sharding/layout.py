"""Named rank axes, and named layouts that assign tokens to ranks. This module works only with integers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ....base.errors import SECTION, ConfigError

Axes = tuple[tuple[str, int], ...]
Key = tuple[int, ...]  # sorted block numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """All ranks of a job, each with a coordinate on every axis.

    The fastest-varying axis comes first, so neighbors along the first axis have consecutive ranks.

    Attributes:
        axes: Pairs (name, size). The names "ulysses" and "data" are reserved; all other axes are CP axes.
        inner: CP axes in the order that defines CP rank numbers, fastest-varying first, regardless of placement.
            Defaults to the order in `axes`.
        collective_axes: CP axes along which the schedule runs collectives.
    """

    axes: Axes
    inner: tuple[str, ...] = ()
    collective_axes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, inner: Axes, *, ulysses: int, data: int, order: tuple[str, ...], collective_axes: tuple[str, ...] = ()
    ) -> Topology:
        """Return the topology for a schedule's axes.

        Args:
            inner: Axes of the schedule, in the order that defines CP rank numbers.
            order: Order of all axes; see `axis_order`.
        """
        sizes = {"ulysses": ulysses, **dict(inner), "data": data}
        return cls(
            axes=tuple((name, sizes[name]) for name in order), inner=tuple(dict(inner)), collective_axes=collective_axes
        )

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def cp_axes(self) -> tuple[str, ...]:
        return self.inner or tuple(name for name, _ in self.axes if name not in ("ulysses", "data"))

    def size(self, *names: str) -> int:
        """Return the number of ranks spanned by the named axes."""
        return math.prod([self._sizes.get(name, 1) for name in names])

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Map each axis to the rank's coordinate on that axis."""
        coordinates = {}
        for name, size in self.axes:
            rank, coordinates[name] = divmod(rank, size)
        return coordinates

    def rank(self, coordinates: dict[str, int]) -> int:
        rank = 0
        for name, size in reversed(self.axes):
            rank = rank * size + coordinates[name]
        return rank

    def index(self, rank: int, *names: str) -> int:
        """Return the rank's index within the named axes, where the first name varies fastest."""
        number, stride = 0, 1
        coordinates = self.coordinates(rank)
        for name in names:
            number, stride = number + coordinates[name] * stride, stride * self.size(name)
        return number

    def group(self, rank: int, *names: str) -> tuple[int, ...]:
        """Return the ranks whose coordinates equal those of `rank` except on the named axes, ordered by `index`."""
        coordinates = self.coordinates(rank)
        points = itertools.product(*(range(self.size(name)) for name in reversed(names)))
        return tuple(self.rank({**coordinates, **dict(zip(reversed(names), point, strict=True))}) for point in points)

    def groups(self, *names: str) -> list[tuple[int, ...]]:
        """Return all distinct groups along the named axes, in the same order on every rank."""
        return sorted({self.group(rank, *names) for rank in range(self.world_size)})


def axis_order(inner: Axes, rank_order: Sequence[str] | str, presets: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the order of "ulysses", the CP axes and "data", fastest-varying axis first.

    Args:
        rank_order: Name of a preset, or an explicit order in which "data" may be omitted.
        presets: The axes that each preset places first.

    Raises:
        ConfigError: `rank_order` does not name every axis exactly once.
    """
    axes = ("ulysses", *dict(inner), "data")
    first = presets[rank_order] if isinstance(rank_order, str) else rank_order
    if not isinstance(rank_order, str) and (sorted({*first, "data"}) != sorted(axes) or len(set(first)) != len(first)):
        raise ConfigError(
            f"{SECTION}.rank_order must order the axes {', '.join(axes[:-1])} (data is last unless named); "
            f"got {list(rank_order)}"
        )
    return (*first, *(name for name in axes if name not in first))


def divisors(number: int) -> list[int]:
    """Return all divisors of a number in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d < number]


# ---- layouts of tokens


class Run(NamedTuple):
    """A run of `length` tokens at the positions start, start + step, start + 2 step, ..."""

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
RunsOf = Callable[[int, int, int], Runs]  # function (tokens, ranks, rank) that returns the rank's runs of tokens


def contiguous(tokens: int, ranks: int, rank: int) -> Runs:
    """Split the sequence into `ranks` slices and assign slice r to rank r."""
    first, end = _share(tokens, ranks, rank)
    return _nonempty(Run(first, 1, end - first))


def zigzag(tokens: int, ranks: int, rank: int) -> Runs:
    """Split the sequence into 2A chunks and assign chunks r and 2A-1-r to rank r.

    Under a causal mask, all ranks then do the same amount of work in every ring step. If the number of tokens is not a
    multiple of 2A, tokens are assigned from both ends of the sequence toward the middle, and half of each rank's share
    comes from the front.
    """
    first, end = _share(tokens, ranks, rank)
    low, high = (first + 1) // 2, (end + 1) // 2
    return _nonempty(Run(low, 1, high - low), Run(tokens - end // 2, 1, end // 2 - first // 2))


def striped(tokens: int, ranks: int, rank: int) -> Runs:
    """Assign every A-th token, starting from token r, to rank r (Striped Attention, section 3.1)."""
    return _nonempty(Run(rank, ranks, len(range(rank, tokens, ranks))))


def _share(tokens: int, ranks: int, rank: int) -> tuple[int, int]:
    return tokens * rank // ranks, tokens * (rank + 1) // ranks


def _nonempty(*runs: Run) -> Runs:
    return tuple(run for run in runs if run.length)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Layout:
    """A rule for dividing a sequence among ranks."""

    name: str  # name in the settings
    runs: RunsOf  # must support any number of tokens; shares differ by at most one token
    # number of runs per rank; all runs have the same length if the sequence length is a multiple of ranks * chunks
    chunks: int = 1
    blocks_per_rank: int = 1  # if 1, all runs form one block; if greater, each run (even an empty one) is a block


# Layouts for any number of ranks. "balanced" is zigzag for a sequence of one document; `balance.balanced` divides
# sequences of several documents.
COMMON = (
    Layout(name="balanced", runs=zigzag, chunks=2),
    Layout(name="contiguous", runs=contiguous),
    Layout(name="striped", runs=striped),
    Layout(name="zigzag", runs=zigzag, chunks=2),
)
LAYOUTS = {layout.name: layout for layout in COMMON}  # also contains layouts that schedules register


def register(*layouts: Layout) -> None:
    """Register layouts by name.

    Raises:
        ConfigError: A name is taken.
    """
    if taken := [layout.name for layout in layouts if layout.name in ("auto", *LAYOUTS)]:
        raise ConfigError(f"a layout needs a name of its own; got {', '.join(taken)}, rename it")
    LAYOUTS.update((layout.name, layout) for layout in layouts)


def remove(*layouts: Layout) -> None:
    for layout in layouts:
        del LAYOUTS[layout.name]


def multiple(layout: str, size: int, ulysses: int) -> int:
    """Return the number by which sequence lengths must be divisible: `size`, or a multiple of `size` if ranks have
    several chunks.
    """
    return math.lcm(LAYOUTS[layout].chunks * size // ulysses, size)


def join(groups: Iterable[Runs]) -> Runs:
    """Return the runs of several blocks sorted by position, which is the token order of gathered blocks."""
    return tuple(sorted(run for runs in groups for run in runs))


def owned(rank: int, blocks_per_rank: int) -> Key:
    """Return the blocks that a rank owns."""
    return tuple(range(rank * blocks_per_rank, (rank + 1) * blocks_per_rank))


def owner(block: int, blocks_per_rank: int) -> int:
    return block // blocks_per_rank
