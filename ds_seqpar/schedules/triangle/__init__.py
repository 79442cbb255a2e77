"""Triangle schedule for causal attention, in which each rank receives only the data for its tile of the causal
triangle.

docs/choosing_settings.md derives the schedule with diagrams, and shows which rank owns each chunk, why every product is
computed exactly once, and how many bytes are sent.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...base.errors import SECTION, ConfigError
from ...core.compiler.schedules.actions import ACCUMULATORS, Compute, Move, Step, Steps
from ...core.compiler.schedules.base import HeadCounts, Schedule, ScheduleOptions, count
from ...core.compiler.schedules.plan import BlockMask, Counted, bits
from ...core.compiler.sharding.layout import Axes, Layout, Run, Runs, Topology
from .tiling import Stop, Tiling, pair_of, tiling


def triangle(topology: Topology, block_mask: BlockMask, direction: str, moving_side: str = "kv") -> Counted:
    """Return the steps of the triangle schedule, in which each rank computes one tile of the causal triangle.

    Rank (i, j), with j < i < T, computes attention from q in sequence block i to k/v in block j. Each block has T - 1
    chunks. On the diagonal, the rank computes products for which no additional bytes are sent. In block i, the rank
    multiplies its own early k/v chunk by all early queries that see the chunk. In block j, the rank multiplies its own
    late query chunk by all k/v that the chunk sees. Every rank computes T (T - 1) products of chunks, where
    half-visible products count as half. With R strips per block, a rank's tile consists of one strip of q and a whole
    block of k/v; see `Tiling`.

    Chunks of q rotate around the ranks of a row in T - 2 hops, and chunks of k/v rotate around the ranks of a column in
    R (T - 1) - 1 hops. Results are then sent to the chunks' owners on the same routes. A hop of k/v starts in every
    second step. A hop of q starts in the step before a hop of k/v, and hops of q are spaced so that both rotations take
    the same time. A chunk may arrive at any time before its next hop starts, so a rank forwards q without waiting for
    k/v, and k/v without waiting for q. In plans, chunks are numbered by owner. Rank r owns chunk `2 * r`, which is late
    in block j, and chunk `2 * r + 1`, which is early in block i.

    Raises:
        ConfigError: A query sees a later chunk, or `moving_side` is "q" (in this schedule, both sides move).
    """
    if moving_side != "kv":
        raise ConfigError('triangle moves k/v and queries by itself; got traveling q, use "kv" or "auto"')
    tiles = tiling(topology.size("strip", "pair"), topology.size("strip"))
    seen = 0
    for q in tiles.chunks:
        seen |= 1 << q
        if later := block_mask.rows[q] & ~seen:
            raise ConfigError(
                "triangle needs causal attention, in which no query sees a later chunk; got queries of chunk "
                f"{q} that see keys of chunk {next(bits(later))}, use a causal mask, or schedule ring or mesh"
            )
    return _Triangle(tiles, block_mask, direction)


def can_compute(q: int, kv: int) -> bool:
    """Return whether a k/v chunk's place in the sequence is at or before the place of a query chunk.

    Without strips, the places of chunks depend only on their numbers.
    """
    blocks = pair_of(max(q, kv) // 2)[0] + 1
    return _is_causal(tiling(blocks * (blocks - 1) // 2, 1), q, kv)


def _is_causal(tiles: Tiling, q: int, kv: int) -> bool:
    return tiles.place[kv] <= tiles.place[q]


class _Triangle(Counted):
    def __init__(self, tiles: Tiling, block_mask: BlockMask, direction: str) -> None:
        self.tiles, self.block_mask, self.direction = tiles, block_mask, direction
        self.hops = {side: tiles.length(side) - 1 for side in ("q", "kv")}  # number of hops that a rotating chunk makes
        self.turn = self.comes("kv", self.hops["kv"])  # first step in which results are sent
        self.steps = max(1, self.turn + 2 * self.hops["kv"])
        self.products = functools.cache(self._products)
        self.rounds = functools.cache(self._rounds)
        self.reads = functools.cache(self._reads)

    def _products(self, rank: int) -> list[tuple[int, int]]:
        """Return the (q chunk, k/v chunk) pairs that a rank computes, in its tile and in its share of the diagonal."""
        i, _, j = self.tiles.tile(rank)
        row, column = self.tiles.members("q", self.groups(rank, "q")[0]), self.tiles.members("kv", j)
        late = column.index(2 * rank)
        pairs = [(q, kv) for q in row for kv in column]
        pairs += [(q, row[j]) for q in row[j:i]]
        pairs += [(column[late], kv) for kv in column[: late + 1]]
        pairs += self.tiles.staircase(rank)
        return [pair for pair in pairs if self.block_mask(*pair)]

    def _reads(self, rank: int) -> tuple[frozenset[int], frozenset[int]]:
        """Return the q chunks and the k/v chunks in a rank's products."""
        pairs = self.products(rank)
        return frozenset(q for q, _ in pairs), frozenset(kv for _, kv in pairs)

    def groups(self, rank: int, side: str) -> list[int]:
        """Return the strips (side q) or blocks (side kv) from which a rank owns or receives a chunk.

        The strip of the rank's row, or the rank's own block, comes first. The other strips or blocks follow in
        descending order. Any two ranks therefore list their common groups in the same order.
        """
        i, strip, j = self.tiles.tile(rank)
        if side == "kv":
            return [i, j]
        late = self.tiles.place[2 * rank] // self.tiles.long
        lent = {strip for strip, _ in self.tiles.lent_to(rank)}
        return [i * self.tiles.strips + strip, *sorted({late, *lent}, reverse=True)]

    def visits(self, side: str, number: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yield every rotating chunk of a group, with (rank, distance in hops) for each reader.

        Readers are the members, other than the chunk's owner, that read the chunk. Chunks that ranks take for the
        staircase are yielded last, in the same form.
        """
        route = self.tiles.route(side, number)
        for start, (chunk, _) in enumerate(route):
            stops = [(route[(start + hop) % len(route)].rank, hop) for hop in range(1, len(route))]
            yield chunk, [(r, hop) for r, hop in stops if r is not None and chunk in self.reads(r)[side == "kv"]]
        for chunk, ranks in self.tiles.stairs(side, number):
            yield chunk, [(r, hop) for hop, r in enumerate(ranks, 1) if chunk in self.reads(r)[side == "kv"]]

    def _rounds(self, side: str, number: int) -> list[tuple[str, Move, int]]:
        """Return all moves of a group as (field of `Step`, move, step).

        The owner of a chunk sends the chunk to its first reader, and each reader forwards the chunk to the next reader.
        Results travel on the same route. Each member adds its own result, and the last member sends the sum to the
        chunk's owner.
        """
        rounds, kind = [], self.kind(side)
        for chunk, visits in self.visits(side, number):
            stops = [chunk // 2, *(rank for rank, _ in visits), chunk // 2]
            for (rank, hop), src, dst in zip(visits, stops, stops[2:], strict=False):
                start = self.starts(side, hop)
                within = self.comes(side, hop) - start
                rounds.append(("moves", Move(src=src, dst=rank, kind=side, key=(chunk,), within=within), start))
                if kind:
                    result = Move(src=rank, dst=dst, kind=kind, key=(chunk,), within=within)
                    rounds.append(("results", result, self.leaves(side, hop)))
        return rounds

    def kind(self, side: str) -> str:
        """Return the kind of result that a rank sends for chunks of this side, or "" if no result is sent."""
        kinds = ACCUMULATORS[self.direction]
        return kinds[0] if side == "q" else "dkv" if "dkv" in kinds else ""

    def __call__(self, rank: int) -> Steps:
        steps: list[dict[str, list]] = [defaultdict(list) for _ in range(self.steps)]
        for side in ("q", "kv"):
            for name, move, t in itertools.chain(*(self.rounds(side, number) for number in self.groups(rank, side))):
                if rank in move.ranks:
                    steps[t][name].append(move)
        for t, pairs in enumerate(self.timed(rank)):
            steps[t]["computes"] = [Compute(rank=rank, q=(q,), kv=(kv,)) for q, kv in pairs]
        return tuple(Step(**{name: tuple(actions) for name, actions in step.items()}) for step in steps)

    def timed(self, rank: int) -> list[list[tuple[int, int]]]:
        """Return a rank's products by step.

        In each step, an equal share of the remaining products is computed, plus any further products whose results must
        be sent in the step. Products whose results are sent earliest are computed first.
        """
        far = {side: self.away(rank, side) for side in ("q", "kv")}
        waiting = []
        for q, kv in self.products(rank):
            hops = [(side, far[side].get(chunk, 0)) for side, chunk in (("q", q), ("kv", kv))]
            waiting.append((min(self.leaves(*hop) for hop in hops), max(self.comes(*hop) for hop in hops), (q, kv)))
        waiting.sort()
        steps = []
        for t in range(self.steps):
            share = -(-len(waiting) // (self.steps - t))
            ready = [entry for entry in waiting if entry[1] <= t]
            taken = [entry for n, entry in enumerate(ready) if n < share or entry[0] <= t]
            waiting = [entry for entry in waiting if entry not in taken]
            steps.append([pair for _, _, pair in taken])
        return steps

    def away(self, rank: int, side: str) -> dict[int, int]:
        """Return the distance in hops for each chunk that a rank receives."""
        hops: dict[int, int] = {}
        for number in self.groups(rank, side):
            for chunk, visits in self.visits(side, number):
                for hop in (hop for visitor, hop in visits if visitor == rank):
                    hops[chunk] = hop
        return hops

    def starts(self, side: str, hop: int) -> int:
        """Return the step in which a chunk's hop starts. Hops are counted from 1."""
        if side == "kv":
            return 2 * hop - 1 if hop else 0
        return 2 * ((hop - 1) * self.hops["kv"] // self.hops["q"]) if hop else 0

    def comes(self, side: str, hops: int) -> int:
        """Return the first step in which a chunk from `hops` hops away can be used."""
        return self.starts(side, hops + 1) if hops else 0

    def leaves(self, side: str, hops: int) -> int:
        """Return the step in which the results for a chunk from `hops` hops away are sent.

        For a rank's own chunks, the last step is returned, since their results are never sent.
        """
        return self.turn + self.starts(side, hops) if hops and self.kind(side) else self.steps - 1

    def received(self, units: Mapping[str, float]) -> list[float]:
        elements: list[float] = [0] * self.tiles.ranks
        for side, number in self.tiles.groups():
            for _, move, _ in self.rounds(side, number):
                elements[move.dst] += units[move.kind]
        return elements


def received(axes: Axes, direction: str, moving_side: str, units: Mapping[str, float]) -> list[float]:
    """Return the number of elements that each rank receives.

    A rank receives T - 2 chunks of q and R (T - 1) - 1 chunks of k/v. A rank also receives one result per received
    chunk (except for results that start at the rank), and one result from the group to which the rank does not belong.
    The elements received for `Tiling.stairs` are added.
    """
    tiles = _tiling_of(dict(axes))
    kinds = {"q": "out"} if direction == "forward" else {"q": "dq", "kv": "dkv"}
    hops = {side: tiles.length(side) - 1 for side in ("q", "kv")}
    elements: list[float] = [sum(hops[side] * units[side] for side in hops)] * tiles.ranks
    for side, number in tiles.groups():
        result = units[kinds[side]] if side in kinds else 0
        route = tiles.route(side, number)
        for n, (chunk, rank) in enumerate(route):
            elements[chunk // 2 if rank is None else rank] += result * (
                1 if rank is None else hops[side] - _foreign(route, n)
            )
        for chunk, ranks in tiles.stairs(side, number):
            for rank, home in zip(ranks, [*ranks[1:], chunk // 2], strict=True):
                elements[rank] += units[side]
                elements[home] += result
    return elements


def _foreign(route: Sequence[Stop], at: int) -> int:
    """Return the number of outside chunks that start directly before a member of a group.

    The member is the first rank to compute results for the outside chunks.
    """
    return next(n for n in range(len(route)) if route[at - 1 - n].rank is not None)


def _tiling_of(axes: Mapping[str, int]) -> Tiling:
    strips = axes.get("strip", 1)
    return tiling(strips * axes["pair"], strips)


STRIPS = {1: "pairs", 2: "pairs2", 4: "pairs4", 8: "pairs8"}  # number of strips per block -> required layout


def pairs(tokens: int, ranks: int, rank: int, strips: int = 1) -> Runs:
    """Return a rank's two chunks, one in a block and one in a later block.

    The number of ranks must be `strips` times T (T - 1) / 2.
    """
    chunks = tiling(ranks, strips).owned[rank]
    ends = [(tokens * c // (2 * ranks), tokens * (c + 1) // (2 * ranks)) for c in chunks]
    return tuple(Run(low, 1, high - low) for low, high in ends)


def _layout(strips: int, name: str) -> Layout:
    return Layout(name=name, runs=functools.partial(pairs, strips=strips), chunks=2, blocks_per_rank=2)


def shapes(ranks: int) -> list[ScheduleOptions]:
    return [{"strips": strips} for strips in STRIPS if _fits(ranks, strips)]


def _fits(ranks: int, strips: int) -> bool:
    blocks, more = pair_of(ranks // strips)
    return not ranks % strips and not more and (blocks > 2 or strips == 1)


def resolve(ranks: int, fixed: ScheduleOptions, heads: HeadCounts | None) -> ScheduleOptions:
    """Return the number of strips.

    The default minimizes the number of elements that the busiest rank receives in the forward and backward passes with
    these heads.
    """
    legal = [options["strips"] for options in shapes(ranks)]
    if not legal:
        nearest = [next(n for n in numbers if shapes(n)) for numbers in (range(ranks, 0, -1), itertools.count(ranks))]
        raise ConfigError(
            f"{SECTION}.schedule triangle needs 1, 2, 4 or 8 times T (T - 1) / 2 CP ranks, size / "
            f"ulysses; got {ranks}, use {nearest[0]} or {nearest[1]}, or schedule mesh"
        )
    strips = fixed.get("strips") or min(legal, key=lambda strips: _elements(ranks, strips, heads or (1, 1)))
    if strips not in legal:
        raise ConfigError(f"{SECTION}.strips must be one of {legal} for {ranks} CP ranks; got {strips}, change it")
    return {"strips": strips}


def _elements(ranks: int, strips: int, heads: HeadCounts) -> float:
    """Return the number of elements that the busiest rank receives in the forward and backward passes, in units of one
    chunk of one head.
    """
    q, kv = heads[0], 2 * heads[1]
    units = {"forward": {"q": q, "kv": kv, "out": q}, "backward": {"q": 2 * q, "kv": kv, "dq": q, "dkv": kv}}
    return sum(max(received(axes(ranks, {"strips": strips}), direction, "kv", units[direction])) for direction in units)


def axes(ranks: int, options: ScheduleOptions) -> Axes:
    return (("strip", options["strips"]), ("pair", ranks // options["strips"]))


def by_shape(ranks: int, options: ScheduleOptions) -> Mapping[str, Any]:
    """Return the fields that depend on the number of strips, which are the layout and the order of chunks."""
    layout = STRIPS[options["strips"]]
    return {
        "layouts": (layout,),
        "default_layout": layout,
        "can_compute": lambda q, kv: _is_causal(_tiling_of(dict(axes(ranks, options))), q, kv),
    }


SCHEDULE = Schedule(
    name="triangle",
    summary="causal attention only: ranks are the tiles of the causal triangle, 0.7 of a mesh's bytes",
    build=triangle,
    axes=axes,
    received=received,
    settings=(count("strips", "of q, to each block of k/v: more for fewer k/v heads"),),
    shapes=shapes,
    resolve=resolve,
    by_shape=by_shape,
    extra_layouts=tuple(_layout(*item) for item in STRIPS.items()),
    layouts=("pairs",),
    default_layout="pairs",
    moving_sides=("kv",),
    can_compute=can_compute,
    ring_axes=("strip", "pair"),
)
