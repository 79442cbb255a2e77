"""The description of a schedule. Every `Schedule` in a file or folder here is registered; `register` adds others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ....base.errors import SECTION, ConfigError
from ..sharding.layout import COMMON, LAYOUTS, Axes, Layout, Topology
from .plan import BlockMask, StepsOf

Value = int | tuple[int, ...]
ScheduleOptions = Mapping[str, Any]  # name -> Value: all of a schedule's own settings, with no "auto"
HeadCounts = tuple[int, int]  # query heads, key/value heads
Builder = Callable[[Topology, BlockMask, str, str], StepsOf]
MOVING_SIDES = ("kv", "q")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Setting:
    """A setting of one schedule, in the JSON, in Python and on the command line.

    "auto" lets the schedule choose.
    """

    name: str
    help: str  # one line
    wanted: str  # describes the values that `accepts` is true for
    accepts: Callable[[Any], bool]
    option: Mapping[str, Any]  # the keyword arguments of argparse's add_argument

    def checked(self, value: object) -> Value | str:
        """Return the value; a list becomes a tuple.

        Raises:
            ConfigError: The value is neither "auto" nor accepted.
        """
        if isinstance(value, str) and value == "auto":
            return value
        if not self.accepts(value):
            raise ConfigError(f'{SECTION}.{self.name} must be {self.wanted} or "auto"; got {value!r}')
        return tuple(value) if isinstance(value, list) else value  # type: ignore[return-value]


def count(name: str, help: str) -> Setting:
    """Return a setting that is one positive whole number."""
    return Setting(name=name, help=help, wanted="a whole number from 1", accepts=is_count, option={"type": int})


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """A schedule for A CP ranks, as other modules see it.

    Attributes:
        name: Its name in settings.
        summary: One line that describes it.
        build: (topology, block mask, direction, moving_side) -> the steps of any rank. Raises ConfigError if it has
            none. If it returns a `plan.Counted`, such as `Rotation` or `Direct`, "auto" chooses the moving side by the
            block mask.
        axes: (ranks, options) -> names and sizes of the axes of its ranks, the fastest-numbered axis first.
        received: (axes, direction, moving_side, units) -> elements that each rank receives, computed without a plan.
            units: elements of one block of each kind, as for `Plan.received`. It is exact if every product that
            `can_compute` allows is needed: under full attention, and under causal attention on zigzag blocks. Otherwise
            plans may omit moves and receive less. It is the same with overlap.
        settings: Its own settings.
        shapes: ranks -> all valid combinations of its settings, one mapping for each shape.
        resolve: (ranks, fixed, heads) -> the settings of one shape, including the `fixed` ones. It chooses the others,
            for these heads if they are known. Raises ConfigError for values that do not fit.
        by_shape: (ranks, options) -> the fields of this class whose values differ for this shape; see `at`.
        extra_layouts: Layouts that exist as long as the schedule is registered.
        layouts: Names of the layouts that it works on.
        default_layout: The layout for "auto".
        moving_sides: The sides that it can move; "auto" takes the one that sends fewer bytes.
        can_compute: (q block, kv block) -> whether it can compute that product at all.
        collective_axes: The axes along which it gathers and reduces, which need process groups.
        digest: For a file's plans, the value that ranks compare in addition to the name.
        ring_axes: The axes of transfers between neighbors. Rank orders place these or `collective_axes` within a node.
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
        """Return the schedule with the fields for this shape."""
        return dataclasses.replace(self, **self.by_shape(ranks, options))

    def shaped(self, ranks: int, fixed: ScheduleOptions, heads: HeadCounts | None, layout: str) -> ScheduleOptions:
        """Return the settings from `resolve`. If only other shapes work on the layout, return the first of them that
        has the `fixed` settings.
        """
        options = self.resolve(ranks, fixed, heads)
        if layout in ("auto", *self.at(ranks, options).layouts):
            return options
        fitting = (shape for shape in self.shapes(ranks) if layout in self.at(ranks, shape).layouts)
        return next((shape for shape in fitting if fixed.items() <= shape.items()), options)

    @property
    def blocks_per_rank(self) -> int:
        """Number of blocks that each CP rank owns under its layouts."""
        return LAYOUTS[self.default_layout].blocks_per_rank

    @property
    def rank_orders(self) -> dict[str, tuple[str, ...]]:
        """Preset -> the axes that it puts first; presets with axes that the schedule does not have are left out."""
        first = {"ulysses_intra": ("ulysses",), "ring_intra": self.ring_axes, "collectives_intra": self.collective_axes}
        return {"auto": ("ulysses",), **{preset: axes for preset, axes in first.items() if axes}}


RANK_ORDERS = ("auto", "collectives_intra", "ring_intra", "ulysses_intra")


def blocks_received(ranks: int, queries: int, keys: int, direction: str, units: Mapping[str, float]) -> list[float]:
    """Return the elements that each rank receives if all receive the same number. Each receives `queries` query blocks,
    and results of its own queries from the same number of ranks. It also receives `keys` key/value blocks and, in
    backward, the same number of gradients.

    Args:
        units: Elements of one block of each kind.
    """
    of_query = units["q"] + units["out" if direction == "forward" else "dq"]
    of_key = units["kv"] + (units["dkv"] if direction == "backward" else 0)
    return [queries * of_query + keys * of_key] * ranks
