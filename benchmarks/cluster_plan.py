"""What the plans of a configuration say of links between nodes: bytes, messages, rounds; and the least bytes there are.

Pure integers. Ranks are numbered node after node. A gather goes as gloo's does, round the ring of its members; a
reduce-scatter and Ulysses' exchange straight from each member to each.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from benchmarks.blocks import block_bytes
from benchmarks.cluster_spec import Spec
from ds_seqpar.compiler import heads as dealing
from ds_seqpar.compiler.compile import pattern_of
from ds_seqpar.compiler.masks import CAUSAL, FULL
from ds_seqpar.compiler.plan import Plan
from ds_seqpar.compiler.program import GatherStart, Post, Program, ScatterStart, Wait
from ds_seqpar.compiler.shape import shape_of
from ds_seqpar.compiler.shards import EvenShards
from ds_seqpar.compiler.simulate import programs_of
from ds_seqpar.config import SequenceParallelConfig
from ds_seqpar.planner.calls import Call
from ds_seqpar.planner.machine import PER_PRODUCT, Machine, Wire
from ds_seqpar.planner.prices import call_seconds
from ds_seqpar.runtime.comm import distances

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
    """Of links between nodes. out, into: bytes of every node; messages: that leave the node of the rank that sends
    most; rounds: the longest chain of messages of which each waits for the one before."""

    out: tuple[float, ...]
    into: tuple[float, ...]
    messages: int
    rounds: int


def figures(spec: Spec, problem: Problem) -> Figures | None:
    """None for a peer whose plan nobody knows. Raises ConfigError where the configuration does not fit."""
    if spec.peer == "deepspeed":
        return _deepspeed(problem)
    if spec.peer:
        return None
    config = SequenceParallelConfig.from_dict({"size": problem.world, **spec.section})
    config = config.resolve(problem.world, (problem.heads, problem.kv_heads))
    edges, count, rounds = [], [0] * problem.world, 0
    agreement = distances(problem.world)  # inputs are compared, once a call
    for rank in range(problem.world):
        for far in itertools.chain(*agreement):
            count[rank] += _apart(problem, rank, (rank + far) % problem.world)
    rounds += len(agreement) if problem.nodes > 1 else 0
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
        longest = 0
        for member, (q, kv) in enumerate(dealt):
            wide = (q.stop - q.start, kv.stop - kv.start)
            shape = shape_of(config.travel_dtype, DTYPES[problem.dtype], 1, (*wide, problem.head_dim))
            chain = 0
            for direction in ("forward", "backward"):
                plan = recipe.plan(direction, pattern, shape)
                at = [ranks[member, i] for i in range(recipe.size)]
                edges += _edges(plan, block_bytes(shape, direction, shards), at)
                programs = programs_of(plan)
                for i, sent in enumerate(_sent(programs, at, problem)):
                    count[at[i]] += sent
                chain += _rounds(programs, at, problem)
            longest = max(longest, chain)
            # inward q, k, v and outward out; in backward do and then dq, dk, dv
            both = tokens // members * token * (2 * wide[0] + 2 * wide[1])
            # what is not kept comes once more: q, k and v, and a number a row in place of out
            again = tokens // members * token * (wide[0] + 2 * wide[1]) * (not kept.operands)
            again += tokens // members * 4 * wide[0] * (not kept.out)
            for i in range(recipe.size):
                me = ranks[member, i]
                for other in (ranks[m, i] for m in range(members) if m != member):
                    edges += [(other, me, both + again), (me, other, both)]
                    count[me] += 4 * _apart(problem, me, other)
        rounds += longest + 4 * any(
            _apart(problem, ranks[0, i], ranks[m, i]) for m in range(members) for i in range(recipe.size)
        )
    return Figures(**_by_node(edges, problem), messages=max(count), rounds=rounds)


def predicted(spec: Spec, problem: Problem, machine: Machine) -> float:
    """Seconds of one call by the planner's model, forward and backward, and the rounds in which inputs are compared."""
    config = SequenceParallelConfig.from_dict({"size": problem.world, **spec.section})
    config = config.resolve(problem.world, (problem.heads, problem.kv_heads))
    first = dealing.stages(problem.heads, problem.kv_heads, config.head_stages)[0]
    call = Call(
        config=config,
        world=problem.world,
        mask=CAUSAL if problem.causal else FULL,
        shards=EvenShards(config.layout, problem.seq, config.size // config.ulysses),
        heads=(*first.counts, problem.head_dim),
        dtype=DTYPES[problem.dtype],
        stages=config.head_stages,
        kept=config.kept(config.head_stages, False, False),
    )
    wire = machine.between if problem.nodes > 1 else machine.inside
    agreement = len(distances(problem.world)) * wire.latency
    return agreement + sum(call_seconds(machine, call, way) for way in ("forward", "backward"))


def critical_path(spec: Spec, problem: Problem, rate: float, unit: float) -> float:
    """The same with a rank a node, where nothing takes time but bytes, at `rate` a second of a link each way, and
    products: `unit` seconds for a visible (query, key) pair of a head, in backward 2.5 times as many."""
    flops = PER_PRODUCT["forward"] * problem.head_dim / unit if unit else 1e300
    kinds = {kind: ((1.0, flops), (1e12, flops)) for kind in ("full", "causal")}
    machine = Machine(
        name="links and products", about="", per_node=1, inside=Wire(latency=0, rate=rate),
        between=Wire(latency=0, rate=rate), uplink=None, duplex=True, stolen=0,
        attention={DTYPES[problem.dtype]: {"forward": kinds, "backward": kinds}}, gemm={DTYPES[problem.dtype]: flops},
        memory_rate=math.inf, elementwise_rate=math.inf, offload_rate=math.inf, instruction=0, ahead=False,
        host_memory=0, host_rate=math.inf, memory=0, spare=0, sources={},
    )  # fmt: skip
    return predicted(spec, dataclasses.replace(problem, nodes=problem.world, per_node=1), machine)


def _deepspeed(problem: Problem) -> Figures:
    """Eight all-to-alls: q, k, v and out, and their gradients."""
    world, tokens = problem.world, problem.seq // problem.world
    pair = tokens * problem.head_dim * problem.itemsize * 4 * (problem.heads + problem.kv_heads) / world
    edges = [(a, b, pair) for a in range(world) for b in range(world) if a != b]
    away = world - problem.per_node
    return Figures(**_by_node(edges, problem), messages=8 * away, rounds=8 if away else 0)


def _apart(problem: Problem, a: int, b: int) -> bool:
    return a // problem.per_node != b // problem.per_node


def _by_node(edges: Sequence[Edge], problem: Problem) -> dict[str, tuple[float, ...]]:
    out, into = [0.0] * problem.nodes, [0.0] * problem.nodes
    for source, target, size in edges:
        if _apart(problem, source, target):
            out[source // problem.per_node] += size
            into[target // problem.per_node] += size
    return {"out": tuple(out), "into": tuple(into)}


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


def _sent(programs: Sequence[Program], at: Sequence[int], problem: Problem) -> list[int]:
    """Messages that leave the node of each inner rank."""
    found = []
    for me, program in enumerate(programs):
        count = 0
        for one in program.code:
            if isinstance(one, Post):
                count += sum(_apart(problem, at[me], at[t.peer]) for t in one.sends)
            elif isinstance(one, GatherStart | ScatterStart):
                count += sum(_apart(problem, at[me], at[other]) for other in one.collective.ranks)
        found.append(count)
    return found


def _rounds(programs: Sequence[Program], at: Sequence[int], problem: Problem) -> int:
    """The time of all programs if nothing took any but a message between nodes, of 1: a rank posts, and goes on when
    what it waits for has arrived."""
    size = len(programs)
    clock, place = [0] * size, [0] * size
    sent: dict[tuple, list[int]] = defaultdict(list)  # a message -> when each of its name arrives
    joined: dict[tuple, list[int]] = defaultdict(list)
    asked: dict[tuple, int] = defaultdict(int)
    due: dict[tuple[int, int], list[tuple[tuple, int]]] = {}
    moved = True
    while moved:
        moved = False
        for me, program in enumerate(programs):
            while place[me] < len(program.code):
                one = program.code[place[me]]
                if isinstance(one, Post):
                    waits = []
                    for t in one.sends:
                        sent[me, t.peer, t.tag].append(clock[me] + _apart(problem, at[me], at[t.peer]))
                    for t in one.receives:
                        name = t.peer, me, t.tag
                        waits.append((name, asked[name]))
                        asked[name] += 1
                    due[me, one.ticket] = waits
                elif isinstance(one, GatherStart | ScatterStart):
                    ranks = one.collective.ranks
                    own = ranks, one.collective.kind, isinstance(one, GatherStart), me
                    number, asked[own] = asked[own], asked[own] + 1
                    name = (*own[:3], number)
                    joined[name].append(clock[me])
                    due[me, one.ticket] = [(name, 0)]
                    if len(joined[name]) == len(ranks):
                        apart = any(_apart(problem, at[ranks[0]], at[other]) for other in ranks)
                        sent[name].append(max(joined[name]) + apart)
                elif isinstance(one, Wait):
                    waits = due[me, one.ticket]
                    if any(len(sent[name]) <= number for name, number in waits):
                        break
                    clock[me] = max([clock[me], *(sent[name][number] for name, number in waits)])
                place[me] += 1
                moved = True
    assert all(p == len(program.code) for p, program in zip(place, programs, strict=True)), "ranks wait for one another"
    return max(clock)


def floor(problem: Problem, steps: int = 96) -> float:
    """The least bytes into the node that receives most, whatever the schedule, and as many out.

    A node that does its share of the products on n query heads meets x queries and y keys of each. Where it keeps for
    backward what arrived, it still has q, do, k and v to receive, and out, dq, dk and dv are to go where they belong,
    all but of tokens that it holds itself: 4 (n x' + m y') rows of head_dim, m their key/value heads. The best n, x
    and y are looked for on a grid of x. No schedule need reach it.
    """
    seq, nodes = problem.seq, problem.nodes
    group, best = problem.heads // problem.kv_heads, float("inf")
    work = problem.heads / nodes * (0.5 if problem.causal else 1.0)  # in products of a whole head
    for n in range(1, problem.heads + 1):
        for x in (step / steps for step in range(1, steps + 1)):
            if (y := _keys(work / n, x, problem.causal, nodes)) is not None:
                rows = n * max(0.0, x - 1 / nodes) + -(-n // group) * max(0.0, y - 1 / nodes)
                best = min(best, rows)
    return 4 * best * seq * problem.head_dim * problem.itemsize


def _keys(area: float, x: float, causal: bool, nodes: int) -> float | None:
    """The fewest keys, as a share of all, with which x of the queries can make so many products; None: all are too few.

    Causal: of the last x queries and the first y keys, where they overlap, half is void; and it is half of the products
    of a node's own tokens with one another."""
    y = (area + causal / (2 * nodes**2)) / x
    if causal and x + y > 1:  # x y - (x + y - 1)^2 / 2 = y - y^2 / 2 - (1 - x)^2 / 2 = area
        square = 1 - (1 - x) ** 2 - 2 * area
        y = max(y, 1 - max(0.0, square) ** 0.5 if square > -1e-9 else 2.0)
    return y if y <= 1 + 1e-9 else None
