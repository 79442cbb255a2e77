"""The mesh family: Attention2D, WallFacer and Ring Attention as shapes (a, b, R) of one schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...errors import SECTION, ConfigError
from ..plan import Gather, Key, Needed, Plan, ReduceScatter
from ..topology import Axes, Topology, divisors
from .base import Heads, Own, Schedule, blocks_received, three_counts
from .rotation import rotation


def mesh(topology: Topology, needed: Needed, direction: str, travels: str = "kv") -> Plan:
    """Rank p = x + a (y + b z): q is gathered along x, k/v along y, one of them rotates along z, and (out, lse) or the
    gradients are reduce-scattered along the axis that their operand was gathered on. q(x0, y0, z0) and kv(x1, y1, z1)
    meet once, on rank (x1, y0, z0) where k/v travels.

    (1, 1, A) is Ring Attention. (a, b, 1) is Attention2D (Algs. 1-3; cols = a, rows = b). (C, C, A / C^2) is WallFacer
    with teams of C; because q and k/v are gathered along different axes, its initial transfer of k/v is not needed.
    """
    a, b, r = (topology.size(axis) for axis in "xyz")

    def row(y: int, z: int) -> Key:
        return tuple(x + a * (y + b * z) for x in range(a))

    def column(x: int, z: int) -> Key:
        return tuple(x + a * (y + b * z) for y in range(b))

    places = [(p % a, p // a % b, p // (a * b)) for p in range(a * b * r)]
    rows = [row(y, z) for z in range(r) for y in range(b)] if a > 1 else []
    columns = [column(x, z) for z in range(r) for x in range(a)] if b > 1 else []
    paths = [[x + a * (y + b * ((z + t) % r)) for t in range(r)] for x, y, z in places]
    results = [("out", rows)] if direction == "forward" else [("dq", rows), ("dkv", columns)]
    return rotation(
        "mesh",
        direction,
        travels,
        [(row(y, z), column(x, z)) for x, y, z in places],
        paths,
        needed,
        gathers=(*_collectives(Gather, "q", rows), *_collectives(Gather, "kv", columns)),
        reduces=tuple(reduce for kind, groups in results for reduce in _collectives(ReduceScatter, kind, groups)),
    )


def _collectives(cls: type, kind: str, groups: list[Key]) -> Iterator[Gather | ReduceScatter]:
    for group in groups:
        yield cls(ranks=group, kind=kind, parts=tuple((rank,) for rank in group))


def sides(ranks: int, heads: Heads | None) -> tuple[int, int]:
    """(a, b R) that receive the fewest elements for these heads, forward and backward together: (a - 1) 5 Hq and
    (b R - 1) 6 Hkv for every token and D."""
    q_heads, kv_heads = heads or (1, 1)
    a = min(divisors(ranks), key=lambda a: 5 * (a - 1) * q_heads + 6 * (ranks // a - 1) * kv_heads)
    return a, ranks // a


def mesh_axes(a: int, b: int, turns: int) -> Axes:
    return (("x", a), ("y", b), ("z", turns))


def received(axes: Axes, direction: str, travels: str, units: Mapping[str, float]) -> list[float]:
    """What is gathered, and along z what travels, group by group."""
    (_, a), (_, b), (_, turns) = axes
    queries, keys = (a, b * turns) if travels == "kv" else (a * turns, b)
    return blocks_received(a * b * turns, queries - 1, keys - 1, direction, units)


def shapes(ranks: int) -> list[Own]:
    return [{"mesh": (a, b, ranks // (a * b))} for a in divisors(ranks) for b in divisors(ranks // a)]


def resolve(ranks: int, given: Own, heads: Heads | None) -> Own:
    """Where no shape is given, as attention2d, but k/v in a ring, not gathered: the same elements, less memory."""
    a, rest = sides(ranks, heads)
    shape = a, b, turns = given.get("mesh") or (a, 1, rest)
    if a * b * turns != ranks:
        raise ConfigError(
            f"{SECTION}.mesh [a, b, R] must multiply to the {ranks} inner ranks; "
            f"got {list(shape)} = {a * b * turns}, use for example {[1, 1, ranks]}"
        )
    return {"mesh": shape}


SCHEDULE = Schedule(
    name="mesh",
    summary="a ranks gather q, b ranks k/v, R go round: holds the rings, attention2d and wallfacer",
    build=mesh,
    axes=lambda ranks, own: mesh_axes(*own["mesh"]),
    received=received,
    settings=(three_counts("mesh", ("a", "b", "R"), "q is gathered over a ranks, k/v over b, R go round"),),
    shapes=shapes,
    resolve=resolve,
    collective_axes=("x", "y"),
    ring_axes=("z",),
)
