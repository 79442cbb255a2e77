"""Programs + cost model -> time line. Pure: no process, no tensor.

Model: a rank computes one product at a time; it has one link in and one link out, which run beside its products, each
carrying one transfer at a time at a fixed rate. A transfer starts when both ends have posted it and both their links
are free. What is packed, merged and posted takes no time.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from .actions import Collective, Key, Unit, name_of
from .lower import lower
from .plan import Plan
from .program import GatherStart, Instruction, Post, Product, Program, ScatterStart, Transfer, Wait
from .timeline import Event, Timeline


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
    """All ranks' time line, in order of time: whoever is earliest goes on, and what has been posted by both ends takes
    its links before anything that is posted later; of what is posted at one time, first what stands first."""
    return _Simulation(programs, costs).run()


Name = tuple  # (source, destination, tag) of a transfer; (ranks, kind, type) of a collective
Place = tuple[int, int]  # which instruction of its program, and which of the instruction's transfers


class _Simulation:
    def __init__(self, programs: Sequence[Program], costs: Costs) -> None:
        self.programs, self.costs, size = programs, costs, len(programs)
        self.at, self.now = [0] * size, [0.0] * size
        self.link_in, self.link_out = [0.0] * size, [0.0] * size
        self.going = [(0.0, 0, rank) for rank in range(size)]  # a heap: (now, at, rank) of those that wait for nobody
        self.asleep: set[int] = set()
        # ends of transfers that the other end has not come to yet
        self.posted: dict[tuple[Name, int], deque[tuple[float, Place]]] = defaultdict(deque)
        self.joined: dict[Name, list[tuple[float, int]]] = defaultdict(list)  # when, and at which instruction
        # a heap: (since when, places, ranks, number) and what starts the transfer
        self.ready: list[tuple[tuple, Callable[[], None]]] = []
        self.number = itertools.count()
        self.ended: dict[Name, list[float]] = defaultdict(list)  # a transfer -> when it is done, in order
        self.asked: dict[Name, int] = defaultdict(int)
        self.due: dict[tuple[int, int], list[tuple[Name, int, str]]] = {}  # (rank, ticket) -> what it waits for
        self.events: list[Event] = []

    def run(self) -> Timeline:
        while self.going or self.ready:
            if self.ready and not (self.going and self.going[0][0] <= self.ready[0][0][0]):
                heapq.heappop(self.ready)[1]()
            else:
                self.go_on(heapq.heappop(self.going)[2])
        assert not self.asleep, "ranks wait for one another"
        return Timeline(tuple(self.events))

    def go_on(self, rank: int) -> None:
        """Executes a rank's next instruction, or lets it sleep before a wait."""
        code, at = self.programs[rank].code, self.at[rank]
        if at == len(code):
            return
        if self.blocked(rank):
            self.asleep.add(rank)
            return
        self.execute(rank, code[at])
        self.at[rank] += 1
        heapq.heappush(self.going, (self.now[rank], self.at[rank], rank))

    def blocked(self, rank: int) -> bool:
        instruction = self.programs[rank].code[self.at[rank]]
        if not isinstance(instruction, Wait):
            return False
        return any(len(self.ended[name]) <= number for name, number, _ in self.due[rank, instruction.ticket])

    def execute(self, rank: int, instruction: Instruction) -> None:
        if isinstance(instruction, Product):
            label = f"q{name_of(instruction.q)}*kv{name_of(instruction.kv)}"
            self.busy(rank, "product", self.costs.compute(instruction.q, instruction.kv), label)
        elif isinstance(instruction, Post):
            self.due[rank, instruction.ticket] = [
                self.expected((t.peer, rank, t.tag), _label(t.unit, t.peer, rank)) for t in instruction.receives
            ]
            for index, transfer in enumerate(instruction.sends):
                self.post((rank, transfer.peer, transfer.tag), 0, transfer, (self.at[rank], index))
            for index, transfer in enumerate(instruction.receives):
                self.post((transfer.peer, rank, transfer.tag), 1, transfer, (self.at[rank], index))
        elif isinstance(instruction, GatherStart | ScatterStart):
            self.join(rank, instruction)
        elif isinstance(instruction, Wait):
            for name, number, label in self.due.pop((rank, instruction.ticket)):
                self.busy(rank, "wait", self.ended[name][number] - self.now[rank], label)

    def expected(self, name: Name, label: str) -> tuple[Name, int, str]:
        self.asked[name] += 1
        return name, self.asked[name] - 1, label

    def busy(self, rank: int, kind: str, seconds: float, label: str) -> None:
        if seconds > 0:
            self.events.append(Event(rank, kind, self.now[rank], self.now[rank] + seconds, label))
            self.now[rank] += seconds

    def post(self, name: Name, end: int, transfer: Transfer, place: Place) -> None:
        """One end of a transfer, which can start once the other has come too."""
        src, dst, _ = name
        now = self.now[(src, dst)[end]]
        if not self.posted[name, 1 - end]:
            self.posted[name, end].append((now, place))
            return
        before, other = self.posted[name, 1 - end].popleft()
        order = max(now, before), max(place, other), min(place, other), (src, dst), next(self.number)
        heapq.heappush(self.ready, (order, lambda: self.carry(name, transfer, max(now, before))))

    def carry(self, name: Name, transfer: Transfer, since: float) -> None:
        src, dst, _ = name
        start, seconds = max(since, self.link_out[src], self.link_in[dst]), self.costs.move(*transfer.unit)
        self.link_out[src] = self.arrive(dst, name, start, seconds, _label(transfer.unit, src, dst))

    def join(self, rank: int, instruction: GatherStart | ScatterStart) -> None:
        """A collective starts when all members and their links are free, and holds each until it has its part."""
        collective = instruction.collective
        name = collective.ranks, collective.kind, type(instruction).__name__
        self.due[rank, instruction.ticket] = [self.expected((*name, rank), str(collective))]
        self.joined[name].append((self.now[rank], self.at[rank]))
        if len(self.joined[name]) == len(collective.ranks):
            since, at = map(max, zip(*self.joined.pop(name), strict=True))
            order = since, (at, 0), (at, 0), collective.ranks, next(self.number)
            heapq.heappush(self.ready, (order, lambda: self.together(name, instruction, since)))

    def together(self, name: Name, instruction: GatherStart | ScatterStart, since: float) -> None:
        collective = instruction.collective
        start = max(since, *(max(self.link_in[r], self.link_out[r]) for r in collective.ranks))
        for member in collective.ranks:
            seconds = self.costs.transfer[collective.kind] * _blocks(instruction, collective, member)
            self.link_out[member] = self.arrive(member, (*name, member), start, seconds, str(collective))

    def arrive(self, rank: int, name: Name, start: float, seconds: float, label: str) -> float:
        """A transfer takes a rank's link in; who waited for it goes on. Returns when it ends."""
        end = self.link_in[rank] = start + seconds
        self.ended[name].append(end)
        self.events.append(Event(rank, "move", start, end, label))
        if rank in self.asleep and not self.blocked(rank):
            self.asleep.remove(rank)
            heapq.heappush(self.going, (self.now[rank], self.at[rank], rank))
        return end


def _label(unit: Unit, src: int, dst: int) -> str:
    return f"{unit[0]}{name_of(unit[1])}:{src}>{dst}"


def _blocks(instruction: GatherStart | ScatterStart, collective: Collective, rank: int) -> int:
    """Those that a member receives."""
    if isinstance(instruction, GatherStart):
        return len(collective.whole) - len(collective.part(rank))
    return len(collective.part(rank)) * (len(collective.ranks) - 1)
