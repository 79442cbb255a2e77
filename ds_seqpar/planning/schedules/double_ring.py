"""BurstAttention's double ring (section 3.2): most hops stay inside a window of ranks, a node."""

from __future__ import annotations

from ..plan import Pattern, StepsOf
from ..topology import Topology
from .rotation import Round, rotation


def double_ring(topology: Topology, pattern: Pattern, direction: str, travels: str = "kv") -> StepsOf:
    """A block visits the W ranks of a window, then crosses to the next window and visits its W, and so on: A/W - 1 of
    its A - 1 hops leave a node, and so does the last hop of its gradient, straight home."""
    window, windows = topology.size("window"), topology.size("windows")

    def at(rank: int, t: int, sign: int) -> int:
        """The rank t hops on (sign 1) or back (-1). W - 1 hops inside a window make a crossing's shift."""
        crossed, inside = divmod(t, window)
        w = (rank % window + sign * (crossed * (window - 1) + inside)) % window
        return w + window * ((rank // window + sign * crossed) % windows)

    way = Round(
        size=window * windows,
        there=lambda unit, t: at(unit, t, 1),
        here=lambda rank, t: at(rank, t, -1),
        keys=lambda rank: ((rank,), (rank,)),
    )
    return rotation(way, window * windows, direction, travels, pattern)
