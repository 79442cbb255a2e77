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

from ..program import instructions as op
from ..program.instructions import KINDS, HeadExchange, Instruction, Program, Transfer, label_of
from ..program.lower import lower
from ..program.ulysses import UNSPLIT, HeadSplit, call_program, exchanges
from ..schedules.actions import Collective, Unit, unit_name
from ..schedules.plan import Plan
from ..sharding.layout import Key
from .timeline import Event, Timeline

Link = Hashable
Start = op.GatherStart | op.ScatterStart | op.ExchangeStart


class TransferTime(NamedTuple):
    """links: those that a transfer takes, and for how many seconds each; seconds: from its start to its arrival."""

    links: tuple[tuple[Link, float], ...]
    seconds: float


class CollectiveTimes(NamedTuple):
    """links: those that a collective takes, and for how many seconds each; seconds: from its start to its end on each
    member, in their order."""

    links: tuple[tuple[Link, float], ...]
    seconds: tuple[float, ...]


class Prices(Protocol):
    """How long everything takes."""

    def busy_time(self, rank: int, instruction: Instruction) -> float:
        """Seconds for which an instruction keeps its rank from the next one; what it waits for is not in them."""
        ...

    def transfer_time(self, src: int, dst: int, unit: Unit) -> TransferTime: ...

    def collective_times(self, start: Start) -> CollectiveTimes: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """transfer: seconds to move one block, by kind. product: seconds of one (q block, kv block) product without a mask;
    weight: the visible share of it. exchange: seconds in which the tensors of an exchange of heads come from all other
    members."""

    transfer: Mapping[str, float]
    product: float
    weight: Callable[[int, int], float] = lambda q, kv: 1.0
    exchange: Callable[[HeadExchange], float] = lambda exchange: 0.0

    def compute(self, q: Key, kv: Key) -> float:
        return self.product * sum(self.weight(i, j) for i in q for j in kv)

    def move(self, kind: str, key: Key) -> float:
        return self.transfer[kind] * len(key)

    def busy_time(self, rank: int, instruction: Instruction) -> float:
        return self.compute(instruction.q, instruction.kv) if isinstance(instruction, op.Product) else 0.0

    def transfer_time(self, src: int, dst: int, unit: Unit) -> TransferTime:
        seconds = self.move(*unit)
        return TransferTime(((("out", src), seconds), (("in", dst), seconds)), seconds)

    def collective_times(self, start: Start) -> CollectiveTimes:
        """A collective takes each member's links until the member has its part."""
        if isinstance(start, op.ExchangeStart):
            seconds: tuple[float, ...] = (self.exchange(start.exchange),) * len(start.ranks)
        else:
            block = self.transfer[start.collective.kind]
            seconds = tuple(block * collective_blocks(start, member) for member in start.ranks)
        ends = itertools.product(("in", "out"), zip(start.ranks, seconds, strict=True))
        return CollectiveTimes(tuple(((way, member), took) for way, (member, took) in ends), seconds)

    def balanced(self, plan: Plan) -> Costs:
        """The same costs but for products: with them the busiest rank computes as long as the busiest link in is
        taken."""
        unit = dataclasses.replace(self, product=1.0)
        return dataclasses.replace(self, product=communication(plan, self) / computation(plan, unit))


def computation(plan: Plan, costs: Costs) -> float:
    """Seconds of products on the busiest rank."""
    return max(sum(costs.compute(c.q, c.kv) for step in steps for c in step.computes) for steps in plan.ranks)


def communication(plan: Plan, costs: Costs) -> float:
    """Seconds for which the busiest link in is taken, with the exchanges of heads around the plan."""
    return max(plan.received(costs.transfer)) + sum(map(costs.exchange, exchanges(plan.direction)))


def programs_of(plan: Plan, head_split: HeadSplit = UNSPLIT) -> list[Program]:
    """All CP ranks' programs, for results that travel in the dtype of sums. They are those of one Ulysses member,
    since all members do the same at the same time; head chunks are alike."""
    inner = [
        lower(plan.name, plan.direction, rank, plan.size, steps, True, plan.blocks_per_rank)
        for rank, steps in enumerate(plan.ranks)
    ]
    members, head_chunks, saved, overlap = head_split
    if (members, head_chunks) == (1, 1):
        return inner
    return [
        _by_itself(call_program([program] * head_chunks, members, True, saved, overlap=overlap)) for program in inner
    ]


def _by_itself(program: Program) -> Program:
    """The program with exchanges of heads that wait for no other rank."""
    code = (one._replace(ranks=(program.rank,)) if isinstance(one, op.ExchangeStart) else one for one in program.code)
    return dataclasses.replace(program, code=tuple(code))


def simulate(programs: Sequence[Program], costs: Prices) -> Timeline:
    """All ranks' time line, in order of time; programs[r]: of rank r. The rank whose time is earliest goes on. What
    both ends have posted takes its links before anything that is posted later. Of what is posted at one time, that
    which stands first in its program takes them first."""
    return _Simulation(programs, costs).run()


Name = tuple  # (source, destination, tag) of a transfer; (ranks, label, type) of a collective
Index = tuple[int, int]  # number of an instruction in its program, and of a transfer in the instruction


class _Simulation:
    def __init__(self, programs: Sequence[Program], costs: Prices) -> None:
        self.programs, self.costs, size = programs, costs, len(programs)
        self.at, self.now = [0] * size, [0.0] * size
        self.link_free: dict[Link, float] = defaultdict(float)  # when a link is free again
        self.running = [(0.0, 0, rank) for rank in range(size)]  # a heap: (now, at, rank) of ranks that do not wait
        self.waiting: set[int] = set()
        # (transfer, end) -> (when, index) of each post that the other end has not matched yet
        self.posted: dict[tuple[Name, int], deque[tuple[float, Index]]] = defaultdict(deque)
        # collective -> (when, instruction) of each member that has come
        self.joined: dict[Name, list[tuple[float, int]]] = defaultdict(list)
        # a heap: (since when, indices, ranks, number) of what both ends have posted, and what starts it
        self.ready: list[tuple[tuple, Callable[[], None]]] = []
        self.number = itertools.count()
        self.ended: dict[Name, list[float]] = defaultdict(list)  # a transfer -> when it is done, in order
        self.expected: dict[Name, int] = defaultdict(int)  # a transfer -> how often its receiver has posted it
        self.due: dict[tuple[int, int], list[tuple[Name, int, str]]] = {}  # (rank, ticket) -> what it waits for
        self.events: list[Event] = []

    def run(self) -> Timeline:
        while self.running or self.ready:
            if self.ready and not (self.running and self.running[0][0] <= self.ready[0][0][0]):
                heapq.heappop(self.ready)[1]()
            else:
                self.go_on(heapq.heappop(self.running)[2])
        assert not self.waiting, "ranks wait for one another"
        return Timeline(tuple(self.events))

    def go_on(self, rank: int) -> None:
        """Executes a rank's next instruction, or lets the rank wait where it has to."""
        code, at = self.programs[rank].code, self.at[rank]
        if at == len(code):
            return
        if self.blocked(rank):
            self.waiting.add(rank)
            return
        self.execute(rank, code[at])
        self.at[rank] += 1
        heapq.heappush(self.running, (self.now[rank], self.at[rank], rank))

    def blocked(self, rank: int) -> bool:
        """Whether the next instruction is a wait for what has not ended yet."""
        instruction = self.programs[rank].code[self.at[rank]]
        if not isinstance(instruction, op.Wait):
            return False
        return any(len(self.ended[name]) <= number for name, number, _ in self.due[rank, instruction.ticket])

    def execute(self, rank: int, instruction: Instruction) -> None:
        if isinstance(instruction, op.Wait):
            for name, number, label in self.due.pop((rank, instruction.ticket)):
                self.spend(rank, "wait", self.ended[name][number] - self.now[rank], label)
        seconds = self.costs.busy_time(rank, instruction)
        if seconds > 0:
            self.spend(rank, KINDS[type(instruction)], seconds, label_of(instruction))
        if isinstance(instruction, op.Post):
            self.due[rank, instruction.ticket] = [
                self.expect((t.peer, rank, t.tag), _label(t.unit, t.peer, rank)) for t in instruction.receives
            ]
            for index, transfer in enumerate(instruction.sends):
                self.post((rank, transfer.peer, transfer.tag), 0, transfer, (self.at[rank], index))
            for index, transfer in enumerate(instruction.receives):
                self.post((transfer.peer, rank, transfer.tag), 1, transfer, (self.at[rank], index))
        elif isinstance(instruction, Start):
            self.join(rank, instruction)

    def expect(self, name: Name, label: str) -> tuple[Name, int, str]:
        """What a wait looks at: a transfer, how many of its name come before it, and its label."""
        self.expected[name] += 1
        return name, self.expected[name] - 1, label

    def spend(self, rank: int, kind: str, seconds: float, label: str) -> None:
        """The rank does something for so many seconds."""
        if seconds > 0:
            self.events.append(Event(rank, kind, self.now[rank], self.now[rank] + seconds, label))
            self.now[rank] += seconds

    def post(self, name: Name, end: int, transfer: Transfer, index: Index) -> None:
        """Posts one end of a transfer (0 sends, 1 receives), which can start once the other end is posted too."""
        src, dst, _ = name
        now = self.now[(src, dst)[end]]
        if not self.posted[name, 1 - end]:
            self.posted[name, end].append((now, index))
            return
        before, other = self.posted[name, 1 - end].popleft()
        order = max(now, before), max(index, other), min(index, other), (src, dst), next(self.number)
        heapq.heappush(self.ready, (order, lambda: self.start_transfer(name, transfer, max(now, before))))

    def start_transfer(self, name: Name, transfer: Transfer, since: float) -> None:
        src, dst, _ = name
        links, seconds = self.costs.transfer_time(src, dst, transfer.unit)
        start = self.take(since, links)
        self.arrive(dst, name, start, seconds, _label(transfer.unit, src, dst))

    def take(self, since: float, links: Sequence[tuple[Link, float]]) -> float:
        """Takes links once all are free, not before `since`; returns when. links: as in `TransferTime`."""
        start = max(since, *(self.link_free[link] for link, _ in links)) if links else since
        for link, seconds in links:
            self.link_free[link] = start + seconds
        return start

    def join(self, rank: int, instruction: Start) -> None:
        """A rank comes to a collective, which starts when all members have come and its links are free."""
        ranks, label = instruction.ranks, instruction.label
        name = ranks, label, type(instruction).__name__
        self.due[rank, instruction.ticket] = [self.expect((*name, rank), label)]
        self.joined[name].append((self.now[rank], self.at[rank]))
        if len(self.joined[name]) == len(ranks):
            since, at = map(max, zip(*self.joined.pop(name), strict=True))
            order = since, (at, 0), (at, 0), ranks, next(self.number)
            heapq.heappush(self.ready, (order, lambda: self.start_collective(name, instruction, since)))

    def start_collective(self, name: Name, instruction: Start, since: float) -> None:
        links, times = self.costs.collective_times(instruction)
        start = self.take(since, links)
        kind = "exchange" if isinstance(instruction, op.ExchangeStart) else "move"
        for member, seconds in zip(instruction.ranks, times, strict=True):
            self.arrive(member, (*name, member), start, seconds, instruction.label, kind)

    def arrive(self, rank: int, name: Name, start: float, seconds: float, label: str, kind: str = "move") -> None:
        """Notes that a transfer arrives on a rank, which goes on if it waited for it."""
        end = start + seconds
        self.ended[name].append(end)
        self.events.append(Event(rank, kind, start, end, label))
        if rank in self.waiting and not self.blocked(rank):
            self.waiting.remove(rank)
            heapq.heappush(self.running, (self.now[rank], self.at[rank], rank))


def _label(unit: Unit, src: int, dst: int) -> str:
    return f"{unit_name(unit)}:{src}>{dst}"


def collective_blocks(start: op.GatherStart | op.ScatterStart, rank: int) -> int:
    """How many blocks a member of a collective receives."""
    collective: Collective = start.collective
    if isinstance(start, op.GatherStart):
        return len(collective.blocks) - len(collective.key_of(rank))
    return len(collective.key_of(rank)) * (len(collective.ranks) - 1)
