"""What a schedule says of itself. Every `Schedule` that a file or folder here makes is registered; `register` takes
yours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...errors import SECTION, ConfigError
from ..sharding.layout import COMMON, LAYOUTS, Axes, Layout, Topology
from .plan import BlockMask, StepsOf

Value = int | tuple[int, ...]
ScheduleOptions = Mapping[str, Any]  # name -> Value: all of a schedule's own settings, none of them "auto"
HeadCounts = tuple[int, int]  # query heads, key/value heads
Builder = Callable[[Topology, BlockMask, str, str], StepsOf]
MOVING_SIDES = ("kv", "q")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Setting:
    """A setting of a schedule's own, in the JSON, in Python and on the command line; "auto" lets the schedule choose.

    help: a line. wanted: in words what `accepts` is true for. option: what argparse's add_argument is told of it.
    """

    name: str
    help: str
    wanted: str
    accepts: Callable[[Any], bool]
    option: Mapping[str, Any]

    def checked(self, value: object) -> Value | str:
        """The value, a list as a tuple. Raises ConfigError for one that is neither "auto" nor accepted."""
        if isinstance(value, str) and value == "auto":
            return value
        if not self.accepts(value):
            raise ConfigError(f'{SECTION}.{self.name} must be {self.wanted} or "auto"; got {value!r}')
        return tuple(value) if isinstance(value, list) else value  # type: ignore[return-value]


def count(name: str, help: str) -> Setting:
    """A setting that is one whole number from 1."""
    return Setting(name=name, help=help, wanted="a whole number from 1", accepts=is_count, option={"type": int})


def three_counts(name: str, parts: tuple[str, str, str], help: str) -> Setting:
    """A setting that is three whole numbers from 1, which messages and the command line name as in `parts`."""

    def accepts(value: object) -> bool:
        return isinstance(value, list | tuple) and len(value) == 3 and all(map(is_count, value))

    option = {"type": int, "nargs": 3, "metavar": tuple(part.upper() for part in parts)}
    wanted = f"three whole numbers [{', '.join(parts)}]"
    return Setting(name=name, help=help, wanted=wanted, accepts=accepts, option=option)


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """All that other modules know of a schedule for A CP ranks.

    name, summary: its name, and a line that says what it is.
    build(topology, block mask, direction, moving_side): the steps of any rank. Raises ConfigError where it has none.
        Where it returns a `plan.Counted`, as `Rotation` and `Direct` are, "auto" chooses the moving side by the block
        mask.
    axes(ranks, options): names and sizes of the axes of its ranks, the one that is numbered fastest first.
    received(axes, direction, moving_side, units): elements that each rank receives; units: those of one block of each
        kind, as `Plan.received` takes them. No plan is built. It is exact where every product is needed that
        `can_compute` allows: under full attention, and under causal attention on zigzag blocks. Elsewhere plans may
        leave moves out and receive less. It is the same with overlap.
    settings: the schedule's own. shapes(ranks): all values that they can have together, one mapping for each shape.
    resolve(ranks, given, heads): the settings of one shape, those that are given among them. It chooses the others, for
        these heads where they are known. Raises ConfigError for what does not fit.
    by_shape(ranks, options): the fields of this class that have other values with this shape; see `at`.
    extra_layouts: layouts that are known as long as the schedule is registered.
    layouts, default_layout: the names of the layouts that it works on, and which one "auto" is.
    moving_sides: the sides that it can let move; "auto" takes the one that sends fewer bytes.
    can_compute(q block, kv block): whether it can compute that product at all.
    collective_axes: the axes along which it gathers and reduces, which need process groups. ring_axes: the axes that
        neighbouring transfers go along. Placements put one or the other into a node.
    """

    name: str
    summary: str
    build: Builder
    axes: Callable[[int, ScheduleOptions], Axes]
    received: Callable[[Axes, str, str, Mapping[str, float]], list[float]]
    settings: tuple[Setting, ...] = ()
    shapes: Callable[[int], Iterable[ScheduleOptions]] = lambda ranks: ({},)
    resolve: Callable[[int, ScheduleOptions, HeadCounts | None], ScheduleOptions] = lambda ranks, given, heads: {}
    by_shape: Callable[[int, ScheduleOptions], Mapping[str, Any]] = lambda ranks, options: {}
    extra_layouts: tuple[Layout, ...] = ()
    layouts: tuple[str, ...] = tuple(layout.name for layout in COMMON)
    default_layout: str = "balanced"
    moving_sides: tuple[str, ...] = MOVING_SIDES
    can_compute: Callable[[int, int], bool] = lambda q, kv: True
    collective_axes: tuple[str, ...] = ()
    ring_axes: tuple[str, ...] = ()

    def at(self, ranks: int, options: ScheduleOptions) -> Schedule:
        """The schedule as it is with this shape."""
        return dataclasses.replace(self, **self.by_shape(ranks, options))

    def shaped(self, ranks: int, given: ScheduleOptions, heads: HeadCounts | None, layout: str) -> ScheduleOptions:
        """The settings that `resolve` gives; for a layout that goes with other shapes only, those of the first of
        these."""
        options = self.resolve(ranks, given, heads)
        if layout in ("auto", *self.at(ranks, options).layouts):
            return options
        fitting = (shape for shape in self.shapes(ranks) if layout in self.at(ranks, shape).layouts)
        return next((shape for shape in fitting if given.items() <= shape.items()), options)

    @property
    def blocks_per_rank(self) -> int:
        """Blocks that each CP rank owns, as its layouts deal them."""
        return LAYOUTS[self.default_layout].blocks_per_rank

    @property
    def rank_orders(self) -> dict[str, tuple[str, ...]]:
        """Preset -> the axes that it puts first. Presets whose axes the schedule has not are left out."""
        first = {"ulysses_intra": ("ulysses",), "ring_intra": self.ring_axes, "collectives_intra": self.collective_axes}
        return {"auto": ("ulysses",), **{preset: axes for preset, axes in first.items() if axes}}


RANK_ORDERS = ("auto", "collectives_intra", "ring_intra", "ulysses_intra")


def blocks_received(ranks: int, queries: int, keys: int, direction: str, units: Mapping[str, float]) -> list[float]:
    """Elements that each rank receives, where all receive as many. Each receives `queries` query blocks, and results of
    its own queries from as many ranks; `keys` key/value blocks and, in backward, as many gradients."""
    of_query = units["q"] + units["out" if direction == "forward" else "dq"]
    of_key = units["kv"] + (units["dkv"] if direction == "backward" else 0)
    return [queries * of_query + keys * of_key] * ranks
