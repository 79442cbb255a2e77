"""Schedules stored as plan files. `show --plan` prints plans in this format, and the setting `"file:PATH"` reads them.

A file contains one plan per direction. A plan consists of a header and one row per step, with one column per rank.
Columns are separated by two or more spaces, and comment lines begin with "#". docs/choosing_settings.md explains the
actions.

    mine forward, 2 ranks
    step  rank 0                      rank 1
    0     q(0)*kv(0) kv(0)>1 kv(1)<1  q(1)*kv(1) kv(0)<0 kv(1)>0
    1     q(0)*kv(1)                  q(1)*kv(0)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

from ..base.errors import SECTION, ConfigError, PlanError
from ..base.files import read_text
from ..base.fingerprint import Fingerprint
from ..core.compiler.schedules.actions import (
    ACCUMULATORS,
    OPERANDS,
    Action,
    Compute,
    Gather,
    Move,
    ReduceScatter,
    Step,
)
from ..core.compiler.schedules.base import HeadCounts, Schedule, ScheduleOptions
from ..core.compiler.schedules.plan import BlockMask, Plan, StepsOf, marked
from ..core.compiler.sharding.layout import Axes, Key, Topology, multiple, owner
from ..core.compiler.sharding.masks import CAUSAL, visibility
from ..core.compiler.sharding.shards import EvenShards
from .validate import validate

FILE = "file:"  # prefix of the setting
MOST_RANKS = 1024  # maximum number of ranks in a plan file
HEAD = re.compile(r"(\S.*) (forward|backward), (\d{1,4}) ranks(?:, (\d{1,4}) blocks each)?")
KEY = r"\((\d{1,6}(?:,\d{1,6})*)\)"
ACTION = re.compile(rf"(q|kv|out|dq|dkv){KEY}(?:\*kv{KEY}|([<>])(\d{{1,4}})(?:\+(\d{{1,6}}))?|([@%]))")


def parse(text: str) -> dict[str, Plan]:
    """Return the plans in a file's text, by direction.

    Raises:
        PlanError: The text does not contain two valid plans. The message shows and marks the invalid line.
    """
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("#")]
    tables = [[*table] for filled, table in itertools.groupby(lines, bool) if filled]
    plans = {plan.direction: plan for plan in map(_plan, tables)}
    if len(tables) != 2 or len(plans) != 2 or len({(plan.size, plan.blocks) for plan in plans.values()}) != 1:
        heads = "; ".join(table[0] for table in tables)
        raise PlanError(f"a file needs a forward and a backward plan, for the same ranks; got {heads or 'no plan'}")
    return plans


def _plan(table: list[str]) -> Plan:
    head, *lines = table
    match = HEAD.fullmatch(head)
    name, direction, size, blocks = match.groups(default="1") if match else ("", "", "0", "1")
    ranks, blocks_per_rank = range(int(size)), int(blocks)
    if not 1 <= len(ranks) <= MOST_RANKS or not 1 <= blocks_per_rank <= MOST_RANKS:
        raise PlanError(f'a plan needs a head such as "mine forward, 4 ranks", up to {MOST_RANKS}; got {head!r}')
    rows = [re.split(" {2,}", line) for line in lines]
    if rows[:1] != [["step", *(f"rank {rank}" for rank in ranks)]] or len(rows) == 1:
        raise PlanError(f'{head!r} needs a row of titles, "step  rank 0  rank 1 ...", and a row for each step after it')
    steps: list[list[Step]] = [[] for _ in ranks]
    for at, row in enumerate(rows[1:], 1):
        rank = 0
        try:
            if row[0] != str(at - 1) or len(row) != len(rows[0]):
                raise PlanError(f"a row needs its number, {at - 1}, and a cell for each rank, with two spaces between")
            for rank in ranks:
                steps[rank].append(_step(row[rank + 1], rank, direction, blocks_per_rank))
        except PlanError as error:
            around = "\n".join([head, *marked(rows, at, rank)])
            raise PlanError(f"rank {rank}, step {at - 1}: {error}\n{around}") from None
    return Plan(name=name, direction=direction, ranks=tuple(map(tuple, steps)), blocks_per_rank=blocks_per_rank)


def _step(cell: str, rank: int, direction: str, blocks_per_rank: int) -> Step:
    actions: dict[str, list[Action]] = {"gathers": [], "moves": [], "computes": [], "results": [], "reduces": []}
    for text in cell.split(" ") if cell != "-" else ():
        match = ACTION.fullmatch(text)
        if not match:
            raise PlanError(f"{text!r} is no action, such as q(0)*kv(1), kv(0)>1 or out(0)<1")
        kind, key, kv, arrow, peer, within, symbol = match.groups()
        is_operand = kind in OPERANDS
        if (not is_operand and kind not in ACCUMULATORS[direction]) or (kv and kind != "q"):
            raise PlanError(f"{text!r} is no action of {direction}")
        if kv:
            actions["computes"].append(Compute(rank=rank, q=_key(key), kv=_key(kv)))
        elif arrow:
            src, dst = (rank, int(peer)) if arrow == ">" else (int(peer), rank)
            move = Move(src=src, dst=dst, kind=kind, key=_key(key), within=int(within or 1))
            actions["moves" if is_operand else "results"].append(move)
        elif is_operand != (symbol == "@"):
            raise PlanError(f"{text!r} must gather an operand by @, or reduce a result by %")
        else:
            owners = itertools.groupby(_key(key), lambda block: owner(block, blocks_per_rank))
            ranks, keys = zip(*((rank, tuple(blocks)) for rank, blocks in owners), strict=True)
            cls, field = (Gather, "gathers") if is_operand else (ReduceScatter, "reduces")
            actions[field].append(cls(ranks=ranks, kind=kind, keys=keys))
    return Step(**{field: tuple(group) for field, group in actions.items()})  # type: ignore[arg-type]


def _key(text: str) -> Key:
    key = tuple(map(int, text.split(",")))
    if key != tuple(sorted(set(key))):
        raise PlanError(f"blocks must ascend; got ({text})")
    return key


# ---- a file as a schedule


def read(name: str, schedules: Iterable[Schedule]) -> Schedule:
    """Return the schedule in a plan file.

    The schedule supports the layouts for which its plans compute all products visible under a causal mask. The layouts
    are in the order of `schedules`.

    Args:
        name: "file:PATH".
        schedules: Schedules whose layouts are tried.

    Raises:
        ConfigError: The file cannot be read.
        PlanError: A plan would hang or compute something other than attention; see `parse` and `validate`.
    """
    place = f"{SECTION}.schedule {name}"
    try:
        plans = parse(read_text(name.removeprefix(FILE), place, "plan"))
        layouts = _layouts(plans, schedules)
        axes, collective_axes = _axes(plans)
    except PlanError as error:
        raise PlanError(f"{place} needs a plan of exact attention; {error}") from None
    size, computed = plans["forward"].size, {direction: _computed(plan) for direction, plan in plans.items()}

    def build(topology: Topology, block_mask: BlockMask, direction: str, moving_side: str) -> StepsOf:
        if missing := set(block_mask.pairs()) - computed[direction]:
            q, kv = min(missing)
            raise ConfigError(
                f"{place} needs a product for every two blocks that meet; got a {direction} plan without "
                f"q({q})*kv({kv}), add it, or use a causal mask and layout {layouts[0]}"
            )
        if collective_axes and not block_mask.even:
            raise ConfigError(f"{place} gathers, which needs blocks of one length; got others, send blocks by > and <")
        return plans[direction].ranks.__getitem__

    def resolve(ranks: int, fixed: ScheduleOptions, heads: HeadCounts | None) -> ScheduleOptions:
        if ranks != size:
            raise ConfigError(f"{place} is a plan for {size} CP ranks, size / ulysses; got {ranks}, change one of them")
        return {}

    return Schedule(
        name=name,
        summary=f"the plans of {name.removeprefix(FILE)}",
        build=build,
        axes=lambda ranks, options: axes,
        received=lambda axes, direction, moving_side, units: plans[direction].received(units),
        shapes=lambda ranks: ({},) if ranks == size else (),
        resolve=resolve,
        layouts=layouts,
        default_layout=layouts[0],
        moving_sides=("kv",),
        can_compute=lambda q, kv: (q, kv) in computed["forward"],
        collective_axes=collective_axes,
        digest=str(Fingerprint.of(sorted(plans.items()))),
    )


def _computed(plan: Plan) -> set[tuple[int, int]]:
    """Return the (q block, kv block) products in a plan."""
    computes = [compute for steps in plan.ranks for step in steps for compute in step.computes]
    return {pair for compute in computes for pair in itertools.product(compute.q, compute.kv)}


def _layouts(plans: Mapping[str, Plan], schedules: Iterable[Schedule]) -> tuple[str, ...]:
    """Return the layouts for which all plans cover a causal mask. Raise PlanError if there is no such layout."""
    size, blocks = plans["forward"].size, plans["forward"].blocks
    computed = _computed(plans["forward"]) & _computed(plans["backward"])
    shapes = [schedule.at(size, options) for schedule in schedules for options in schedule.shapes(size)]
    missing: dict[str, set[tuple[int, int]]] = {}
    for layout in dict.fromkeys(layout for schedule in shapes for layout in schedule.layouts):
        shards = EvenShards(layout, 2 * multiple(layout, size, 1), size)
        if shards.blocks_per_rank * size == blocks:
            runs = [shards.runs("q", (block,)) for block in range(blocks)]
            missing[layout] = set(BlockMask(visibility(runs, runs, CAUSAL)).pairs()) - computed
    if not missing:
        raise PlanError(f"it is for {size} ranks of {blocks // size} blocks each, which no layout has")
    nearest = min(missing.values(), key=len)
    for plan in plans.values():
        validate(plan, nearest)
    return tuple(layout for layout, products in missing.items() if not products)


def _axes(plans: Mapping[str, Plan]) -> tuple[Axes, tuple[str, ...]]:
    """Return the axes of a rank grid that contains all collectives, and the names of the axes along which collectives
    run.

    Process groups are created along the axes, which are the same on all ranks.
    """
    size = plans["forward"].size
    steps = [step for plan in plans.values() for ranks in plan.ranks for step in ranks]
    groups = {action.ranks for step in steps for action in (*step.gathers, *step.reduces)}
    # maps the distance between neighbors to the group size
    lengths = {ranks[1] - ranks[0]: len(ranks) for ranks in groups if len(ranks) > 1}
    axes: list[tuple[str, int]] = []
    stride = 1
    for number, (distance, length) in enumerate([*sorted(lengths.items()), (size, 1)]):
        axes += [(f"between{number}", distance // stride), (f"collective{number}", length)]
        stride = distance * length
    topology = Topology(axes=tuple(axes))
    collective_axes = tuple(name for name, length in axes[1::2] if length > 1)
    known = {ranks for axis in collective_axes for ranks in topology.groups(axis)}
    if topology.world_size != size or groups - known:
        shown = ", ".join(map(str, sorted(groups)[:3]))
        raise PlanError(f"its collectives are along no axes of a grid of ranks: they join {shown}, use > and < instead")
    return topology.axes, collective_axes
