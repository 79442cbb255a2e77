"""What every ring has in common: units that go round while others stay, and results that follow them home."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..actions import Compute, Gather, Key, Move, ReduceScatter, Step, Steps
from ..plan import Pattern, StepsOf

# (what travels, direction) -> the accumulator that travels with it, one hop behind
FOLLOWER = {("kv", "forward"): None, ("kv", "backward"): "dkv", ("q", "forward"): "out", ("q", "backward"): "dq"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """One way round all ranks. `there(unit, t)`: the rank where it is in step t; `here(rank, t)`: the unit that is at
    that rank then (the inverse); unit u starts on rank u. `keys(rank)`: the (q, kv) keys that a rank starts with."""

    size: int
    there: Callable[[int, int], int]
    here: Callable[[int, int], int]
    keys: Callable[[int], tuple[Key, Key]]
    gathers: Callable[[int], tuple[Gather, ...]] = lambda rank: ()
    reduces: Callable[[int], tuple[ReduceScatter, ...]] = lambda rank: ()


def rotation(way: Round, steps: int, direction: str, travels: str, pattern: Pattern) -> StepsOf:
    """The steps of any rank. steps: how many ranks a unit visits, its own included.

    A unit stops at the last rank that needs it. What was computed at home stays at home; the results of visits follow
    the unit one hop behind, and the last visited rank sends them home. Gathers come before the first step, reduces
    after everything is home.
    """
    return _Rotation(way, steps, direction, travels, pattern).of


class _Rotation:
    def __init__(self, way: Round, steps: int, direction: str, travels: str, pattern: Pattern) -> None:
        self.way, self.travels, self.direction = way, travels, direction
        self.side = 1 if travels == "kv" else 0
        self.follower = FOLLOWER[travels, direction]
        keys = [way.keys(rank) for rank in range(way.size)]
        self.moving, self.staying = [k[self.side] for k in keys], [k[1 - self.side] for k in keys]
        self.visits = [[t for t in range(steps) if self.wanted(unit, t, pattern)] for unit in range(way.size)]
        self.last = [visits[-1] if visits else 0 for visits in self.visits]
        self.first = [next((t for t in visits if t > 0), steps) for visits in self.visits]
        self.steps = max(self.last) + 1

    def product(self, unit: int, rank: int) -> Compute:
        moving, staying = self.moving[unit], self.staying[rank]
        return Compute(rank=rank, q=staying if self.side else moving, kv=moving if self.side else staying)

    def wanted(self, unit: int, t: int, pattern: Pattern) -> bool:
        moving, staying = self.moving[unit], self.staying[self.way.there(unit, t)]
        return pattern.any(staying, moving) if self.side else pattern.any(moving, staying)

    def of(self, rank: int) -> Steps:
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
            computes=(self.product(unit, rank),) if t in self.visits[unit] else (),
            results=_of(rank, results) if self.follower else (),
        )

    def hop(self, unit: int, t: int) -> Move:
        at = self.way.there
        return Move(src=at(unit, t), dst=at(unit, t + 1), kind=self.travels, key=self.moving[unit])

    def result(self, unit: int, t: int) -> Move:
        home = unit if t == self.last[unit] else self.way.there(unit, t + 1)
        return Move(src=self.way.there(unit, t), dst=home, kind=self.follower or "", key=self.moving[unit])


def _of(rank: int, moves: list[Move]) -> tuple[Move, ...]:
    return tuple(sorted((move for move in moves if rank in move.ranks), key=lambda move: move.key))
