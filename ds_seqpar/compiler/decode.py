"""The program of a decode step: attention of one new token a row to the keys that all ranks have kept.

Every rank has the token's queries, and computes them with its own keys. The partial results are merged in a
reduce-scatter by query heads, and gathered. So in a decode plan block b of queries is the b-th share of the heads, and
what other plans call a token is a head. The step does not depend on how many keys a rank has kept: a kv block stands
for all of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

from .compile import BoundProgram, Compiler, Recipe
from .program.shape import Shape
from .program.ulysses import UlyssesGroup
from .schedules import Schedule
from .schedules.actions import Compute, Gather, ReduceScatter, Step, Steps
from .schedules.plan import BlockMask, StepsOf
from .sharding.layout import Axes, Run, Topology
from .sharding.masks import FULL
from .sharding.shards import UnevenShards
from .tiles.launches import PLAIN_KERNEL

AXIS = "rank"


def decode(topology: Topology, block_mask: BlockMask, direction: str, moving_side: str) -> StepsOf:
    """Return the steps of any rank: its product, a reduce-scatter by heads, and a gather of the merged results.

    Two ranks gather the partial results of one another, as many elements in one exchange.
    """
    ranks = tuple(range(topology.size(AXIS)))
    keys = tuple((block,) for block in ranks)

    def steps(rank: int) -> Steps:
        product = (Compute(rank=rank, q=ranks, kv=(rank,)),)
        if len(ranks) == 1:
            return (Step(computes=product),)
        if len(ranks) == 2:
            return Step(computes=product), Step(gathers=(Gather(ranks=ranks, kind="out", keys=(ranks, ranks)),))
        reduce = ReduceScatter(ranks=ranks, kind="out", keys=keys)
        gather = Gather(ranks=ranks, kind="out", keys=keys)
        return Step(computes=product, reduces=(reduce,)), Step(gathers=(gather,))

    return steps


def received(axes: Axes, direction: str, moving_side: str, units: Mapping[str, float]) -> list[float]:
    """Return the elements that each rank receives: its share from all others, and theirs, where all are equal."""
    ((_, ranks),) = axes
    return [2 * (ranks - 1) * units["out"]] * ranks


# not among `schedules.SCHEDULES`: nothing trains with it
DECODE = Schedule(
    name="decode",
    summary="a decode step: every rank has the queries, and its own part of the kept keys",
    build=decode,
    axes=lambda ranks, options: ((AXIS, ranks),),
    received=received,
    moving_sides=("kv",),
    shares_queries=True,
    collective_axes=(AXIS,),
)


def recipe(size: int) -> Recipe:
    """Return the recipe of decode steps on `size` ranks."""
    return Recipe(schedule=DECODE, topology=Topology(axes=((AXIS, size),), collective_axes=(AXIS,)))


@functools.lru_cache(maxsize=64)
def shards(size: int, heads: int) -> UnevenShards:
    """Return the shares of the query heads, as tokens of q, and one token of kv for the keys of each rank."""
    ends = [heads * rank // size for rank in range(size + 1)]
    q = [(Run(first, 1, end - first),) for first, end in itertools.pairwise(ends)]
    return UnevenShards(q, [(Run(rank, 1, 1),) for rank in range(size)])


@functools.lru_cache(maxsize=64)
def bound_decode(size: int, rank: int, heads: int, shape: Shape) -> BoundProgram:
    """Return the program of a decode step on one rank, for results (rows, heads, 1, head_dim).

    Args:
        heads: The query heads.
        shape: That of one of them, with the values' head_dim, in the dtype of sums.
    """
    compiler = Compiler(recipe(size), rank)
    return compiler.bound_call("forward", FULL, shards(size, heads), shape, UlyssesGroup(1, 0), PLAIN_KERNEL)
