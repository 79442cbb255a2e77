"""A lower bound of the time of a call of attention on a machine, from the steps of a few of its ranks. Nothing is
simulated, so it is cheap enough to rule most candidates out. It also counts the bytes of the busiest rank and node.
Does not import torch."""

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
    """Bounds of one call of attention, in seconds and bytes."""

    seconds: float  # at most the simulated seconds of programs without overlap
    overlapped: float  # the same, with overlap
    compute: float  # seconds of the busiest rank's products
    links: float  # seconds of the busiest link
    collectives: float  # seconds of gathers, reductions and Ulysses' exchanges, which nothing hides
    inside: float  # the most bytes that a rank receives from its own node
    between: float  # the most bytes that a rank receives from other nodes
    received: float  # the most bytes that a rank receives from both
    messages: int  # the most messages that a rank sends or receives


def lower_bound(machine: Machine, call: AttentionCall, direction: str) -> LowerBound:
    """Return the bound of a call, from the steps of `sampled_ranks`."""
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
    """Return the first and last ranks of the first node and of the sequence, and the middle one of the sequence. If
    ranks of a node share an uplink, return all ranks of the first node too."""
    last = min(machine.per_node, size) - 1
    first_node = range(last + 1) if machine.uplink and size > machine.per_node else ()
    return sorted({0, last, size // 2, size - 1, *first_node})


class _Rank:
    """Sums over one rank's steps.

    Attributes:
        exchanges: Seconds of Ulysses' exchanges.
        before: Seconds of gathers.
        after: Seconds of reductions.
        between_collectives: Seconds of the steps themselves; of each, the longer of its products and its incoming
            messages.
        received: Bytes, by whether they come from the rank's own node.
    """

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
        # the host posts messages; it packs a result that is sent, and merges one that is received
        posting = self.machine.instruction * (bool(step.moves) + bool(step.results) + len(step.results))
        work = sum(self.product_seconds(compute) for compute in step.computes)
        incoming: dict[LinkEnd, float] = defaultdict(float)
        latency = 0.0
        for move in (*step.moves, *step.results):
            self.move(move)
        for move in step.moves:
            if move.dst == self.cp_rank and move.within == 1:
                latency = max(latency, self.machine.wire(self.at(move.src), self.rank).latency)
                for link, seconds in self.ends(move, 1):
                    incoming[link] += seconds
        self.compute += work
        self.between_collectives += max(
            posting + work, latency + max(incoming.values(), default=0.0) if incoming else 0.0
        )
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
        """Return the rank of a CP rank with the same Ulysses rank."""
        return self.call.ranks[self.ulysses_rank, cp_rank]

    def ends(self, move: Move, end: int) -> Sequence[tuple[LinkEnd, float]]:
        """Return (link, seconds) of the links at the source of a move (end 0), or at its destination (end 1)."""
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
        """Add collectives that run at the same time. Return the seconds until this rank has its shard of all."""
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
        group = tuple(self.call.ranks[member, self.cp_rank] for member in range(self.call.ulysses_size))
        start = ExchangeStart(0, 0, exchange, group, LOCAL, LOCAL)
        self.exchanges += 2 * self.machine.instruction + self.add_collective(start, defaultdict(float))

    def add_collective(self, start: Start, links: dict[LinkEnd, float]) -> float:
        """Add a collective's messages, and add the seconds of this rank's links to `links`. Return the seconds until
        this rank has its shard."""
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
