"""The price of one call of attention on a machine: its seconds, and what its busiest rank and link carry.

A call of few instructions is simulated on all its ranks. Of a larger one a few representative ranks are followed, each
as if its peers did the same at the same time. Does not import torch.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ..compiler.compile import Recipe, block_mask_of, side_of
from ..compiler.overlap.simulate import CollectiveTimes, Link, Start, TransferTime, simulate
from ..compiler.overlap.timeline import Timeline
from ..compiler.program import instructions as op
from ..compiler.program.lower import lower
from ..compiler.program.shape import ITEMSIZE, Shape, shape_of
from ..compiler.program.ulysses import PER_ROW, SIDE, SavedForBackward, call_program
from ..compiler.schedules.actions import Unit
from ..compiler.schedules.plan import BlockMask
from ..compiler.sharding.balance import shards_of
from ..compiler.sharding.heads import busiest_ulysses_rank, heads_by_ulysses_rank
from ..compiler.sharding.layout import Key, Topology
from ..compiler.sharding.masks import Mask
from ..compiler.sharding.shards import EvenShards, Shards, tokens_of
from ..compiler.tiles.tiles import tiles
from ..config.settings import SequenceParallelConfig
from .machine import Machine
from .request import TrainingStep

DIRECTIONS = ("forward", "backward")
SIMULATED = 4_000  # instructions up to which all ranks of a call are simulated, which takes about 50 ms
# an end of a link: direction, kind, and rank or node, such as ("out", "net", rank) or ("in", "uplink", node)
LinkEnd = tuple[str, str, int]
_block_mask = functools.lru_cache(maxsize=256)(block_mask_of)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """What one layer's attention takes in one direction, all head chunks together, in seconds and bytes."""

    seconds: float
    simulated: bool  # whether all ranks were simulated
    compute: float  # seconds of the busiest rank's products
    links: float  # seconds of the busiest link
    collectives: float  # seconds for which a rank waits for gathers, reductions and Ulysses' exchanges
    inside: float  # the most bytes that a rank receives from its own node
    between: float  # the most bytes that a rank receives from other nodes
    received: float  # the most bytes that a rank receives from both
    messages: int  # the most messages that a rank sends or receives

    @property
    def overlapped(self) -> float:
        """Seconds if products and messages overlapped perfectly."""
        return max(self.compute, self.links)


def price_of(machine: Machine, call: AttentionCall, direction: str) -> Price:
    """Return the price of a call, whose head chunks run one after the other unless they hide exchanges."""
    followed, every = sampled_ranks(machine, call.config.size), range(simulated_ranks(machine, call))
    simulated = 12 * len(every) * (call.recipe.size + 1) * call.chunks_together <= SIMULATED
    programs = {rank: call.program(direction, rank) for rank in (every if simulated else followed)}
    costs = MachineCosts(machine, call, direction, programs.values())
    walks = walk_alone(costs, [programs[rank] for rank in followed])
    busy: dict[Link, float] = defaultdict(float)
    for link, seconds in itertools.chain.from_iterable(walk.busy.items() for walk in walks):
        busy[link] += seconds
    links = max(busy.values(), default=0.0)
    if simulated:
        seconds = simulate(list(programs.values()), costs).seconds
    else:
        seconds = max(links, *(walk.now for walk in walks))
    times = call.head_chunks // call.chunks_together
    names = "compute", "collectives", "inside", "between", "received", "messages"
    most = {name: times * max(getattr(walk, name) for walk in walks) for name in names}
    return Price(seconds=times * seconds, simulated=simulated, links=times * links, **most)


def timeline_of(machine: Machine, call: AttentionCall, direction: str) -> Timeline:
    """Simulate all ranks of a call: one head chunk, or all that hide one another's exchanges."""
    programs = [call.program(direction, rank) for rank in range(simulated_ranks(machine, call))]
    return simulate(programs, MachineCosts(machine, call, direction, programs))


def simulated_ranks(machine: Machine, call: AttentionCall) -> int:
    """Return how many ranks must be simulated together: those of one sequence if all sequences do the same at the same
    time. If ranks of two sequences share a node's uplink, it is as many sequences as fill whole nodes."""
    size, per_node = call.config.size, machine.per_node
    if machine.uplink is None or size % per_node == 0 or per_node % size == 0:
        return size
    return min(call.world, math.lcm(size, per_node)) // size * size


def sampled_ranks(machine: Machine, size: int) -> list[int]:
    """Return the first and last ranks of the first node and of the sequence, and the middle one of the sequence. If
    ranks of a node share an uplink, return all ranks of the first node too."""
    last = min(machine.per_node, size) - 1
    first_node = range(last + 1) if machine.uplink and size > machine.per_node else ()
    return sorted({0, last, size // 2, size - 1, *first_node})


# ---- a call and its programs


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCall:
    """Attention of one layer."""

    config: SequenceParallelConfig  # without any "auto"
    world: int  # ranks of the job
    mask: Mask
    shards: Shards  # of the CP ranks
    # (query heads, key/value heads, head_dim) that are computed at once: the model's, or those of one head chunk
    heads: tuple[int, int, int]
    dtype: str = "bfloat16"
    batch: int = 1
    head_chunks: int = 1  # number of head chunks, all of equally many heads
    kept: SavedForBackward = SavedForBackward.QKV_AND_OUT  # what forward saves for backward

    @property
    def chunks_together(self) -> int:
        """Number of head chunks that run together, Ulysses' exchanges of one during the computation of another."""
        return self.head_chunks if self.config.overlap and self.config.ulysses > 1 else 1

    @functools.cached_property
    def topology(self) -> Topology:
        return self.config.topology(self.world)

    @functools.cached_property
    def recipe(self) -> Recipe:
        """What programs are made from. On which nodes ranks are changes no program."""
        return self.config.recipe(Topology(axes=self.config.cp_axes))

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of attention on each Ulysses rank."""
        q_heads, kv_heads, dim = self.heads
        counts = [
            (q.stop - q.start, kv.stop - kv.start)
            for q, kv in heads_by_ulysses_rank(q_heads, kv_heads, self.config.ulysses)
        ]
        return tuple(shape_of(self.config.comm_dtype, self.dtype, self.batch, (*count, dim)) for count in counts)

    @functools.cached_property
    def largest_shape(self) -> Shape:
        """The shape on a Ulysses rank with the most heads. Its bytes decide what rotates on all Ulysses ranks."""
        return self.shapes[busiest_ulysses_rank(*self.heads[:2], self.config.ulysses)]

    @functools.cached_property
    def coordinates(self) -> tuple[tuple[int, int], ...]:
        """(Ulysses rank, CP rank) of each rank that shares the first sequence; ranks of the next sequences repeat
        them."""
        topology, ranks = self.topology, range(self.config.size)
        return tuple((topology.index(rank, "ulysses"), topology.index(rank, *topology.cp_axes)) for rank in ranks)

    @functools.cached_property
    def ranks(self) -> dict[tuple[int, int], int]:
        """(Ulysses rank, CP rank) -> rank."""
        return {coordinates: rank for rank, coordinates in enumerate(self.coordinates)}

    def moving_side(self, direction: str) -> str:
        sizes = self.largest_shape.bytes_per_token(direction)
        return self.recipe.moving_side(direction, _block_mask(self.mask, self.shards), sizes)

    def program(self, direction: str, rank: int) -> op.Program:
        """Return the program of a rank, with Ulysses' exchanges, in which peers are numbered as in the world.

        Raises:
            ConfigError: If the schedule has none.
        """
        size, chunks = self.config.size, self.chunks_together
        (ulysses_rank, cp_rank), first = self.coordinates[rank % size], rank - rank % size
        block_mask = _block_mask(self.mask, self.shards)
        inner = _inner_program(self.recipe, direction, block_mask, self.largest_shape, cp_rank)
        program = call_program([inner] * chunks, self.config.ulysses, True, self.kept, overlap=chunks > 1)
        group = tuple(first + self.ranks[member, cp_rank] for member in range(self.config.ulysses))

        def in_world(cp_rank: int) -> int:
            return first + self.ranks[ulysses_rank, cp_rank]

        code: list[op.Instruction] = []
        for instruction in program.code:
            if isinstance(instruction, op.Post):
                sends, receives = (
                    tuple(transfer._replace(peer=in_world(transfer.peer)) for transfer in transfers)
                    for transfers in (instruction.sends, instruction.receives)
                )
                code.append(instruction._replace(sends=sends, receives=receives))
            elif isinstance(instruction, op.GatherStart | op.ScatterStart | op.Assemble):
                ranks = tuple(map(in_world, instruction.collective.ranks))
                code.append(instruction._replace(collective=dataclasses.replace(instruction.collective, ranks=ranks)))
            elif isinstance(instruction, op.ExchangeStart):
                code.append(instruction._replace(ranks=group))
            else:
                code.append(instruction)
        return dataclasses.replace(program, rank=rank, code=tuple(code))


@functools.lru_cache(maxsize=2048)  # programs depend neither on memory settings nor on which rank is on which node
def _inner_program(recipe: Recipe, direction: str, block_mask: BlockMask, shape: Shape, rank: int) -> op.Program:
    schedule, steps = recipe.schedule, recipe.steps(direction, block_mask, shape, rank)
    exact = shape.comm_dtype == shape.accum_dtype
    return lower(schedule.name, direction, rank, recipe.size, steps, exact, schedule.blocks_per_rank)


def call_of(step: TrainingStep) -> AttentionCall:
    """Return the attention call of one layer of a step, on the heads of its first head chunk."""
    m, config = step.model, step.config
    kv_heads = math.ceil(m.kv_heads / config.head_chunks)
    cp_size = config.size // config.ulysses
    lengths = tuple(b - a for a, b in itertools.pairwise((*step.mask.documents, step.seq)))
    return AttentionCall(
        config=config,
        world=step.world,
        mask=step.mask,
        shards=shards_of(config.layout, lengths, cp_size, step.mask.parents)
        if lengths
        else EvenShards(config.layout, step.seq, cp_size),
        heads=(kv_heads * (m.heads // m.kv_heads), kv_heads, m.head_dim),
        dtype=step.dtype,
        batch=step.batch,
        head_chunks=config.head_chunks,
        kept=config.kept(config.head_chunks, step.checkpointing, not config.recompute_attention),
    )


# ---- a few ranks alone


def walk_alone(costs: MachineCosts, programs: Sequence[op.Program]) -> list[_RankWalk]:
    """Follow ranks that share the uplinks of their nodes. The one whose time is earliest is advanced."""
    free: dict[Link, float] = defaultdict(float)
    walks = [_RankWalk(costs, program, free) for program in programs]
    running = [(0.0, index, iter(program.code)) for index, program in enumerate(programs)]
    while running:
        _, index, code = running[0]
        if (instruction := next(code, None)) is None:
            heapq.heappop(running)
        else:
            walks[index].execute(instruction)
            heapq.heapreplace(running, (walks[index].now, index, code))
    return walks


class _RankWalk:
    """One rank's way through its program, whose peers post and join what it does at the same time.

    Attributes:
        now: Seconds since the start.
        busy: Seconds for which it occupies its ends of links.
    """

    def __init__(self, costs: MachineCosts, program: op.Program, free: dict[Link, float]) -> None:
        self.costs, self.rank = costs, program.rank
        self.now = self.compute = self.collectives = self.inside = self.between = 0.0
        self.messages = 0
        self.busy: dict[Link, float] = defaultdict(float)
        self.free = free  # time from which a link can be used again
        self.due: dict[int, tuple[float, bool]] = {}  # ticket -> (time of arrival, whether it is a collective's)

    def execute(self, instruction: op.Instruction) -> None:
        if isinstance(instruction, op.Wait):
            arrival, collective = self.due.pop(instruction.ticket)
            self.collectives += max(0.0, arrival - self.now) * collective
            self.now = max(self.now, arrival)
        seconds = self.costs.busy_time(self.rank, instruction)
        self.compute += seconds * isinstance(instruction, op.Product)
        self.now += seconds
        if isinstance(instruction, op.Post):
            for transfer in instruction.sends:
                self.transfer(self.rank, transfer.peer, transfer.unit)
            arrivals = [self.transfer(transfer.peer, self.rank, transfer.unit) for transfer in instruction.receives]
            self.due[instruction.ticket] = max(arrivals, default=self.now), False
        elif isinstance(instruction, Start):
            self.due[instruction.ticket] = self.join(instruction), True

    def transfer(self, src: int, dst: int, unit: Unit) -> float:
        """Return when a transfer from or to this rank arrives."""
        links, seconds = self.costs.transfer_time(src, dst, unit)
        self.count(src, dst, self.costs.unit_bytes(src, unit))
        return self.occupy(links[int(dst == self.rank) :: 2]) + seconds

    def count(self, src: int, dst: int, size: float) -> None:
        self.messages += 1
        if dst == self.rank and self.costs.machine.node(src) == self.costs.machine.node(dst):
            self.inside += size
        elif dst == self.rank:
            self.between += size

    @property
    def received(self) -> float:
        return self.inside + self.between

    def occupy(self, links: Iterable[tuple[Link, float]]) -> float:
        """Occupy links once all are free, and return the start."""
        links = list(links)
        start = max([self.now, *(self.free[link] for link, _ in links)])
        for link, seconds in links:
            self.free[link] = start + seconds
            self.busy[link] += seconds
        return start

    def join(self, instruction: Start) -> float:
        """Return when this rank has its share of a collective."""
        links: dict[LinkEnd, float] = defaultdict(float)
        longest = 0.0  # seconds of one message on any link
        for src, dst, size in self.costs.transfers_of(instruction, self.rank):
            ends = self.costs.link_seconds(src, dst, size)
            longest = max(longest, *(seconds for _, seconds in ends))
            if self.rank in (src, dst):
                self.count(src, dst, size)
                for link, seconds in ends[int(dst == self.rank) :: 2]:
                    links[link] += seconds
        if isinstance(instruction, op.GatherStart):
            arrival = self.occupy(links.items()) + longest
        else:  # members of a node have its uplink together, whoever uses it first
            node = self.costs.machine.node
            sharers = sum(node(rank) == node(self.rank) for rank in instruction.ranks)
            together = max(seconds * (sharers if link[1] == "uplink" else 1) for link, seconds in links.items())
            arrival = max(self.now + together, self.occupy(links.items()) + max(links.values()))
        return arrival + self.costs.latency(instruction)


# ---- seconds of instructions and transfers


class MachineCosts:
    """The seconds of a call's programs on a machine, in the interface that the simulator needs (`simulate.Prices`).

    Ranks are those of the first sequence, and of the next ones if several are simulated. A gather sends blocks along
    the ring of its members. In a reduce-scatter and in Ulysses' exchange each member sends directly to each other."""

    def __init__(self, machine: Machine, call: AttentionCall, direction: str, programs: Iterable[op.Program]) -> None:
        self.machine, self.call, self.direction = machine, call, direction
        self.sizes = [shape.bytes_per_token(direction) for shape in call.shapes]
        # caches of `product_seconds` and `transfer_time`
        self.products: dict[tuple, tuple[float, int]] = {}
        self.transfers: dict[tuple, TransferTime] = {}
        # (rank, product) pairs whose result is added to an earlier one
        self.added = {(program.rank, product) for program in programs for product in _adding_products(program)}

    # ---- work of a rank

    def busy_time(self, rank: int, instruction: op.Instruction) -> float:
        """Return the seconds of an instruction on the device, and of the host's calls that start it."""
        if isinstance(instruction, op.Wait | op.Enter | op.Leave):
            return 0.0
        ulysses_rank, cp_rank = self.coordinates_of(rank)
        calls = 1
        if isinstance(instruction, op.Product):
            device, calls = self.product_seconds(ulysses_rank, instruction.q, instruction.kv)
            if (rank, instruction) in self.added:
                device += sum(self.copy_seconds(3, ulysses_rank, unit, wide=True) for unit, _ in instruction.results)
        else:
            device = self.copies(ulysses_rank, cp_rank, instruction)
            if self.machine.stolen:
                device += self.machine.stolen * self.bytes_through(rank, instruction)
        host = self.machine.instruction * calls
        return max(device, host) if self.machine.ahead else device + host

    def bytes_through(self, rank: int, instruction: op.Instruction) -> float:
        """Return the bytes that the rank sends and receives in an instruction."""
        if isinstance(instruction, op.Post):
            sent = sum(self.unit_bytes(rank, transfer.unit) for transfer in instruction.sends)
            return sent + sum(self.unit_bytes(transfer.peer, transfer.unit) for transfer in instruction.receives)
        if isinstance(instruction, Start):
            return sum(size for src, dst, size in self.transfers_of(instruction, rank) if rank in (src, dst))
        return 0.0

    def copies(self, ulysses_rank: int, cp_rank: int, instruction: op.Instruction) -> float:
        """Return the seconds in which an instruction reads and writes memory."""
        if isinstance(instruction, op.PackHeads | op.UnpackHeads):
            return self.pack_seconds(ulysses_rank, cp_rank, instruction)
        if isinstance(instruction, op.Pack):
            return self.copy_seconds(2, ulysses_rank, instruction.unit)
        if isinstance(instruction, op.Assemble):
            return self.copy_seconds(2, ulysses_rank, (instruction.collective.kind, instruction.collective.blocks))
        if isinstance(instruction, op.Export) and instruction.accumulator != instruction.into:
            return self.copy_seconds(2, ulysses_rank, instruction.unit)
        if isinstance(instruction, op.Merge) and instruction.accumulator != op.LOCAL:
            return self.copy_seconds(3, ulysses_rank, instruction.unit, wide=True)
        if isinstance(instruction, op.Fold):
            return self.copy_seconds(instruction.parts + 2, ulysses_rank, instruction.unit, wide=True)
        if isinstance(instruction, op.Finish):
            return sum(self.copy_seconds(1, ulysses_rank, unit, wide=True) for unit, _ in instruction.results)
        return 0.0

    def pack_seconds(self, ulysses_rank: int, cp_rank: int, instruction: op.PackHeads | op.UnpackHeads) -> float:
        """Return the seconds of packing for an exchange, or of unpacking. A single tensor that is sent outward is not
        packed."""
        exchange, packs = instruction.exchange, isinstance(instruction, op.PackHeads)
        if packs and not exchange.inward and len(exchange.fields) == 1:
            return 0.0
        ends = [(ulysses_rank, other) if packs else (other, ulysses_rank) for other in range(self.call.config.ulysses)]
        return 2 * sum(self.exchanged_bytes(exchange, cp_rank, *end) for end in ends) / self.machine.memory_rate

    def copy_seconds(self, times: int, ulysses_rank: int, unit: Unit, wide: bool = False) -> float:
        """Return the seconds of reading or writing a unit `times` times: in accum_dtype if `wide`, else in
        comm_dtype."""
        per_token = self.sizes[ulysses_rank][unit[0]]
        if wide:
            shape = self.call.shapes[ulysses_rank]
            fields = shape.fields(self.direction, unit[0], shape.accum_dtype)
            per_token = shape.batch * sum(field.elements * field.itemsize for field in fields)
        return times * per_token * self.call.shards.tokens(side_of(unit[0]), unit[1]) / self.machine.memory_rate

    def product_seconds(self, ulysses_rank: int, q: Key, kv: Key) -> tuple[float, int]:
        """Return (seconds, kernel calls) of the product of some blocks of q with some of kv."""
        shape, call = self.call.shapes[ulysses_rank], self.call
        key = shape.q_heads, self._tiling_key(q, kv)
        if key not in self.products:
            launches = tiles(call.shards.runs("q", q), call.shards.runs("kv", kv), call.mask)
            seconds = functools.partial(self.machine.tile_seconds, call.dtype, self.direction)
            total = sum(seconds(tile, shape.q_heads, shape.head_dim, shape.batch) for tile in launches)
            self.products[key] = total, len(launches)
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

    def unit_bytes(self, src: int, unit: Unit) -> float:
        """Return the bytes of a unit that rank `src` sends."""
        return self.sizes[self.coordinates_of(src)[0]][unit[0]] * self.call.shards.tokens(side_of(unit[0]), unit[1])

    def exchanged_bytes(self, exchange: op.HeadExchange, cp_rank: int, src: int, dst: int) -> float:
        """Return the bytes that one Ulysses rank sends to another. Inward it sends the receiver's heads, outward its
        own."""
        shape = self.call.shapes[dst if exchange.inward else src]
        heads = sum(shape.kv_heads if field in SIDE else shape.q_heads for field in exchange.fields)
        tokens = tokens_of(self.call.shards, "q", cp_rank) / self.call.config.ulysses
        bytes_per_row = (
            ITEMSIZE[shape.accum_dtype] if exchange.fields[0] in PER_ROW else shape.head_dim * shape.itemsize
        )
        return tokens * heads * shape.batch * bytes_per_row

    def transfer_time(self, src: int, dst: int, unit: Unit) -> TransferTime:
        key = src, dst, self.unit_bytes(src, unit)
        if key not in self.transfers:
            links = self.link_seconds(src, dst, key[2])
            seconds = self.machine.wire(src, dst).latency + max(seconds for _, seconds in links)
            self.transfers[key] = TransferTime(links, seconds)
        return self.transfers[key]

    def link_seconds(self, src: int, dst: int, size: float) -> tuple[tuple[LinkEnd, float], ...]:
        """Return (link, seconds) for each link that a message of `size` bytes uses, those of its source first, third
        and so on. A link that carries one direction at a time has one name for both directions."""
        machine, (out, into) = self.machine, ("out", "in") if self.machine.duplex else ("link", "link")
        nodes = machine.node(src), machine.node(dst)
        kind, seconds = "node" if nodes[0] == nodes[1] else "net", size / machine.wire(src, dst).rate
        ends: tuple[tuple[LinkEnd, float], ...] = ((out, kind, src), seconds), ((into, kind, dst), seconds)
        if kind == "net" and machine.uplink:
            seconds = size / machine.uplink
            ends += ((out, "uplink", nodes[0]), seconds), ((into, "uplink", nodes[1]), seconds)
        return ends

    def latency(self, start: Start) -> float:
        """Return the latency of a collective: that of the slowest link between neighbors, for each round."""
        ranks = start.ranks
        neighbors = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
        rounds = len(ranks) - 1 if isinstance(start, op.GatherStart) else 1
        return rounds * max(self.machine.wire(*pair).latency for pair in neighbors)

    def collective_times(self, start: Start) -> CollectiveTimes:
        ranks, latency = start.ranks, self.latency(start)
        busy: dict[LinkEnd, float] = defaultdict(float)
        for src, dst, size in self.transfers_of(start):
            for link, seconds in self.link_seconds(src, dst, size):
                busy[link] += seconds
        if isinstance(start, op.GatherStart):  # a ring is as fast as its slowest link
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
        if isinstance(start, op.GatherStart):
            kind = start.collective.kind
            sizes = [self.unit_bytes(src, (kind, key)) for src, key in zip(ranks, start.collective.keys, strict=True)]
            for index, (dst, local_size) in enumerate(zip(ranks, sizes, strict=True)):
                yield ranks[index - 1], dst, sum(sizes) - local_size
            return
        others = [other for other in ranks if other != rank]
        ends: Iterable[Sequence[int]] = itertools.permutations(ranks, 2)
        if rank is not None:
            ends = [*((rank, other) for other in others), *((other, rank) for other in others)]
        for src, dst in ends:
            yield src, dst, self.collective_bytes(start, src, dst)

    def collective_bytes(self, start: op.ScatterStart | op.ExchangeStart, src: int, dst: int) -> float:
        """Return the bytes of the message from one member of a reduce-scatter or an exchange to another."""
        if isinstance(start, op.ExchangeStart):
            (sender, cp_rank), (receiver, _) = self.coordinates_of(src), self.coordinates_of(dst)
            return self.exchanged_bytes(start.exchange, cp_rank, sender, receiver)
        return self.unit_bytes(src, (start.collective.kind, start.collective.key_of(dst)))


def _adding_products(program: op.Program) -> Iterator[op.Product]:
    # the products whose results are added to those of earlier products
    computed: set[Unit] = set()
    for instruction in program.code:
        if isinstance(instruction, op.Product):
            units = {unit for unit, _ in instruction.results}
            if units & computed:
                yield instruction
            computed |= units
