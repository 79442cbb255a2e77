"""The program that passes states of layers between ranks: each rank gets those of the runs before its own.

A layer with a state maps the state S before a run of tokens to M S + S' behind it. In a plan of states, what other
plans call a token is a run, and a key/value block is the state S' and the map M of each of a rank's runs. Backward is
the same plan in the reverse order of runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from .compile import BoundProgram, Compiler, Recipe
from .program.shape import Field, Shape
from .program.ulysses import NO_ULYSSES
from .schedules import Schedule
from .schedules.actions import Compute, Move, Step, Steps, moves_of
from .schedules.plan import BlockMask, StepsOf
from .sharding.layout import Axes, Topology
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateShape(Shape):
    """The numbers of a run's state and of its map, for one row."""

    state: int
    transition: int

    def fields(self, direction: str, kind: str, dtype: str | None = None) -> tuple[Field, ...]:
        state = Field("state", 1, self.state, self.dtype)
        return {"q": (), "kv": (state, Field("map", 1, self.transition, self.dtype)), "out": (state,)}[kind]


def shape_of_states(dtype: str, rows: int, state: int, transition: int) -> StateShape:
    return StateShape(
        batch=rows, q_heads=1, kv_heads=1, head_dim=1, dtype=dtype, comm_dtype=dtype, state=state, transition=transition
    )


def recipe(size: int) -> Recipe:
    """Return the recipe of plans of states on `size` ranks."""
    return Recipe(schedule=STATES, topology=Topology(axes=((AXIS, size),)))


@functools.lru_cache(maxsize=256)
def bound_states(rank: int, shards: UnevenShards, reach: int, shape: StateShape) -> BoundProgram:
    """Return the program that passes the states of runs on one rank.

    Args:
        rank: The rank.
        shards: The runs of each rank, as tokens.
        reach: On how many runs before it a run depends.
        shape: That of one state.
    """
    compiler = Compiler(recipe(shards.size), rank)
    return compiler.bound_call("forward", Mask(window=reach + 1), shards, shape, NO_ULYSSES, PLAIN_KERNEL)
