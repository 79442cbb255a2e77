"""Plan + cost model -> time line. Pure: no process, no tensor.

Model: a rank computes one product at a time; it has one link in and one link out, which run beside its products, each
carrying one transfer at a time at a fixed rate. A transfer starts when both ends have posted it and both their links
are free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from .plan import Collective, Key, Move, Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """transfer: seconds to move one block of each kind. product: seconds of one (q block, kv block) product; weight:
    how much of it a mask leaves, 1 for all."""

    transfer: Mapping[str, float]
    product: float
    weight: Callable[[int, int], float] = lambda q, kv: 1.0

    def compute(self, q: Key, kv: Key) -> float:
        return self.product * sum(self.weight(i, j) for i in q for j in kv)

    def move(self, move: Move) -> float:
        return self.transfer[move.kind] * len(move.key)

    def balanced(self, plan: Plan) -> Costs:
        """The same with products as slow as makes the busiest rank compute as long as the busiest link in carries."""
        unit = dataclasses.replace(self, product=1.0)
        return dataclasses.replace(self, product=communication(plan, self) / computation(plan, unit))


@dataclasses.dataclass(frozen=True)
class Event:
    """What `rank` does from `start` to `end`: kind "product", "move" (arriving here) or "wait"."""

    rank: int
    kind: str
    start: float
    end: float
    label: str


@dataclasses.dataclass(frozen=True)
class Timeline:
    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """The plan's critical path."""
        return max((event.end for event in self.events), default=0.0)


def computation(plan: Plan, costs: Costs) -> float:
    """Seconds of products on the busiest rank."""
    total = [0.0] * plan.size
    for step in plan.steps:
        for compute in step.computes:
            total[compute.rank] += costs.compute(compute.q, compute.kv)
    return max(total)


def communication(plan: Plan, costs: Costs) -> float:
    """Seconds of the busiest link in."""
    return max(plan.received(costs.transfer))


def simulate(plan: Plan, costs: Costs) -> Timeline:
    """Walks all ranks step by step. What a step posts depends on earlier steps only, so steps can be done in order."""
    return _Simulation(plan, costs).run()


class _Simulation:
    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self.costs = plan, costs
        self.now = [0.0] * plan.size
        self.link_in, self.link_out = [0.0] * plan.size, [0.0] * plan.size
        self.due: dict[tuple[int, int, bool], list[tuple[float, str]]] = {}  # (rank, step, operand) -> arrivals
        self.events: list[Event] = []

    def run(self) -> Timeline:
        for index, step in enumerate(self.plan.steps):
            for gather in step.gathers:
                self.together(gather, lambda g, r: len(g.whole) - len(g.part(r)))
            for move in step.moves:
                self.post(move, index, operand=True)
            for compute in step.computes:
                self.busy(compute.rank, "product", self.costs.compute(compute.q, compute.kv), str(compute))
            for rank in range(self.plan.size):
                self.wait(rank, index, operand=False)
            for move in step.results:
                self.post(move, index, operand=False)
            for reduce in step.reduces:
                self.together(reduce, lambda g, r: len(g.part(r)) * (len(g.ranks) - 1))
            for rank in range(self.plan.size):
                self.wait(rank, index, operand=True)
        for rank, step, operand in sorted(self.due):
            self.wait(rank, step, operand)
        return Timeline(tuple(self.events))

    def busy(self, rank: int, kind: str, seconds: float, label: str) -> None:
        if seconds > 0:
            self.events.append(Event(rank, kind, self.now[rank], self.now[rank] + seconds, label))
            self.now[rank] += seconds

    def wait(self, rank: int, step: int, operand: bool) -> None:
        for arrival, label in self.due.pop((rank, step, operand), []):
            self.busy(rank, "wait", arrival - self.now[rank], label)

    def post(self, move: Move, index: int, operand: bool) -> None:
        start = max(self.now[move.src], self.now[move.dst], self.link_out[move.src], self.link_in[move.dst])
        end = start + self.costs.move(move)
        self.link_out[move.src] = self.link_in[move.dst] = end
        self.events.append(Event(move.dst, "move", start, end, str(move)))
        # operands are waited for at the end of their last step under way, results after the products of the next
        due = index + move.within - (1 if operand else 0)
        self.due.setdefault((move.dst, due, operand), []).append((end, str(move)))

    def together(self, collective: Collective, blocks: Callable[[Collective, int], int]) -> None:
        """A collective starts when all members and their links are free, and holds each until it has its part."""
        start = max(max(self.now[r], self.link_in[r], self.link_out[r]) for r in collective.ranks)
        for rank in collective.ranks:
            end = start + self.costs.transfer[collective.kind] * blocks(collective, rank)
            self.busy(rank, "wait", end - self.now[rank], str(collective))
            self.events.append(Event(rank, "move", start, end, str(collective)))
            self.link_in[rank] = self.link_out[rank] = end
