"""The costs of a call of attention on a machine: the seconds of its programs' instructions and transfers, and those of
the whole call, by simulation. Does not import torch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ..compiler.compile import side_of
from ..compiler.overlap.simulate import CollectiveTimes, Start, TransferTime, simulate
from ..compiler.overlap.timeline import Timeline
from ..compiler.program.instructions import (
    LOCAL,
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
from ..compiler.program.shape import ITEMSIZE
from ..compiler.program.ulysses import PER_ROW, SIDE, call_program
from ..compiler.schedules.actions import Unit
from ..compiler.sharding.layout import Key
from ..compiler.sharding.shards import EvenShards, tokens_of
from ..compiler.tiles.tiles import tiles
from .attention_call import AttentionCall, inner_programs, programs, simulated_sequences, with_world_ranks
from .machine import Machine, Wire

# an end of a link: direction, kind, and rank or node, such as ("out", "net", rank) or ("in", "uplink", node)
LinkEnd = tuple[str, str, int]


class MachineCosts:
    """The seconds of a call's programs on a machine, in the interface that the simulator needs (`simulate.Prices`).

    Ranks are those of the first sequence, and of the next ones if several are simulated. A gather sends blocks along
    the ring of its members. In a reduce-scatter and in Ulysses' exchange each member sends directly to each other."""

    def __init__(self, machine: Machine, call: AttentionCall, direction: str, programs: Iterable[Program] = ()) -> None:
        self.machine, self.call, self.direction = machine, call, direction
        self.sizes = [shape.bytes_per_token(direction) for shape in call.shapes]
        # caches of `product_seconds`, `transfer_time` and `rank_seconds`
        self.products: dict[tuple, tuple[float, int]] = {}
        self.transfers: dict[tuple, TransferTime] = {}
        self.collectives: dict[tuple, tuple[float, ...]] = {}
        # (rank, product) pairs whose result is added to an earlier one
        self.added = {(program.rank, product) for program in programs for product in _adding_products(program)}

    # ---- work of a rank

    def busy_time(self, rank: int, instruction: Instruction) -> float:
        if isinstance(instruction, Wait | Enter | Leave):
            return 0.0
        return self.with_host(*self.work(rank, instruction))

    def with_host(self, device: float, calls: int) -> float:
        """Return the seconds of work that takes `device` seconds on the device and that the host starts by `calls`
        calls."""
        host = self.machine.instruction * calls
        return max(device, host) if self.machine.ahead else device + host

    def work(self, rank: int, instruction: Instruction) -> tuple[float, int]:
        """Return (seconds on the device, calls by which the host starts the work)."""
        ulysses_rank, cp_rank = self.coordinates_of(rank)
        if isinstance(instruction, Product):
            seconds, calls = self.product_seconds(ulysses_rank, instruction.q, instruction.kv)
            if (rank, instruction) in self.added:
                seconds += sum(self.copy_seconds(3, ulysses_rank, unit, wide=True) for unit, _ in instruction.results)
            return seconds, calls
        return self.copies(ulysses_rank, cp_rank, instruction) + self.machine.stolen * self.bytes_through(
            rank, instruction
        ), 1

    def bytes_through(self, rank: int, instruction: Instruction) -> float:
        """Return the bytes that the rank sends and receives in an instruction, if these slow its work down; else 0."""
        if not self.machine.stolen:
            return 0.0
        if isinstance(instruction, Post):
            ends = [(rank, transfer.unit) for transfer in instruction.sends] + [
                (transfer.peer, transfer.unit) for transfer in instruction.receives
            ]
            return sum(self.unit_bytes(self.coordinates_of(src)[0], unit) for src, unit in ends)
        if isinstance(instruction, Start):
            return sum(size for src, dst, size in self.transfers_of(instruction) if rank in (src, dst))
        return 0.0

    def copies(self, ulysses_rank: int, cp_rank: int, instruction: Instruction) -> float:
        """Return the seconds in which an instruction reads and writes memory."""
        if isinstance(instruction, PackHeads | UnpackHeads):
            return self.pack_seconds(ulysses_rank, cp_rank, instruction)
        if isinstance(instruction, Pack):
            return self.copy_seconds(2, ulysses_rank, instruction.unit)
        if isinstance(instruction, Assemble):
            return self.copy_seconds(2, ulysses_rank, (instruction.collective.kind, instruction.collective.blocks))
        if isinstance(instruction, Export) and instruction.accumulator != instruction.into:
            return self.copy_seconds(2, ulysses_rank, instruction.unit)
        if isinstance(instruction, Merge) and instruction.accumulator != LOCAL:
            return self.copy_seconds(3, ulysses_rank, instruction.unit, wide=True)
        if isinstance(instruction, Fold):
            return self.copy_seconds(instruction.parts + 2, ulysses_rank, instruction.unit, wide=True)
        if isinstance(instruction, Finish):
            return sum(self.copy_seconds(1, ulysses_rank, unit, wide=True) for unit, _ in instruction.results)
        return 0.0

    def pack_seconds(self, ulysses_rank: int, cp_rank: int, instruction: PackHeads | UnpackHeads) -> float:
        """Return the seconds of packing for an exchange, or of unpacking. A single tensor that is sent outward is not
        packed."""
        exchange, others = instruction.exchange, range(self.call.ulysses_size)
        if isinstance(instruction, PackHeads) and not exchange.inward and len(exchange.fields) == 1:
            return 0.0
        ends = [
            (ulysses_rank, other) if isinstance(instruction, PackHeads) else (other, ulysses_rank) for other in others
        ]
        return 2 * sum(self.exchanged_bytes(exchange, cp_rank, *end) for end in ends) / self.machine.memory_rate

    def copy_seconds(self, times: int, ulysses_rank: int, unit: Unit, wide: bool = False) -> float:
        """Return the seconds of reading or writing a unit `times` times: in accum_dtype if `wide`, else in
        comm_dtype."""
        size = self.unit_bytes(ulysses_rank, unit)
        if wide:
            shape = self.call.shapes[ulysses_rank]
            fields = shape.fields(self.direction, unit[0], shape.accum_dtype)
            per_token = shape.batch * sum(field.elements * field.itemsize for field in fields)
            size = per_token * self.call.shards.tokens(side_of(unit[0]), unit[1])
        return times * size / self.machine.memory_rate

    def product_seconds(self, ulysses_rank: int, q: Key, kv: Key) -> tuple[float, int]:
        """Return (seconds, kernel calls) of the product of some blocks of q with some of kv."""
        shape = self.call.shapes[ulysses_rank]
        key = shape.q_heads, self._tiling_key(q, kv)
        if key not in self.products:
            shards = self.call.shards
            kernel_calls = tiles(shards.runs("q", q), shards.runs("kv", kv), self.call.mask)
            seconds = functools.partial(self.machine.tile_seconds, self.call.dtype, self.direction)
            total = sum(seconds(tile, shape.q_heads, shape.head_dim, shape.batch) for tile in kernel_calls)
            self.products[key] = total, len(kernel_calls)
        return self.products[key]

    def _tiling_key(self, q: Key, kv: Key) -> tuple:
        """Return a key that is equal for products with equal tiles. If the mask depends only on the order of tokens,
        and all runs have one length, it is the order in which the runs start."""
        shards = self.call.shards
        if self.call.mask.full and shards.even:
            return len(q), len(kv)
        if not (self.call.mask.scale_free and isinstance(shards, EvenShards)):
            return q, kv
        starts = [[run.start for run in shards.runs(side, key)] for side, key in (("q", q), ("kv", kv))]
        order = {start: number for number, start in enumerate(sorted({*starts[0], *starts[1]}))}
        return tuple(tuple(order[start] for start in of_side) for of_side in starts)

    # ---- transfers

    def coordinates_of(self, rank: int) -> tuple[int, int]:
        """Return (Ulysses rank, CP rank)."""
        return self.call.coordinates[rank % self.call.config.size]

    def unit_bytes(self, ulysses_rank: int, unit: Unit) -> float:
        return self.sizes[ulysses_rank][unit[0]] * self.call.shards.tokens(side_of(unit[0]), unit[1])

    def exchanged_bytes(self, exchange: HeadExchange, cp_rank: int, src: int, dst: int) -> float:
        """Return the bytes that one Ulysses rank sends to another. Inward it sends the receiver's heads, outward its
        own."""
        shape = self.call.shapes[dst if exchange.inward else src]
        heads = sum(shape.kv_heads if field in SIDE else shape.q_heads for field in exchange.fields)
        tokens = tokens_of(self.call.shards, "q", cp_rank) / self.call.ulysses_size
        bytes_per_row = (
            ITEMSIZE[shape.accum_dtype] if exchange.fields[0] in PER_ROW else shape.head_dim * shape.itemsize
        )
        return tokens * heads * shape.batch * bytes_per_row

    def transfer_time(self, src: int, dst: int, unit: Unit) -> TransferTime:
        ulysses_rank = self.coordinates_of(src)[0]
        key = src, dst, self.unit_bytes(ulysses_rank, unit)
        if key not in self.transfers:
            busy = dict(self.link_seconds(src, dst, key[2]))
            seconds = self.machine.wire(src, dst).latency + max(busy.values())
            self.transfers[key] = TransferTime(tuple(busy.items()), seconds)
        return self.transfers[key]

    def link_seconds(self, src: int, dst: int, size: float) -> Iterator[tuple[LinkEnd, float]]:
        """Yield (link, seconds) for each link that a message of `size` bytes uses. A link that carries one direction at
        a time has one name for both directions."""
        machine, directions = self.machine, ("out", "in") if self.machine.duplex else ("link", "link")
        in_node = machine.node(src) == machine.node(dst)
        wire: Wire = machine.inside if in_node else machine.between
        for direction, rank in zip(directions, (src, dst), strict=True):
            yield (direction, "node" if in_node else "net", rank), size / wire.rate
        if not in_node and machine.uplink:
            for direction, rank in zip(directions, (src, dst), strict=True):
                yield (direction, "uplink", machine.node(rank)), size / machine.uplink

    def rank_seconds(self, start: Start) -> tuple[float, ...]:
        """Return the seconds of each member of a collective. If all blocks have one length, the result is cached for
        groups that are spread alike over nodes."""
        ranks = start.ranks
        if not self.call.shards.even:
            return self.collective_times(start).seconds
        nodes = tuple(self.machine.node(rank) - self.machine.node(ranks[0]) for rank in ranks)
        ulysses_ranks = tuple(self.coordinates_of(rank)[0] for rank in ranks)
        if isinstance(start, ExchangeStart):
            collective_key: tuple = start.exchange
        else:
            collective_key = start.collective.kind, len(start.collective.keys[0])
        key = type(start), collective_key, nodes, ulysses_ranks
        if key not in self.collectives:
            self.collectives[key] = self.collective_times(start).seconds
        return self.collectives[key]

    def collective_times(self, start: Start) -> CollectiveTimes:
        ranks = start.ranks
        busy: dict[LinkEnd, float] = defaultdict(float)
        for src, dst, size in self.transfers_of(start):
            for link, seconds in self.link_seconds(src, dst, size):
                busy[link] += seconds
        wires = [self.machine.wire(a, b) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]
        rounds = len(ranks) - 1 if isinstance(start, GatherStart) else 1
        latency = rounds * max(wire.latency for wire in wires)
        if isinstance(start, GatherStart):  # a ring is as fast as its slowest link
            longest = max(busy.values(), default=0.0)
            return CollectiveTimes(tuple(busy.items()), (latency + longest,) * len(ranks))
        times = []
        for rank in ranks:
            local_links = ("node", rank), ("net", rank), ("uplink", self.machine.node(rank))
            times.append(latency + max(seconds for (_, *link), seconds in busy.items() if tuple(link) in local_links))
        return CollectiveTimes(tuple(busy.items()), tuple(times))

    def transfers_of(self, start: Start, rank: int | None = None) -> Iterator[tuple[int, int, float]]:
        """Yield (source, destination, bytes) of each message of a collective. If `rank` is given and members send
        directly to each other, yield only the messages from and to that rank."""
        ranks = start.ranks
        if isinstance(start, GatherStart):
            keys_of_ranks = zip(ranks, start.collective.keys, strict=True)
            sizes = [
                self.unit_bytes(self.coordinates_of(src)[0], (start.collective.kind, key)) for src, key in keys_of_ranks
            ]
            for index, (dst, local_size) in enumerate(zip(ranks, sizes, strict=True)):
                yield ranks[index - 1], dst, sum(sizes) - local_size
            return
        others = [other for other in ranks if other != rank]
        ends = (
            itertools.permutations(ranks, 2)
            if rank is None
            else [*((rank, other) for other in others), *((other, rank) for other in others)]
        )
        for src, dst in ends:
            yield src, dst, self.collective_bytes(start, src, dst)

    def collective_bytes(self, start: ScatterStart | ExchangeStart, src: int, dst: int) -> float:
        """Return the bytes of the message from one member of a reduce-scatter or an exchange to another."""
        (sender, cp_rank), (receiver, _) = self.coordinates_of(src), self.coordinates_of(dst)
        if isinstance(start, ExchangeStart):
            return self.exchanged_bytes(start.exchange, cp_rank, sender, receiver)
        return self.unit_bytes(sender, (start.collective.kind, start.collective.key_of(dst)))


def _adding_products(program: Program) -> Iterator[Product]:
    # the products whose results are added to those of earlier products
    computed: set[Unit] = set()
    for instruction in program.code:
        if isinstance(instruction, Product):
            units = {unit for unit, _ in instruction.results}
            if units & computed:
                yield instruction
            computed |= units


# ---- seconds of a call


def simulate_call(machine: Machine, call: AttentionCall, direction: str) -> Timeline:
    """Simulate all ranks that must be simulated together, and return their timeline."""
    of_all_ranks = programs(machine, call, direction)
    return simulate(of_all_ranks, MachineCosts(machine, call, direction, of_all_ranks))


def call_seconds(machine: Machine, call: AttentionCall, direction: str) -> float:
    """Return the seconds of a call by simulation. If all Ulysses ranks do the same at the same time, only the CP ranks
    of one Ulysses rank are simulated."""
    if call.hides_exchanges:
        return simulate_call(machine, call, direction).seconds
    return call.head_chunks * _head_chunk_seconds(machine, call, direction)


def _head_chunk_seconds(machine: Machine, call: AttentionCall, direction: str) -> float:
    if not ulysses_ranks_are_alike(machine, call):
        return simulate_call(machine, call, direction).seconds
    inner, ranks = inner_programs(call, direction), [call.ranks[0, cp_rank] for cp_rank in range(call.recipe.size)]
    numbered = (dataclasses.replace(program, rank=ranks[cp_rank]) for cp_rank, program in enumerate(inner))
    costs = MachineCosts(machine, call, direction, numbered)
    return _exchange_seconds(costs, call, inner[0]) + simulate(inner, _CostsOfRanks(costs, ranks)).seconds


def simulated_ranks(machine: Machine, call: AttentionCall) -> int:
    """Return how many ranks `call_seconds` simulates."""
    one_ulysses_rank = ulysses_ranks_are_alike(machine, call) and not call.hides_exchanges
    return call.recipe.size if one_ulysses_rank else simulated_sequences(machine, call) * call.config.size


def ulysses_ranks_are_alike(machine: Machine, call: AttentionCall) -> bool:
    """Return whether all Ulysses ranks have equally many heads, share no links, and are spread alike over nodes."""
    if machine.uplink is not None or len(set(call.shapes)) > 1 or not call.shards.even:
        return False
    along = [
        [call.ranks[ulysses_rank, cp_rank] for cp_rank in range(call.recipe.size)]
        for ulysses_rank in range(call.ulysses_size)
    ]
    across = zip(*along, strict=True)
    return all(len({_node_pattern(machine, ranks) for ranks in groups}) == 1 for groups in (along, across))


def _node_pattern(machine: Machine, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return for each rank the index of the first one in its node: equal for groups that are spread alike over
    nodes."""
    nodes = [machine.node(rank) for rank in ranks]
    return tuple(map(nodes.index, nodes))


def _exchange_seconds(costs: MachineCosts, call: AttentionCall, program: Program) -> float:
    """Return the seconds of Ulysses' exchanges around a call, with their packing, on the first rank of the
    sequence."""
    group = tuple(call.ranks[ulysses_rank, 0] for ulysses_rank in range(call.ulysses_size))
    empty = dataclasses.replace(program, code=(), frees=(), slots=(), words=())
    exchanges = call_program([empty], call.ulysses_size, True, call.kept)
    code = with_world_ranks(exchanges, group[0], lambda rank: rank, group).code
    waited = sum(costs.rank_seconds(instruction)[0] for instruction in code if isinstance(instruction, ExchangeStart))
    return waited + sum(costs.busy_time(group[0], instruction) for instruction in code)


class _CostsOfRanks:
    """Costs of a subset of ranks, which the simulator numbers from 0."""

    def __init__(self, costs: MachineCosts, ranks: Sequence[int]) -> None:
        self.costs, self.ranks = costs, ranks

    def busy_time(self, rank: int, instruction: Instruction) -> float:
        return self.costs.busy_time(self.ranks[rank], instruction)

    def transfer_time(self, src: int, dst: int, unit: Unit) -> TransferTime:
        return self.costs.transfer_time(self.ranks[src], self.ranks[dst], unit)

    def collective_times(self, start: Start) -> CollectiveTimes:
        assert not isinstance(start, ExchangeStart)  # the ranks of one Ulysses rank exchange nothing
        ranks = tuple(self.ranks[rank] for rank in start.ranks)
        collective = dataclasses.replace(start.collective, ranks=ranks)
        return self.costs.collective_times(start._replace(collective=collective))
