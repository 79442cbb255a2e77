"""From settings, mask and lengths to the program of one rank; each part of it made once for what it depends on.

The structure (what is computed and moved in which order, in which slots) depends on which blocks meet, which for a
causal or full mask no length changes. A length gives slots their tokens and products their tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from . import exchange
from .actions import Key, Steps
from .cuts import PLAIN, Takes, calls
from .exchange import ALL_KEPT, Heads, Kept, Members, Traffic
from .layout import LAYOUTS, Topology
from .lower import lower
from .masks import Mask, visibility
from .plan import Counted, Pattern, Plan
from .program import Program, Trade
from .schedules import Schedule
from .shape import Field, Place, Shape, buffer_bytes, places_of
from .shards import EvenShards, Shards, members_tokens
from .tiles import Tile, tiles

KEPT = 64  # of each: more masks and lengths than a run has at one time
PROBE = 4  # tokens of a run from which on what is visible only grows with it
Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings that plans are made from, whatever is attended to. forward, backward: what travels."""

    schedule: Schedule
    topology: Topology
    forward: str = "auto"
    backward: str = "auto"
    overlap: bool = False

    @property
    def size(self) -> int:
        return self.topology.size(*self.topology.inner_axes)

    def travels(self, direction: str, pattern: Pattern, sizes: Mapping[str, int]) -> str:
        """What travels; "auto" is what makes the busiest rank receive fewer bytes of blocks, all as long; where that is
        the same, the mean one. sizes: bytes of a block of each kind."""
        chosen = self.forward if direction == "forward" else self.backward
        if chosen != "auto" or len(self.schedule.travellers) == 1:
            return self.schedule.travellers[0] if chosen == "auto" else chosen
        if pattern.plain:
            return min(self.schedule.travellers, key=lambda way: max(self.received(direction, way, sizes)))
        return _fewest(self, direction, pattern, tuple(sizes.items()))

    def received(
        self, direction: str, travels: str, sizes: Mapping[str, int], pattern: Pattern | None = None
    ) -> list[float]:
        """Bytes that each rank receives; without a pattern, or where the schedule cannot tell, of all blocks."""
        if pattern:
            steps = self.schedule.build(self.topology, pattern, direction, travels)
            if isinstance(steps, Counted):
                return steps.received(sizes)
        axes = tuple((axis, self.topology.size(axis)) for axis in self.topology.inner_axes)
        return self.schedule.received(axes, direction, travels, sizes)

    def plan(self, direction: str, pattern: Pattern, shape: Shape) -> Plan:
        """The whole plan, of all ranks. Raises ConfigError where the schedule has none for what is visible."""
        sizes = shape.bytes_per_token(direction)
        return _plan(self, direction, pattern, self.travels(direction, pattern, sizes), tuple(sizes.items()))

    def steps(self, direction: str, pattern: Pattern, shape: Shape, rank: int) -> Steps:
        """One rank's. The overlap pass needs the others' too."""
        if self.overlap:
            return self.plan(direction, pattern, shape).ranks[rank]
        travels = self.travels(direction, pattern, shape.bytes_per_token(direction))
        return self.schedule.build(self.topology, pattern, direction, travels)(rank)


@functools.lru_cache(maxsize=KEPT)
def _fewest(recipe: Recipe, direction: str, pattern: Pattern, sizes: tuple[tuple[str, int], ...]) -> str:
    """What travels so that the busiest rank receives the fewest bytes, and of such the mean rank."""

    def cost(travels: str) -> tuple[float, float]:
        found = recipe.received(direction, travels, dict(sizes), pattern)
        return max(found), sum(found)

    return min(recipe.schedule.travellers, key=cost)


@functools.lru_cache(maxsize=2)  # all ranks that one process has, as virtual ones, read the same plan
def _plan(recipe: Recipe, direction: str, pattern: Pattern, travels: str, sizes: tuple[tuple[str, int], ...]) -> Plan:
    steps = recipe.schedule.build(recipe.topology, pattern, direction, travels)
    plan = Plan.of(recipe.schedule.name, direction, recipe.size, steps, recipe.schedule.parts)
    if not recipe.overlap:
        return plan
    from .overlap import overlapped  # and the simulator

    return overlapped(plan, pattern, dict(sizes))


class Bound:
    """A program with the lengths of one call: read by the walker, the simulator and the memory figure. shapes: of the
    inner tensors of every stage. heads: who has which; of an inner program alone one member has all."""

    def __init__(
        self, program: Program, shapes: Sequence[Shape], shards: Shards, mask: Mask, takes: Takes,
        growing: _Growing | None, heads: Heads,
    ) -> None:  # fmt: skip
        self.program, self.shapes, self.shards, self.mask, self.takes = program, shapes, shards, mask, takes
        self.shape, self.heads = shapes[0], heads
        self._growing, self._run = growing, run_length(shards) if growing else 0
        self._per_token = [shape.elements_per_token(program.direction) for shape in shapes]
        # asked for at every walk, and made once
        self.fields = functools.cache(self._fields)
        self.tiles, self.calls = functools.cache(self._tiles), functools.cache(self._calls)
        self.size, self.traffic = functools.cache(self._size), functools.cache(self._traffic)
        self.places, self._placed = functools.cache(self._places), functools.cache(self._places_of)

    def _tiles(self, q: Key, kv: Key) -> tuple[Tile, ...]:
        """What is visible of a product."""
        if self._growing:
            return self._growing.tiles(q, kv, self._run)
        return tiles(self.shards.runs("q", q), self.shards.runs("kv", kv), self.mask, self.takes.square)

    def _calls(self, q: Key, kv: Key) -> tuple[Tile, ...]:
        """The same as calls that the kernel takes."""
        return calls(self.tiles(q, kv), self.takes)

    def tokens(self, kind: str, key: Key) -> int:
        """Of some blocks of q (or its results), or of k/v."""
        return self.shards.tokens(side_of(kind), key)

    def _size(self, slot: int, kind: str, key: Key) -> tuple[int, int]:
        """(elements that a unit in a slot brings, bytes that it takes of the slot)."""
        tokens, each = self.tokens(kind, key), self._per_token[self.program.slots[slot].stage][kind]
        return tokens * each, buffer_bytes(self.fields(slot), self.shape.batch * tokens)

    def _traffic(self, trade: Trade) -> Traffic:
        """What an exchange of heads sends and receives."""
        return exchange.traffic(self.heads, trade, self.shapes[trade.stage], self.shards, self.program.rank)

    def unit_bytes(self, slot: int, kind: str, key: Key) -> int:
        """Bytes of a slot that a unit takes."""
        return self.size(slot, kind, key)[1]

    def _places(self, slot: int, kind: str, key: Key) -> tuple[Place, ...]:
        """Where a unit's tensors stand in its part of a slot: the same object for units of as many tokens."""
        return self._placed(slot, self.tokens(kind, key))

    def _places_of(self, slot: int, tokens: int) -> tuple[Place, ...]:
        return places_of(self.fields(slot), self.shape.batch, tokens)

    def _fields(self, slot: int) -> tuple[Field, ...]:
        """The tensors of a unit in this slot, which is none of an exchange."""
        kind, role, _, stage, _ = self.program.slots[slot]
        shape = self.shapes[stage]
        return shape.fields(self.program.direction, kind, shape.wide if role == "wide" else None)

    def slot_bytes(self, slot: int) -> int:
        """What it must hold: the largest of its units, or one part after the other."""
        kind, role, keys, _, trade = self.program.slots[slot]
        if trade:
            traffic = self.traffic(trade)
            return sum(traffic.outgoing if role == "sent" else traffic.incoming) * traffic.itemsize
        tokens = max(self.tokens(kind, key) for key in (keys[:1] if self.shards.even else keys))
        parts = len(keys[0])
        return parts * buffer_bytes(self.fields(slot), self.shape.batch * -(-tokens // parts))


class Compiler:
    """Makes and keeps the programs of one rank. early: of the transport; see `Comm`."""

    def __init__(self, recipe: Recipe, rank: int, early: int = 0) -> None:
        self.recipe, self.rank, self.early = recipe, rank, early
        self._bound: OrderedDict[Hashable, Bound] = OrderedDict()
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()
        self._calls: OrderedDict[Hashable, tuple[tuple[Program, ...], Program]] = OrderedDict()
        self._patterns: OrderedDict[Hashable, Pattern] = OrderedDict()
        self._growing: OrderedDict[Hashable, _Growing] = OrderedDict()

    def bound(self, direction: str, mask: Mask, shards: Shards, shape: Shape, takes: Takes = PLAIN) -> Bound:
        """Raises ConfigError where the schedule cannot do what this mask asks of these shards."""

        def make() -> Bound:
            program, heads = self.program(direction, mask, shards, shape), Heads.of(shape.q_heads, shape.kv_heads)
            return Bound(program, (shape,), shards, mask, takes, self.growing(mask, shards, takes.square), heads)

        return _kept(self._bound, (direction, mask, shards, shape, takes), make)

    def call(
        self, direction: str, mask: Mask, shards: Shards, own: Shape, members: Members, takes: Takes,
        stages: int = 1, kept: Kept = ALL_KEPT, lse: bool = False,
    ) -> Bound:  # fmt: skip
        """Of a whole call. own: the shape of a rank's own tensors, of all heads; members: of Ulysses. Raises as `bound`
        does."""

        def make() -> Bound:
            heads = Heads.of(own.q_heads, own.kv_heads, members, stages)
            shapes = tuple(own.of_heads(*heads.inner(stage)) for stage in range(stages))
            inner = tuple(self.program(direction, mask, shards, shape) for shape in shapes)
            program = self.whole(inner, members.degree, shards, kept, lse)
            return Bound(program, shapes, shards, mask, takes, self.growing(mask, shards, takes.square), heads)

        return _kept(self._bound, (direction, mask, shards, own, members, takes, stages, kept, lse), make)

    def whole(self, inner: tuple[Program, ...], members: int, shards: Shards, kept: Kept, lse: bool) -> Program:
        """The program of a call, from that of each stage."""
        q, kv = (members_tokens(shards, side, self.rank, members) for side in ("q", "kv"))
        more = members, q == kv, kept, lse, self.recipe.overlap
        # the inner programs are kept with it: a number of `id` is good for as long as they are
        key = tuple(map(id, inner)), *more
        return _kept(self._calls, key, lambda: (inner, exchange.whole(inner, *more)))[1]

    def program(self, direction: str, mask: Mask, shards: Shards, shape: Shape) -> Program:
        pattern = self.pattern(mask, shards)
        wide_travel = shape.travel == shape.wide
        # of the shape only what a choice hangs on
        sizes = tuple(shape.bytes_per_token(direction).items()) if self.recipe.overlap else ()
        travels = self.recipe.travels(direction, pattern, shape.bytes_per_token(direction))

        def make() -> Program:
            name, parts = self.recipe.schedule.name, self.recipe.schedule.parts
            steps = self.recipe.steps(direction, pattern, shape, self.rank)
            early = self.early if self.recipe.overlap else 0
            return lower(name, direction, self.rank, self.recipe.size, steps, wide_travel, parts, early)

        return _kept(self._programs, (direction, pattern, travels, wide_travel, sizes), make)

    def growing(self, mask: Mask, shards: Shards, square: bool) -> _Growing | None:
        """What gives tiles for these shards by their length alone, where there is such a thing."""
        if not (mask.scale_free and isinstance(shards, EvenShards) and run_length(shards) > PROBE):
            return None
        key = mask, shards.layout, shards.size, square
        return _kept(self._growing, key, lambda: _Growing(*key))

    def pattern(self, mask: Mask, shards: Shards) -> Pattern:
        standing = _stand_in(mask, shards)
        return _kept(self._patterns, (mask, standing), lambda: pattern_of(mask, standing))


def pattern_of(mask: Mask, shards: Shards) -> Pattern:
    """Which pairs of blocks meet: some query of the one sees some key of the other."""
    q, kv = ([shards.runs(side, (block,)) for block in range(shards.size * shards.parts)] for side in ("q", "kv"))
    return Pattern(visibility(q, kv, mask), even=shards.even)


def weight(mask: Mask, shards: Shards) -> Callable[[int, int], float]:
    """The share of the product of a q block and a kv block that the mask leaves."""

    @functools.cache
    def share(q: int, kv: int) -> float:
        whole = shards.tokens("q", (q,)) * shards.tokens("kv", (kv,))
        seen = sum(tile.products for tile in tiles(shards.runs("q", (q,)), shards.runs("kv", (kv,)), mask))
        return seen / whole if whole else 0.0

    return share


def _stand_in(mask: Mask, shards: Shards) -> Shards:
    """Shards of few tokens whose blocks meet where these do."""
    if mask.scale_free and isinstance(shards, EvenShards):
        run = run_length(shards)
        if run > 2:  # two tokens have an order, which is all that such a mask looks at
            return dataclasses.replace(shards, seq=shards.seq // run * 2)
    return shards


class _Growing:
    """Tiles of products for runs of any length. Under a mask of order alone every edge of a tile grows linearly with
    the length, so two short lengths show it."""

    def __init__(self, mask: Mask, layout: str, size: int, square: bool) -> None:
        runs = len(LAYOUTS[layout].runs(2 * size, size, 0)) * size
        self.small, self.large = (EvenShards(layout, runs * length, size) for length in (PROBE, PROBE + 1))
        self.mask, self.square = mask, square
        self.known: dict[tuple[Key, Key], tuple[tuple[Tile, tuple[int, ...]], ...]] = {}

    def tiles(self, q: Key, kv: Key, run: int) -> tuple[Tile, ...]:
        """For runs of so many tokens, PROBE or more."""
        lines = self.known.get((q, kv))
        if lines is None:
            lines = self.known[q, kv] = self.lines(q, kv)
        more = run - PROBE
        return tuple(
            Tile(low.q0 + more * a, low.q1 + more * b, low.k0 + more * c, low.k1 + more * d, low.kind, low.width)
            for low, (a, b, c, d) in lines
        )

    def lines(self, q: Key, kv: Key) -> tuple[tuple[Tile, tuple[int, ...]], ...]:
        """The tiles at PROBE, and by how much each edge grows with a run."""
        small, large = (
            tiles(shards.runs("q", q), shards.runs("kv", kv), self.mask, self.square)
            for shards in (self.small, self.large)
        )
        return tuple(
            (low, tuple(b - a for a, b in zip(low[:4], high[:4], strict=True)))
            for low, high in zip(small, large, strict=True)
        )


def run_length(shards: Shards) -> int:
    """Of every run, where a named layout gives them; 0 where there are no tokens."""
    return next((run.length for run in shards.runs("q", (0,))), 0)


def side_of(kind: str) -> str:
    """Whose tokens a unit of this kind has: those of "q" or of "kv"."""
    return "kv" if kind in ("kv", "dkv") else "q"


def _kept(cache: OrderedDict[Hashable, Made], key: Hashable, make: Callable[[], Made]) -> Made:
    """What was made for this key; the oldest goes when there are too many."""
    if key not in cache:
        cache[key] = make()
        if len(cache) > KEPT:
            cache.popitem(last=False)
    return cache[key]
