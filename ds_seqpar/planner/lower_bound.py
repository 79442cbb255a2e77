"""A lower bound of the time that a call of attention takes on a machine, from the steps of a few of its ranks. Nothing
is simulated, so it is cheap enough to rule most candidates out. It also counts the bytes of the busiest rank and node.
Imports no torch."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from ..compiler.overlap.simulate import Start
from ..compiler.program.instructions import LOCAL, ExchangeStart, GatherStart, HeadExchange, ScatterStart
from ..compiler.program.ulysses import exchanges
from ..compiler.schedules.actions import ACCUMULATORS, Collective, Compute, Gather, Move, ReduceScatter, Step, Unit
from ..compiler.schedules.plan import StepsOf
from .attention_call import AttentionCall
from .call_costs import LinkEnd, MachineCosts
from .machine import Machine

WIDE = 64  # members of a collective beyond which only the sampled rank's own links are counted


@dataclasses.dataclass(frozen=True)
class LowerBound:
    """Bounds of one call of attention, in seconds and bytes.

    seconds: at most what the simulator finds for programs without overlap; overlapped: the same with overlap. compute:
    seconds of the busiest rank's products. links: seconds of the busiest link. collectives: seconds of gathers,
    reductions and Ulysses' exchanges, which nothing hides. inside, between: the most bytes that a rank receives from
    its own node, and from other nodes; received: from both. messages: the most that a rank sends or receives."""

    seconds: float
    overlapped: float
    compute: float
    links: float
    collectives: float
    inside: float
    between: float
    received: float
    messages: int


def lower_bound(machine: Machine, call: AttentionCall, direction: str) -> LowerBound:
    """The bound of a call, by the steps of `sampled_ranks`."""
    steps, costs = call.steps(direction), MachineCosts(machine, call, direction)
    ranks = [_Rank(costs, call, rank, steps) for rank in sampled_ranks(machine, call.config.size)]
    busy: dict[LinkEnd, float] = defaultdict(float)
    for rank in ranks:
        for link, seconds in rank.link_seconds.items():
            busy[link] += seconds
    slowest = max(ranks, key=lambda rank: rank.least_seconds())
    longest = max(busy.values(), default=0.0)
    return LowerBound(
        seconds=max(slowest.least_seconds(), longest),
        overlapped=max(longest, *(rank.exchanges * (not call.hides_exchanges) + rank.compute for rank in ranks)),
        compute=max(rank.compute for rank in ranks),
        links=longest,
        collectives=slowest.exchanges + slowest.before + slowest.after,
        inside=max(rank.received[True] for rank in ranks),
        between=max(rank.received[False] for rank in ranks),
        received=max(sum(rank.received.values()) for rank in ranks),
        messages=max(rank.messages for rank in ranks),
    )


def sampled_ranks(machine: Machine, size: int) -> list[int]:
    """The first and last ranks of the first node and of the sequence, and the middle one of the sequence. Where ranks
    of a node share an uplink, all ranks of the first node."""
    last = min(machine.per_node, size) - 1
    first_node = range(last + 1) if machine.uplink and size > machine.per_node else ()
    return sorted({0, last, size // 2, size - 1, *first_node})


class _Rank:
    """The sums over one rank's steps. exchanges, before, after: seconds of Ulysses' exchanges, of gathers, and of
    reductions. between_collectives: seconds of the steps themselves; in each, the longer of its products and its
    incoming messages. received: bytes, by whether they come from the rank's own node."""

    def __init__(self, costs: MachineCosts, call: AttentionCall, rank: int, steps: StepsOf) -> None:
        self.costs, self.call, self.machine, self.rank = costs, call, costs.machine, rank
        self.ulysses_rank, self.cp_rank = call.coordinates[rank]
        self.link_seconds: dict[LinkEnd, float] = defaultdict(float)  # of the rank's links and its node's
        self.received = {True: 0.0, False: 0.0}
        self.messages = 0
        self.compute = self.between_collectives = self.before = self.after = self.exchanges = 0.0
        self.computed: set[Unit] = set()
        for step in steps(self.cp_rank):
            self.step(step)
        if call.ulysses_size > 1:
            for exchange in exchanges(costs.direction, saved=call.kept):
                self.exchange(exchange)

    def least_seconds(self) -> float:
        return self.exchanges + self.before + self.between_collectives + self.after

    def step(self, step: Step) -> None:
        self.before += self.collectives_seconds(step.gathers, GatherStart)
        # the host posts messages; it packs a result that leaves, and merges one that arrives
        posting = self.machine.instruction * (bool(step.moves) + bool(step.results) + len(step.results))
        work = sum(self.product_seconds(compute) for compute in step.computes)
        coming: dict[LinkEnd, float] = defaultdict(float)
        latency = 0.0
        for move in (*step.moves, *step.results):
            self.move(move)
        for move in step.moves:
            if move.dst == self.cp_rank and move.within == 1:
                latency = max(latency, self.machine.wire(self.at(move.src), self.rank).latency)
                for link, seconds in self.ends(move, 1):
                    coming[link] += seconds
        self.compute += work
        self.between_collectives += max(posting + work, latency + max(coming.values(), default=0.0) if coming else 0.0)
        self.after += self.collectives_seconds(step.reduces, ScatterStart)

    def product_seconds(self, compute: Compute) -> float:
        device, calls = self.costs.product_seconds(self.ulysses_rank, compute.q, compute.kv)
        kinds = ACCUMULATORS[self.costs.direction]
        units: list[Unit] = [(kind, compute.kv if kind == "dkv" else compute.q) for kind in kinds]
        if self.computed & set(units):
            device += sum(self.costs.copy_seconds(3, self.ulysses_rank, unit, wide=True) for unit in units)
        self.computed |= set(units)
        return self.costs.with_host(device, calls)

    def at(self, cp_rank: int) -> int:
        """The rank of a CP rank, of the same Ulysses rank."""
        return self.call.ranks[self.ulysses_rank, cp_rank]

    def ends(self, move: Move, end: int) -> Sequence[tuple[LinkEnd, float]]:
        """(link, seconds) of the links at the source of a move (end 0), or at its destination (end 1)."""
        src, dst = self.at(move.src), self.at(move.dst)
        return list(self.costs.link_seconds(src, dst, self.costs.unit_bytes(self.ulysses_rank, move.unit)))[end::2]

    def move(self, move: Move) -> None:
        self.messages += 1
        for link, seconds in self.ends(move, int(move.dst == self.cp_rank)):
            self.link_seconds[link] += seconds
        if move.dst == self.cp_rank:
            in_node = self.machine.node(self.at(move.src)) == self.machine.node(self.rank)
            self.received[in_node] += self.costs.unit_bytes(self.ulysses_rank, move.unit)

    def collectives_seconds(
        self, collectives: Sequence[Collective], start: type[GatherStart] | type[ScatterStart]
    ) -> float:
        """Adds collectives that run at the same time. Returns the seconds until this rank has its part of all."""
        links: dict[LinkEnd, float] = defaultdict(float)
        slowest = 0.0
        for collective in collectives:
            ranks = tuple(self.at(cp_rank) for cp_rank in collective.ranks)
            cls = Gather if start is GatherStart else ReduceScatter
            mapped: Collective = cls(ranks=ranks, kind=collective.kind, keys=collective.keys)
            slowest = max(slowest, self.add_collective(_start(start, mapped), links))
        # the host starts each, and puts its result in place; it does so while the other collectives transfer
        host, count = 2 * self.machine.instruction, len(collectives)
        return max(host * count, host + max(slowest, *links.values())) if links else 0.0

    def exchange(self, exchange: HeadExchange) -> None:
        group = tuple(self.call.ranks[m, self.cp_rank] for m in range(self.call.ulysses_size))
        start = ExchangeStart(0, 0, exchange, group, LOCAL, LOCAL)
        self.exchanges += 2 * self.machine.instruction + self.add_collective(start, defaultdict(float))

    def add_collective(self, start: Start, links: dict[LinkEnd, float]) -> float:
        """Adds a collective's messages. links: takes the seconds of this rank's links. Returns the seconds until this
        rank has its part."""
        ranks = start.ranks
        self.messages += len(ranks) - 1
        longest = 0.0
        for src, dst, size in self.costs.transfers_of(start, self.rank):
            if self.rank in (src, dst):
                for link, seconds in list(self.costs.link_seconds(src, dst, size))[int(dst == self.rank) :: 2]:
                    links[link] += seconds
                    self.link_seconds[link] += seconds
                    longest = max(longest, links[link])
            if dst == self.rank:
                self.received[self.machine.node(src) == self.machine.node(dst)] += size
        return self.costs.rank_seconds(start)[ranks.index(self.rank)] if len(ranks) <= WIDE else longest


def _start(cls: type[GatherStart] | type[ScatterStart], collective: Collective) -> Start:
    return cls(0, 0, collective, LOCAL, LOCAL) if cls is GatherStart else ScatterStart(0, 0, collective, *(LOCAL,) * 4)
