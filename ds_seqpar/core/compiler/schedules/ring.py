"""Ring schedules, in which the units of one side rotate, the units of the other side stay, and results follow the
moving units.

The module contains Ring Attention (Liu et al., 2023) and the two rings of BurstAttention: the ring that rotates q, and
the double ring.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping

from ....base.errors import SECTION, ConfigError
from ..sharding.layout import Axes, Key, Topology, divisors
from . import plan
from .actions import Compute, Gather, Move, ReduceScatter, Step, Steps, moves_of
from .base import HeadCounts, Schedule, ScheduleOptions, blocks_received, count
from .plan import BlockMask, Counted

# (moving side, direction) -> the accumulator that follows the moving units one hop behind
FOLLOWER = {("kv", "forward"): None, ("kv", "backward"): "dkv", ("q", "forward"): "out", ("q", "backward"): "dq"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """A route around all ranks. Unit u starts on rank u, its home."""

    size: int
    there: Callable[[int, int], int]  # (unit, t) -> the rank that holds the unit in step t
    here: Callable[[int, int], int]  # (rank, t) -> the unit that the rank holds in step t; inverse of `there`
    keys: Callable[[int], tuple[Key, Key]]  # maps a rank to its initial (q, kv) keys
    gathers: Callable[[int], tuple[Gather, ...]] = lambda rank: ()  # maps a rank to its collectives before the rotation
    # maps a rank to its collectives after the rotation
    reduces: Callable[[int], tuple[ReduceScatter, ...]] = lambda rank: ()

    def facing(self, moving_side: str) -> Round:
        """Return the route for the moving side, given the route for k/v. Queries rotate in the opposite direction.

        With windows or causal documents, the ranks that read a k/v block come after the block's owner. The owner of a
        query block reads k/v blocks from ranks that come before the owner.
        """
        return self if moving_side == "kv" else dataclasses.replace(self, there=self.here, here=self.there)


class Rotation(Counted):
    """The steps of a schedule in which units rotate along a route.

    A unit stops at the last rank that needs it. Results computed on a unit's home rank are not sent. Results from other
    ranks follow the unit one hop behind, and the last rank that the unit visits sends the results to the home rank.
    Gathers run before the first step. Reduce-scatters run after all results have arrived on their home ranks.

    Args:
        steps: Number of ranks that a unit visits, including its home.
    """

    def __init__(self, route: Round, steps: int, direction: str, moving_side: str, block_mask: BlockMask) -> None:
        self.route, self.moving_side, self.direction = route, moving_side, direction
        self.side = 1 if moving_side == "kv" else 0
        self.follower = FOLLOWER[moving_side, direction]
        keys = [route.keys(rank) for rank in range(route.size)]
        self.moving, self.staying = [k[self.side] for k in keys], [k[1 - self.side] for k in keys]
        seen = [functools.reduce(operator.or_, [block_mask.rows[i] for i in q], 0) for q, _ in keys]
        held = [sum([1 << j for j in kv]) for _, kv in keys]
        # bitmasks of k/v blocks. `held`: the blocks in a unit; `seen`: the blocks that a unit's queries see. A moving
        # unit and a staying unit meet if `brings` for one of them and `wants` for the other share a block.
        self.brings, self.wants = (held, seen) if self.side else (seen, held)
        # for each unit, the last step with a product, and the first step after step 0 (the home step) with a product
        self.last = [next(self.visits(unit, range(steps - 1, 0, -1)), 0) for unit in range(route.size)]
        self.first = [next(self.visits(unit, range(1, last + 1)), steps) for unit, last in enumerate(self.last)]
        self.steps = max(self.last) + 1

    def visits(self, unit: int, steps: Iterable[int]) -> Iterator[int]:
        """Yield each of the given steps in which a unit is needed for a product with the block that stays on the
        rank.
        """
        brings, wants, there = self.brings[unit], self.wants, self.route.there
        return (t for t in steps if brings & wants[there(unit, t)])

    def product(self, unit: int, rank: int) -> Compute:
        moving, staying = self.moving[unit], self.staying[rank]
        return Compute(rank=rank, q=staying if self.side else moving, kv=moving if self.side else staying)

    def __call__(self, rank: int) -> Steps:
        steps = [self.step(rank, t) for t in range(self.steps)]
        if gathers := self.route.gathers(rank):
            steps[0] = dataclasses.replace(steps[0], gathers=gathers)
        if reduces := self.route.reduces(rank):
            steps.append(Step(reduces=reduces))
        return tuple(steps)

    def step(self, rank: int, t: int) -> Step:
        unit = self.route.here(rank, t)
        coming = self.route.here(rank, t + 1) if t + 1 < self.steps else unit
        leaving = [self.hop(u, t) for u in {unit, coming} if t < self.last[u] and t + 1 < self.steps]
        results = [self.result(u, t) for u in {unit, coming, rank} if self.first[u] <= t <= self.last[u]]
        return Step(
            moves=moves_of(rank, leaving),
            computes=(self.product(unit, rank),) if self.brings[unit] & self.wants[rank] else (),
            results=moves_of(rank, results) if self.follower else (),
        )

    def hop(self, unit: int, t: int) -> Move:
        there = self.route.there
        return Move(src=there(unit, t), dst=there(unit, t + 1), kind=self.moving_side, key=self.moving[unit])

    def result(self, unit: int, t: int) -> Move:
        home = unit if t == self.last[unit] else self.route.there(unit, t + 1)
        return Move(src=self.route.there(unit, t), dst=home, kind=self.follower or "", key=self.moving[unit])

    def collected(self, rank: int, units: Mapping[str, float]) -> float:
        """Return the number of elements that a rank receives in collectives."""
        gathers, reduces = self.route.gathers(rank), self.route.reduces(rank)
        return plan.received((Step(gathers=gathers, reduces=reduces),), rank, units) if gathers or reduces else 0

    def received(self, units: Mapping[str, float]) -> list[float]:
        """Return the number of elements that each rank receives.

        Every hop transfers a unit to the next rank. After the first visit, each hop also transfers the unit's results.
        The last rank that a unit visits sends the results to the home rank.
        """
        size, there, operand = self.route.size, self.route.there, units[self.moving_side]
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


# ---- the rings


def ring(topology: Topology, block_mask: BlockMask, direction: str, moving_side: str = "kv") -> Counted:
    """Return the steps of a ring or a double ring. Every unit of the moving side visits all ranks that need it.

    In step t of a single ring, rank p holds the k/v block of rank p - t. In a double ring, a block visits the W ranks
    of one inner ring, then crosses to the next inner ring, and so on. If each inner ring is a node, only A/W - 1 of a
    block's A - 1 hops cross between nodes. The final transfer of a gradient to its owner also crosses between nodes.

    With `moving_side="q"`, the backward pass follows BurstAttention (section 3.1): q, `do`, lse and delta rotate
    instead of k, v and their gradients, so 3 large tensors are sent instead of 4. Queries rotate in the opposite
    direction: in step t of a single ring, rank p holds the tensors of rank p + t.
    """
    ring_size, rings = topology.size("ring", "inner_ring"), topology.size("outer_ring")

    def at(rank: int, t: int, sign: int) -> int:
        """Return the rank t hops ahead (sign 1) or back (sign -1).

        A crossing shifts the position within the inner ring by W - 1, the number of hops before the crossing.
        """
        crossed, inside = divmod(t, ring_size)
        w = (rank % ring_size + sign * (crossed * (ring_size - 1) + inside)) % ring_size
        return w + ring_size * ((rank // ring_size + sign * crossed) % rings)

    route = Round(
        size=ring_size * rings,
        there=lambda unit, t: at(unit, t, 1),
        here=lambda rank, t: at(rank, t, -1),
        keys=lambda rank: ((rank,), (rank,)),
    )
    return Rotation(route.facing(moving_side), ring_size * rings, direction, moving_side, block_mask)


def received(axes: Axes, direction: str, moving_side: str, units: Mapping[str, float]) -> list[float]:
    """Return the number of elements that each rank receives, assuming that it needs all A - 1 remote blocks."""
    ranks = math.prod(size for _, size in axes)
    queries, keys = (0, ranks - 1) if moving_side == "kv" else (ranks - 1, 0)
    return blocks_received(ranks, queries, keys, direction, units)


RING = Schedule(
    name="ring",
    summary="Ring Attention; with traveling q, BurstAttention's backward",
    build=ring,
    axes=lambda ranks, options: (("ring", ranks),),
    received=received,
    ring_axes=("ring",),
)


# ---- the shape of a double ring


def ring_sizes_of(ranks: int) -> list[ScheduleOptions]:
    return [{"ring_size": size} for size in divisors(ranks)]


def ring_size_of(ranks: int, fixed: ScheduleOptions, heads: HeadCounts | None) -> ScheduleOptions:
    """Return the configured ring size. The default is the divisor of `ranks` closest to the square root of `ranks`."""
    fitting = divisors(ranks)
    size = fixed.get("ring_size") or min(reversed(fitting), key=lambda w: abs(w * w - ranks))
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
