"""Rings: units of one side go round while those of the other stay, and results follow them home.

Ring Attention (Liu et al., 2023), and BurstAttention's rings: the q-travelling one and the double one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping

from ...errors import SECTION, ConfigError
from ..sharding.layout import Axes, Key, Topology, divisors
from . import plan
from .actions import Compute, Gather, Move, ReduceScatter, Step, Steps
from .base import HeadCounts, Schedule, ScheduleOptions, blocks_received, count
from .plan import BlockMask, Counted

# (moving side, direction) -> the accumulator that travels with it, one hop behind
FOLLOWER = {("kv", "forward"): None, ("kv", "backward"): "dkv", ("q", "forward"): "out", ("q", "backward"): "dq"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """One way round all ranks. `there(unit, t)`: the rank where a unit is in step t; `here(rank, t)`: the unit that is
    on a rank then (the inverse). Unit u starts on rank u. `keys(rank)`: the (q, kv) keys that a rank starts with.
    `gathers`, `reduces`: the collectives of a rank before and after the way."""

    size: int
    there: Callable[[int, int], int]
    here: Callable[[int, int], int]
    keys: Callable[[int], tuple[Key, Key]]
    gathers: Callable[[int], tuple[Gather, ...]] = lambda rank: ()
    reduces: Callable[[int], tuple[ReduceScatter, ...]] = lambda rank: ()

    def facing(self, moving_side: str) -> Round:
        """From the way of k/v, that of the moving side: queries go it backwards. Under windows and causal documents the
        ranks that read k/v come after its owner, and the ranks whose k/v a query reads come before."""
        return self if moving_side == "kv" else dataclasses.replace(self, there=self.here, here=self.there)


class Rotation(Counted):
    """The steps of any rank. steps: how many ranks a unit visits, its own included.

    A unit stops at the last rank that needs it. What was computed at home stays at home; the results of visits follow
    the unit one hop behind, and the last visited rank sends them home. Gathers come before the first step, reduces
    after everything is home.
    """

    def __init__(self, way: Round, steps: int, direction: str, moving_side: str, block_mask: BlockMask) -> None:
        self.way, self.moving_side, self.direction = way, moving_side, direction
        self.side = 1 if moving_side == "kv" else 0
        self.follower = FOLLOWER[moving_side, direction]
        keys = [way.keys(rank) for rank in range(way.size)]
        self.moving, self.staying = [k[self.side] for k in keys], [k[1 - self.side] for k in keys]
        seen = [functools.reduce(operator.or_, [block_mask.rows[i] for i in q], 0) for q, _ in keys]
        held = [sum([1 << j for j in kv]) for _, kv in keys]
        # of a moving unit the k/v blocks that it has, or that its queries see, and the same of what stays on a rank:
        # the two meet where they have a block in common
        self.brings, self.wants = (held, seen) if self.side else (seen, held)
        # of each unit the last step in which it meets something, and the first in which it does after step 0, at home
        self.last = [next(self.visits(unit, range(steps - 1, 0, -1)), 0) for unit in range(way.size)]
        self.first = [next(self.visits(unit, range(1, last + 1)), steps) for unit, last in enumerate(self.last)]
        self.steps = max(self.last) + 1

    def visits(self, unit: int, steps: Iterable[int]) -> Iterator[int]:
        """Those of some steps in which a unit meets what stays on the rank where it is."""
        brings, wants, there = self.brings[unit], self.wants, self.way.there
        return (t for t in steps if brings & wants[there(unit, t)])

    def product(self, unit: int, rank: int) -> Compute:
        moving, staying = self.moving[unit], self.staying[rank]
        return Compute(rank=rank, q=staying if self.side else moving, kv=moving if self.side else staying)

    def __call__(self, rank: int) -> Steps:
        steps = [self.step(rank, t) for t in range(self.steps)]
        if gathers := self.way.gathers(rank):
            steps[0] = dataclasses.replace(steps[0], gathers=gathers)
        if reduces := self.way.reduces(rank):
            steps.append(Step(reduces=reduces))
        return tuple(steps)

    def step(self, rank: int, t: int) -> Step:
        unit = self.way.here(rank, t)
        coming = self.way.here(rank, t + 1) if t + 1 < self.steps else unit
        leaving = [self.hop(u, t) for u in {unit, coming} if t < self.last[u] and t + 1 < self.steps]
        results = [self.result(u, t) for u in {unit, coming, rank} if self.first[u] <= t <= self.last[u]]
        return Step(
            moves=_of(rank, leaving),
            computes=(self.product(unit, rank),) if self.brings[unit] & self.wants[rank] else (),
            results=_of(rank, results) if self.follower else (),
        )

    def hop(self, unit: int, t: int) -> Move:
        at = self.way.there
        return Move(src=at(unit, t), dst=at(unit, t + 1), kind=self.moving_side, key=self.moving[unit])

    def result(self, unit: int, t: int) -> Move:
        home = unit if t == self.last[unit] else self.way.there(unit, t + 1)
        return Move(src=self.way.there(unit, t), dst=home, kind=self.follower or "", key=self.moving[unit])

    def collected(self, rank: int, units: Mapping[str, float]) -> float:
        """Elements that a rank receives by collectives."""
        gathers, reduces = self.way.gathers(rank), self.way.reduces(rank)
        return plan.received((Step(gathers=gathers, reduces=reduces),), rank, units) if gathers or reduces else 0

    def received(self, units: Mapping[str, float]) -> list[float]:
        """Each hop of a unit brings a rank the unit; each after the first visit brings its results too, and so does
        the way home."""
        size, there, operand = self.way.size, self.way.there, units[self.moving_side]
        follower = units[self.follower] if self.follower else 0
        received = [self.collected(rank, units) for rank in range(size)]
        for unit, (first, last) in enumerate(zip(self.first, self.last, strict=True)):
            blocks = len(self.moving[unit])
            alone, both = operand * blocks, (operand + follower) * blocks
            for t in range(1, last + 1):
                received[there(unit, t)] += alone if t <= first else both
            if last:
                received[unit] += follower * blocks
        return received


def _of(rank: int, moves: list[Move]) -> tuple[Move, ...]:
    """The moves that a rank takes part in, in one order on all ranks."""
    return tuple(sorted((move for move in moves if rank in move.ranks), key=lambda move: move.key))


# ---- the rings


def ring(topology: Topology, block_mask: BlockMask, direction: str, moving_side: str = "kv") -> Counted:
    """Every key/value block goes round all ranks whose queries need it. In step t of one ring rank p holds that of
    p - t. In a double ring a block visits the W ranks of an inner ring, then crosses to the next one and visits its W,
    and so on. So A/W - 1 of its A - 1 hops leave a node; and the last hop of its gradient does, straight home.

    moving_side="q" in backward is BurstAttention's (section 3.1): q, do, lse and delta go round instead of k, v and
    their gradients: 3 large tensors for 4. They go the other way, in step t of one ring rank p holds those of p + t.
    """
    ring_size, rings = topology.size("ring", "inner_ring"), topology.size("outer_ring")

    def at(rank: int, t: int, sign: int) -> int:
        """The rank t hops on (sign 1) or back (-1). W - 1 hops inside an inner ring make a crossing's shift."""
        crossed, inside = divmod(t, ring_size)
        w = (rank % ring_size + sign * (crossed * (ring_size - 1) + inside)) % ring_size
        return w + ring_size * ((rank // ring_size + sign * crossed) % rings)

    way = Round(
        size=ring_size * rings,
        there=lambda unit, t: at(unit, t, 1),
        here=lambda rank, t: at(rank, t, -1),
        keys=lambda rank: ((rank,), (rank,)),
    )
    return Rotation(way.facing(moving_side), ring_size * rings, direction, moving_side, block_mask)


def received(axes: Axes, direction: str, moving_side: str, units: Mapping[str, float]) -> list[float]:
    """Elements that each rank receives: A - 1 foreign blocks of the moving side."""
    ranks = math.prod(size for _, size in axes)
    queries, keys = (0, ranks - 1) if moving_side == "kv" else (ranks - 1, 0)
    return blocks_received(ranks, queries, keys, direction, units)


RING = Schedule(
    name="ring",
    summary="Ring Attention; with travelling q, BurstAttention's backward",
    build=ring,
    axes=lambda ranks, options: (("ring", ranks),),
    received=received,
    ring_axes=("ring",),
)


# ---- the shape of a double ring


def ring_sizes_of(ranks: int) -> list[ScheduleOptions]:
    return [{"ring_size": size} for size in divisors(ranks)]


def ring_size_of(ranks: int, given: ScheduleOptions, heads: HeadCounts | None) -> ScheduleOptions:
    """The size that is given, or the divisor of `ranks` nearest to its square root."""
    fitting = divisors(ranks)
    size = given.get("ring_size") or min(reversed(fitting), key=lambda w: abs(w * w - ranks))
    if size not in fitting:
        raise ConfigError(
            f"{SECTION}.ring_size must divide the {ranks} ranks of the double ring; got {size}, use one of {fitting}"
        )
    return {"ring_size": size}


DOUBLE_RING = Schedule(
    name="double_ring",
    summary="BurstAttention's: most hops of a ring stay inside an inner ring, a node",
    build=ring,
    axes=lambda ranks, options: (("inner_ring", options["ring_size"]), ("outer_ring", ranks // options["ring_size"])),
    received=received,
    settings=(count("ring_size", "ranks of the inner ring, a node's"),),
    shapes=ring_sizes_of,
    resolve=ring_size_of,
    ring_axes=("inner_ring",),
)
