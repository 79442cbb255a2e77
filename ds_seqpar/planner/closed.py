"""The least time that a call of attention takes on a machine, from the steps of a few of its ranks: nothing is
simulated. What serves to leave most candidates out, and says what the busiest rank and node send. Torch-free."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from ..compiler.actions import ACCUMULATORS, Collective, Compute, Gather, Move, ReduceScatter, Step, Unit
from ..compiler.exchange import exchanges
from ..compiler.plan import StepsOf
from ..compiler.program import OWN, ExchangeStart, GatherStart, HeadExchange, ScatterStart
from ..compiler.simulate import Start
from .calls import Call
from .machine import Machine
from .prices import MachinePrices, Wires

WIDE = 64  # members of a collective, beyond which a rank's own links are looked at only


@dataclasses.dataclass(frozen=True)
class Closed:
    """seconds: a lower bound of what `simulate` finds for the programs without overlap; overlapped: for those with it.
    compute: of the busiest rank; links: of the link that carries longest; collectives: gathers, reductions and Ulysses'
    exchanges, which nothing hides. inside, between: bytes that a rank receives at most from its node, and from others;
    received: together; messages: of the rank with the most."""

    seconds: float
    overlapped: float
    compute: float
    links: float
    collectives: float
    inside: float
    between: float
    received: float
    messages: int


def closed(machine: Machine, call: Call, direction: str) -> Closed:
    """Of the ranks at the ends of the first node and of the sequence, and one between; where a node's ranks share a
    link, of all the first node's."""
    ranks = sampled(machine, call.config.size)
    steps, prices = call.steps(direction), MachinePrices(machine, call, direction)
    found = [_Rank(prices, call, rank, steps) for rank in ranks]
    shared: dict[Wires, float] = defaultdict(float)
    for one in found:
        for link, seconds in one.taken.items():
            shared[link] += seconds
    busiest = max(found, key=lambda one: one.least())
    longest = max(shared.values(), default=0.0)
    return Closed(
        seconds=max(busiest.least(), longest),
        overlapped=max(longest, *(one.exchanges * (not call.hides_exchanges) + one.compute for one in found)),
        compute=max(one.compute for one in found),
        links=longest,
        collectives=busiest.exchanges + busiest.before + busiest.after,
        inside=max(one.bytes[True] for one in found),
        between=max(one.bytes[False] for one in found),
        received=max(sum(one.bytes.values()) for one in found),
        messages=max(one.messages for one in found),
    )


def sampled(machine: Machine, size: int) -> list[int]:
    last = min(machine.per_node, size) - 1
    shared = range(last + 1) if machine.uplink and size > machine.per_node else ()
    return sorted({0, last, size // 2, size - 1, *shared})


class _Rank:
    """One rank's steps, added up."""

    def __init__(self, prices: MachinePrices, call: Call, rank: int, steps: StepsOf) -> None:
        self.prices, self.call, self.machine, self.rank = prices, call, prices.machine, rank
        self.member, self.inner = call.places[rank]
        self.taken: dict[Wires, float] = defaultdict(float)  # own ends of links, and the node's
        self.bytes = {True: 0.0, False: 0.0}  # received, by whether it is from the own node
        self.messages = 0
        self.compute = self.hidden = 0.0  # hidden: products, or operands that must have come by the end of a step
        self.before = self.after = self.exchanges = 0.0
        self.seen: set[Unit] = set()
        for step in steps(self.inner):
            self.step(step)
        if call.members > 1:
            for exchange in exchanges(prices.direction, saved=call.kept):
                self.exchange(exchange)

    def least(self) -> float:
        """The exchanges, and between them all in its order, or at least what a link carries."""
        return self.exchanges + self.before + self.hidden + self.after

    def step(self, step: Step) -> None:
        self.before += self.together(step.gathers, GatherStart)
        host = self.machine.instruction
        # posts; and a result is packed where it leaves and merged where it arrives
        posting = host * (bool(step.moves) + bool(step.results) + len(step.results))
        work = sum(self.product(compute) for compute in step.computes)
        coming: dict[Wires, float] = defaultdict(float)
        latency = 0.0
        for move in (*step.moves, *step.results):
            self.move(move)
        for move in step.moves:
            if move.dst == self.inner and move.within == 1:
                latency = max(latency, self.machine.wire(self.at(move.src), self.rank).latency)
                for link, seconds in self.ends(move, 1):
                    coming[link] += seconds
        self.compute += work
        self.hidden += max(posting + work, latency + max(coming.values(), default=0.0) if coming else 0.0)
        self.after += self.together(step.reduces, ScatterStart)

    def product(self, compute: Compute) -> float:
        device, calls = self.prices.product(self.member, compute.q, compute.kv)
        kinds = ACCUMULATORS[self.prices.direction]
        units: list[Unit] = [(kind, compute.kv if kind == "dkv" else compute.q) for kind in kinds]
        if self.seen & set(units):
            device += sum(self.prices.copied(3, self.member, unit, wide=True) for unit in units)
        self.seen |= set(units)
        return self.prices.with_host(device, calls)

    def at(self, inner: int) -> int:
        return self.call.ranks[self.member, inner]

    def ends(self, move: Move, end: int) -> Sequence[tuple[Wires, float]]:
        """The links at one end of a move, 0: where it leaves, with their seconds."""
        src, dst = self.at(move.src), self.at(move.dst)
        return list(self.prices.taken(src, dst, self.prices.bytes(self.member, move.unit)))[end::2]

    def move(self, move: Move) -> None:
        self.messages += 1
        for link, seconds in self.ends(move, int(move.dst == self.inner)):
            self.taken[link] += seconds
        if move.dst == self.inner:
            near = self.machine.node(self.at(move.src)) == self.machine.node(self.rank)
            self.bytes[near] += self.prices.bytes(self.member, move.unit)

    def together(self, collectives: Sequence[Collective], start: type[GatherStart] | type[ScatterStart]) -> float:
        """Those that run beside one another; returns the seconds until this rank has all of its own."""
        links: dict[Wires, float] = defaultdict(float)
        slowest = 0.0
        for collective in collectives:
            ranks = tuple(self.at(inner) for inner in collective.ranks)
            cls = Gather if start is GatherStart else ReduceScatter
            mapped: Collective = cls(ranks=ranks, kind=collective.kind, parts=collective.parts)
            slowest = max(slowest, self.trade(_start(start, mapped), links))
        # each is started, and what it brought is put in place: beside the transfers of others
        host, count = 2 * self.machine.instruction, len(collectives)
        return max(host * count, host + max(slowest, *links.values())) if links else 0.0

    def exchange(self, exchange: HeadExchange) -> None:
        group = tuple(self.call.ranks[m, self.inner] for m in range(self.call.members))
        start = ExchangeStart(0, 0, exchange, group, OWN, OWN)
        self.exchanges += 2 * self.machine.instruction + self.trade(start, defaultdict(float))

    def trade(self, start: Start, links: dict[Wires, float]) -> float:
        """Adds the seconds of the rank's own links; returns those until it has its part."""
        ranks = start.ranks
        self.messages += len(ranks) - 1
        own = 0.0
        for src, dst, size in self.prices.edges(start, self.rank):
            if self.rank in (src, dst):
                for link, seconds in list(self.prices.taken(src, dst, size))[int(dst == self.rank) :: 2]:
                    links[link] += seconds
                    self.taken[link] += seconds
                    own = max(own, links[link])
            if dst == self.rank:
                self.bytes[self.machine.node(src) == self.machine.node(dst)] += size
        return self.prices.pace(start)[ranks.index(self.rank)] if len(ranks) <= WIDE else own


def _start(cls: type[GatherStart] | type[ScatterStart], collective: Collective) -> Start:
    return cls(0, 0, collective, OWN, OWN) if cls is GatherStart else ScatterStart(0, 0, collective, *(OWN,) * 4)
