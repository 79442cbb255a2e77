"""BurstAttention's double ring (section 3.2): most hops stay inside a window of ranks, a node."""

from __future__ import annotations

from ..plan import Needed, Plan
from ..topology import Topology
from .rotation import rotation


def double_ring(topology: Topology, needed: Needed, direction: str, travels: str = "kv") -> Plan:
    """A block visits the W ranks of a window, then crosses to the next window and visits its W, and so on: A/W - 1 of
    its A - 1 hops leave a node, and so does the last hop of its gradient, straight home."""
    window, windows = topology.size("window"), topology.size("windows")

    def at(rank: int, t: int) -> int:
        crossed, inside = divmod(t, window)
        w = (rank % window + crossed * (window - 1) + inside) % window
        return w + window * ((rank // window + crossed) % windows)

    size = window * windows
    paths = [[at(rank, t) for t in range(size)] for rank in range(size)]
    return rotation("double_ring", direction, travels, [((r,), (r,)) for r in range(size)], paths, needed)
