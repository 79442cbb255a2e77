"""One call of attention under a configuration: its programs on all ranks, and the memory that they take. Does not
import torch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from ..compiler.compile import BoundProgram, Compiler, Recipe, block_mask_of
from ..compiler.memory import Figures, fewest_head_chunks, figures
from ..compiler.program.instructions import (
    Assemble,
    ExchangeStart,
    GatherStart,
    Instruction,
    Post,
    Program,
    ScatterStart,
)
from ..compiler.program.lower import lower
from ..compiler.program.shape import Shape, shape_of
from ..compiler.program.ulysses import SavedForBackward, UlyssesGroup, call_program
from ..compiler.schedules.base import Schedule
from ..compiler.schedules.plan import BlockMask, StepsOf
from ..compiler.sharding.heads import busiest_ulysses_rank, heads_by_ulysses_rank
from ..compiler.sharding.layout import Topology
from ..compiler.sharding.masks import Mask
from ..compiler.sharding.shards import EvenShards, Shards
from ..compiler.tiles.launches import PLAIN_KERNEL, KernelSupport
from ..config.settings import SequenceParallelConfig
from .machine import Machine


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCall:
    """Attention of one layer."""

    config: SequenceParallelConfig  # without any "auto"
    world: int  # ranks of the job
    mask: Mask
    shards: Shards  # of the CP ranks
    # (query heads, key/value heads, head_dim) that are computed at once: the model's, or those of one head chunk
    heads: tuple[int, int, int]
    dtype: str = "bfloat16"
    batch: int = 1
    head_chunks: int = 1  # number of head chunks, all of equally many heads
    kept: SavedForBackward = SavedForBackward.QKV_AND_OUT  # what forward saves for backward

    @property
    def hides_exchanges(self) -> bool:
        """Whether Ulysses' exchanges of one head chunk overlap with the computation of another."""
        return self.config.overlap and self.head_chunks > 1 and self.ulysses_size > 1

    @functools.cached_property
    def topology(self) -> Topology:
        return self.config.topology(self.world)

    @functools.cached_property
    def recipe(self) -> Recipe:
        return self.config.recipe(self.topology)

    @functools.cached_property
    def block_mask(self) -> BlockMask:
        return _block_mask(self.mask, self.shards)

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of attention on each Ulysses rank."""
        q_heads, kv_heads, dim = self.heads
        counts = [
            (q.stop - q.start, kv.stop - kv.start)
            for q, kv in heads_by_ulysses_rank(q_heads, kv_heads, self.ulysses_size)
        ]
        return tuple(shape_of(self.config.comm_dtype, self.dtype, self.batch, (*count, dim)) for count in counts)

    @property
    def ulysses_size(self) -> int:
        return self.config.ulysses

    @functools.cached_property
    def busiest_ulysses_rank(self) -> int:
        """The first Ulysses rank with the most heads. Its bytes decide what rotates on all Ulysses ranks."""
        return max(
            range(self.ulysses_size), key=lambda rank: (self.shapes[rank].q_heads, self.shapes[rank].kv_heads, -rank)
        )

    @functools.cached_property
    def coordinates(self) -> tuple[tuple[int, int], ...]:
        """(Ulysses rank, CP rank) of each rank that shares the first sequence; ranks of the next sequences repeat
        them."""
        topology, ranks = self.topology, range(self.config.size)
        return tuple((topology.index(rank, "ulysses"), topology.index(rank, *topology.cp_axes)) for rank in ranks)

    @functools.cached_property
    def ranks(self) -> dict[tuple[int, int], int]:
        """(Ulysses rank, CP rank) -> rank."""
        return {coordinates: rank for rank, coordinates in enumerate(self.coordinates)}

    def moving_side(self, direction: str) -> str:
        sizes = self.shapes[self.busiest_ulysses_rank].bytes_per_token(direction)
        return self.recipe.moving_side(direction, self.block_mask, sizes)

    def steps(self, direction: str) -> StepsOf:
        """Return a function from a CP rank to its steps, without overlap.

        Raises:
            ConfigError: If the schedule has none.
        """
        return _steps(self.recipe.schedule, self.topology, self.block_mask, direction, self.moving_side(direction))


@functools.lru_cache(maxsize=64)
def _steps(schedule: Schedule, topology: Topology, block_mask: BlockMask, direction: str, moving_side: str) -> StepsOf:
    return schedule.build(topology, block_mask, direction, moving_side)


@functools.lru_cache(maxsize=64)
def _block_mask(mask: Mask, shards: Shards) -> BlockMask:
    if mask.scale_free and isinstance(shards, EvenShards):
        runs = len(shards.runs("q", (0,))) * shards.size * shards.blocks_per_rank
        shards = dataclasses.replace(shards, seq=2 * runs)  # the same blocks meet
    return block_mask_of(mask, shards)


# ---- programs


def simulated_sequences(machine: Machine, call: AttentionCall) -> int:
    """Return how many sequences must be simulated together. One is enough if all do the same at the same time. If ranks
    of two sequences share a node's uplink, it is as many as fill whole nodes."""
    size, per_node = call.config.size, machine.per_node
    if machine.uplink is None or size % per_node == 0 or per_node % size == 0:
        return 1
    return min(call.world // size, math.lcm(size, per_node) // size)


def programs(machine: Machine, call: AttentionCall, direction: str) -> list[Program]:
    """Return the programs of all simulated ranks, with Ulysses' exchanges: of all head chunks if these hide one
    another's exchanges, else of one head chunk."""
    return with_exchanges(machine, call, inner_programs(call, direction))


def inner_programs(call: AttentionCall, direction: str) -> list[Program]:
    """Return the programs of the CP ranks of the first Ulysses rank, without Ulysses' exchanges."""
    shape, schedule, size = call.shapes[0], call.recipe.schedule, call.recipe.size
    if call.recipe.overlap:
        steps_of_ranks = list(
            call.recipe.plan(direction, call.block_mask, call.shapes[call.busiest_ulysses_rank]).ranks
        )
    else:
        steps_of_ranks = [call.steps(direction)(rank) for rank in range(size)]
    exact = shape.comm_dtype == shape.accum_dtype
    return [
        lower(schedule.name, direction, rank, size, tuple(steps), exact, schedule.blocks_per_rank)
        for rank, steps in enumerate(steps_of_ranks)
    ]


def with_exchanges(machine: Machine, call: AttentionCall, inner: Sequence[Program]) -> list[Program]:
    """Return the programs of all simulated ranks, given those of the CP ranks without Ulysses' exchanges."""
    size, head_chunks = call.config.size, call.head_chunks if call.hides_exchanges else 1
    programs_of_ranks = []
    for rank in range(simulated_sequences(machine, call) * size):
        ulysses_rank, cp_rank = call.coordinates[rank % size]
        base = rank - rank % size

        def world_rank(peer: int, ulysses_rank: int = ulysses_rank, base: int = base) -> int:
            return base + call.ranks[ulysses_rank, peer]

        group = tuple(base + call.ranks[member, cp_rank] for member in range(call.ulysses_size))
        program = call_program(
            [inner[cp_rank]] * head_chunks, call.ulysses_size, True, call.kept, overlap=head_chunks > 1
        )
        programs_of_ranks.append(with_world_ranks(program, rank, world_rank, group))
    return programs_of_ranks


def with_world_ranks(program: Program, rank: int, world_rank: Callable[[int], int], group: tuple[int, ...]) -> Program:
    """Replace CP ranks by ranks of the world in a program.

    Args:
        program: The program of one rank.
        rank: That rank in the world.
        world_rank: Returns the rank in the world of a CP rank.
        group: Ranks in the world of its Ulysses group.
    """
    code: list[Instruction] = []
    for instruction in program.code:
        if isinstance(instruction, Post):
            sends, receives = (
                tuple(transfer._replace(peer=world_rank(transfer.peer)) for transfer in transfers)
                for transfers in (instruction.sends, instruction.receives)
            )
            code.append(instruction._replace(sends=sends, receives=receives))
        elif isinstance(instruction, GatherStart | ScatterStart | Assemble):
            ranks = tuple(map(world_rank, instruction.collective.ranks))
            code.append(instruction._replace(collective=dataclasses.replace(instruction.collective, ranks=ranks)))
        elif isinstance(instruction, ExchangeStart):
            code.append(instruction._replace(ranks=group))
        else:
            code.append(instruction)
    return dataclasses.replace(program, rank=rank, code=tuple(code))


# ---- memory

# cached, since memory settings, head chunks included, do not change the programs of CP ranks
cached_compiler = functools.lru_cache(maxsize=256)(Compiler)


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
    ulysses_rank: int | None = None,
    support: KernelSupport = PLAIN_KERNEL,
    early: int = 0,
    kept: bool | None = None,
) -> Figures:
    """Return the memory of a layer's attention on one rank.

    Args:
        config: The configuration, without any "auto".
        world: Ranks of the job.
        tokens: Tokens per rank.
        mask: The mask of the whole sequence.
        heads: (query heads, key/value heads, head_dim) of the model.
        dtype: dtype of q, k and v.
        batch: Sequences that a group of ranks trains at once.
        rank: The CP rank.
        ulysses_rank: The Ulysses rank; None: one with the most heads.
        support: What the kernel supports.
        early: As `Comm.early`, which is 0 except over gloo.
        kept: Whether the checkpoint around attention keeps its results; None: there is no checkpoint.
    """
    recipe = config.recipe(Topology(axes=config.cp_axes))  # the placement of ranks changes no program
    shards = EvenShards(config.layout, tokens * config.size, recipe.size)
    q_heads, kv_heads, _ = heads
    local = shape_of(config.comm_dtype, dtype, batch, heads)
    count = config.head_chunks
    if count == "auto":
        count = fewest_head_chunks(recipe, config.ulysses, local, mask, shards)
    if ulysses_rank is None:
        ulysses_rank = busiest_ulysses_rank(q_heads, kv_heads, config.ulysses)
    saved_for_backward = config.kept(count, kept is not None, bool(kept))
    compiler, ulysses_group = cached_compiler(recipe, rank, early), UlyssesGroup(config.ulysses, ulysses_rank)

    def bound(direction: str) -> BoundProgram:
        kept_for_backward = saved_for_backward if config.ulysses > 1 else SavedForBackward.QKV_AND_OUT
        return compiler.bound_call(direction, mask, shards, local, ulysses_group, support, count, kept_for_backward)

    return figures(bound("forward"), bound("backward"), saved_for_backward)
