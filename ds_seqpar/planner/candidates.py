"""Every configuration that may be chosen for a job, by what the runtime takes. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .. import limits
from ..compiler import schedules
from ..compiler.layout import LAYOUTS, Topology, divisors, multiple, place
from ..compiler.schedules.base import Own, Schedule
from ..config import SequenceParallelConfig, legal_ulysses
from ..errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A configuration but for what travels and what spares memory. own: the schedule's own settings; topology: of the
    job. A search makes thousands of these, and of few of them a `SequenceParallelConfig`."""

    size: int
    ulysses: int
    schedule: Schedule
    own: Own
    layout: str
    placement: str
    topology: Topology
    overlap: bool = False

    @property
    def inner(self) -> int:
        return self.size // self.ulysses

    @property
    def degree(self) -> tuple[int, int]:
        return self.size, self.ulysses

    @property
    def settings(self) -> dict[str, Any]:
        named = {"size": self.size, "ulysses": self.ulysses, "schedule": self.schedule.name, "layout": self.layout}
        return {**named, "placement": self.placement, **self.own}

    def config(self, heads: tuple[int, int], **settings: Any) -> SequenceParallelConfig:
        """Resolved. settings: those that it leaves open. Raises ConfigError where they do not fit."""
        own = {**self.settings, "overlap": self.overlap, **settings}
        return SequenceParallelConfig(**own).resolve(self.topology.world_size, heads)

    def plan_key(self, documents: bool) -> tuple:
        """Equal where plans are: of one builder, with the same axes of more than one rank in the same order, and equal
        layouts. Without documents layouts of the same runs are equal. One ring is one, whoever makes it; a rank alone
        does the same work by any schedule."""
        layout = None if self.inner == 1 else self.layout if documents else LAYOUTS[self.layout].runs
        long = [name for name in self.topology.inner_axes if self.topology.size(name) > 1]
        if len(long) < 2 and not set(long) & set(self.schedule.collective_axes):
            kind = self.schedule.parts, self.schedule.travellers, self.schedule.takes(0, 1)
            inner: tuple = kind if long else ()
            coordinates = tuple((name in long, size) for name, size in self.topology.axes if size > 1)
            return inner, coordinates, self.size, layout
        inner = tuple((name, self.topology.size(name)) for name in self.topology.inner_axes)
        order = tuple(axis for axis in self.topology.axes if axis[1] > 1)
        return self.schedule.build, inner, order, layout

    @property
    def has_default_layout(self) -> bool:
        """Whether tokens lie as the schedule has them by itself."""
        return self.layout == self.schedule.default_layout

    @property
    def ring_ranks(self) -> int:
        """Ranks along axes that nothing is gathered over."""
        axes = set(self.topology.inner_axes) - set(self.schedule.collective_axes)
        return self.topology.size(*axes)

    def __str__(self) -> str:
        named = self.schedule.name
        own = "".join(f"{'' if name == named else f' {name}'} {_word(value)}" for name, value in self.own.items())
        name = f"{named}{own}" if self.inner > 1 else ""
        ulysses = f"Ulysses {self.ulysses}" if self.ulysses > 1 else ""
        kind = " x ".join(filter(None, (ulysses, name))) or "alone"
        words = f"{self.size} rank{'s' * (self.size > 1)}: {kind}"
        if not self.has_default_layout:
            words += f", {self.layout}"
        return words + (f", {self.placement}" if self.placement != "auto" else "")


def _word(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


ParallelShape = tuple[int, int, Schedule, Own]  # size, ulysses, and a schedule with its own settings


def shapes(world: int, heads: tuple[int, int], given: Mapping[str, Any]) -> Iterator[ParallelShape]:
    """All of them, of sizes whose programs can be followed, in one order. given: settings that are no choice any more:
    a size, a schedule, a shape ..."""
    for size, ulysses in degrees(world, heads, given):
        for schedule in _schedules(given):
            for own in schedule.shapes(size // ulysses):
                wanted = {name: given[name] for name in own if _is_given(given, name)}
                if all(own[name] == (tuple(x) if isinstance(x, list) else x) for name, x in wanted.items()):
                    yield size, ulysses, schedule, own


def degrees(world: int, heads: tuple[int, int], given: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """(size, ulysses), of as many inner ranks as programs can be followed of."""
    for size in _options(given, "size", divisors(world)):
        for ulysses in _options(given, "ulysses", legal_ulysses(size, heads[0])):
            few = size <= limits.PLANNED and ulysses <= limits.MEMBERS
            if few and size % ulysses == 0 and size // ulysses <= limits.FOLLOWED:
                yield size, ulysses


def candidates(
    world: int, heads: tuple[int, int], given: Mapping[str, Any], plain: bool = False
) -> Iterator[Candidate]:
    """All shapes in all placements and layouts; plain: in the first of each, where none is given."""
    for shape in shapes(world, heads, given):
        yield from _candidates_of_shape(world, shape, given, 1 if plain else None)


def _candidates_of_shape(
    world: int, shape: ParallelShape, given: Mapping[str, Any], most: int | None
) -> Iterator[Candidate]:
    size, ulysses, schedule, own = shape
    axes, schedule = schedule.axes(size // ulysses, own), schedule.at(size // ulysses, own)
    layouts = dict.fromkeys((schedule.default_layout, *schedule.layouts))
    for placement in _options(given, "placement", schedule.placements)[:most]:
        order = place(axes, placement, schedule.placements)
        topology = Topology.of(
            axes, ulysses=ulysses, data=world // size, order=order, collective_axes=schedule.collective_axes
        )
        for layout in _options(given, "layout", layouts)[:most]:
            if layout in schedule.layouts:
                yield Candidate(
                    size=size, ulysses=ulysses, schedule=schedule, own=own, layout=layout, placement=placement,
                    topology=topology, overlap=bool(given.get("overlap")),
                )  # fmt: skip


def _schedules(given: Mapping[str, Any]) -> list[Schedule]:
    """What "auto" is comes first, so that it stands for others whose plan is the same."""
    plain = schedules.schedule(given.get("schedule", "auto"))
    return [plain] if _is_given(given, "schedule") else list(dict.fromkeys((plain, *schedules.SCHEDULES.values())))


def _is_given(given: Mapping[str, Any], name: str) -> bool:
    return given.get(name, "auto") != "auto"


def _options(given: Mapping[str, Any], name: str, every: Iterable[Any]) -> list[Any]:
    """The value that is given, or every one."""
    return [given[name]] if _is_given(given, name) else list(every)


def travels(candidate: Candidate, given: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Direction -> what may go round, of that which makes a difference."""
    sides = candidate.schedule.travellers if candidate.inner > 1 else candidate.schedule.travellers[:1]
    return {way: tuple(_options(given, way, sides)) for way in ("forward", "backward")}


def refusal(candidate: Candidate, seq: int, documents: bool) -> str:
    """Why the runtime would refuse a sequence of this length; "" where it would not. Packs may have any length."""
    share = multiple(candidate.layout, candidate.size, candidate.ulysses)
    if documents or seq % share == 0:
        return ""
    return f"a length that is a multiple of {share} is needed"


def check_given(given: Mapping[str, Any], world: int, heads: tuple[int, int]) -> None:
    """Raises ConfigError for settings that the runtime would refuse whatever is chosen for the others."""
    SequenceParallelConfig(**given).resolve(world, heads)
    if isinstance(given.get("placement", "auto"), str):
        return
    raise ConfigError("the planner chooses among placements by name; got axes, leave placement out or name one")
