"""From settings, mask and lengths to the program of one rank. Each part is made once for what it depends on.

The structure says what is computed and moved in which order, in which slots. It depends on which blocks meet; under a
causal or full mask no length changes that. A length gives slots their tokens and products their tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from .program.instructions import HeadExchange, Program
from .program.lower import lower
from .program.shape import Field, FieldLocation, Shape, buffer_bytes, locations_of
from .program.ulysses import ExchangeSizes, Heads, SavedForBackward, UlyssesGroup, call_program, exchange_sizes
from .schedules import Schedule
from .schedules.actions import Steps
from .schedules.plan import BlockMask, Counted, Plan
from .sharding.layout import LAYOUTS, Key, Topology
from .sharding.masks import Mask, visibility
from .sharding.shards import EvenShards, Shards, tokens_by_ulysses_rank
from .tiles.launches import PLAIN_KERNEL, KernelSupport, launches
from .tiles.tiles import Tile, tiles

CACHE_SIZE = 64  # entries of each cache: more masks and lengths than are in use at one time
# tokens: where runs are at least this long, each edge of a tile is a linear function of the run's length
SAMPLE_LENGTH = 4
Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings that plans are made from, whatever is attended to. forward, backward: the side that moves in that
    direction, "kv", "q" or "auto". overlap: whether the overlap pass reorders the plan."""

    schedule: Schedule
    topology: Topology
    forward: str = "auto"
    backward: str = "auto"
    overlap: bool = False

    @property
    def size(self) -> int:
        return self.topology.size(*self.topology.cp_axes)

    def moving_side(self, direction: str, block_mask: BlockMask, sizes: Mapping[str, int]) -> str:
        """The side that moves: the one that is set, or the one that "auto" chooses. That is the side with which the
        busiest rank receives the fewest bytes. If two sides tie: under a plain block mask the schedule's first side;
        otherwise the side with the smaller total over all ranks. sizes: bytes of a block of each kind; all blocks count
        as equally long."""
        chosen, sides = self.forward if direction == "forward" else self.backward, self.schedule.moving_sides
        if chosen != "auto" or len(sides) == 1:
            return sides[0] if chosen == "auto" else chosen
        if block_mask.plain:
            return min(sides, key=lambda side: max(self.bytes_received(direction, side, sizes)))
        return _cheapest_side(self, direction, block_mask, tuple(sizes.items()))

    def bytes_received(
        self, direction: str, moving_side: str, sizes: Mapping[str, int], block_mask: BlockMask | None = None
    ) -> list[float]:
        """Bytes that each rank receives. Without a block mask, or where the schedule cannot count by one, they are
        those of all products that the schedule can compute. sizes: bytes of a block of each kind."""
        if block_mask:
            steps = self.schedule.build(self.topology, block_mask, direction, moving_side)
            if isinstance(steps, Counted):
                return steps.received(sizes)
        axes = tuple((axis, self.topology.size(axis)) for axis in self.topology.cp_axes)
        return self.schedule.received(axes, direction, moving_side, sizes)

    def plan(self, direction: str, block_mask: BlockMask, shape: Shape) -> Plan:
        """The plan of all ranks. Raises ConfigError where the schedule has none for what is visible."""
        sizes = shape.bytes_per_token(direction)
        return _plan(self, direction, block_mask, self.moving_side(direction, block_mask, sizes), tuple(sizes.items()))

    def steps(self, direction: str, block_mask: BlockMask, shape: Shape, rank: int) -> Steps:
        """The steps of one rank. With overlap they are made from the plan of all ranks."""
        if self.overlap:
            return self.plan(direction, block_mask, shape).ranks[rank]
        moving_side = self.moving_side(direction, block_mask, shape.bytes_per_token(direction))
        return self.schedule.build(self.topology, block_mask, direction, moving_side)(rank)


@functools.lru_cache(maxsize=CACHE_SIZE)
def _cheapest_side(recipe: Recipe, direction: str, block_mask: BlockMask, sizes: tuple[tuple[str, int], ...]) -> str:
    """The moving side with which the busiest rank receives the fewest bytes. If two tie: the one with the smaller total
    over all ranks."""

    def cost(side: str) -> tuple[float, float]:
        received = recipe.bytes_received(direction, side, dict(sizes), block_mask)
        return max(received), sum(received)

    return min(recipe.schedule.moving_sides, key=cost)


@functools.lru_cache(maxsize=2)  # the virtual ranks of one process all read the same plan
def _plan(
    recipe: Recipe, direction: str, block_mask: BlockMask, moving_side: str, sizes: tuple[tuple[str, int], ...]
) -> Plan:
    steps = recipe.schedule.build(recipe.topology, block_mask, direction, moving_side)
    plan = Plan.of(recipe.schedule.name, direction, recipe.size, steps, recipe.schedule.blocks_per_rank)
    if not recipe.overlap:
        return plan
    # imported here only: it loads the simulator too, which training without overlap does not need
    from .overlap.overlap import overlapped

    return overlapped(plan, block_mask, dict(sizes))


class BoundProgram:
    """A program with the lengths of one call: the walker, the simulator and the memory figure read it.

    shapes: for each head chunk, the shape of its inner tensors. support: of the kernel. linear_tiles: what gives tiles
    by the length alone, where there is such a thing. heads: which Ulysses rank has which heads, in which head chunk."""

    def __init__(
        self, program: Program, shapes: Sequence[Shape], shards: Shards, mask: Mask, support: KernelSupport,
        linear_tiles: _LinearTiles | None, heads: Heads,
    ) -> None:  # fmt: skip
        self.program, self.shapes, self.shards, self.mask, self.support = program, shapes, shards, mask, support
        self.shape, self.heads = shapes[0], heads
        self._linear_tiles, self._run_length = linear_tiles, run_length(shards) if linear_tiles else 0
        self._per_token = [shape.elements_per_token(program.direction) for shape in shapes]
        # asked for at every walk, and made once
        self.fields = functools.cache(self._fields)
        self.tiles, self.launches = functools.cache(self._tiles), functools.cache(self._launches)
        self.unit_size = functools.cache(self._unit_size)
        self.exchange_sizes = functools.cache(self._exchange_sizes)
        self.locations = functools.cache(self._locations)
        self._locations_of = functools.cache(lambda slot, n: locations_of(self.fields(slot), self.shape.batch, n))

    def _tiles(self, q: Key, kv: Key) -> tuple[Tile, ...]:
        """The visible part of the product of some q and kv blocks."""
        if self._linear_tiles:
            return self._linear_tiles.tiles(q, kv, self._run_length)
        return tiles(self.shards.runs("q", q), self.shards.runs("kv", kv), self.mask, self.support.square)

    def _launches(self, q: Key, kv: Key) -> tuple[Tile, ...]:
        """The visible part of a product as launches that the kernel supports."""
        return launches(self.tiles(q, kv), self.support)

    def tokens(self, kind: str, key: Key) -> int:
        """How many tokens a unit has."""
        return self.shards.tokens(side_of(kind), key)

    def _unit_size(self, slot: int, kind: str, key: Key) -> tuple[int, int]:
        """(elements of a unit in this slot, bytes that it takes of the slot)."""
        tokens, elements = self.tokens(kind, key), self._per_token[self.program.slots[slot].head_chunk][kind]
        return tokens * elements, buffer_bytes(self.fields(slot), self.shape.batch * tokens)

    def _exchange_sizes(self, exchange: HeadExchange) -> ExchangeSizes:
        """How many elements this Ulysses rank sends and receives in an exchange of heads."""
        return exchange_sizes(self.heads, exchange, self.shapes[exchange.head_chunk], self.shards, self.program.rank)

    def unit_bytes(self, slot: int, kind: str, key: Key) -> int:
        """Bytes that a unit takes of a slot."""
        return self.unit_size(slot, kind, key)[1]

    def _locations(self, slot: int, kind: str, key: Key) -> tuple[FieldLocation, ...]:
        """Where a unit's tensors stand in its part of a slot: the same object for units of as many tokens."""
        return self._locations_of(slot, self.tokens(kind, key))

    def _fields(self, slot: int) -> tuple[Field, ...]:
        """The tensors of a unit in this slot, which is no slot of an exchange."""
        kind, role, _, head_chunk, _ = self.program.slots[slot]
        shape = self.shapes[head_chunk]
        dtype = shape.accum_dtype if role == "accum" else None  # None: results have the dtype in which they travel
        return shape.fields(self.program.direction, kind, dtype)

    def slot_bytes(self, slot: int) -> int:
        """Bytes that a slot must hold: the largest of its units, or one part after the other."""
        kind, role, keys, _, exchange = self.program.slots[slot]
        if exchange:
            sizes = self.exchange_sizes(exchange)
            return sum(sizes.outgoing if role == "sent" else sizes.incoming) * sizes.itemsize
        tokens = max(self.tokens(kind, key) for key in (keys[:1] if self.shards.even else keys))
        parts = len(keys[0])
        return parts * buffer_bytes(self.fields(slot), self.shape.batch * -(-tokens // parts))


class Compiler:
    """Makes and caches the programs of one rank. An inner program is one head chunk's, without exchanges of heads; a
    call's program has all head chunks with their exchanges. A bound program also has lengths.

    receive_ahead: by how many steps receives are posted early, as the transport needs it; see `lower`."""

    def __init__(self, recipe: Recipe, rank: int, receive_ahead: int = 0) -> None:
        self.recipe, self.rank, self.receive_ahead = recipe, rank, receive_ahead
        self._bound: OrderedDict[Hashable, BoundProgram] = OrderedDict()
        self._inner: OrderedDict[Hashable, Program] = OrderedDict()
        self._calls: OrderedDict[Hashable, tuple[tuple[Program, ...], Program]] = OrderedDict()
        self._patterns: OrderedDict[Hashable, BlockMask] = OrderedDict()
        self._linear_tiles: OrderedDict[Hashable, _LinearTiles] = OrderedDict()

    def bound_inner(
        self, direction: str, mask: Mask, shards: Shards, shape: Shape, support: KernelSupport = PLAIN_KERNEL
    ) -> BoundProgram:
        """An inner program with lengths. shape: of the inner tensors. Raises ConfigError where the schedule cannot do
        what this mask asks of these shards."""

        def make() -> BoundProgram:
            program, heads = self.inner_program(direction, mask, shards, shape), Heads.of(shape.q_heads, shape.kv_heads)
            linear = self.linear_tiles(mask, shards, support.square)
            return BoundProgram(program, (shape,), shards, mask, support, linear, heads)

        return _cached(self._bound, (direction, mask, shards, shape, support), make)

    def bound_call(
        self, direction: str, mask: Mask, shards: Shards, local: Shape, ulysses: UlyssesGroup, support: KernelSupport,
        head_chunks: int = 1, saved: SavedForBackward = SavedForBackward.QKV_AND_OUT, lse: bool = False,
    ) -> BoundProgram:  # fmt: skip
        """The program of one call of attention, with lengths. local: the shape of a rank's local tensors, of all heads.
        lse: whether the caller wants the lse too. Raises as `bound_inner` does."""

        def make() -> BoundProgram:
            heads = Heads.of(local.q_heads, local.kv_heads, ulysses, head_chunks)
            shapes = tuple(local.of_heads(*heads.inner(head_chunk)) for head_chunk in range(head_chunks))
            inner = tuple(self.inner_program(direction, mask, shards, shape) for shape in shapes)
            program = self.program_of_call(inner, ulysses.size, shards, saved, lse)
            linear = self.linear_tiles(mask, shards, support.square)
            return BoundProgram(program, shapes, shards, mask, support, linear, heads)

        return _cached(self._bound, (direction, mask, shards, local, ulysses, support, head_chunks, saved, lse), make)

    def program_of_call(
        self, inner: tuple[Program, ...], ulysses_size: int, shards: Shards, saved: SavedForBackward, lse: bool
    ) -> Program:
        """The program of a call, from the inner program of each head chunk. ulysses_size: of the Ulysses group."""
        q, kv = (tokens_by_ulysses_rank(shards, side, self.rank, ulysses_size) for side in ("q", "kv"))
        same_tokens = q == kv  # then q, k and v can travel in one exchange
        options = ulysses_size, same_tokens, saved, lse, self.recipe.overlap
        # the inner programs are cached beside it: an `id` is good for as long as its program is
        cache_key = tuple(map(id, inner)), *options
        return _cached(self._calls, cache_key, lambda: (inner, call_program(inner, *options)))[1]

    def inner_program(self, direction: str, mask: Mask, shards: Shards, shape: Shape) -> Program:
        """The program of one head chunk. Raises as `bound_inner` does."""
        block_mask = self.block_mask(mask, shards)
        comm_in_accum_dtype = shape.comm_dtype == shape.accum_dtype
        # the cache key has of the shape only what the steps depend on
        sizes = tuple(shape.bytes_per_token(direction).items()) if self.recipe.overlap else ()
        moving_side = self.recipe.moving_side(direction, block_mask, shape.bytes_per_token(direction))

        def make() -> Program:
            name, blocks_per_rank = self.recipe.schedule.name, self.recipe.schedule.blocks_per_rank
            steps = self.recipe.steps(direction, block_mask, shape, self.rank)
            ahead = self.receive_ahead if self.recipe.overlap else 0
            return lower(
                name, direction, self.rank, self.recipe.size, steps, comm_in_accum_dtype, blocks_per_rank, ahead
            )

        return _cached(self._inner, (direction, block_mask, moving_side, comm_in_accum_dtype, sizes), make)

    def linear_tiles(self, mask: Mask, shards: Shards, square: bool) -> _LinearTiles | None:
        """What gives the tiles of these shards by their length alone; None where more than the length decides."""
        if not (mask.scale_free and isinstance(shards, EvenShards) and run_length(shards) > SAMPLE_LENGTH):
            return None
        cache_key = mask, shards.layout, shards.size, square
        return _cached(self._linear_tiles, cache_key, lambda: _LinearTiles(*cache_key))

    def block_mask(self, mask: Mask, shards: Shards) -> BlockMask:
        """Which blocks meet; see `block_mask_of`."""
        small = _stand_in(mask, shards)
        return _cached(self._patterns, (mask, small), lambda: block_mask_of(mask, small))


def block_mask_of(mask: Mask, shards: Shards) -> BlockMask:
    """Which pairs of blocks meet: some query of the one sees some key of the other."""
    q, kv = (
        [shards.runs(side, (block,)) for block in range(shards.size * shards.blocks_per_rank)] for side in ("q", "kv")
    )
    return BlockMask(visibility(q, kv, mask), even=shards.even)


def visible_share(mask: Mask, shards: Shards) -> Callable[[int, int], float]:
    """A function of a q block and a kv block: the visible share of their product, from 0 to 1."""

    @functools.cache
    def share(q: int, kv: int) -> float:
        all_pairs = shards.tokens("q", (q,)) * shards.tokens("kv", (kv,))
        visible_pairs = sum(tile.pairs for tile in tiles(shards.runs("q", (q,)), shards.runs("kv", (kv,)), mask))
        return visible_pairs / all_pairs if all_pairs else 0.0

    return share


def _stand_in(mask: Mask, shards: Shards) -> Shards:
    """Shards of few tokens whose blocks meet where these do."""
    if mask.scale_free and isinstance(shards, EvenShards):
        length = run_length(shards)
        if length > 2:  # two tokens have an order, which is all that such a mask looks at
            return dataclasses.replace(shards, seq=shards.seq // length * 2)
    return shards


class _LinearTiles:
    """The tiles of products as a linear function of the length of all runs. Under a mask that only looks at the order
    of positions, every edge of a tile grows linearly with that length. So the tiles for two short lengths show it."""

    def __init__(self, mask: Mask, layout: str, size: int, square: bool) -> None:
        runs = len(LAYOUTS[layout].runs(2 * size, size, 0)) * size
        self.samples = tuple(EvenShards(layout, runs * (SAMPLE_LENGTH + more), size) for more in (0, 1))
        self.mask, self.square = mask, square
        self.cache: dict[tuple[Key, Key], tuple[tuple[Tile, tuple[int, ...]], ...]] = {}

    def tiles(self, q: Key, kv: Key, length: int) -> tuple[Tile, ...]:
        """The tiles of a product for runs of `length` tokens, SAMPLE_LENGTH or more."""
        slopes = self.cache.get((q, kv))
        if slopes is None:
            slopes = self.cache[q, kv] = self.slopes(q, kv)
        n = length - SAMPLE_LENGTH
        return tuple(
            Tile(low.q0 + n * a, low.q1 + n * b, low.k0 + n * c, low.k1 + n * d, low.kind, low.width)
            for low, (a, b, c, d) in slopes
        )

    def slopes(self, q: Key, kv: Key) -> tuple[tuple[Tile, tuple[int, ...]], ...]:
        """Each tile at SAMPLE_LENGTH, and by how much each of its edges grows when runs grow by one token."""
        small, large = (
            tiles(shards.runs("q", q), shards.runs("kv", kv), self.mask, self.square) for shards in self.samples
        )
        return tuple(
            (low, tuple(b - a for a, b in zip(low[:4], high[:4], strict=True)))
            for low, high in zip(small, large, strict=True)
        )


def run_length(shards: Shards) -> int:
    """Tokens of every run, where a named layout gives them; 0 where there are no tokens."""
    return next((run.length for run in shards.runs("q", (0,))), 0)


def side_of(kind: str) -> str:
    """Whose tokens a unit of this kind has: those of "q" or of "kv"."""
    return "kv" if kind in ("kv", "dkv") else "q"


def _cached(cache: OrderedDict[Hashable, Made], cache_key: Hashable, make: Callable[[], Made]) -> Made:
    """The entry of this key, made where it is missing; beyond CACHE_SIZE entries the oldest goes."""
    if cache_key not in cache:
        cache[cache_key] = make()
        if len(cache) > CACHE_SIZE:
            cache.popitem(last=False)
    return cache[cache_key]
