"""The `Schedule` class, which describes a schedule to the rest of the library.

The registry imports all modules of this package and registers each `Schedule` found in them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ....base.errors import SECTION, ConfigError
from ..sharding.layout import COMMON, LAYOUTS, Axes, Layout, Topology
from .plan import BlockMask, StepsOf

Value = int | tuple[int, ...]
ScheduleOptions = Mapping[str, Any]  # maps each of the schedule's own settings to its resolved value (never "auto")
HeadCounts = tuple[int, int]  # query heads, key/value heads
Builder = Callable[[Topology, BlockMask, str, str], StepsOf]
MOVING_SIDES = ("kv", "q")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Setting:
    """A setting that belongs to one schedule and can be configured in JSON, in Python or on the command line.

    With "auto", the schedule picks the value.
    """

    name: str
    help: str  # one line
    wanted: str  # description of the values that `accepts` allows
    accepts: Callable[[Any], bool]
    option: Mapping[str, Any]  # keyword arguments for argparse's add_argument

    def checked(self, value: object) -> Value | str:
        """Validate a value and return it, with lists converted to tuples.

        Raises:
            ConfigError: The value is neither "auto" nor accepted.
        """
        if isinstance(value, str) and value == "auto":
            return value
        if not self.accepts(value):
            raise ConfigError(f'{SECTION}.{self.name} must be {self.wanted} or "auto"; got {value!r}')
        return tuple(value) if isinstance(value, list) else value  # type: ignore[return-value]


def count(name: str, help: str) -> Setting:
    """Return a setting whose value is one positive integer."""
    return Setting(name=name, help=help, wanted="a whole number from 1", accepts=is_count, option={"type": int})


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """A schedule for A CP ranks, as seen by the rest of the library.

    Attributes:
        name: Name of the schedule in the settings.
        summary: One-line description.
        build: Function (topology, block mask, direction, moving_side) that returns the steps as a function of the rank.
            `build` raises ConfigError if the schedule does not support these arguments. If the result is a
            `plan.Counted`, such as `Rotation` or `Direct`, "auto" uses the block mask to pick the moving side.
        axes: Function (ranks, options) that returns the names and sizes of the rank axes, fastest-varying axis first.
        received: Function (axes, direction, moving_side, units) that computes, without a plan, how many elements each
            rank receives. `units` maps each kind of block to its number of elements, as in `Plan.received`. The count
            is exact if every product allowed by `can_compute` is needed, for example under full attention, or under
            causal attention with zigzag blocks. Under other masks, a plan may skip moves, so ranks may receive fewer
            elements. Overlap does not change the count.
        settings: Settings specific to this schedule.
        shapes: Function that takes the number of ranks and returns every valid combination of the settings, one mapping
            per shape.
        resolve: Function (ranks, fixed, heads) that returns the settings for one shape, including the `fixed` settings.
            The remaining settings are chosen for the given numbers of heads, if known. `resolve` raises ConfigError if
            the `fixed` settings are not compatible.
        by_shape: Function (ranks, options) that returns the fields of this class that depend on the shape; see `at`.
        extra_layouts: Layouts that are registered and removed together with the schedule.
        layouts: Names of the layouts that the schedule supports.
        default_layout: Layout that "auto" selects.
        moving_sides: Sides that the schedule can move. "auto" picks the side for which fewer bytes are sent.
        can_compute: Function (q block, kv block) that returns whether the schedule can compute the product of the two
            blocks.
        collective_axes: Axes along which the schedule runs collectives, and for which process groups are created.
        digest: Fingerprint of plans loaded from a file, which ranks compare in addition to the name.
        ring_axes: Axes along which neighbors exchange messages. Rank orders can place `ring_axes` or `collective_axes`
            within a node.
    """

    name: str
    summary: str
    build: Builder
    axes: Callable[[int, ScheduleOptions], Axes]
    received: Callable[[Axes, str, str, Mapping[str, float]], list[float]]
    settings: tuple[Setting, ...] = ()
    shapes: Callable[[int], Iterable[ScheduleOptions]] = lambda ranks: ({},)
    resolve: Callable[[int, ScheduleOptions, HeadCounts | None], ScheduleOptions] = lambda ranks, fixed, heads: {}
    by_shape: Callable[[int, ScheduleOptions], Mapping[str, Any]] = lambda ranks, options: {}
    extra_layouts: tuple[Layout, ...] = ()
    layouts: tuple[str, ...] = tuple(layout.name for layout in COMMON)
    default_layout: str = "balanced"
    moving_sides: tuple[str, ...] = MOVING_SIDES
    can_compute: Callable[[int, int], bool] = lambda q, kv: True
    collective_axes: tuple[str, ...] = ()
    ring_axes: tuple[str, ...] = ()
    digest: str = ""

    def at(self, ranks: int, options: ScheduleOptions) -> Schedule:
        """Return a copy of the schedule with the field values for this shape."""
        return dataclasses.replace(self, **self.by_shape(ranks, options))

    def shaped(self, ranks: int, fixed: ScheduleOptions, heads: HeadCounts | None, layout: str) -> ScheduleOptions:
        """Return the settings from `resolve`, or the settings for another shape if the layout requires one.

        If the resolved shape does not support the layout, return the first shape that supports the layout and has the
        `fixed` settings.
        """
        options = self.resolve(ranks, fixed, heads)
        if layout in ("auto", *self.at(ranks, options).layouts):
            return options
        fitting = (shape for shape in self.shapes(ranks) if layout in self.at(ranks, shape).layouts)
        return next((shape for shape in fitting if fixed.items() <= shape.items()), options)

    @property
    def blocks_per_rank(self) -> int:
        """Number of blocks that each CP rank owns in this schedule's layouts."""
        return LAYOUTS[self.default_layout].blocks_per_rank

    @property
    def rank_orders(self) -> dict[str, tuple[str, ...]]:
        """Map each preset to the axes that it places first. Presets for axes that the schedule does not have are
        omitted.
        """
        first = {"ulysses_intra": ("ulysses",), "ring_intra": self.ring_axes, "collectives_intra": self.collective_axes}
        return {"auto": ("ulysses",), **{preset: axes for preset, axes in first.items() if axes}}


RANK_ORDERS = ("auto", "collectives_intra", "ring_intra", "ulysses_intra")


def blocks_received(ranks: int, queries: int, keys: int, direction: str, units: Mapping[str, float]) -> list[float]:
    """Return the number of elements that each rank receives, as a list with the same number for every rank.

    Each rank receives `queries` query blocks, and the same number of results for its own queries. Each rank also
    receives `keys` key/value blocks and, in the backward pass, the same number of key/value gradients.

    Args:
        units: Number of elements per block for each kind of block.
    """
    of_query = units["q"] + units["out" if direction == "forward" else "dq"]
    of_key = units["kv"] + (units["dkv"] if direction == "backward" else 0)
    return [queries * of_query + keys * of_key] * ranks
