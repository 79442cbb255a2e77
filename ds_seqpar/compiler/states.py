"""The program that passes states of layers between ranks: each rank gets those of the runs before its own.

A layer with a state maps the state S before a run of tokens to M S + S' behind it. In a plan of states, what other
plans call a token is a run. There are two of them. In one a key/value block is the state S' and the map M of each of a
rank's runs, and each rank gets those of the runs before its own at once. In the other a block is the state behind one
run, which goes to the rank of the next run: by far fewer bytes, and as many steps as there are runs. Backward is the
same plan in the reverse order of runs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping

from .compile import BoundProgram, Compiler, Recipe
from .program.shape import Field, Shape, token_bytes
from .program.ulysses import NO_ULYSSES
from .schedules import Schedule
from .schedules.actions import Compute, Move, Step, Steps, moves_of
from .schedules.plan import BlockMask, StepsOf
from .sharding.layout import Axes, Topology, owner
from .sharding.masks import Mask
from .sharding.shards import UnevenShards
from .tiles.launches import PLAIN_KERNEL

AXIS = "rank"


def states(topology: Topology, block_mask: BlockMask, direction: str, moving_side: str) -> StepsOf:
    """Return the steps of any rank: it gets what it needs of the others at once."""
    ranks = range(topology.size(AXIS))

    def steps(rank: int) -> Steps:
        moves = [Move(src=src, dst=dst, kind="kv", key=(src,)) for dst, src in block_mask.pairs() if src != dst]
        computes = tuple(Compute(rank=rank, q=(rank,), kv=(src,)) for src in ranks if block_mask(rank, src))
        return Step(moves=moves_of(rank, moves)), Step(computes=computes)

    return steps


def received(axes: Axes, direction: str, moving_side: str, units: Mapping[str, float]) -> list[float]:
    """Return the elements that each rank receives where all need the states of all others."""
    ((_, ranks),) = axes
    return [(ranks - 1) * units["kv"]] * ranks


# not among `schedules.SCHEDULES`: attention has other operands
STATES = Schedule(
    name="states",
    summary="states of layers: every rank gets those of the runs before its own",
    build=states,
    axes=lambda ranks, options: ((AXIS, ranks),),
    received=received,
    moving_sides=("kv",),
)


RUNS = 2  # that a rank has at most, if states go from run to run


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _InOrder(Schedule):
    @property
    def blocks_per_rank(self) -> int:
        return RUNS


def in_order(topology: Topology, block_mask: BlockMask, direction: str, moving_side: str) -> StepsOf:
    """Return the steps of any rank: the state behind a run goes to the rank of the next one, which maps it."""
    after = {kv: q for q, kv in block_mask.pairs() if q != kv}
    (block,) = {q for q, kv in block_mask.pairs() if q == kv} - {*after.values()}
    chain = [block]
    while chain[-1] in after:
        chain.append(after[chain[-1]])

    def steps(rank: int) -> Steps:
        own = [block for block in chain if owner(block, RUNS) == rank]
        made = [Step(computes=tuple(Compute(rank=rank, q=(block,), kv=(block,)) for block in own))]
        for before, block in itertools.pairwise(chain):
            src, dst = owner(before, RUNS), owner(block, RUNS)
            move = Move(src=src, dst=dst, kind="kv", key=(before,))
            compute = Compute(rank=dst, q=(block,), kv=(before,))
            made += [Step(moves=moves_of(rank, [move])), Step(computes=(compute,) if rank == dst else ())]
        return tuple(made)

    return steps


def received_in_order(axes: Axes, direction: str, moving_side: str, units: Mapping[str, float]) -> list[float]:
    """Return the elements that each rank receives in the balanced layout: a state for each of its runs but the first of
    all. The last rank has one run, in the middle."""
    ((_, ranks),) = axes
    return [(RUNS - (rank == 0) - (rank == ranks - 1)) * units["kv"] for rank in range(ranks)]


IN_ORDER = _InOrder(
    name="states_in_order",
    summary="states of layers: the state behind a run goes to the rank of the next run",
    build=in_order,
    axes=lambda ranks, options: ((AXIS, ranks),),
    received=received_in_order,
    moving_sides=("kv",),
)
AT_ONCE = 2**21  # bytes of states and maps that a rank takes at once; more go in order


def go_in_order(reach: int, runs: int, run_bytes: float) -> bool:
    """Return whether states go from run to run.

    Args:
        reach: On how many runs before it a run depends at most.
        runs: How many runs a rank has at most.
        run_bytes: The bytes of a run's state and map.
    """
    return runs <= RUNS and reach > 1 and reach * run_bytes > AT_ONCE


def received_bytes(reach: int, runs: int, state: float, transition: float) -> float:
    """Return the bytes that the rank receives which receives most, in one direction.

    Args:
        reach: As for `go_in_order`.
        runs: As for `go_in_order`.
        state: The bytes of a run's state.
        transition: Those of its map.
    """
    return runs * state if go_in_order(reach, runs, state + transition) else reach * (state + transition)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateShape(Shape):
    """The numbers of a run's state and of its map, for one row; 0: no map is sent."""

    state: int
    transition: int

    def fields(self, direction: str, kind: str, dtype: str | None = None) -> tuple[Field, ...]:
        state, transition = Field("state", 1, self.state, self.dtype), Field("map", 1, self.transition, self.dtype)
        return {"q": (), "kv": (state, transition) if self.transition else (state,), "out": (state,)}[kind]

    @property
    def run_bytes(self) -> int:
        return self.batch * token_bytes(self.fields("forward", "kv"))


def shape_of_states(dtype: str, rows: int, state: int, transition: int) -> StateShape:
    return StateShape(
        batch=rows, q_heads=1, kv_heads=1, head_dim=1, dtype=dtype, comm_dtype=dtype, state=state, transition=transition
    )


def recipe(size: int, ordered: bool = False) -> Recipe:
    """Return the recipe of plans of states on `size` ranks. ordered: whether they go from run to run."""
    return Recipe(schedule=IN_ORDER if ordered else STATES, topology=Topology(axes=((AXIS, size),)))


@functools.lru_cache(maxsize=256)
def bound_states(rank: int, shards: UnevenShards, reach: int, shape: StateShape) -> BoundProgram:
    """Return the program that passes the states of runs on one rank.

    Args:
        rank: The rank.
        shards: The runs of each rank, as tokens; with a block for each, states go from run to run.
        reach: On how many runs before it a run depends.
        shape: That of one state.
    """
    ordered = shards.blocks_per_rank > 1
    compiler, mask = Compiler(recipe(shards.size, ordered), rank), Mask(window=2 if ordered else reach + 1)
    return compiler.bound_call("forward", mask, shards, shape, NO_ULYSSES, PLAIN_KERNEL)
