"""The compiler, which turns the settings, the mask and the sequence lengths into one rank's program.

Each compilation stage caches its results, keyed by its inputs. A program's structure specifies what is computed and
moved, in which order, and in which buffers (slots). The structure depends only on which blocks meet. A q block and a kv
block meet if some query in the q block sees some key in the kv block. Under a causal or full mask, the sequence lengths
do not affect which blocks meet. The lengths determine the number of tokens per slot and the tiles of each product.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from .program.instructions import HeadExchange, Product, Program
from .program.lower import lower
from .program.shape import Field, FieldLocation, Shape, buffer_bytes, locations_of
from .program.ulysses import ExchangeSizes, Heads, SavedForBackward, UlyssesGroup, call_program, exchange_sizes
from .schedules import Schedule
from .schedules.actions import Steps
from .schedules.plan import PASSES, BlockMask, Counted, Plan
from .sharding.layout import Key, Topology
from .sharding.masks import Mask, visibility
from .sharding.shards import Shards, length, tokens_of
from .tiles.launches import PLAIN_KERNEL, KernelSupport, launches
from .tiles.tiles import Tile, tiles

CACHE_SIZE = 64  # entries per cache, more than the number of masks and lengths in use at the same time
T = TypeVar("T")
Arguments = ParamSpec("Arguments")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings from which plans are built, for any mask and lengths."""

    schedule: Schedule
    topology: Topology
    forward: str = "auto"  # side that moves in the forward pass: "kv", "q" or "auto"
    backward: str = "auto"  # side that moves in the backward pass
    overlap: bool = False  # whether the overlap pass reorders the plan

    @property
    def size(self) -> int:
        return self.topology.size(*self.topology.cp_axes)

    def moving_side(self, direction: str, block_mask: BlockMask, sizes: Mapping[str, int]) -> str:
        """Return the configured moving side, or the side that "auto" selects.

        "auto" selects the side for which the busiest rank receives the fewest bytes. On a tie, "auto" selects the
        schedule's first side if the block mask is plain, and otherwise the side with the smaller total over all ranks.

        Args:
            sizes: Bytes per token for each kind of unit, assuming that all blocks of a side have the same length.
        """
        chosen, sides = self.forward if direction == "forward" else self.backward, self.schedule.moving_sides
        if chosen != "auto" or len(sides) == 1:
            return sides[0] if chosen == "auto" else chosen
        sizes = {kind: size * block_mask.tokens[side_of(kind) == "kv"] for kind, size in sizes.items()}
        if block_mask.plain:
            return min(sides, key=lambda side: max(self.bytes_received(direction, side, sizes)))
        return _cheapest_side(self, direction, block_mask, tuple(sizes.items()))

    def bytes_received(
        self, direction: str, moving_side: str, sizes: Mapping[str, int], block_mask: BlockMask | None = None
    ) -> list[float]:
        """Return the number of bytes that each rank receives.

        Without a block mask, or if the schedule ignores the mask, assume that every product that the schedule can
        compute is needed. `sizes` contains the bytes per block for each kind of unit.
        """
        if block_mask:
            steps = self.schedule.build(self.topology, block_mask, direction, moving_side)
            if isinstance(steps, Counted):
                return steps.received(sizes)
        axes = tuple((axis, self.topology.size(axis)) for axis in self.topology.cp_axes)
        return self.schedule.received(axes, direction, moving_side, sizes)

    def plan(self, direction: str, block_mask: BlockMask, shape: Shape) -> Plan:
        """Return the plan for all ranks. Raise ConfigError if the schedule has no plan for the visible blocks."""
        sizes = shape.bytes_per_token(direction)
        return _plan(self, direction, block_mask, self.moving_side(direction, block_mask, sizes), tuple(sizes.items()))

    def steps(self, direction: str, block_mask: BlockMask, shape: Shape, rank: int) -> Steps:
        """Return the steps of one rank, taken from the plan of all ranks if overlap is on."""
        if self.overlap:
            return self.plan(direction, block_mask, shape).ranks[rank]
        moving_side = self.moving_side(direction, block_mask, shape.bytes_per_token(direction))
        return self.schedule.build(self.topology, block_mask, direction, moving_side)(rank)


@functools.lru_cache(maxsize=CACHE_SIZE)
def _cheapest_side(recipe: Recipe, direction: str, block_mask: BlockMask, sizes: tuple[tuple[str, int], ...]) -> str:
    """Return the moving side for which the busiest rank receives the fewest bytes.

    On a tie, return the side with the smaller total over all ranks.
    """

    def cost(side: str) -> tuple[float, float]:
        received = recipe.bytes_received(direction, side, dict(sizes), block_mask)
        return max(received), sum(received)

    return min(recipe.schedule.moving_sides, key=cost)


@functools.lru_cache(maxsize=2)  # all virtual ranks in a process use the same plan
def _plan(
    recipe: Recipe, direction: str, block_mask: BlockMask, moving_side: str, sizes: tuple[tuple[str, int], ...]
) -> Plan:
    steps = recipe.schedule.build(recipe.topology, block_mask, direction, moving_side)
    plan = Plan.of(recipe.schedule.name, direction, recipe.size, steps, recipe.schedule.blocks_per_rank)
    return PASSES["overlap"](plan, block_mask, dict(sizes)) if recipe.overlap else plan


def _kept(method: Callable[Concatenate[Any, Arguments], T]) -> Callable[Concatenate[Any, Arguments], T]:
    """Cache a method's results in the `results` attribute of its object, since a cache of bound methods would create a
    reference cycle.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Arguments.args, **kwargs: Arguments.kwargs) -> T:
        key = name, args
        if key not in self.results:
            self.results[key] = method(self, *args, **kwargs)
        return self.results[key]

    return call


class BoundProgram:
    """A program bound to the lengths of one call, used by the executor, the simulator and the memory estimate.

    Args:
        shapes: Shape of the inner tensors for each head chunk.
        support: Features that the kernel supports.
        heads: Heads of each Ulysses rank in each head chunk.
    """

    def __init__(
        self, program: Program, shapes: Sequence[Shape], shards: Shards, mask: Mask, support: KernelSupport,
        heads: Heads,
    ) -> None:  # fmt: skip
        self.program, self.shapes, self.shards, self.mask, self.support = program, shapes, shards, mask, support
        self.shape, self.heads = shapes[0], heads
        self._per_token = [shape.elements_per_token(program.direction) for shape in shapes]
        self.results: dict[tuple, Any] = {}  # results of `_kept` methods, which every execution calls

    @_kept
    def tiles(self, q: Key, kv: Key) -> tuple[Tile, ...]:
        """Return the visible part of a product of q and kv blocks as tiles."""
        return tiles(self.shards.runs("q", q), self.shards.runs("kv", kv), self.mask, self.support.square)

    @_kept
    def launches(self, q: Key, kv: Key) -> tuple[Tile, ...]:
        """Return the visible part of a product as launches that the kernel supports."""
        return launches(self.tiles(q, kv), self.support)

    @_kept
    def most_keys(self) -> int:
        """Return the maximum number of keys in a kernel launch."""
        products = {(x.q, x.kv) for x in self.program.code if isinstance(x, Product)}
        return max((tile.k1 - tile.k0 for product in products for tile in self.launches(*product)), default=0)

    def tokens(self, kind: str, key: Key) -> int:
        return self.shards.tokens(side_of(kind), key)

    @_kept
    def unit_size(self, slot: int, kind: str, key: Key) -> tuple[int, int]:
        """Return the number of elements of a unit, and the number of bytes that the unit occupies in this slot."""
        tokens, elements = self.tokens(kind, key), self._per_token[self.program.slots[slot].head_chunk][kind]
        return tokens * elements, buffer_bytes(self.fields(slot), self.shape.batch * tokens)

    @_kept
    def exchange_sizes(self, exchange: HeadExchange) -> ExchangeSizes:
        return exchange_sizes(self.heads, exchange, self.shapes[exchange.head_chunk], self.shards, self.program.rank)

    def unit_bytes(self, slot: int, kind: str, key: Key) -> int:
        """Return the number of bytes that a unit occupies in a slot."""
        return self.unit_size(slot, kind, key)[1]

    @_kept
    def locations(self, slot: int, kind: str, key: Key) -> tuple[FieldLocation, ...]:
        """Return the locations of a unit's tensors. Units with the same number of tokens share the returned object."""
        return self._locations(slot, self.tokens(kind, key))

    @_kept
    def _locations(self, slot: int, tokens: int) -> tuple[FieldLocation, ...]:
        return locations_of(self.fields(slot), self.shape.batch, tokens)

    @_kept
    def fields(self, slot: int) -> tuple[Field, ...]:
        """Return the tensors of a unit in the slot. Slots used for head exchanges are not supported."""
        kind, role, _, head_chunk, _ = self.program.slots[slot]
        shape = self.shapes[head_chunk]
        dtype = shape.accum_dtype if role == "accum" else None  # None: results are in comm_dtype
        return shape.fields(self.program.direction, kind, dtype)

    @_kept
    def slot_bytes(self, slot: int) -> int:
        """Return the size of a slot in bytes, which is the size of its largest unit.

        The blocks of a unit are stored consecutively.
        """
        kind, role, keys, _, exchange = self.program.slots[slot]
        if exchange:
            sizes = self.exchange_sizes(exchange)
            return sum(sizes.outgoing if role == "sent" else sizes.incoming) * sizes.itemsize
        units = keys[:1] if self.shards.even else keys
        rows = [[self.shape.batch * self.tokens(kind, (block,)) for block in key] for key in units]
        return max(sum(buffer_bytes(self.fields(slot), count) for count in counts) for counts in rows)


class Compiler:
    """Compiles and caches the programs for one rank.

    An inner program covers one head chunk, without head exchanges. A call's program covers all head chunks and their
    exchanges. A bound program is a program for specific sequence lengths.

    Args:
        receive_ahead: Number of steps by which receives are posted early, as required by the transport (see `lower`).
    """

    def __init__(self, recipe: Recipe, rank: int, receive_ahead: int = 0) -> None:
        self.recipe, self.rank, self.receive_ahead = recipe, rank, receive_ahead
        self._bound: OrderedDict[Hashable, BoundProgram] = OrderedDict()
        self._inner: OrderedDict[Hashable, Program] = OrderedDict()
        self._calls: OrderedDict[Hashable, tuple[tuple[Program, ...], Program]] = OrderedDict()
        self._block_masks: OrderedDict[Hashable, BlockMask] = OrderedDict()

    def bound_inner(
        self, direction: str, mask: Mask, shards: Shards, shape: Shape, support: KernelSupport = PLAIN_KERNEL
    ) -> BoundProgram:
        """Return an inner program for specific lengths. `shape` describes the inner tensors.

        Raises:
            ConfigError: The schedule does not support this mask for these shards.
        """

        def make() -> BoundProgram:
            program, heads = self.inner_program(direction, mask, shards, shape), Heads.of(shape.q_heads, shape.kv_heads)
            return BoundProgram(program, (shape,), shards, mask, support, heads)

        return _cached(self._bound, (direction, mask, shards, shape, support), make)

    def bound_call(
        self, direction: str, mask: Mask, shards: Shards, local: Shape, ulysses: UlyssesGroup, support: KernelSupport,
        head_chunks: int = 1, saved: SavedForBackward = SavedForBackward.QKV_AND_OUT, lse: bool = False,
    ) -> BoundProgram:  # fmt: skip
        """Return the program of one attention call for specific lengths.

        Args:
            local: Shape of this rank's local tensors, which contain all heads.
            lse: Whether the lse is returned to the caller.

        Raises:
            ConfigError: The schedule does not support this mask for these shards.
        """

        def make() -> BoundProgram:
            heads = Heads.of(local.q_heads, local.kv_heads, ulysses, head_chunks)
            shapes = tuple(local.of_heads(*heads.inner(head_chunk)) for head_chunk in range(head_chunks))
            inner = tuple(self.inner_program(direction, mask, shards, shape) for shape in shapes)
            program = self.program_of_call(inner, ulysses.size, shards, saved, lse, tuple(local.kv))
            return BoundProgram(program, shapes, shards, mask, support, heads)

        return _cached(self._bound, (direction, mask, shards, local, ulysses, support, head_chunks, saved, lse), make)

    def program_of_call(
        self, inner: tuple[Program, ...], ulysses_size: int, shards: Shards, saved: SavedForBackward, lse: bool,
        kv: tuple[str, ...],
    ) -> Program:  # fmt: skip
        """Return a call's program, built from the inner programs of the head chunks."""
        q_tokens, kv_tokens = (tokens_of(shards, side, self.rank) for side in ("q", "kv"))
        same_tokens = q_tokens == kv_tokens  # if True, one exchange can carry q, k and v
        options = ulysses_size, same_tokens, saved, lse, self.recipe.overlap, kv
        # the entry also contains the inner programs, so each `id` stays valid as long as the entry exists
        cache_key = tuple(map(id, inner)), *options
        return _cached(self._calls, cache_key, lambda: (inner, call_program(inner, *options)))[1]

    def inner_program(self, direction: str, mask: Mask, shards: Shards, shape: Shape) -> Program:
        """Return the program for one head chunk. Raise ConfigError if the schedule does not support the mask for these
        shards.
        """
        block_mask = self.block_mask(mask, shards)
        comm_in_accum_dtype = shape.comm_dtype == shape.accum_dtype
        # the cache key includes only the properties of the shape that affect the steps
        sizes = tuple(shape.bytes_per_token(direction).items()) if self.recipe.overlap else ()
        moving_side = self.recipe.moving_side(direction, block_mask, shape.bytes_per_token(direction))

        def make() -> Program:
            schedule = self.recipe.schedule
            steps = self.recipe.steps(direction, block_mask, shape, self.rank)
            ahead = self.receive_ahead if self.recipe.overlap else 0
            return lower(
                schedule.name, direction, self.rank, self.recipe.size, steps, comm_in_accum_dtype,
                schedule.blocks_per_rank, ahead,
            )  # fmt: skip

        return _cached(self._inner, (direction, block_mask, moving_side, comm_in_accum_dtype, sizes), make)

    def block_mask(self, mask: Mask, shards: Shards) -> BlockMask:
        return _cached(self._block_masks, (mask, shards), lambda: block_mask_of(mask, shards))


def block_mask_of(mask: Mask, shards: Shards) -> BlockMask:
    """Return the pairs of blocks in which some query in the q block sees some key in the kv block."""
    q, kv = (
        [shards.runs(side, (block,)) for block in range(shards.size * shards.blocks_per_rank)] for side in ("q", "kv")
    )
    q_tokens, kv_tokens = sum(map(length, q)), sum(map(length, kv))
    divisor = math.gcd(q_tokens, kv_tokens) or 1
    return BlockMask(visibility(q, kv, mask), shards.even, (q_tokens // divisor, kv_tokens // divisor))


def side_of(kind: str) -> str:
    """Return the side ("q" or "kv") to which a unit's tokens belong, given the kind of unit."""
    return "kv" if kind in ("kv", "dkv") else "q"


def _cached(cache: OrderedDict[Hashable, T], cache_key: Hashable, make: Callable[[], T]) -> T:
    """Return the cache entry for a key, creating the entry if necessary. Evict the least recently used entry if the
    cache exceeds CACHE_SIZE.
    """
    if cache_key not in cache:
        cache[cache_key] = make()
        if len(cache) > CACHE_SIZE:
            cache.popitem(last=False)
    cache.move_to_end(cache_key)
    return cache[cache_key]
