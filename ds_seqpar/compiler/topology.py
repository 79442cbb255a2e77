"""Ranks as named axes, by one reshape. Pure integers: no process group, no environment."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from ..errors import SECTION, ConfigError

Axes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """A world of ranks with one coordinate an axis, the fastest axis first (its neighbours are neighbouring ranks).

    axes: ((name, size), ...). "ulysses" and "data" are special; every other axis is an inner axis.
    inner: the inner axes in the order in which the inner rank counts them, the first fastest, wherever they are placed;
    default: as in `axes`. collective_axes: the inner axes along which a schedule has collectives.
    """

    axes: Axes
    inner: tuple[str, ...] = ()
    collective_axes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, inner: Axes, *, ulysses: int, data: int, order: tuple[str, ...], collective_axes: tuple[str, ...] = ()
    ) -> Topology:
        """inner: a schedule's axes, as its inner ranks count them. order: of all axes, see `place`."""
        sizes = {"ulysses": ulysses, **dict(inner), "data": data}
        return cls(
            axes=tuple((name, sizes[name]) for name in order), inner=tuple(dict(inner)), collective_axes=collective_axes
        )

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def inner_axes(self) -> tuple[str, ...]:
        return self.inner or tuple(name for name, _ in self.axes if name not in ("ulysses", "data"))

    def size(self, *names: str) -> int:
        """How many ranks the named axes span."""
        return math.prod([self._sizes.get(name, 1) for name in names])

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's coordinate on every axis."""
        found = {}
        for name, size in self.axes:
            rank, found[name] = divmod(rank, size)
        return found

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank at these coordinates."""
        rank = 0
        for name, size in reversed(self.axes):
            rank = rank * size + coordinates[name]
        return rank

    def index(self, rank: int, *names: str) -> int:
        """The rank's number within the named axes, the first name fastest."""
        number, stride = 0, 1
        at = self.coordinates(rank)
        for name in names:
            number, stride = number + at[name] * stride, stride * self.size(name)
        return number

    def group(self, rank: int, *names: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only on the named axes, ordered by `index(..., *names)`."""
        at = self.coordinates(rank)
        points = itertools.product(*(range(self.size(name)) for name in reversed(names)))
        return tuple(self.rank({**at, **dict(zip(reversed(names), point, strict=True))}) for point in points)

    def groups(self, *names: str) -> list[tuple[int, ...]]:
        """Every such group of the world, in one order that is the same on every rank."""
        return sorted({self.group(rank, *names) for rank in range(self.world_size)})


def place(inner: Axes, placement: Sequence[str] | str, presets: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The order of "ulysses", the inner axes and "data" over ranks, the fastest first: its ranks are neighbours.

    placement: a preset's name, or an order of one's own, in which "data" may be left out. presets: name -> the axes
    that it puts first.
    """
    every = ("ulysses", *dict(inner), "data")
    first = presets[placement] if isinstance(placement, str) else placement
    if not isinstance(placement, str) and (sorted({*first, "data"}) != sorted(every) or len(set(first)) != len(first)):
        raise ConfigError(
            f"{SECTION}.placement must order the axes {', '.join(every[:-1])} (data is last unless named); "
            f"got {list(placement)}"
        )
    return (*first, *(name for name in every if name not in first))


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d < number]
