"""Simulate programs under a cost model, and return a timeline.

The simulator uses neither processes nor tensors. A simulated rank does one thing at a time. Transfers over different
links run in parallel, and each link carries one transfer at a time. A transfer starts when both ends have posted it and
all its links are free. `Costs` defines all durations: each rank has one link in and one link out, and only products and
transfers take time.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from ..core.compiler.program import instructions as op
from ..core.compiler.program.instructions import KINDS, HeadExchange, Instruction, Program, Transfer, label_of
from ..core.compiler.program.lower import lower
from ..core.compiler.program.ulysses import KV, SavedForBackward, call_program, inward_fields, outward_fields
from ..core.compiler.schedules.actions import Unit, unit_name
from ..core.compiler.schedules.plan import Plan
from ..core.compiler.sharding.layout import Key
from .timeline import Event, Timeline

Link = Hashable
Start = op.GatherStart | op.ScatterStart | op.ExchangeStart


class TransferTime(NamedTuple):
    """Duration of a transfer."""

    links: tuple[tuple[Link, float], ...]  # links that are occupied, each with the number of seconds
    seconds: float  # from start to arrival


class CollectiveTimes(NamedTuple):
    """Duration of a collective."""

    links: tuple[tuple[Link, float], ...]  # each link that is occupied, and for how many seconds
    seconds: tuple[float, ...]  # from start to end, for each member in order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs for ranks with one inward and one outward link each. Only products and transfers take time."""

    transfer: Mapping[str, float]  # number of seconds to move one block, by kind
    product: float  # number of seconds for one (q block, kv block) product without a mask
    weight: Callable[[int, int], float] = lambda q, kv: 1.0  # visible fraction of a product
    # number of seconds to receive the tensors of a head exchange from all other members
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
        """Return the times of a collective. A collective occupies each member's links until the member has its data."""
        if isinstance(start, op.ExchangeStart):
            seconds: tuple[float, ...] = (self.exchange(start.exchange),) * len(start.ranks)
        else:
            block = self.transfer[start.collective.kind]
            seconds = tuple(block * start.collective.received(member) for member in start.ranks)
        ends = itertools.product(("in", "out"), zip(start.ranks, seconds, strict=True))
        return CollectiveTimes(
            tuple(((direction, member), duration) for direction, (member, duration) in ends), seconds
        )

    def balanced(self, plan: Plan) -> Costs:
        """Return costs with products scaled so that the busiest rank spends as long on computation as the busiest link
        spends on receiving.
        """
        unit = dataclasses.replace(self, product=1.0)
        return dataclasses.replace(self, product=communication(plan, self) / computation(plan, unit))


def computation(plan: Plan, costs: Costs) -> float:
    """Return the number of seconds that the busiest rank spends on products."""
    return max(sum(costs.compute(c.q, c.kv) for step in steps for c in step.computes) for steps in plan.ranks)


def communication(plan: Plan, costs: Costs) -> float:
    """Return the number of seconds for which the busiest inward link is occupied, including head exchanges."""
    inward = inward_fields(plan.direction, True, SavedForBackward.QKV_AND_OUT, KV)
    exchanges = [HeadExchange(0, True, fields) for fields in inward]
    exchanges += [HeadExchange(0, False, fields) for fields in outward_fields(plan.direction, False, KV)]
    return max(plan.received(costs.transfer)) + sum(map(costs.exchange, exchanges))


class HeadSplit(NamedTuple):
    """Division of a call's heads among Ulysses ranks and head chunks."""

    ulysses_size: int = 1
    head_chunks: int = 1
    saved: SavedForBackward = SavedForBackward.QKV_AND_OUT
    overlap: bool = False  # whether a head chunk's exchanges overlap with another head chunk's computation


UNSPLIT = HeadSplit()


def programs_of(plan: Plan, head_split: HeadSplit = UNSPLIT) -> list[Program]:
    """Return the programs of all CP ranks, with results sent in accum_dtype.

    The programs belong to one Ulysses rank, because all Ulysses ranks do the same work at the same time. All head
    chunks run the same program.
    """
    inner = [
        lower(plan.name, plan.direction, rank, plan.size, steps, True, plan.blocks_per_rank)
        for rank, steps in enumerate(plan.ranks)
    ]
    ulysses_size, head_chunks, saved, overlap = head_split
    if (ulysses_size, head_chunks) == (1, 1):
        return inner
    return [
        _with_local_exchanges(call_program([program] * head_chunks, ulysses_size, True, saved, overlap=overlap))
        for program in inner
    ]


def _with_local_exchanges(program: Program) -> Program:
    """Return the program with its head exchanges modified so that they do not wait for other ranks."""
    code = (
        instruction._replace(ranks=(program.rank,)) if isinstance(instruction, op.ExchangeStart) else instruction
        for instruction in program.code
    )
    return dataclasses.replace(program, code=tuple(code))


def simulate(programs: Sequence[Program], costs: Costs) -> Timeline:
    """Return the timeline of all ranks in chronological order. `programs[r]` is rank r's program.

    The rank with the earliest time is always advanced next. Transfers occupy links in the order in which they were
    posted by both ends. Among transfers posted at the same time, the transfer that comes first in its program has
    priority.
    """
    return _Simulation(programs, costs).run()


# transfer: (source, destination, tag); collective: (ranks, label, type), or (ranks, label, type, member)
Name = tuple
Index = tuple[int, int]  # instruction number in the program, transfer number in the instruction


class _Simulation:
    def __init__(self, programs: Sequence[Program], costs: Costs) -> None:
        self.programs, self.costs, size = programs, costs, len(programs)
        self.at, self.now = [0] * size, [0.0] * size
        self.link_free: dict[Link, float] = defaultdict(float)  # time at which a link becomes free
        # heap of (now, at, rank) for ranks that are not waiting
        self.running = [(0.0, 0, rank) for rank in range(size)]
        self.waiting: set[int] = set()
        # maps (transfer, end) to the (time, index) of each post that the other end has not matched
        self.posted: dict[tuple[Name, int], deque[tuple[float, Index]]] = defaultdict(deque)
        # maps a collective to the (time, instruction) of each member that has joined
        self.joined: dict[Name, list[tuple[float, int]]] = defaultdict(list)
        # heap of transfers posted by both ends: (time, indices, ranks, number), and a function that starts the transfer
        self.ready: list[tuple[tuple, Callable[[], None]]] = []
        self.number = itertools.count()
        self.ended: dict[Name, list[float]] = defaultdict(list)  # maps a transfer to its end times, in order
        self.expected: dict[Name, int] = defaultdict(int)  # maps a transfer to the receiver's number of posts
        # maps (rank, ticket) to the transfers to wait for
        self.due: dict[tuple[int, int], list[tuple[Name, int, str]]] = {}
        self.events: list[Event] = []

    def run(self) -> Timeline:
        while self.running or self.ready:
            if self.ready and not (self.running and self.running[0][0] <= self.ready[0][0][0]):
                heapq.heappop(self.ready)[1]()
            else:
                self.advance(heapq.heappop(self.running)[2])
        assert not self.waiting, "ranks wait for one another"
        return Timeline(tuple(self.events))

    def advance(self, rank: int) -> None:
        """Execute a rank's next instruction, or make the rank wait."""
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
        """Return whether a rank's next instruction waits for an unfinished transfer."""
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
        """Return the target of a wait: a transfer, the number of earlier transfers with the same name, and a label."""
        self.expected[name] += 1
        return name, self.expected[name] - 1, label

    def spend(self, rank: int, kind: str, seconds: float, label: str) -> None:
        """Add an event of this duration to a rank."""
        if seconds > 0:
            self.events.append(Event(rank, kind, self.now[rank], self.now[rank] + seconds, label))
            self.now[rank] += seconds

    def post(self, name: Name, end: int, transfer: Transfer, index: Index) -> None:
        """Post one end of a transfer (0 sends, 1 receives).

        The transfer can start when the other end has also been posted.
        """
        src, dst, _ = name
        now = self.now[(src, dst)[end]]
        if not self.posted[name, 1 - end]:
            self.posted[name, end].append((now, index))
            return
        other_now, other_index = self.posted[name, 1 - end].popleft()
        order = max(now, other_now), max(index, other_index), min(index, other_index), (src, dst), next(self.number)
        heapq.heappush(self.ready, (order, lambda: self.start_transfer(name, transfer, max(now, other_now))))

    def start_transfer(self, name: Name, transfer: Transfer, since: float) -> None:
        src, dst, _ = name
        links, seconds = self.costs.transfer_time(src, dst, transfer.unit)
        start = self.occupy(since, links)
        self.arrive(dst, name, start, seconds, _label(transfer.unit, src, dst))

    def occupy(self, since: float, links: Sequence[tuple[Link, float]]) -> float:
        """Occupy links when all of them are free, but not before `since`, and return the start time.

        `links` has the same format as in `TransferTime`.
        """
        start = max(since, *(self.link_free[link] for link, _ in links)) if links else since
        for link, seconds in links:
            self.link_free[link] = start + seconds
        return start

    def join(self, rank: int, instruction: Start) -> None:
        """Add a rank to a collective. The collective starts when all members have joined and its links are free."""
        ranks, label = instruction.ranks, label_of(instruction)
        name = ranks, label, type(instruction).__name__
        self.due[rank, instruction.ticket] = [self.expect((*name, rank), label)]
        self.joined[name].append((self.now[rank], self.at[rank]))
        if len(self.joined[name]) == len(ranks):
            since, at = map(max, zip(*self.joined.pop(name), strict=True))
            order = since, (at, 0), (at, 0), ranks, next(self.number)
            heapq.heappush(self.ready, (order, lambda: self.start_collective(name, instruction, since)))

    def start_collective(self, name: Name, instruction: Start, since: float) -> None:
        links, times = self.costs.collective_times(instruction)
        start = self.occupy(since, links)
        kind = "exchange" if isinstance(instruction, op.ExchangeStart) else "move"
        for member, seconds in zip(instruction.ranks, times, strict=True):
            self.arrive(member, (*name, member), start, seconds, label_of(instruction), kind)

    def arrive(self, rank: int, name: Name, start: float, seconds: float, label: str, kind: str = "move") -> None:
        """Record the arrival of a transfer on a rank, and resume the rank if it was waiting for the transfer."""
        end = start + seconds
        self.ended[name].append(end)
        self.events.append(Event(rank, kind, start, end, label))
        if rank in self.waiting and not self.blocked(rank):
            self.waiting.remove(rank)
            heapq.heappush(self.running, (self.now[rank], self.at[rank], rank))


def _label(unit: Unit, src: int, dst: int) -> str:
    return f"{unit_name(unit)}:{src}>{dst}"
