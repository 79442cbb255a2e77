"""A rough estimate of a candidate's time, from bytes and flops alone: it says which candidates are worth a price. Does
not import torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from ..compiler.program.shape import ITEMSIZE, shape_of
from ..compiler.sharding.heads import largest_share
from ..compiler.sharding.layout import LAYOUTS, Axes, Topology, contiguous
from ..config.settings import SequenceParallelConfig
from .candidates import Candidate, travels
from .machine import FLOPS_PER_PAIR, Machine
from .price import DIRECTIONS
from .request import Request
from .steptime import step_time


class Estimate(NamedTuple):
    seconds: float  # of a step, divided by its sequences
    message_seconds: float  # of one layer's messages
    candidate: Candidate


class Estimator:
    """Estimates the time of candidates. Caches what several candidates have in common."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.products, self.seconds = functools.cache(self._products), functools.cache(self._seconds)
        self.message_seconds: dict[tuple, tuple[float, list[float]]] = {}

    def __call__(self, candidate: Candidate) -> Estimate:
        schedule = candidate.schedule
        key = schedule.name, *candidate.options.values(), candidate.topology
        if key not in self.message_seconds:  # other layouts have the same
            self.message_seconds[key] = self._exchange_seconds(candidate), self._schedule_seconds(candidate)
        exchange, messages = self.message_seconds[key]
        # the last rank computes about twice its share where attention is causal and blocks are contiguous. Schedules
        # that never take keys of a later block are made for such blocks, and are balanced
        in_order = self.request.mask.scale_free and LAYOUTS[candidate.layout].runs is contiguous
        slower = 2 if in_order and candidate.cp_size > 1 and schedule.can_compute(0, 1) else 1
        products = self.products(candidate.size, candidate.ulysses)
        attention = [max(slower * work, links) + exchange for work, links in zip(products, messages, strict=True)]
        return Estimate(self.seconds(candidate.size, *attention), 2 * exchange + sum(messages), candidate)

    def _products(self, size: int, ulysses: int) -> list[float]:
        """Return the seconds of a layer's products [in forward, in backward] on the Ulysses rank with the most heads,
        if all CP ranks compute equally much."""
        request = self.request
        q_heads, _ = largest_share(*request.heads, ulysses)
        pairs = request.pairs * q_heads * request.model.head_dim * request.batch / (size // ulysses)
        return [
            FLOPS_PER_PAIR[direction] * pairs / request.machine.best_rate(request.dtype, direction)
            for direction in DIRECTIONS
        ]

    def _seconds(self, size: int, forward: float, backward: float) -> float:
        """Return the seconds of a step, divided by its sequences, from the seconds of one layer's attention."""
        config = SequenceParallelConfig(size=size, ulysses=1).resolve(size)
        time = step_time(self.request.step(config), self.request.machine, forward, backward)
        return self.request.seconds_a_sequence(time.seconds, time.sequences)

    def _exchange_seconds(self, candidate: Candidate) -> float:
        """Return the seconds of Ulysses' exchanges in one direction."""
        request, ulysses = self.request, candidate.ulysses
        rate = request.machine.inside.rate
        if _crossing(request.machine, candidate.topology, "ulysses"):
            rate = _between_rate(request.machine, 1.0)  # Ulysses ranks send directly to one another
        heads = sum(largest_share(*request.heads, ulysses))
        elements = request.seq / candidate.size * request.batch * (ulysses - 1) * 2 * heads * request.model.head_dim
        return elements * ITEMSIZE[request.dtype] / rate

    def _schedule_seconds(self, candidate: Candidate) -> list[float]:
        """Return the seconds in which the busiest rank receives all messages of the schedule [in forward, in backward].
        All bytes along an axis that leaves the node count as bytes between nodes."""
        request, schedule, topology = self.request, candidate.schedule, candidate.topology
        machine, heads = request.machine, largest_share(*request.heads, candidate.ulysses)
        comm_dtype = request.given.get("comm_dtype", "fp32")
        shape = shape_of(comm_dtype, request.dtype, request.batch, (*heads, request.model.head_dim))
        axes = tuple((name, topology.size(name)) for name in topology.cp_axes)
        crossing = {name: _crossing(machine, topology, name) for name, _ in axes}
        in_node = tuple((name, 1 if crossing[name] else size) for name, size in axes)
        rate = _between_rate(machine, max(crossing.values()))
        block = request.seq / (candidate.cp_size * schedule.blocks_per_rank)

        def seconds(direction: str, side: str) -> float:
            units = tuple((kind, n * block) for kind, n in shape.bytes_per_token(direction).items())
            total, inside = (_most_received(schedule.received, x, direction, side, units) for x in (axes, in_node))
            return max(inside / machine.inside.rate, (total - inside) / rate)

        return [
            min(seconds(direction, side) for side in sides)
            for direction, sides in travels(candidate, request.given).items()
        ]


@functools.lru_cache(maxsize=2**14)
def _most_received(
    received: Callable[..., list[float]], axes: Axes, direction: str, side: str, units: tuple[tuple[str, float], ...]
) -> float:
    # bytes; cached, since candidates that differ only in layout or rank order share them
    return max(received(axes, direction, side, dict(units)))


def _crossing(machine: Machine, topology: Topology, axis: str) -> float:
    """Return the share of ranks whose neighbor along this axis is in another node; 0 if a node holds the whole axis."""
    stride = 1
    for name, size in topology.axes:
        if name == axis:
            in_node = size == 1 or (stride * size <= machine.per_node and machine.per_node % (stride * size) == 0)
            return 0.0 if in_node else min(1.0, stride / machine.per_node)
        stride *= size
    return 0.0


def _between_rate(machine: Machine, crossing: float) -> float:
    """Return the bytes/s of a rank to other nodes, if the share `crossing` of a node's ranks uses its uplink."""
    if not (machine.uplink and crossing):
        return machine.between.rate
    return min(machine.between.rate, machine.uplink / (machine.per_node * crossing))
