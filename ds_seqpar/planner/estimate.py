"""Roughly estimate the time of a training step. The estimates rank the configurations that fit in memory.

One rank's attention program is simulated in isolation. A product's time depends on its flops, and a message's time on
its bytes. Between two waits, the estimate counts the longer of computation and communication. docs/choosing_settings.md
lists the effects that are ignored. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from ..core.compiler.compile import BoundProgram, side_of
from ..core.compiler.program import instructions as op
from ..core.compiler.program.shape import ITEMSIZE, Shape, shape_of
from ..core.compiler.program.ulysses import UlyssesGroup
from ..core.compiler.schedules.actions import Unit
from ..core.compiler.sharding.heads import busiest_ulysses_rank
from ..core.compiler.sharding.layout import Topology
from ..core.compiler.sharding.shards import EvenShards, Shards
from ..core.compiler.tiles.launches import PLAIN_KERNEL
from ..data.balance import shards_of
from .attention_memory import compiler_of
from .machine import Machine, Wire
from .request import Index, TrainingStep, visible_pairs
from .state_memory import state_bytes

DIRECTIONS = ("forward", "backward")
PICKED_BACKWARD = 12  # flops per picked key and element in the backward pass, which recomputes a block's forward pass
FLOPS_PER_PAIR = {"forward": 4, "backward": 10}  # flops per visible pair and element of head_dim: 2 and 5 matmuls


class Attention(NamedTuple):
    """Cost of one layer's attention in one direction. Each figure is the maximum over several ranks."""

    seconds: float
    inside: int  # bytes received from ranks on the same node
    between: int  # bytes received from ranks on other nodes
    messages: int  # number of received messages

    @property
    def received(self) -> int:
        return self.inside + self.between


class Estimate(NamedTuple):
    """Estimated cost of one micro-batch on all ranks."""

    seconds: float
    forward: Attention
    backward: Attention


def estimate(step: TrainingStep, machine: Machine) -> Estimate:
    """Estimate the time of a step, including attention in all layers, matrix products, image features, and state
    exchanges.
    """
    m, config = step.model, step.config
    seconds, found = 0.0, list[Attention]()
    if m.index is not None:
        found = _gathered(step, m.index, machine)
        seconds = m.index.layers * ((1 + step.checkpointing) * found[0].seconds + found[1].seconds)
        seconds += _scores(step, machine) * visible_pairs(_lengths(step)) * step.batch / config.size
    if m.dense or not found:
        found = [attention(step, machine, direction) for direction in DIRECTIONS]
        seconds += m.dense * (found[0].seconds * _forwards(step) + found[1].seconds)
    forward, backward = found
    seconds += math.ceil(step.seq / config.size) * step.batch * work(step, machine).token
    seconds += tower_seconds(step, machine)
    if m.states is not None and config.size > 1:
        states, wire = state_bytes(step), _wire(machine, config.size > machine.per_node)
        seconds += m.states.count * 2 * (states.received + states.exchanged) / wire.rate
    return Estimate(seconds, forward, backward)


def tower_seconds(step: TrainingStep, machine: Machine) -> float:
    """Return the time that a rank needs to compute the features of its images and to exchange features."""
    tower, images, config = step.model.tower, step.images, step.config
    if tower is None or images is None:
        return 0.0
    again = dataclasses.replace(config, recompute_attention=True)  # checkpoints keep no results of a tower's attention
    pair, token = work(dataclasses.replace(step, model=tower.layers, config=again), machine)
    number = images.of_rank(config, step.batch)
    received = step.batch * images.number * images.tokens * step.model.hidden * ITEMSIZE[step.dtype]
    received = 0 if config.divide_media is False else received * (config.size - 1) // config.size
    seconds = number * images.patches * (pair * tower.pairs(images.patches) + token)
    return seconds + 2 * received / _wire(machine, config.size > machine.per_node).rate


class Work(NamedTuple):
    """Seconds that a rank spends on computation, without communication."""

    pair: float  # seconds per visible (query, key) pair, in all layers with attention
    # seconds per token, including attention over keys picked by an index, as if the maximum number of keys were picked
    token: float


def work(step: TrainingStep, machine: Machine) -> Work:
    """Return the computation times for a step's model, which determine how samples are distributed.

    The step's sequence lengths are ignored.
    """
    m, (attention_rate, matrix_rate) = step.model, machine.rates(step.dtype)
    flops = FLOPS_PER_PAIR["forward"] * _forwards(step) + FLOPS_PER_PAIR["backward"]
    pair = m.dense * flops * m.heads * m.head_dim / attention_rate
    token = 2 * ((3 + step.checkpointing) * m.weights + 3 * m.embedding) / matrix_rate
    if m.index is not None:
        flops = FLOPS_PER_PAIR["forward"] * (1 + step.checkpointing) + PICKED_BACKWARD
        token += flops * m.index.layers * m.heads * m.index.latent * m.index.picks / attention_rate
    return Work(pair + _scores(step, machine), token)


def _scores(step: TrainingStep, machine: Machine) -> float:
    """Return the time needed to score one (query, key) pair, summed over all layers with an index."""
    if (index := step.model.index) is None:
        return 0.0
    return 2 * (1 + step.checkpointing) * index.own * index.heads * index.keys / machine.rates(step.dtype)[0]


def _forwards(step: TrainingStep) -> int:
    """Return how many times attention's forward pass is computed."""
    return 1 + (step.checkpointing and step.config.recompute_attention)


def attention(step: TrainingStep, machine: Machine, direction: str) -> Attention:
    """Return the cost of one layer's attention, estimated from the programs of a few ranks.

    The simulated ranks are the first, middle and last ranks that share a sequence, and a rank with the largest number
    of heads.
    """
    config = step.config
    topology = config.topology(step.world)
    ranks = topology.group(0, "ulysses", *topology.cp_axes)  # ranks that share the first sequence
    last, busiest = len(ranks) - 1, busiest_ulysses_rank(step.model.heads, step.model.kv_heads, config.ulysses)
    followed = sorted({0, (last + 1) // 2, last, busiest})
    found = [_followed(step, machine, direction, topology, ranks[number]) for number in followed]
    return Attention(*map(max, zip(*found, strict=True)))


def received(step: TrainingStep, machine: Machine, rank: int) -> int:
    """Return the number of bytes that one of the first sequence's ranks receives for attention in all layers, in both
    directions.
    """
    topology = step.config.topology(step.world)
    ranks = topology.group(0, "ulysses", *topology.cp_axes)
    forward, backward = (_followed(step, machine, direction, topology, ranks[rank]) for direction in DIRECTIONS)
    found = step.model.dense * (forward.received * _forwards(step) + backward.received)
    if (index := step.model.index) is not None:
        forward, backward = _gathered(step, index, machine)
        found += index.layers * (forward.received * (1 + step.checkpointing) + backward.received)
    return found


def _followed(step: TrainingStep, machine: Machine, direction: str, topology: Topology, rank: int) -> Attention:
    """Simulate one rank, assuming that all other ranks do the same things at the same time.

    A link carries one transfer after another. The link's latency is added once per transfer.
    """
    bound = _bound(step, direction, topology, rank)
    peers = topology.group(rank, "ulysses"), topology.group(rank, *topology.cp_axes)
    flops, (rate, _) = FLOPS_PER_PAIR[direction] * step.batch, machine.rates(step.dtype)
    now, messages, shape = 0.0, 0, bound.shape
    due: dict[int, float] = {}  # arrival time, by ticket
    free, received = (
        [0.0, 0.0],
        [0, 0],
    )  # indexed by whether the sender is on another node: time at which the link is free, received bytes
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


def _gathered(step: TrainingStep, index: Index, machine: Machine) -> list[Attention]:
    """Return the mean cost of messages in a layer with an index, for the forward and backward passes."""
    size, own, found = step.config.size, math.ceil(step.seq / step.config.size), list[Attention]()
    others, near = size - 1, min(size, machine.per_node) - 1
    for elements in index.received(step.seq, own, size):
        received = elements * step.batch * ITEMSIZE[step.dtype] // index.layers
        inside = received * near // max(others, 1)
        seconds = max(inside / machine.inside.rate, (received - inside) / machine.between.rate)
        latency = _wire(machine, others > near).latency
        found.append(Attention(seconds + latency, inside, received - inside, others))
    return found


def _lengths(step: TrainingStep) -> tuple[int, ...]:
    return tuple(b - a for a, b in itertools.pairwise((*(step.mask.documents or (0,)), step.seq)))


def _wire(machine: Machine, outside: bool) -> Wire:
    return machine.between if outside else machine.inside


def _bound(step: TrainingStep, direction: str, topology: Topology, rank: int) -> BoundProgram:
    """Return a rank's program, compiled as in the runtime."""
    config, m = step.config, step.model
    recipe = config.recipe(Topology(axes=config.cp_axes))  # rank placement does not affect programs
    ulysses = UlyssesGroup(config.ulysses, topology.index(rank, "ulysses"))
    compiler = compiler_of(recipe, topology.index(rank, *topology.cp_axes), 0)
    local = shape_of(config.comm_dtype, step.dtype, step.batch, (m.heads, m.kv_heads, m.head_dim))
    saved = config.kept(config.head_chunks, step.checkpointing, not config.recompute_attention)
    shards = _shards(step, recipe.size)
    return compiler.bound_call(direction, step.mask, shards, local, ulysses, PLAIN_KERNEL, config.head_chunks, saved)


def _shards(step: TrainingStep, cp_size: int) -> Shards:
    if not step.mask.documents:
        return EvenShards(step.config.layout, step.seq, cp_size)
    return shards_of(step.config.layout, _lengths(step), cp_size, step.mask.parents)


def _arriving(
    bound: BoundProgram, shape: Shape, start: op.Started, ulysses_ranks: tuple[int, ...], cp_ranks: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """Yield the sender and the size in bytes of each message that a rank receives in a head chunk.

    `shape` is the shape of the head chunk's inner tensors.
    """
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
