"""All configurations that the runtime supports for a job. Does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..compiler import schedules
from ..compiler.schedules.base import Schedule, ScheduleOptions
from ..compiler.sharding.heads import legal_ulysses
from ..compiler.sharding.layout import LAYOUTS, Topology, axis_order, divisors, multiple
from ..config.settings import SequenceParallelConfig
from ..errors import ConfigError
from . import limits


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A configuration without memory settings and without the choice of what rotates. A search makes thousands of
    candidates, and a `SequenceParallelConfig` from a few of them."""

    size: int
    ulysses: int
    schedule: Schedule
    options: ScheduleOptions  # the schedule's own settings
    layout: str
    rank_order: str
    topology: Topology  # of the job
    overlap: bool = False

    @property
    def cp_size(self) -> int:
        return self.size // self.ulysses

    @property
    def settings(self) -> dict[str, Any]:
        named = {"size": self.size, "ulysses": self.ulysses, "schedule": self.schedule.name, "layout": self.layout}
        return {**named, "rank_order": self.rank_order, **self.options}

    def config(self, heads: tuple[int, int], **settings: Any) -> SequenceParallelConfig:
        """Return the candidate as a configuration without any "auto".

        Args:
            heads: (query heads, key/value heads) of the model.
            settings: Settings that a candidate does not have.

        Raises:
            ConfigError: If the settings do not fit.
        """
        options = {**self.settings, "overlap": self.overlap, **settings}
        return SequenceParallelConfig(**options).resolve(self.topology.world_size, heads)

    def plan_key(self, documents: bool) -> tuple:
        """Return a key that is equal for candidates with equal plans. These have the same builder, the same axes of
        more than one rank in the same order, and equal layouts. Schedules with one ring and nothing else are equal, and
        on one CP rank all are. `documents`: whether sequences are packs; if not, layouts with the same tokens per rank
        are equal."""
        layout = None if self.cp_size == 1 else self.layout if documents else LAYOUTS[self.layout].runs
        long_axes = [name for name in self.topology.cp_axes if self.topology.size(name) > 1]
        if len(long_axes) < 2 and not set(long_axes) & set(self.schedule.collective_axes):
            ring_key = self.schedule.blocks_per_rank, self.schedule.moving_sides, self.schedule.can_compute(0, 1)
            key: tuple = ring_key if long_axes else ()
            order = tuple((name in long_axes, size) for name, size in self.topology.axes if size > 1)
            return key, order, self.size, layout
        cp_size = tuple((name, self.topology.size(name)) for name in self.topology.cp_axes)
        return self.schedule.build, cp_size, tuple(axis for axis in self.topology.axes if axis[1] > 1), layout

    @property
    def gathers(self) -> bool:
        """Whether ranks gather and reduce, which overlap replaces by single messages."""
        return any(self.topology.size(axis) > 1 for axis in self.schedule.collective_axes)

    @property
    def steps(self) -> int:
        """About how many steps a rank has: one for each CP rank along axes without collectives, and some for these."""
        rings = set(self.topology.cp_axes) - set(self.schedule.collective_axes)
        return self.topology.size(*rings) + self.cp_size // 8 + 2

    @property
    def has_default_layout(self) -> bool:
        """Whether the layout is the schedule's default."""
        return self.layout == self.schedule.default_layout

    def __str__(self) -> str:
        schedule_name = self.schedule.name
        options = "".join(
            f"{'' if name == schedule_name else f' {name}'} {_word(value)}" for name, value in self.options.items()
        )
        name = f"{schedule_name}{options}" if self.cp_size > 1 else ""
        ulysses = f"Ulysses {self.ulysses}" if self.ulysses > 1 else ""
        shape = " x ".join(filter(None, (ulysses, name))) or "alone"
        text = f"{self.size} rank{'s' * (self.size > 1)}: {shape}"
        if not self.has_default_layout:
            text += f", {self.layout}"
        return text + (f", {self.rank_order}" if self.rank_order != "auto" else "")


def _word(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def candidates(world: int, heads: tuple[int, int], given: Mapping[str, Any]) -> Iterator[Candidate]:
    """Yield all configurations that agree with the given settings, of sizes that can be planned, always in the same
    order."""
    for size, ulysses in ulysses_sizes(world, heads, given):
        for schedule in _schedules(given):
            for options in schedule.shapes(size // ulysses):
                wanted = {name: given[name] for name in options if _is_given(given, name)}
                if all(
                    options[name] == (tuple(value) if isinstance(value, list) else value)
                    for name, value in wanted.items()
                ):
                    yield from _of_shape(world, size, ulysses, schedule, options, given)


def ulysses_sizes(world: int, heads: tuple[int, int], given: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield all pairs (size, ulysses) that agree with the given settings and are small enough to be planned."""
    for size in _options(given, "size", divisors(world)):
        if size <= limits.MAX_PLANNED_RANKS:
            for ulysses in _options(given, "ulysses", legal_ulysses(size, heads[0])):
                if size % ulysses == 0 and size // ulysses <= limits.MAX_CP_RANKS:
                    yield size, ulysses


def _of_shape(
    world: int, size: int, ulysses: int, schedule: Schedule, options: ScheduleOptions, given: Mapping[str, Any]
) -> Iterator[Candidate]:
    """Yield a shape in all its rank orders and layouts."""
    axes, schedule = schedule.axes(size // ulysses, options), schedule.at(size // ulysses, options)
    layouts = dict.fromkeys((schedule.default_layout, *schedule.layouts))
    for rank_order in _options(given, "rank_order", schedule.rank_orders):
        order = axis_order(axes, rank_order, schedule.rank_orders)
        topology = Topology.of(
            axes, ulysses=ulysses, data=world // size, order=order, collective_axes=schedule.collective_axes
        )
        for layout in _options(given, "layout", layouts):
            if layout in schedule.layouts:
                yield Candidate(
                    size=size, ulysses=ulysses, schedule=schedule, options=options, layout=layout,
                    rank_order=rank_order, topology=topology, overlap=bool(given.get("overlap")),
                )  # fmt: skip


def _schedules(given: Mapping[str, Any]) -> list[Schedule]:
    # the default comes first: of candidates with equal plans the search keeps the first
    first = schedules.schedule(given.get("schedule", "auto"))
    return [first] if _is_given(given, "schedule") else list(dict.fromkeys((first, *schedules.SCHEDULES.values())))


def _is_given(given: Mapping[str, Any], name: str) -> bool:
    return given.get(name, "auto") != "auto"


def _options(given: Mapping[str, Any], name: str, all_values: Iterable[Any]) -> list[Any]:
    return [given[name]] if _is_given(given, name) else list(all_values)


def travels(candidate: Candidate, given: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return direction -> the sides that may rotate, "q" or "kv". On one CP rank nothing rotates, so one side is
    enough."""
    sides = candidate.schedule.moving_sides if candidate.cp_size > 1 else candidate.schedule.moving_sides[:1]
    return {direction: tuple(_options(given, f"rotate_{direction}", sides)) for direction in ("forward", "backward")}


def refusal(candidate: Candidate, seq: int, documents: bool) -> str:
    """Return why the runtime would refuse sequences of `seq` tokens; "" if it supports them. Packs may have any
    length."""
    share = multiple(candidate.layout, candidate.size, candidate.ulysses)
    if documents or seq % share == 0:
        return ""
    return f"a length that is a multiple of {share} is needed"


def check_given(given: Mapping[str, Any], world: int, heads: tuple[int, int]) -> None:
    """Raise ConfigError for given settings that the runtime refuses whatever the other settings are."""
    SequenceParallelConfig(**given).resolve(world, heads)
    if isinstance(given.get("rank_order", "auto"), str):
        return
    raise ConfigError("the planner chooses among rank orders by name; got axes, leave rank_order out or name one")
