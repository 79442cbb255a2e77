"""Programs + cost model -> time line. Pure: no process, no tensor.

Model: a rank does one thing at a time. Transfers run beside it, each on the links that it takes, and a link carries one
at a time. A transfer starts when both ends have posted it and all its links are free. `Prices` says what takes how
long, and which links there are. `Costs` has one link in and one out a rank, and only products and transfers take time;
`planner.call_costs` has a machine with nodes.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol

from . import exchange
from . import program as op
from .actions import Collective, Key, Unit, unit_name
from .exchange import ALONE, Around
from .lower import lower
from .plan import Plan
from .program import KINDS, Instruction, Program, Trade, Transfer, label_of
from .timeline import Event, Timeline

Link = Hashable
Start = op.GatherStart | op.ScatterStart | op.ExchangeStart


class Carried(NamedTuple):
    """taken: the links that a transfer takes, and for how many seconds each; seconds: from its start to its arrival."""

    taken: tuple[tuple[Link, float], ...]
    seconds: float


class Traded(NamedTuple):
    """The same of a collective; seconds: of each member, in their order."""

    taken: tuple[tuple[Link, float], ...]
    seconds: tuple[float, ...]


class Prices(Protocol):
    """Seconds of everything."""

    def busy(self, rank: int, instruction: Instruction) -> float:
        """That an instruction keeps its rank from the next one, waiting apart."""
        ...

    def carried(self, src: int, dst: int, unit: Unit) -> Carried: ...

    def traded(self, start: Start) -> Traded: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """transfer: seconds to move one block of each kind. product: seconds of one (q block, kv block) product; weight:
    how much of it a mask leaves, 1 for all. exchange: seconds in which the tensors of an exchange of heads come from
    all other members."""

    transfer: Mapping[str, float]
    product: float
    weight: Callable[[int, int], float] = lambda q, kv: 1.0
    exchange: Callable[[Trade], float] = lambda trade: 0.0

    def compute(self, q: Key, kv: Key) -> float:
        return self.product * sum(self.weight(i, j) for i in q for j in kv)

    def move(self, kind: str, key: Key) -> float:
        return self.transfer[kind] * len(key)

    def busy(self, rank: int, instruction: Instruction) -> float:
        return self.compute(instruction.q, instruction.kv) if isinstance(instruction, op.Product) else 0.0

    def carried(self, src: int, dst: int, unit: Unit) -> Carried:
        seconds = self.move(*unit)
        return Carried(((("out", src), seconds), (("in", dst), seconds)), seconds)

    def traded(self, start: Start) -> Traded:
        """It holds each member's links until the member has its part."""
        if isinstance(start, op.ExchangeStart):
            seconds: tuple[float, ...] = (self.exchange(start.trade),) * len(start.ranks)
        else:
            block = self.transfer[start.collective.kind]
            seconds = tuple(block * blocks(start, member) for member in start.ranks)
        both = itertools.product(("in", "out"), zip(start.ranks, seconds, strict=True))
        return Traded(tuple(((way, member), took) for way, (member, took) in both), seconds)

    def balanced(self, plan: Plan) -> Costs:
        """The same with products as slow as makes the busiest rank compute as long as the busiest link in carries."""
        unit = dataclasses.replace(self, product=1.0)
        return dataclasses.replace(self, product=communication(plan, self) / computation(plan, unit))


def computation(plan: Plan, costs: Costs) -> float:
    """Seconds of products on the busiest rank."""
    return max(sum(costs.compute(c.q, c.kv) for step in steps for c in step.computes) for steps in plan.ranks)


def communication(plan: Plan, costs: Costs) -> float:
    """Seconds of the busiest link in, with the exchanges of heads around the plan."""
    return max(plan.received(costs.transfer)) + sum(map(costs.exchange, exchange.trades(plan.direction)))


def programs_of(plan: Plan, around: Around = ALONE) -> list[Program]:
    """All inner ranks' programs, for results that travel in the dtype that they are accumulated in. They are of one
    Ulysses member, since all do the same at the same time; stages are alike."""
    inner = [
        lower(plan.name, plan.direction, rank, plan.size, steps, True, plan.parts)
        for rank, steps in enumerate(plan.ranks)
    ]
    members, stages, kept, overlap = around
    if (members, stages) == (1, 1):
        return inner
    return [_by_itself(exchange.whole([program] * stages, members, True, kept, overlap=overlap)) for program in inner]


def _by_itself(program: Program) -> Program:
    """The program, in which exchanges wait for no other rank's."""
    code = (one._replace(ranks=(program.rank,)) if isinstance(one, op.ExchangeStart) else one for one in program.code)
    return dataclasses.replace(program, code=tuple(code))


def simulate(programs: Sequence[Program], costs: Prices) -> Timeline:
    """All ranks' time line, in order of time; programs[r]: of rank r. Whoever is earliest goes on. What both ends have
    posted takes its links before anything that is posted later; of what is posted at one time, first what stands
    first."""
    return _Simulation(programs, costs).run()


Name = tuple  # (source, destination, tag) of a transfer; (ranks, label, type) of a collective
Place = tuple[int, int]  # which instruction of its program, and which of the instruction's transfers


class _Simulation:
    def __init__(self, programs: Sequence[Program], costs: Prices) -> None:
        self.programs, self.costs, size = programs, costs, len(programs)
        self.at, self.now = [0] * size, [0.0] * size
        self.free: dict[Link, float] = defaultdict(float)  # when a link is
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
        if not isinstance(instruction, op.Wait):
            return False
        return any(len(self.ended[name]) <= number for name, number, _ in self.due[rank, instruction.ticket])

    def execute(self, rank: int, instruction: Instruction) -> None:
        if isinstance(instruction, op.Wait):
            for name, number, label in self.due.pop((rank, instruction.ticket)):
                self.busy(rank, "wait", self.ended[name][number] - self.now[rank], label)
        seconds = self.costs.busy(rank, instruction)
        if seconds > 0:
            self.busy(rank, KINDS[type(instruction)], seconds, label_of(instruction))
        if isinstance(instruction, op.Post):
            self.due[rank, instruction.ticket] = [
                self.expected((t.peer, rank, t.tag), _label(t.unit, t.peer, rank)) for t in instruction.receives
            ]
            for index, transfer in enumerate(instruction.sends):
                self.post((rank, transfer.peer, transfer.tag), 0, transfer, (self.at[rank], index))
            for index, transfer in enumerate(instruction.receives):
                self.post((transfer.peer, rank, transfer.tag), 1, transfer, (self.at[rank], index))
        elif isinstance(instruction, Start):
            self.join(rank, instruction)

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
        taken, seconds = self.costs.carried(src, dst, transfer.unit)
        start = self.take(since, taken)
        self.arrive(dst, name, start, seconds, _label(transfer.unit, src, dst))

    def take(self, since: float, taken: Sequence[tuple[Link, float]]) -> float:
        """Takes links once all are free; returns when."""
        start = max(since, *(self.free[link] for link, _ in taken)) if taken else since
        for link, seconds in taken:
            self.free[link] = start + seconds
        return start

    def join(self, rank: int, instruction: Start) -> None:
        """A collective starts when all members have come and the links are free."""
        ranks, label = instruction.ranks, instruction.label
        name = ranks, label, type(instruction).__name__
        self.due[rank, instruction.ticket] = [self.expected((*name, rank), label)]
        self.joined[name].append((self.now[rank], self.at[rank]))
        if len(self.joined[name]) == len(ranks):
            since, at = map(max, zip(*self.joined.pop(name), strict=True))
            order = since, (at, 0), (at, 0), ranks, next(self.number)
            heapq.heappush(self.ready, (order, lambda: self.together(name, instruction, since)))

    def together(self, name: Name, instruction: Start, since: float) -> None:
        taken, times = self.costs.traded(instruction)
        start = self.take(since, taken)
        kind = "exchange" if isinstance(instruction, op.ExchangeStart) else "move"
        for member, seconds in zip(instruction.ranks, times, strict=True):
            self.arrive(member, (*name, member), start, seconds, instruction.label, kind)

    def arrive(self, rank: int, name: Name, start: float, seconds: float, label: str, kind: str = "move") -> None:
        """Something does; who waited for it goes on."""
        end = start + seconds
        self.ended[name].append(end)
        self.events.append(Event(rank, kind, start, end, label))
        if rank in self.asleep and not self.blocked(rank):
            self.asleep.remove(rank)
            heapq.heappush(self.going, (self.now[rank], self.at[rank], rank))


def _label(unit: Unit, src: int, dst: int) -> str:
    return f"{unit_name(unit)}:{src}>{dst}"


def blocks(start: op.GatherStart | op.ScatterStart, rank: int) -> int:
    """How many blocks a member receives."""
    collective: Collective = start.collective
    if isinstance(start, op.GatherStart):
        return len(collective.whole) - len(collective.part(rank))
    return len(collective.part(rank)) * (len(collective.ranks) - 1)
