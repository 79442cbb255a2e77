"""What the plans of a configuration say of links between nodes: bytes.

Pure integers. Ranks are numbered node after node. A gather goes as gloo's does, round the ring of its members; a
reduce-scatter and Ulysses' exchange straight from each member to each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks.attention.blocks import block_bytes
from benchmarks.contenders import Spec
from ds_seqpar.compiler import heads as dealing
from ds_seqpar.compiler.compile import pattern_of
from ds_seqpar.compiler.masks import CAUSAL, FULL
from ds_seqpar.compiler.plan import Plan
from ds_seqpar.compiler.shape import shape_of
from ds_seqpar.compiler.shards import EvenShards
from ds_seqpar.config import SequenceParallelConfig

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
Edge = tuple[int, int, float]  # from a rank, to a rank, bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of attention, forward and backward, of `batch` 1 on nodes * per_node ranks."""

    nodes: int
    per_node: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    @property
    def itemsize(self) -> int:
        return {"fp32": 4, "bf16": 2}[self.dtype]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Of links between nodes: bytes out of and into every node."""

    out: tuple[float, ...]
    into: tuple[float, ...]


def figures(spec: Spec, problem: Problem) -> Figures:
    """Raises ConfigError where the configuration does not fit."""
    if spec.peer:
        return _deepspeed(problem)
    config = SequenceParallelConfig.from_dict({"size": problem.world, **spec.section})
    config = config.resolve(problem.world, (problem.heads, problem.kv_heads))
    edges: list[Edge] = []
    topology, members = config.topology(problem.world), config.ulysses
    recipe, mask = config.recipe(topology), CAUSAL if problem.causal else FULL
    shards = EvenShards(config.layout, problem.seq, recipe.size)
    pattern, inner = pattern_of(mask, shards), topology.inner_axes
    ranks = {(topology.index(r, "ulysses"), topology.index(r, *inner)): r for r in range(problem.world)}
    tokens, token = problem.seq // recipe.size, problem.head_dim * problem.itemsize
    if config.head_stages == "auto":
        raise ValueError('the bytes of head_stages "auto" are known to the run only; got it, give a number')
    kept = config.kept(config.head_stages, False, False)
    for stage in dealing.stages(problem.heads, problem.kv_heads, config.head_stages):
        dealt = dealing.dealt(*stage.counts, members)
        for member, (q, kv) in enumerate(dealt):
            wide = (q.stop - q.start, kv.stop - kv.start)
            shape = shape_of(config.travel_dtype, DTYPES[problem.dtype], 1, (*wide, problem.head_dim))
            for direction in ("forward", "backward"):
                plan = recipe.plan(direction, pattern, shape)
                at = [ranks[member, i] for i in range(recipe.size)]
                edges += _edges(plan, block_bytes(shape, direction, shards), at)
            # inward q, k, v and outward out; in backward do and then dq, dk, dv
            both = tokens // members * token * (2 * wide[0] + 2 * wide[1])
            # what is not kept comes once more: q, k and v, and a number a row in place of out
            again = tokens // members * token * (wide[0] + 2 * wide[1]) * (not kept.operands)
            again += tokens // members * 4 * wide[0] * (not kept.out)
            for i in range(recipe.size):
                me = ranks[member, i]
                for other in (ranks[m, i] for m in range(members) if m != member):
                    edges += [(other, me, both + again), (me, other, both)]
    return _by_node(edges, problem)


def _deepspeed(problem: Problem) -> Figures:
    """Eight all-to-alls: q, k, v and out, and their gradients."""
    world, tokens = problem.world, problem.seq // problem.world
    pair = tokens * problem.head_dim * problem.itemsize * 4 * (problem.heads + problem.kv_heads) / world
    return _by_node([(a, b, pair) for a in range(world) for b in range(world) if a != b], problem)


def _apart(problem: Problem, a: int, b: int) -> bool:
    return a // problem.per_node != b // problem.per_node


def _by_node(edges: Sequence[Edge], problem: Problem) -> Figures:
    out, into = [0.0] * problem.nodes, [0.0] * problem.nodes
    for source, target, size in edges:
        if _apart(problem, source, target):
            out[source // problem.per_node] += size
            into[target // problem.per_node] += size
    return Figures(out=tuple(out), into=tuple(into))


def _edges(plan: Plan, sizes: dict[str, float], at: Sequence[int]) -> Iterator[Edge]:
    """What goes from rank to rank. at: the ranks of the plan's inner ranks."""
    for me, steps in enumerate(plan.ranks):
        for step in steps:
            for move in (*step.moves, *step.results):
                if move.dst == me:
                    yield at[move.src], at[me], sizes[move.kind] * len(move.key)
            for gather in step.gathers:
                for other in gather.ranks:
                    if other != me:
                        yield at[other], at[me], sizes[gather.kind] * len(gather.part(other))
            for reduce in step.reduces:
                for other in reduce.ranks:
                    if other != me:
                        yield at[other], at[me], sizes[reduce.kind] * len(reduce.part(me))
