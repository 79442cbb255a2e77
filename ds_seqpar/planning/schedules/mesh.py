"""The mesh family: Attention2D, WallFacer and Ring Attention as shapes (a, b, R) of one schedule."""

from __future__ import annotations

from collections.abc import Iterator

from ..plan import Gather, Key, Needed, Plan, ReduceScatter
from ..topology import Topology
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
