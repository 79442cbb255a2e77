"""Programs + cost model -> time line. Pure: no process, no tensor.

Model: a rank computes one product at a time; it has one link in and one link out, which run beside its products, each
carrying one transfer at a time at a fixed rate. A transfer starts when both ends have posted it and both their links
are free. What is packed, merged and posted takes no time.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from .actions import Collective, Key, name_of
from .lower import lower
from .plan import Plan
from .program import GatherStart, Instruction, Post, Product, Program, ScatterStart, Transfer, Wait


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """transfer: seconds to move one block of each kind. product: seconds of one (q block, kv block) product; weight:
    how much of it a mask leaves, 1 for all."""

    transfer: Mapping[str, float]
    product: float
    weight: Callable[[int, int], float] = lambda q, kv: 1.0

    def compute(self, q: Key, kv: Key) -> float:
        return self.product * sum(self.weight(i, j) for i in q for j in kv)

    def move(self, kind: str, key: Key) -> float:
        return self.transfer[kind] * len(key)

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
        """The critical path."""
        return max((event.end for event in self.events), default=0.0)


def computation(plan: Plan, costs: Costs) -> float:
    """Seconds of products on the busiest rank."""
    return max(sum(costs.compute(c.q, c.kv) for step in steps for c in step.computes) for steps in plan.ranks)


def communication(plan: Plan, costs: Costs) -> float:
    """Seconds of the busiest link in."""
    return max(plan.received(costs.transfer))


def programs_of(plan: Plan) -> list[Program]:
    """All ranks' programs, as they are for results that travel in the dtype that they are accumulated in."""
    return [lower(plan.name, plan.direction, rank, plan.size, steps, True) for rank, steps in enumerate(plan.ranks)]


def simulate(programs: Sequence[Program], costs: Costs) -> Timeline:
    """All ranks' time line. The rank that is earliest goes on, to its next wait for what has not been posted yet."""
    return _Simulation(programs, costs).run()


class _Simulation:
    def __init__(self, programs: Sequence[Program], costs: Costs) -> None:
        self.programs, self.costs, size = programs, costs, len(programs)
        self.at, self.now = [0] * size, [0.0] * size
        self.link_in, self.link_out = [0.0] * size, [0.0] * size
        # a transfer or collective by name -> when each end has come to it, in order
        self.posted: dict[tuple, list[float]] = defaultdict(list)
        self.matched: dict[tuple, list[float]] = defaultdict(list)  # a transfer -> when it ends, in order
        self.joined: dict[tuple, list[tuple[int, float]]] = defaultdict(list)
        self.due: dict[tuple[int, int], list[tuple[tuple, int, str]]] = {}  # (rank, ticket) -> what it waits for
        self.asked: dict[tuple, int] = defaultdict(int)
        self.events: list[Event] = []

    def run(self) -> Timeline:
        going = set(range(len(self.programs)))
        while going:
            ready = [rank for rank in going if not self.blocked(rank)]
            assert ready, "ranks wait for one another"
            rank = min(ready, key=lambda r: (self.now[r], r))
            self.execute(rank, self.programs[rank].code[self.at[rank]])
            self.at[rank] += 1
            if self.at[rank] == len(self.programs[rank].code):
                going.remove(rank)
        return Timeline(tuple(self.events))

    def blocked(self, rank: int) -> bool:
        instruction = self.programs[rank].code[self.at[rank]]
        if not isinstance(instruction, Wait):
            return False
        return any(len(self.matched[name]) <= number for name, number, _ in self.due[rank, instruction.ticket])

    def execute(self, rank: int, instruction: Instruction) -> None:
        if isinstance(instruction, Product):
            label = f"q{name_of(instruction.q)}*kv{name_of(instruction.kv)}"
            self.busy(rank, "product", self.costs.compute(instruction.q, instruction.kv), label)
        elif isinstance(instruction, Post):
            self.due[rank, instruction.ticket] = [self.expected(rank, transfer) for transfer in instruction.receives]
            for transfer in instruction.sends:
                self.post((rank, transfer.peer, transfer.tag), 0, transfer, rank)
            for transfer in instruction.receives:
                self.post((transfer.peer, rank, transfer.tag), 1, transfer, rank)
        elif isinstance(instruction, GatherStart | ScatterStart):
            self.join(rank, instruction)
        elif isinstance(instruction, Wait):
            for name, number, label in self.due.pop((rank, instruction.ticket)):
                self.busy(rank, "wait", self.matched[name][number] - self.now[rank], label)

    def expected(self, rank: int, transfer: Transfer) -> tuple[tuple, int, str]:
        name = transfer.peer, rank, transfer.tag
        self.asked[name] += 1
        return name, self.asked[name] - 1, f"{transfer.unit[0]}{name_of(transfer.unit[1])}:{transfer.peer}>{rank}"

    def busy(self, rank: int, kind: str, seconds: float, label: str) -> None:
        if seconds > 0:
            self.events.append(Event(rank, kind, self.now[rank], self.now[rank] + seconds, label))
            self.now[rank] += seconds

    def post(self, name: tuple, end: int, transfer: Transfer, rank: int) -> None:
        """One end of a transfer; it starts once the other has come too."""
        other, mine = self.posted[*name, 1 - end], self.posted[*name, end]
        if not other:
            mine.append(self.now[rank])
            return
        src, dst, _ = name
        start = max(self.now[rank], other.pop(0), self.link_out[src], self.link_in[dst])
        finish = start + self.costs.move(*transfer.unit)
        self.link_out[src] = self.link_in[dst] = finish
        self.matched[name].append(finish)
        label = f"{transfer.unit[0]}{name_of(transfer.unit[1])}:{src}>{dst}"
        self.events.append(Event(dst, "move", start, finish, label))

    def join(self, rank: int, instruction: GatherStart | ScatterStart) -> None:
        """A collective starts when all members and their links are free, and holds each until it has its part."""
        collective = instruction.collective
        name = collective.ranks, collective.kind, type(instruction)
        self.due[rank, instruction.ticket] = [((*name, rank), self.asked[*name, rank], str(collective))]
        self.asked[*name, rank] += 1
        self.joined[name].append((rank, self.now[rank]))
        if len(self.joined[name]) == len(collective.ranks):
            members = self.joined.pop(name)
            start = max(max(now, self.link_in[r], self.link_out[r]) for r, now in members)
            for member, _ in members:
                end = start + self.costs.transfer[collective.kind] * _blocks(instruction, collective, member)
                self.events.append(Event(member, "move", start, end, str(collective)))
                self.matched[*name, member].append(end)
                self.link_in[member] = self.link_out[member] = end


def _blocks(instruction: GatherStart | ScatterStart, collective: Collective, rank: int) -> int:
    """Those that a member receives."""
    if isinstance(instruction, GatherStart):
        return len(collective.whole) - len(collective.part(rank))
    return len(collective.part(rank)) * (len(collective.ranks) - 1)
