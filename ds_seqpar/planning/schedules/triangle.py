"""The triangle: causal attention in which a rank receives what its tile of the causal triangle needs, and no more.

docs/triangle.md derives it in pictures: who owns what, that every product is computed once, and the bytes.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...errors import SECTION, ConfigError
from ..actions import ACCUMULATORS, Compute, Move, Step, Steps
from ..layout import pair_of
from ..plan import Counted, Pattern, bits
from ..topology import Axes, Topology
from .base import Heads, Own, Schedule


def triangle(topology: Topology, pattern: Pattern, direction: str, travels: str = "kv") -> Counted:
    """Rank (i, j), j < i < T, computes q of sequence block i with k/v of block j, each of T - 1 chunks, and of the
    diagonal what costs no bytes: of block i all early queries that see its own early k/v chunk, of block j all that its
    own late query chunk sees. Every rank then has T (T - 1) products of chunks to do, those half seen counted half.

    Chunks go round: q round the ranks (i, .), k/v round the ranks (., j), T - 2 hops each; then results on the same
    ways to their owners. A hop of q starts in every second step and one of k/v between: each has two steps to arrive,
    so that a rank need not have got both before it passes on the one. Plans number chunks by their owner: rank r has
    2 r, which is late in block j, and 2 r + 1, early in block i. Raises ConfigError where a query sees a later chunk,
    or for travels="q" (both sides travel here).
    """
    if travels != "kv":
        raise ConfigError('triangle moves k/v and queries by itself; got travelling q, use "kv" or "auto"')
    seen = 0
    for q in sorted(range(pattern.size), key=_place):
        seen |= 1 << q
        if later := pattern.rows[q] & ~seen:
            raise ConfigError(
                "triangle needs causal attention, in which no query sees a later chunk; got queries of chunk "
                f"{q} that see keys of chunk {next(bits(later))}, use a causal mask, or schedule ring or mesh"
            )
    return _Triangle(topology.size("pair"), pattern, direction)


def takes(q: int, kv: int) -> bool:
    """Whether the k/v chunk stands at the query chunk's place or before it, which hangs on their numbers alone."""
    return _place(kv) <= _place(q)


def _place(chunk: int) -> tuple[int, int, int]:
    """Sorts chunks by position: the block, early before late, and within each."""
    i, j = pair_of(chunk // 2)
    return (i, 0, j) if chunk % 2 else (j, 1, -i)


class Stop(NamedTuple):
    """A place on the way round a group. rank: who is there, None where the chunk's owner is outside of the group."""

    chunk: int
    rank: int | None


class _Blocks:
    """T blocks of T - 1 chunks, for `ranks` = T (T - 1) / 2."""

    def __init__(self, ranks: int) -> None:
        self.count = pair_of(ranks)[0]

    def chunks(self, block: int) -> list[int]:
        """Those of a block, in the order of positions: `block` early ones and then the late ones."""
        early = [2 * rank + 1 for rank in self.group("q", block)]
        return early + [2 * rank for rank in reversed(self.group("kv", block))]

    def group(self, side: str, block: int) -> list[int]:
        """The ranks that need all of a block's q: (block, .); or all of its k/v: (., block)."""
        if side == "q":
            return [_number(block, j) for j in range(block)]
        return [_number(i, block) for i in range(block + 1, self.count)]

    def way(self, side: str, block: int) -> list[Stop]:
        """A group's way: each of the block's chunks starts at a stop and goes on by one a turn. Those that come from
        outside stand evenly between the members', so that all members' results have as far to go."""
        chunks, members = self.chunks(block), self.group(side, block)
        own = [chunk for chunk in chunks if chunk // 2 in members]
        foreign = iter([chunk for chunk in chunks if chunk // 2 not in members])
        at = {number * len(chunks) // len(own): chunk for number, chunk in enumerate(own)}
        return [Stop(at[n], at[n] // 2) if n in at else Stop(next(foreign), None) for n in range(len(chunks))]


def _number(i: int, j: int) -> int:
    return i * (i - 1) // 2 + j


class _Triangle(Counted):
    def __init__(self, ranks: int, pattern: Pattern, direction: str) -> None:
        self.ranks, self.pattern, self.direction, self.blocks = ranks, pattern, direction, _Blocks(ranks)
        self.hops = max(0, self.blocks.count - 2)  # of a chunk that goes round
        self.turn = self.comes("kv", self.hops)  # the first step in which results leave
        self.steps = max(1, self.turn + 2 * self.hops)
        self.products = functools.cache(self._products)
        self.reads = functools.cache(self._reads)

    def _products(self, rank: int) -> list[tuple[int, int]]:
        """The (q chunk, k/v chunk) pairs of a rank that are needed: its tile and its share of the diagonal."""
        i, j = pair_of(rank)
        row, column = self.blocks.chunks(i), self.blocks.chunks(j)
        late = column.index(2 * rank)
        found = [(q, kv) for q in row for kv in column]
        found += [(q, row[j]) for q in row[j:i]]
        found += [(column[late], kv) for kv in column[: late + 1]]
        return [pair for pair in found if self.pattern(*pair)]

    def _reads(self, rank: int) -> tuple[frozenset[int], frozenset[int]]:
        """The q and the k/v chunks in its products."""
        pairs = self.products(rank)
        return frozenset(q for q, _ in pairs), frozenset(kv for _, kv in pairs)

    def visits(self, side: str, block: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Of every chunk that goes round a group: the members that read it, but for its owner, each with how many hops
        it is away."""
        if not self.blocks.group(side, block):
            return
        way = self.blocks.way(side, block)
        for start, (chunk, _) in enumerate(way):
            stops = [(way[(start + hop) % len(way)].rank, hop) for hop in range(1, len(way))]
            yield chunk, [(r, hop) for r, hop in stops if r is not None and chunk in self.reads(r)[side == "kv"]]

    def moves(self, side: str, block: int) -> Iterator[tuple[Move, int]]:
        """Operands round a group, each with its step: the chunk's owner sends to the first member, who passes it on."""
        for chunk, visits in self.visits(side, block):
            holders = [chunk // 2, *(rank for rank, _ in visits)]
            for src, (rank, hop) in zip(holders, visits, strict=False):
                yield Move(src=src, dst=rank, kind=side, key=(chunk,), within=2), self.starts(side, hop)

    def results(self, side: str, block: int) -> Iterator[tuple[Move, int]]:
        """Results on the same way, each member's added to those before it, and at the end to the owner's."""
        for chunk, visits in self.visits(side, block) if self.kind(side) else ():
            ends = [*(rank for rank, _ in visits[1:]), chunk // 2]
            for (rank, hop), dst in zip(visits, ends, strict=False):
                yield Move(src=rank, dst=dst, kind=self.kind(side), key=(chunk,), within=2), self.leaves(side, hop)

    def kind(self, side: str) -> str:
        """Of what is accumulated for this side's chunks and leaves the rank; "" for none."""
        kinds = ACCUMULATORS[self.direction]
        return kinds[0] if side == "q" else "dkv" if "dkv" in kinds else ""

    def __call__(self, rank: int) -> Steps:
        steps: list[dict[str, list]] = [defaultdict(list) for _ in range(self.steps)]
        for side, block in itertools.product(("q", "kv"), pair_of(rank)):  # of both blocks it owns a chunk
            for name, found in (("moves", self.moves), ("results", self.results)):
                for move, t in found(side, block):
                    if rank in move.ranks:
                        steps[t][name].append(move)
        for t, pairs in enumerate(self.timed(rank)):
            steps[t]["computes"] = [Compute(rank=rank, q=(q,), kv=(kv,)) for q, kv in pairs]
        return tuple(Step(**{name: tuple(actions) for name, actions in step.items()}) for step in steps)

    def timed(self, rank: int) -> list[list[tuple[int, int]]]:
        """A rank's products by step: in each what must leave with its results, and as many as are left for each step
        that is left; of those that can be computed, first what has to leave first."""
        far = {side: self.away(rank, side) for side in ("q", "kv")}
        waiting = []
        for q, kv in self.products(rank):
            hops = [(side, far[side].get(chunk, 0)) for side, chunk in (("q", q), ("kv", kv))]
            waiting.append((min(self.leaves(*one) for one in hops), max(self.comes(*one) for one in hops), (q, kv)))
        waiting.sort()
        found = []
        for t in range(self.steps):
            share = -(-len(waiting) // (self.steps - t))
            ready = [one for one in waiting if one[1] <= t]
            taken = [one for n, one in enumerate(ready) if n < share or one[0] <= t]
            waiting = [one for one in waiting if one not in taken]
            found.append([pair for _, _, pair in taken])
        return found

    def away(self, rank: int, side: str) -> dict[int, int]:
        """How many hops each chunk that comes to a rank is away from it; 0 for its own."""
        way = self.blocks.way(side, pair_of(rank)[side == "kv"])
        here = next(n for n, stop in enumerate(way) if stop.rank == rank)
        return {chunk: (here - n) % len(way) for n, (chunk, _) in enumerate(way)}

    def starts(self, side: str, hop: int) -> int:
        """The step in which a chunk's hop of this number, from 1, starts."""
        return 2 * (hop - 1) + (side == "kv") if hop else 0

    def comes(self, side: str, hops: int) -> int:
        """The first step that has a chunk from so many hops away."""
        return self.starts(side, hops) + 2 if hops else 0

    def leaves(self, side: str, hops: int) -> int:
        """The step in which the results of a chunk from so many hops away leave; those of own chunks stay."""
        return self.turn + self.starts(side, hops) if hops and self.kind(side) else self.steps - 1

    def received(self, units: Mapping[str, float]) -> list[float]:
        found: list[float] = [0] * self.ranks
        for side, block in itertools.product(("q", "kv"), range(self.blocks.count)):
            for move, _ in itertools.chain(self.moves(side, block), self.results(side, block)):
                found[move.dst] += units[move.kind]
        return found


def received(axes: Axes, direction: str, travels: str, units: Mapping[str, float]) -> list[float]:
    """T - 2 chunks of q and of k/v; and of their results as many, but for those that start with a rank, and one more
    from the group that it is outside of."""
    ((_, ranks),) = axes
    blocks = _Blocks(ranks)
    hops = max(0, blocks.count - 2)
    kinds = {"q": "out"} if direction == "forward" else {"q": "dq", "kv": "dkv"}
    found: list[float] = [hops * (units["q"] + units["kv"])] * ranks
    for side, kind in kinds.items():
        for block in range(blocks.count):
            way = blocks.way(side, block) if blocks.group(side, block) else []
            for n, (chunk, rank) in enumerate(way):
                if rank is None:
                    found[chunk // 2] += units[kind]
                else:
                    found[rank] += units[kind] * (hops - _foreign(way, n))
    return found


def _foreign(way: Sequence[Stop], at: int) -> int:
    """Chunks from outside that start right before a member: of theirs its result is the first."""
    return next(n for n in range(len(way)) if way[at - 1 - n].rank is not None)


def shapes(ranks: int) -> list[Own]:
    return [{}] if pair_of(ranks)[1] == 0 else []


def resolve(ranks: int, given: Own, heads: Heads | None) -> Own:
    if not shapes(ranks):
        below = pair_of(ranks)[0]
        fits = [side * (side - 1) // 2 for side in (below, below + 1)]
        raise ConfigError(
            f"{SECTION}.schedule triangle needs T (T - 1) / 2 inner ranks, size / ulysses; got {ranks}, use "
            f"{fits[0]} or {fits[1]}, or schedule mesh"
        )
    return {}


SCHEDULE = Schedule(
    name="triangle",
    summary="causal attention only: ranks are the tiles of the causal triangle, 0.7 of a mesh's bytes",
    build=triangle,
    axes=lambda ranks, own: (("pair", ranks),),
    received=received,
    shapes=shapes,
    resolve=resolve,
    layouts=("pairs",),
    default_layout="pairs",
    travellers=("kv",),
    takes=takes,
    ring_axes=("pair",),
)
