"""The mesh family: Attention2D, WallFacer and Ring Attention as shapes (a, b, R) of one schedule.

Attention2D is a mesh without a ring. WallFacer is a mesh of shape (C, C, A / C^2).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from ....base.errors import SECTION, ConfigError
from ..sharding.layout import Axes, Key, Topology, divisors
from .actions import ACCUMULATORS, OPERANDS, Collective, Compute, Gather, Move, ReduceScatter, Step, Steps, Unit
from .base import HeadCounts, Schedule, ScheduleOptions, Setting, blocks_received, count, is_count
from .plan import BlockMask, Counted, bits
from .ring import Rotation, Round


def mesh(topology: Topology, block_mask: BlockMask, direction: str, moving_side: str = "kv") -> Counted:
    """Return the steps of a mesh in which the rank with coordinates x, y, z is p = x + a (y + b z).

    Ranks gather q along x and k/v along y, and rotate either q or k/v along z. Results (`out` and `lse`, or gradients)
    are reduce-scattered along the axis on which the corresponding operand was gathered. If k/v rotates, the q block of
    rank (x0, y0, z0) and the kv block of rank (x1, y1, z1) meet exactly once, on rank (x1, y0, z0).

    The shape (1, 1, A) is Ring Attention. The shape (a, b, 1) is Attention2D (Algs. 1-3; cols = a, rows = b). The shape
    (C, C, A / C^2) is WallFacer with teams of C. This implementation of WallFacer needs no initial k/v transfer,
    because q and k/v are gathered along different axes. Collectives are used only if all blocks have the same length
    and every member of the group needs all of them. Otherwise, owners send their blocks directly to the ranks that need
    them.
    """
    a, b, turns = (topology.size(axis) for axis in "xyz")
    plane, size = a * b, a * b * turns

    def keys(rank: int) -> tuple[Key, Key]:
        """Return the blocks that a rank gathers: the q blocks of its row and the k/v blocks of its column."""
        row, column = rank - rank % a, rank - rank % plane + rank % a
        return tuple(range(row, row + a)), tuple(range(column, column + plane, a))

    route = Round(
        size=size,
        there=lambda rank, t: (rank + plane * t) % size,
        here=lambda rank, t: (rank - plane * t) % size,
        keys=keys,
        gathers=lambda rank: _collectives(Gather, *zip(("q", "kv"), keys(rank), strict=True)),
        reduces=lambda rank: _collectives(ReduceScatter, *zip(ACCUMULATORS[direction], keys(rank), strict=False)),
    ).facing(moving_side)
    if plane == 1:
        return Rotation(route, turns, direction, moving_side, block_mask)
    groups = [_group(route, rank, turns, moving_side) for rank in range(size)]
    reads = [_read(q, kv, block_mask) for q, kv in groups]
    # a gather transfers all blocks of its group, so every member must read every block
    if block_mask.even and reads == [(_mask(q), kv) for q, kv in groups]:
        return Rotation(route, turns, direction, moving_side, block_mask)
    return Direct(size, direction, lambda rank: _pairs(route, rank, turns, moving_side, block_mask), reads.__getitem__)


def _collectives(cls: Callable[..., Collective], *groups: tuple[str, Key]) -> tuple:
    return tuple(
        cls(ranks=ranks, kind=kind, keys=tuple((rank,) for rank in ranks)) for kind, ranks in groups if len(ranks) > 1
    )


def _group(route: Round, rank: int, turns: int, moving_side: str) -> tuple[Key, int]:
    """Return the q blocks that a rank receives (as a tuple) and the kv blocks that it receives (as a bitmask)."""
    visitors = [route.keys(route.here(rank, t)) for t in range(turns)]
    if moving_side == "kv":
        return route.keys(rank)[0], _mask(block for _, kv in visitors for block in kv)
    return tuple(block for q, _ in visitors for block in q), _mask(route.keys(rank)[1])


def _read(q: Key, kv: int, block_mask: BlockMask) -> tuple[int, int]:
    """Return bitmasks of the q blocks and kv blocks that are in at least one product."""
    rows = block_mask.rows
    return _mask([i for i in q if rows[i] & kv]), functools.reduce(operator.or_, [rows[i] & kv for i in q])


def _mask(blocks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, [1 << block for block in blocks], 0)


def _pairs(route: Round, rank: int, turns: int, moving_side: str, block_mask: BlockMask) -> Sequence[Pairs]:
    """Return the rank's products, grouped by step.

    In step 0, the rank computes only the product of its own blocks while other blocks arrive. Each turn of the rotation
    adds one step.
    """
    local_pairs = [(rank, rank)] if block_mask(rank, rank) else []
    steps: list[Pairs] = [local_pairs]
    for t in range(turns):
        moving, staying = route.keys(route.here(rank, t)), route.keys(rank)
        q, kv = (staying[0], moving[1]) if moving_side == "kv" else (moving[0], staying[1])
        steps.append([(i, j) for i in q for j in kv if block_mask(i, j) and (i, j) != (rank, rank)])
    return steps


def sides(ranks: int, heads: HeadCounts | None) -> tuple[int, int]:
    """Return the grid sides (a, b R) for which ranks receive the fewest elements in the forward and backward passes
    combined.

    Each rank receives (a - 1) 5 Hq + (b R - 1) 6 Hkv elements per token and per unit of the head dimension D.
    """
    q_heads, kv_heads = heads or (1, 1)
    a = min(divisors(ranks), key=lambda a: 5 * (a - 1) * q_heads + 6 * (ranks // a - 1) * kv_heads)
    return a, ranks // a


def mesh_axes(a: int, b: int, turns: int) -> Axes:
    return (("x", a), ("y", b), ("z", turns))


def received(axes: Axes, direction: str, moving_side: str, units: Mapping[str, float]) -> list[float]:
    """Return the number of elements that each rank receives in gathers and in the rotation along z."""
    (_, a), (_, b), (_, turns) = axes
    queries, keys = (a, b * turns) if moving_side == "kv" else (a * turns, b)
    return blocks_received(a * b * turns, queries - 1, keys - 1, direction, units)


def shapes(ranks: int) -> list[ScheduleOptions]:
    return [{"mesh": (a, b, ranks // (a * b))} for a in divisors(ranks) for b in divisors(ranks // a)]


def resolve(ranks: int, fixed: ScheduleOptions, heads: HeadCounts | None) -> ScheduleOptions:
    """Return the configured mesh. The default is Attention2D's grid with k/v rotated instead of gathered.

    The default mesh transfers as many elements as Attention2D and needs less memory.
    """
    cols, rows = sides(ranks, heads)
    shape = a, b, turns = fixed.get("mesh") or (cols, 1, rows)
    if a * b * turns != ranks:
        raise ConfigError(
            f"{SECTION}.mesh [a, b, R] must multiply to the {ranks} CP ranks; "
            f"got {list(shape)} = {a * b * turns}, use for example {[1, 1, ranks]}"
        )
    return {"mesh": shape}


MESH = Schedule(
    name="mesh",
    summary="a ranks gather q, b ranks k/v, R go round: holds the rings, attention2d and wallfacer",
    build=mesh,
    axes=lambda ranks, options: mesh_axes(*options["mesh"]),
    received=received,
    settings=(
        Setting(
            name="mesh",
            help="q is gathered over a ranks, k/v over b, R go round",
            wanted="three whole numbers [a, b, R]",
            accepts=lambda value: isinstance(value, list | tuple) and len(value) == 3 and all(map(is_count, value)),
            option={"type": int, "nargs": 3, "metavar": ("A", "B", "R")},
        ),
    ),
    shapes=shapes,
    resolve=resolve,
    collective_axes=("x", "y"),
    ring_axes=("z",),
)


# ---- Attention2D


def grids(ranks: int) -> list[ScheduleOptions]:
    return [{"rows": ranks // cols, "cols": cols} for cols in divisors(ranks)]


def grid(ranks: int, fixed: ScheduleOptions, heads: HeadCounts | None) -> ScheduleOptions:
    """Return the grid's rows and cols.

    If only one side is set, the other side is derived from it. If neither side is set, the sides are chosen
    to minimize the number of received elements.
    """
    rows, cols = fixed.get("rows"), fixed.get("cols")
    if not (rows or cols):
        cols, rows = sides(ranks, heads)
    rows = ranks // cols if cols and not rows else rows
    cols = ranks // rows if rows and not cols else cols
    if {"rows": rows, "cols": cols} not in grids(ranks):
        fitting = [(shape["rows"], shape["cols"]) for shape in grids(ranks)]
        raise ConfigError(
            f"{SECTION}.rows x cols must be the {ranks} ranks of attention2d; got "
            f"{', '.join(f'{side} {value}' for side, value in fixed.items())}, use one of (rows, cols) = {fitting}"
        )
    return {"rows": rows, "cols": cols}


ATTENTION2D = Schedule(
    name="attention2d",
    summary="Attention2D: q is gathered along the rows of a grid, k/v along its columns",
    build=mesh,
    axes=lambda ranks, options: mesh_axes(options["cols"], options["rows"], 1),
    received=received,
    settings=(
        count("rows", "ranks that k/v is gathered over"),
        count("cols", "ranks that q is gathered over"),
    ),
    shapes=grids,
    resolve=grid,
    collective_axes=("x", "y"),
    ring_axes=("z",),
)


# ---- WallFacer


def teams(ranks: int) -> list[ScheduleOptions]:
    return [{"team": team} for team in divisors(ranks) if ranks % (team * team) == 0]


def team_of(ranks: int, fixed: ScheduleOptions, heads: HeadCounts | None) -> ScheduleOptions:
    """Return the configured team size, or the largest team size that fits."""
    fitting = [shape["team"] for shape in teams(ranks)]
    team = fixed.get("team") or fitting[-1]
    if team not in fitting:
        raise ConfigError(
            f"{SECTION}.team must be a number whose square divides the {ranks} ranks of wallfacer; "
            f"got {team}, use one of {fitting}"
        )
    return {"team": team}


WALLFACER = Schedule(
    name="wallfacer",
    summary="WallFacer: q and k/v are gathered over teams of C, and A / C^2 teams go round",
    build=mesh,
    axes=lambda ranks, options: mesh_axes(options["team"], options["team"], ranks // options["team"] ** 2),
    received=received,
    settings=(count("team", "the size C of a team"),),
    shapes=teams,
    resolve=team_of,
    collective_axes=("x", "y"),
    ring_axes=("z",),
)


# ---- without collectives: each rank receives every block directly from its owner

Pairs = Sequence[tuple[int, int]]


@dataclasses.dataclass(eq=False)
class Direct(Counted):
    """Steps without collectives. Blocks are sent only to the ranks that need them, and results are sent directly to the
    owner.

    A mesh uses `Direct` if some members of a group do not need all of the group's blocks, or if blocks differ in
    length. `Direct` never sends more bytes than the collectives would.

    Attributes:
        products: Function that takes a rank. `products(rank)[t]` lists the (q block, kv block) pairs that the rank
            computes in step t. Step 0 contains only pairs of the rank's own blocks.
        reads: Function that takes a rank. `reads(rank)` returns bitmasks of the q blocks and the kv blocks in the
            rank's products.
    """

    size: int
    direction: str
    products: Callable[[int], Sequence[Pairs]]
    reads: Callable[[int], tuple[int, int]]

    @functools.cached_property
    def all_products(self) -> list[Sequence[Pairs]]:
        return [self.products(rank) for rank in range(self.size)]

    @functools.cached_property
    def moves(self) -> tuple[dict[tuple[int, int], list[Move]], dict[tuple[int, int], list[Move]]]:
        """The operand moves and the result moves, each keyed by (rank, step)."""
        operands: dict[tuple[int, int], list[Move]] = defaultdict(list)
        results: dict[tuple[int, int], list[Move]] = defaultdict(list)
        kinds = (("out", 0),) if self.direction == "forward" else (("dq", 0), ("dkv", 1))
        for rank, steps in enumerate(self.all_products):
            # a remote block is sent one step before its first use
            for (kind, key), t in _first_steps(rank, enumerate(steps), (("q", 0), ("kv", 1))).items():
                for end in (*key, rank):
                    operands[end, t - 1].append(Move(src=key[0], dst=rank, kind=kind, key=key))
            # the block's result is returned to the owner after the last step that updates it
            for (kind, key), t in _first_steps(rank, reversed([*enumerate(steps)]), kinds).items():
                for end in (rank, *key):
                    results[end, t].append(Move(src=rank, dst=key[0], kind=kind, key=key))
        return operands, results

    def __call__(self, rank: int) -> Steps:
        products, (operands, results) = self.all_products[rank], self.moves
        return tuple(
            Step(
                moves=tuple(operands[rank, t]),
                computes=tuple(Compute(rank=rank, q=(i,), kv=(j,)) for pairs in products[t : t + 1] for i, j in pairs),
                results=tuple(results[rank, t]),
            )
            for t in range(max(map(len, self.all_products)))
        )

    def received(self, units: Mapping[str, float]) -> list[float]:
        """Return the number of elements that each rank receives.

        A rank receives every remote block that it needs, and one result from every other rank that uses one of its
        blocks.
        """
        received: list[float] = [0] * self.size
        results = (units["out"], 0) if self.direction == "forward" else (units["dq"], units["dkv"])
        for rank in range(self.size):
            for kind, blocks, result in zip(OPERANDS, self.reads(rank), results, strict=True):
                foreign = blocks & ~(1 << rank)
                received[rank] += units[kind] * foreign.bit_count()
                for owner in bits(foreign) if result else ():
                    received[owner] += result
        return received


def _first_steps(rank: int, steps: Iterable[tuple[int, Pairs]], kinds: Iterable[tuple[str, int]]) -> dict[Unit, int]:
    """Map each remote block in a rank's products to the first of the given steps that uses the block.

    Args:
        kinds: Pairs (kind of unit, index of the unit's block in a product pair).
    """
    first: dict[Unit, int] = {}
    for t, pairs in steps:
        for pair in pairs:
            for kind, side in kinds:
                if pair[side] != rank:
                    first.setdefault((kind, (pair[side],)), t)
    return first
