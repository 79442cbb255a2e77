"""A plain estimate of a training step's time, to order what fits. A rank's program of attention is followed alone: its
products take their flops, its messages their bytes, and of the two the longer one counts between waits.
docs/choosing_settings.md says what is left out. Does not import torch."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from ..core.compiler.compile import BoundProgram, side_of
from ..core.compiler.program import instructions as op
from ..core.compiler.program.shape import Shape, shape_of
from ..core.compiler.program.ulysses import UlyssesGroup
from ..core.compiler.schedules.actions import Unit
from ..core.compiler.sharding.heads import busiest_ulysses_rank
from ..core.compiler.sharding.layout import Topology
from ..core.compiler.sharding.shards import EvenShards, Shards
from ..core.compiler.tiles.launches import PLAIN_KERNEL
from ..data.balance import shards_of
from .attention_memory import compiler_of
from .machine import Machine, Wire
from .request import TrainingStep
from .state_memory import state_bytes

DIRECTIONS = ("forward", "backward")
FLOPS_PER_PAIR = {"forward": 4, "backward": 10}  # flops of a visible pair and element of head_dim: 2 and 5 matmuls


class Attention(NamedTuple):
    """One layer's attention in one direction: of several ranks, the most of each."""

    seconds: float
    inside: int  # bytes received from ranks of the own node
    between: int  # bytes received from ranks of other nodes
    messages: int  # received

    @property
    def received(self) -> int:
        return self.inside + self.between


class Estimate(NamedTuple):
    """The estimate of a step, of one micro-batch on all ranks."""

    seconds: float
    forward: Attention
    backward: Attention


def estimate(step: TrainingStep, machine: Machine) -> Estimate:
    """Return the estimate of a step: attention of all layers, matrix products, and states that layers pass on."""
    m, config = step.model, step.config
    forward, backward = (attention(step, machine, direction) for direction in DIRECTIONS)
    seconds = m.attending * (forward.seconds * _forwards(step) + backward.seconds)
    seconds += math.ceil(step.seq / config.size) * step.batch * work(step, machine).token
    if m.states is not None and config.size > 1:
        states, wire = state_bytes(step), _wire(machine, config.size > machine.per_node)
        seconds += m.states.count * 2 * (states.received + states.exchanged) / wire.rate
    return Estimate(seconds, forward, backward)


class Work(NamedTuple):
    """What a rank computes, without what it sends, in seconds."""

    pair: float  # for a query and a key that it sees, in all layers
    token: float


def work(step: TrainingStep, machine: Machine) -> Work:
    """Return the work of a step's model, by which samples are dealt; the lengths of the step are not read."""
    m, (attention_rate, matrix_rate) = step.model, machine.rates(step.dtype)
    flops = FLOPS_PER_PAIR["forward"] * _forwards(step) + FLOPS_PER_PAIR["backward"]
    pair = m.attending * flops * m.heads * m.head_dim / attention_rate
    return Work(pair, 2 * ((3 + step.checkpointing) * m.weights + 3 * m.embedding) / matrix_rate)


def _forwards(step: TrainingStep) -> int:
    """Return how many times attention's forward is computed."""
    return 1 + (step.checkpointing and step.config.recompute_attention)


def attention(step: TrainingStep, machine: Machine, direction: str) -> Attention:
    """Return one layer's attention, by the programs of a few ranks: the first, the middle and the last one of a
    sequence, and one with the most heads."""
    config = step.config
    topology = config.topology(step.world)
    ranks = topology.group(0, "ulysses", *topology.cp_axes)  # of the first sequence
    last, busiest = len(ranks) - 1, busiest_ulysses_rank(step.model.heads, step.model.kv_heads, config.ulysses)
    followed = sorted({0, (last + 1) // 2, last, busiest})
    found = [_followed(step, machine, direction, topology, ranks[number]) for number in followed]
    return Attention(*map(max, zip(*found, strict=True)))


def received(step: TrainingStep, machine: Machine, rank: int) -> int:
    """Return the bytes that a rank of the first sequence receives in attention of all layers, in both directions."""
    topology = step.config.topology(step.world)
    ranks = topology.group(0, "ulysses", *topology.cp_axes)
    forward, backward = (_followed(step, machine, direction, topology, ranks[rank]) for direction in DIRECTIONS)
    return step.model.attending * (forward.received * _forwards(step) + backward.received)


def _followed(step: TrainingStep, machine: Machine, direction: str, topology: Topology, rank: int) -> Attention:
    """Follow one rank, whose peers do the same at the same time. A link carries one transfer after another, and each
    has its latency once."""
    bound = _bound(step, direction, topology, rank)
    peers = topology.group(rank, "ulysses"), topology.group(rank, *topology.cp_axes)
    flops, (rate, _) = FLOPS_PER_PAIR[direction] * step.batch, machine.rates(step.dtype)
    now, messages, shape = 0.0, 0, bound.shape
    due: dict[int, float] = {}  # ticket -> time of arrival
    free, received = [0.0, 0.0], [0, 0]  # by whether another node sends: time from which the link is free, bytes
    for instruction in bound.program.code:
        match instruction:
            case op.Enter():
                shape = bound.shapes[instruction.head_chunk]
            case op.Product():
                pairs = sum(tile.pairs for tile in bound.tiles(instruction.q, instruction.kv))
                now += flops * pairs * shape.q_heads * shape.head_dim / rate
            case op.Wait():
                now = max(now, due.pop(instruction.ticket))
            case op.Post() | op.GatherStart() | op.ScatterStart() | op.ExchangeStart():
                sizes: dict[bool, int] = defaultdict(int)
                for peer, size in _arriving(bound, shape, instruction, *peers):
                    sizes[not machine.is_inside(rank, peer)] += size
                    messages += 1
                arrivals = [now]
                for outside, size in sizes.items():
                    wire = _wire(machine, outside)
                    free[outside] = max(now, free[outside]) + size / wire.rate
                    received[outside] += size
                    arrivals.append(free[outside] + wire.latency)
                due[instruction.ticket] = max(arrivals)
    return Attention(now, received[False], received[True], messages)


def _wire(machine: Machine, outside: bool) -> Wire:
    return machine.between if outside else machine.inside


def _bound(step: TrainingStep, direction: str, topology: Topology, rank: int) -> BoundProgram:
    """Return the program of a rank, as the runtime compiles it."""
    config, m = step.config, step.model
    recipe = config.recipe(Topology(axes=config.cp_axes))  # the placement of ranks changes no program
    ulysses = UlyssesGroup(config.ulysses, topology.index(rank, "ulysses"))
    compiler = compiler_of(recipe, topology.index(rank, *topology.cp_axes), 0)
    local = shape_of(config.comm_dtype, step.dtype, step.batch, (m.heads, m.kv_heads, m.head_dim))
    saved = config.kept(config.head_chunks, step.checkpointing, not config.recompute_attention)
    shards = _shards(step, recipe.size)
    return compiler.bound_call(direction, step.mask, shards, local, ulysses, PLAIN_KERNEL, config.head_chunks, saved)


def _shards(step: TrainingStep, cp_size: int) -> Shards:
    """Return the shards of a step's sequence on CP ranks."""
    if not step.mask.documents:
        return EvenShards(step.config.layout, step.seq, cp_size)
    lengths = tuple(b - a for a, b in itertools.pairwise((*step.mask.documents, step.seq)))
    return shards_of(step.config.layout, lengths, cp_size, step.mask.parents)


def _arriving(
    bound: BoundProgram, shape: Shape, start: op.Started, ulysses_ranks: tuple[int, ...], cp_ranks: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """Yield (rank, bytes) of each message that a rank receives, in a head chunk whose inner tensors have this shape."""
    per_token = shape.bytes_per_token(bound.program.direction)

    def size(unit: Unit) -> int:
        return per_token[unit[0]] * bound.shards.tokens(side_of(unit[0]), unit[1])

    match start:
        case op.Post():
            for transfer in start.receives:
                yield cp_ranks[transfer.peer], size(transfer.unit)
        case op.ExchangeStart():
            sizes = bound.exchange_sizes(start.exchange)
            for peer, elements in zip(ulysses_ranks, sizes.incoming, strict=True):
                if peer != ulysses_ranks[bound.heads.ulysses.rank]:
                    yield peer, elements * sizes.itemsize
        case op.GatherStart() | op.ScatterStart():
            collective, here = start.collective, bound.program.rank
            for peer, key in zip(collective.ranks, collective.keys, strict=True):
                if peer != here:
                    own = isinstance(start, op.ScatterStart)
                    yield cp_ranks[peer], size((collective.kind, collective.key_of(here) if own else key))
