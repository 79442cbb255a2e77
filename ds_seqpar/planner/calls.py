"""A call of attention of a configuration: its programs on all ranks, and how much memory they take. Torch-free."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from ..compiler.compile import BoundProgram, Compiler, Recipe, pattern_of
from ..compiler.cuts import PLAIN_KERNEL, KernelSupport
from ..compiler.exchange import SAVE_ALL, Members, SaveChoice, call_program
from ..compiler.heads import busiest_member, heads_of_members
from ..compiler.layout import Topology
from ..compiler.lower import lower
from ..compiler.masks import Mask
from ..compiler.memory import Figures, fewest_stages, figures
from ..compiler.plan import Pattern, StepsOf
from ..compiler.program import Assemble, ExchangeStart, GatherStart, Instruction, Post, Program, ScatterStart
from ..compiler.schedules.base import Schedule
from ..compiler.shape import Shape, shape_of
from ..compiler.shards import EvenShards, Shards
from ..config import SequenceParallelConfig
from .machine import Machine


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """Attention of one layer. config: resolved. heads: (query heads, key/value heads, head_dim) that it works on at
    once, the model's or a stage's. shards: of the inner ranks. stages: of heads, all alike. kept: what backward finds
    of forward, where there are other Ulysses members."""

    config: SequenceParallelConfig
    world: int
    mask: Mask
    shards: Shards
    heads: tuple[int, int, int]
    dtype: str = "bfloat16"
    batch: int = 1
    stages: int = 1
    kept: SaveChoice = SAVE_ALL

    @property
    def hides_exchanges(self) -> bool:
        """Whether the exchanges of a stage are under way while another one computes."""
        return self.config.overlap and self.stages > 1 and self.members > 1

    @functools.cached_property
    def topology(self) -> Topology:
        return self.config.topology(self.world)

    @functools.cached_property
    def recipe(self) -> Recipe:
        return self.config.recipe(self.topology)

    @functools.cached_property
    def pattern(self) -> Pattern:
        return _pattern(self.mask, self.shards)

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Of each Ulysses member."""
        q_heads, kv_heads, dim = self.heads
        counts = [(q.stop - q.start, kv.stop - kv.start) for q, kv in heads_of_members(q_heads, kv_heads, self.members)]
        return tuple(shape_of(self.config.travel_dtype, self.dtype, self.batch, (*count, dim)) for count in counts)

    @property
    def members(self) -> int:
        return self.config.ulysses

    @functools.cached_property
    def first(self) -> int:
        """A member with the most heads: all choose what travels by it."""
        return max(range(self.members), key=lambda m: (self.shapes[m].q_heads, self.shapes[m].kv_heads, -m))

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of each rank that shares the first sequence, and then of those of the next ones: (member, inner rank)."""
        top = self.topology
        return tuple((top.index(r, "ulysses"), top.index(r, *top.inner_axes)) for r in range(self.config.size))

    @functools.cached_property
    def ranks(self) -> dict[tuple[int, int], int]:
        """(member, inner rank) -> rank."""
        return {place: rank for rank, place in enumerate(self.places)}

    def travels(self, direction: str) -> str:
        return self.recipe.moving_side(direction, self.pattern, self.shapes[self.first].bytes_per_token(direction))

    def steps(self, direction: str) -> StepsOf:
        """Those of any inner rank, without overlap. Raises ConfigError where the schedule cannot."""
        return _steps(self.recipe.schedule, self.topology, self.pattern, direction, self.travels(direction))


@functools.lru_cache(maxsize=64)
def _steps(schedule: Schedule, topology: Topology, pattern: Pattern, direction: str, travels: str) -> StepsOf:
    return schedule.build(topology, pattern, direction, travels)


@functools.lru_cache(maxsize=64)
def _pattern(mask: Mask, shards: Shards) -> Pattern:
    if mask.scale_free and isinstance(shards, EvenShards):
        runs = len(shards.runs("q", (0,))) * shards.size * shards.parts
        shards = dataclasses.replace(shards, seq=2 * runs)  # the same blocks meet
    return pattern_of(mask, shards)


# ---- programs


def followed(machine: Machine, call: Call) -> int:
    """How many sequences are followed together: as many as fill nodes, where nodes' links are shared and a sequence
    does not end with its node. Else one, as the others do the same at the same time."""
    size, per_node = call.config.size, machine.per_node
    if machine.uplink is None or size % per_node == 0 or per_node % size == 0:
        return 1
    return min(call.world // size, math.lcm(size, per_node) // size)


def programs(machine: Machine, call: Call, direction: str) -> list[Program]:
    """Those of all ranks that are followed, each with Ulysses' exchanges before and after: of all stages where they
    hide one another's exchanges, else of one."""
    return worldwide(machine, call, inner_programs(call, direction))


def inner_programs(call: Call, direction: str) -> list[Program]:
    """Of the first member's ranks, without exchanges."""
    shape, schedule, size = call.shapes[0], call.recipe.schedule, call.recipe.size
    if call.recipe.overlap:
        every = list(call.recipe.plan(direction, call.pattern, call.shapes[call.first]).ranks)
    else:
        every = [call.steps(direction)(rank) for rank in range(size)]
    exact = shape.travel == shape.wide
    return [
        lower(schedule.name, direction, rank, size, tuple(steps), exact, schedule.parts)
        for rank, steps in enumerate(every)
    ]


def worldwide(machine: Machine, call: Call, inner: Sequence[Program]) -> list[Program]:
    """inner: of the inner ranks."""
    size, found, stages = call.config.size, [], call.stages if call.hides_exchanges else 1
    for rank in range(followed(machine, call) * size):
        member, place = call.places[rank % size]
        base = rank - rank % size

        def at(peer: int, member: int = member, base: int = base) -> int:
            return base + call.ranks[member, peer]

        group = tuple(base + call.ranks[m, place] for m in range(call.members))
        found.append(
            renumbered(
                call_program([inner[place]] * stages, call.members, True, call.kept, overlap=stages > 1),
                rank, at, group,
            )
        )  # fmt: skip
    return found


def renumbered(program: Program, rank: int, at: Callable[[int], int], group: tuple[int, ...]) -> Program:
    """With ranks of the world in place of inner ones. group: Ulysses' members."""
    code: list[Instruction] = []
    for one in program.code:
        if isinstance(one, Post):
            sends, receives = (tuple(t._replace(peer=at(t.peer)) for t in ts) for ts in (one.sends, one.receives))
            code.append(one._replace(sends=sends, receives=receives))
        elif isinstance(one, GatherStart | ScatterStart | Assemble):
            ranks = tuple(map(at, one.collective.ranks))
            code.append(one._replace(collective=dataclasses.replace(one.collective, ranks=ranks)))
        elif isinstance(one, ExchangeStart):
            code.append(one._replace(ranks=group))
        else:
            code.append(one)
    return dataclasses.replace(program, rank=rank, code=tuple(code))


# ---- memory

# kept, since settings that spare memory, stages of heads too, leave the inner programs as they are
compiler_of = functools.lru_cache(maxsize=256)(Compiler)


def call_figures(
    config: SequenceParallelConfig,
    *,
    world: int,
    tokens: int,
    mask: Mask,
    heads: tuple[int, int, int],
    dtype: str = "bfloat16",
    batch: int = 1,
    rank: int = 0,
    member: int | None = None,
    support: KernelSupport = PLAIN_KERNEL,
    early: int = 0,
    kept: bool | None = None,
) -> Figures:
    """What a resolved configuration's attention over `tokens` of a rank takes.

    heads: (query heads, key/value heads, head_dim) of the model. rank: the inner one. member: of Ulysses, None for one
    with the most heads. support: of the kernel. early: as `Comm.early`, which is 0 but over gloo. kept: whether the
    checkpoint around it keeps what backward needs, None where there is no checkpoint.
    """
    recipe = config.recipe(Topology(axes=config.inner_axes))  # where ranks lie changes no program
    shards = EvenShards(config.layout, tokens * config.size, recipe.size)
    q_heads, kv_heads, _ = heads
    own = shape_of(config.travel_dtype, dtype, batch, heads)
    count = config.head_stages
    if count == "auto":
        count = fewest_stages(recipe, config.ulysses, config.travel_dtype, own, mask, shards)
    if member is None:
        member = busiest_member(q_heads, kv_heads, config.ulysses)
    leaves = config.kept(count, kept is not None, bool(kept))
    compiler, members = compiler_of(recipe, rank, early), Members(config.ulysses, member)

    def bound(direction: str) -> BoundProgram:
        more = count, leaves if config.ulysses > 1 else SaveChoice()
        return compiler.bound_call(direction, mask, shards, own, members, support, *more)

    return figures(bound("forward"), bound("backward"), leaves)
