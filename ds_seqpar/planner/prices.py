"""What a call of attention costs on a machine: the prices of its programs' instructions and transfers, and the seconds
that the simulator finds by them. Torch-free."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ..compiler.actions import Key, Unit
from ..compiler.compile import side_of
from ..compiler.exchange import PER_ROW, SIDE, call_program
from ..compiler.program import (
    OWN,
    Assemble,
    Enter,
    ExchangeStart,
    Export,
    Finish,
    Fold,
    GatherStart,
    HeadExchange,
    Instruction,
    Leave,
    Merge,
    Pack,
    PackHeads,
    Post,
    Product,
    Program,
    ScatterStart,
    UnpackHeads,
    Wait,
)
from ..compiler.shape import ITEMSIZE
from ..compiler.shards import EvenShards, tokens_of
from ..compiler.simulate import CollectiveTimes, Start, TransferTime, simulate
from ..compiler.tiles import tiles
from ..compiler.timeline import Timeline
from .calls import Call, followed, inner_programs, programs, renumbered
from .machine import Machine, Wire

Wires = tuple[str, str, int]  # way, what, and whose: ("out", "net", rank), ("in", "uplink", node)


class MachinePrices:
    """`simulate.Prices` of the programs of a call. Ranks are those of the first sequence, and where more sequences are
    followed those of the next ones. A gather goes round the ring of its members; a reduce-scatter and Ulysses'
    exchange straight from each member to each."""

    def __init__(self, machine: Machine, call: Call, direction: str, programs: Iterable[Program] = ()) -> None:
        self.machine, self.call, self.direction = machine, call, direction
        self.sizes = [shape.bytes_per_token(direction) for shape in call.shapes]
        self.seconds: dict[tuple, float] = {}
        self.moved: dict[tuple, TransferTime] = {}
        self.paces: dict[tuple, tuple[float, ...]] = {}
        # (rank, product) whose result is added to what is there
        self.added = {(program.rank, product) for program in programs for product in _added(program)}

    # ---- work of a rank

    def busy_time(self, rank: int, instruction: Instruction) -> float:
        if isinstance(instruction, Wait | Enter | Leave):
            return 0.0
        return self.with_host(*self.work(rank, instruction))

    def with_host(self, device: float, calls: int) -> float:
        """Seconds of a device's work that the host starts in so many calls."""
        host = self.machine.instruction * calls
        return max(device, host) if self.machine.ahead else device + host

    def work(self, rank: int, instruction: Instruction) -> tuple[float, int]:
        """(seconds of the device, things that the host starts)."""
        member, inner = self.place(rank)
        if isinstance(instruction, Product):
            seconds, calls = self.product(member, instruction.q, instruction.kv)
            if (rank, instruction) in self.added:
                seconds += sum(self.copied(3, member, unit, wide=True) for unit, _ in instruction.results)
            return seconds, calls
        return self.copies(member, inner, instruction) + self.machine.stolen * self.carries(rank, instruction), 1

    def carries(self, rank: int, one: Instruction) -> float:
        """Bytes that the rank sends and receives because of an instruction, where they take something from its work."""
        if not self.machine.stolen:
            return 0.0
        if isinstance(one, Post):
            ends = [(rank, t.unit) for t in one.sends] + [(t.peer, t.unit) for t in one.receives]
            return sum(self.bytes(self.place(src)[0], unit) for src, unit in ends)
        if isinstance(one, Start):
            return sum(size for src, dst, size in self.edges(one) if rank in (src, dst))
        return 0.0

    def copies(self, member: int, inner: int, one: Instruction) -> float:
        """Bytes that are read and written, at the memory's rate."""
        if isinstance(one, PackHeads | UnpackHeads):
            return self.packed(member, inner, one)
        if isinstance(one, Pack):
            return self.copied(2, member, one.unit)
        if isinstance(one, Assemble):
            return self.copied(2, member, (one.collective.kind, one.collective.blocks))
        if isinstance(one, Export) and one.own != one.into:
            return self.copied(2, member, one.unit)
        if isinstance(one, Merge) and one.own != OWN:
            return self.copied(3, member, one.unit, wide=True)
        if isinstance(one, Fold):
            return self.copied(one.parts + 2, member, one.unit, wide=True)
        if isinstance(one, Finish):
            return sum(self.copied(1, member, unit, wide=True) for unit, _ in one.results)
        return 0.0

    def packed(self, member: int, inner: int, one: PackHeads | UnpackHeads) -> float:
        """Outward a tensor by itself is sent as it lies, and copied where it arrives."""
        exchange, others = one.exchange, range(self.call.members)
        if isinstance(one, PackHeads) and not exchange.inward and len(exchange.fields) == 1:
            return 0.0
        if isinstance(one, PackHeads):
            size = sum(self.exchanged(exchange, inner, member, other) for other in others)
        else:
            size = sum(self.exchanged(exchange, inner, other, member) for other in others)
        return 2 * size / self.machine.memory_rate

    def copied(self, times: int, member: int, unit: Unit, wide: bool = False) -> float:
        size = self.bytes(member, unit)
        if wide:
            shape = self.call.shapes[member]
            fields = shape.fields(self.direction, unit[0], shape.wide)
            per_token = shape.batch * sum(field.elements * field.itemsize for field in fields)
            size = per_token * self.call.shards.tokens(side_of(unit[0]), unit[1])
        return times * size / self.machine.memory_rate

    def product(self, member: int, q: Key, kv: Key) -> tuple[float, int]:
        """(seconds, kernel calls) of every block of q with every one of kv."""
        shape = self.call.shapes[member]
        key = shape.q_heads, self._like(q, kv)
        if key not in self.seconds:
            shards = self.call.shards
            found = tiles(shards.runs("q", q), shards.runs("kv", kv), self.call.mask)
            price = functools.partial(self.machine.tile_seconds, self.call.dtype, self.direction)
            seconds = sum(price(tile, shape.q_heads, shape.head_dim, shape.batch) for tile in found)
            self.seconds[key] = seconds
            self.seconds[*key, "calls"] = len(found)
        return self.seconds[key], int(self.seconds[*key, "calls"])

    def _like(self, q: Key, kv: Key) -> tuple:
        """What tiles depend on: under a mask of order alone, on runs of one length, the order in which they start."""
        shards = self.call.shards
        if self.call.mask.full and shards.even:
            return len(q), len(kv)
        if not (self.call.mask.scale_free and isinstance(shards, EvenShards)):
            return q, kv
        starts = [[run.start for run in shards.runs(side, key)] for side, key in (("q", q), ("kv", kv))]
        order = {start: number for number, start in enumerate(sorted({*starts[0], *starts[1]}))}
        return tuple(order[start] for start in starts[0]), tuple(order[start] for start in starts[1])

    # ---- transfers

    def place(self, rank: int) -> tuple[int, int]:
        return self.call.places[rank % self.call.config.size]

    def bytes(self, member: int, unit: Unit) -> float:
        return self.sizes[member][unit[0]] * self.call.shards.tokens(side_of(unit[0]), unit[1])

    def exchanged(self, exchange: HeadExchange, inner: int, src: int, dst: int) -> float:
        """Bytes that a member sends to another one of its inner rank: of the heads of who receives them inward, and of
        who sends them outward."""
        shape = self.call.shapes[dst if exchange.inward else src]
        heads = sum(shape.kv_heads if field in SIDE else shape.q_heads for field in exchange.fields)
        tokens = tokens_of(self.call.shards, "q", inner) / self.call.members
        each = ITEMSIZE[shape.wide] if exchange.fields[0] in PER_ROW else shape.head_dim * shape.itemsize
        return tokens * heads * shape.batch * each

    def transfer_time(self, src: int, dst: int, unit: Unit) -> TransferTime:
        member = self.place(src)[0]
        key = src, dst, self.bytes(member, unit)
        if key not in self.moved:
            taken = dict(self.taken(src, dst, key[2]))
            seconds = self.machine.wire(src, dst).latency + max(taken.values())
            self.moved[key] = TransferTime(tuple(taken.items()), seconds)
        return self.moved[key]

    def taken(self, src: int, dst: int, size: float) -> Iterator[tuple[Wires, float]]:
        """The links between two ranks, with the seconds that so many bytes take each. Where a link carries one way at a
        time both ways are one link."""
        machine, ways = self.machine, ("out", "in") if self.machine.duplex else ("link", "link")
        near = machine.node(src) == machine.node(dst)
        wire: Wire = machine.inside if near else machine.between
        for way, rank in zip(ways, (src, dst), strict=True):
            yield (way, "node" if near else "net", rank), size / wire.rate
        if not near and machine.uplink:
            for way, rank in zip(ways, (src, dst), strict=True):
                yield (way, "uplink", machine.node(rank)), size / machine.uplink

    def pace(self, start: Start) -> tuple[float, ...]:
        """Seconds of each member of a collective. Those of groups that lie alike on nodes are the same, where blocks
        have one length."""
        ranks = start.ranks
        if not self.call.shards.even:
            return self.collective_times(start).seconds
        nodes = tuple(self.machine.node(rank) - self.machine.node(ranks[0]) for rank in ranks)
        members = tuple(self.place(rank)[0] for rank in ranks)
        if isinstance(start, ExchangeStart):
            what: tuple = start.exchange
        else:
            what = start.collective.kind, len(start.collective.parts[0])
        key = type(start), what, nodes, members
        if key not in self.paces:
            self.paces[key] = self.collective_times(start).seconds
        return self.paces[key]

    def collective_times(self, start: Start) -> CollectiveTimes:
        ranks = start.ranks
        taken: dict[Wires, float] = defaultdict(float)
        for src, dst, size in self.edges(start):
            for link, seconds in self.taken(src, dst, size):
                taken[link] += seconds
        wires = [self.machine.wire(a, b) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]
        rounds = len(ranks) - 1 if isinstance(start, GatherStart) else 1
        latency = rounds * max(wire.latency for wire in wires)
        longest = max(taken.values(), default=0.0)
        if isinstance(start, GatherStart):  # all go at the pace of the slowest
            return CollectiveTimes(tuple(taken.items()), (latency + longest,) * len(ranks))
        times = []
        for rank in ranks:
            own = (rank, "node"), (rank, "net"), (self.machine.node(rank), "uplink")
            times.append(latency + max(x for (_, what, place), x in taken.items() if (place, what) in own))
        return CollectiveTimes(tuple(taken.items()), tuple(times))

    def edges(self, start: Start, rank: int | None = None) -> Iterator[tuple[int, int, float]]:
        """(from, to, bytes) of a collective; of an exchange straight from each to each those of one rank, if given."""
        ranks = start.ranks
        if isinstance(start, GatherStart):
            parts = zip(ranks, start.collective.parts, strict=True)
            sizes = [self.bytes(self.place(src)[0], (start.collective.kind, part)) for src, part in parts]
            whole = sum(sizes)
            for at, (dst, own) in enumerate(zip(ranks, sizes, strict=True)):
                yield ranks[at - 1], dst, whole - own
            return
        others = [other for other in ranks if other != rank]
        ends = (
            itertools.permutations(ranks, 2)
            if rank is None
            else [*((rank, x) for x in others), *((x, rank) for x in others)]
        )
        for src, dst in ends:
            yield src, dst, self.exchanged_bytes(start, src, dst)

    def exchanged_bytes(self, start: ScatterStart | ExchangeStart, src: int, dst: int) -> float:
        (one, inner), (other, _) = self.place(src), self.place(dst)
        if isinstance(start, ExchangeStart):
            return self.exchanged(start.exchange, inner, one, other)
        return self.bytes(one, (start.collective.kind, start.collective.part(dst)))


def _added(program: Program) -> Iterator[Product]:
    seen: set[Unit] = set()
    for one in program.code:
        if isinstance(one, Product):
            units = {unit for unit, _ in one.results}
            if units & seen:
                yield one
            seen |= units


# ---- seconds of a call


def simulated(machine: Machine, call: Call, direction: str) -> Timeline:
    """Of all ranks that are followed; what `programs` gives of them."""
    everyones = programs(machine, call, direction)
    return simulate(everyones, MachinePrices(machine, call, direction, everyones))


def call_seconds(machine: Machine, call: Call, direction: str) -> float:
    """Of a call, simulated: of one Ulysses member's ranks, where all members do the same at the same time."""
    if call.hides_exchanges:
        return simulated(machine, call, direction).seconds
    return call.stages * _stage_seconds(machine, call, direction)


def _stage_seconds(machine: Machine, call: Call, direction: str) -> float:
    if not alike(machine, call):
        return simulated(machine, call, direction).seconds
    inner, ranks = inner_programs(call, direction), [call.ranks[0, i] for i in range(call.recipe.size)]
    numbered = (dataclasses.replace(program, rank=ranks[i]) for i, program in enumerate(inner))
    prices = MachinePrices(machine, call, direction, numbered)
    return _around(prices, call, inner[0]) + simulate(inner, _Some(prices, ranks)).seconds


def followed_ranks(machine: Machine, call: Call) -> int:
    """How many ranks `call_seconds` simulates."""
    one = alike(machine, call) and not call.hides_exchanges
    return call.recipe.size if one else followed(machine, call) * call.config.size


def alike(machine: Machine, call: Call) -> bool:
    """Whether members have as many heads as one another, share no links, and lie alike on nodes."""
    if machine.uplink is not None or len(set(call.shapes)) > 1 or not call.shards.even:
        return False
    along = [[call.ranks[member, i] for i in range(call.recipe.size)] for member in range(call.members)]
    across = zip(*along, strict=True)
    return all(len({_pattern(machine, ranks) for ranks in groups}) == 1 for groups in (along, across))


def _pattern(machine: Machine, ranks: Sequence[int]) -> tuple[int, ...]:
    """Which of them are in one node."""
    nodes = [machine.node(rank) for rank in ranks]
    return tuple(map(nodes.index, nodes))


def _around(prices: MachinePrices, call: Call, program: Program) -> float:
    """Seconds of the exchanges of the first rank of each member, with what is packed for them."""
    group = tuple(call.ranks[member, 0] for member in range(call.members))
    empty = dataclasses.replace(program, code=(), frees=(), slots=(), words=())
    around = renumbered(call_program([empty], call.members, True, call.kept), group[0], lambda inner: inner, group).code
    waited = sum(prices.pace(one)[0] for one in around if isinstance(one, ExchangeStart))
    return waited + sum(prices.busy_time(group[0], one) for one in around)


class _Some:
    """Prices of some ranks, by their numbers among themselves."""

    def __init__(self, prices: MachinePrices, ranks: Sequence[int]) -> None:
        self.prices, self.ranks = prices, ranks

    def busy_time(self, rank: int, instruction: Instruction) -> float:
        return self.prices.busy_time(self.ranks[rank], instruction)

    def transfer_time(self, src: int, dst: int, unit: Unit) -> TransferTime:
        return self.prices.transfer_time(self.ranks[src], self.ranks[dst], unit)

    def collective_times(self, start: Start) -> CollectiveTimes:
        assert not isinstance(start, ExchangeStart)  # which one member's ranks alone have none of
        ranks = tuple(self.ranks[rank] for rank in start.ranks)
        return self.prices.collective_times(
            start._replace(collective=dataclasses.replace(start.collective, ranks=ranks))
        )
