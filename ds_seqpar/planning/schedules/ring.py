"""Ring Attention (Liu et al., 2023), and BurstAttention's rings: the q-travelling one and the double one."""

from __future__ import annotations

from collections.abc import Mapping

from ..plan import Needed, Plan
from ..topology import Axes, Topology
from .base import Own, Schedule, blocks_received
from .rotation import rotation


def ring(topology: Topology, needed: Needed, direction: str, travels: str = "kv") -> Plan:
    """Every key/value block goes round all ranks whose queries need it; in step t rank p holds that of p - t.

    travels="q" in backward is BurstAttention's (section 3.1): q, do, lse and delta go round instead of k, v and their
    gradients: 3 large tensors for 4.
    """
    size = topology.size("ring")
    paths = [[(rank + t) % size for t in range(size)] for rank in range(size)]
    return rotation("ring", direction, travels, [((r,), (r,)) for r in range(size)], paths, needed)


def axes(ranks: int, own: Own) -> Axes:
    return (("ring", ranks),)


def received(axes: Axes, direction: str, travels: str, units: Mapping[str, float]) -> list[float]:
    """A - 1 foreign blocks of what travels."""
    ((_, size),) = axes
    queries, keys = (0, size - 1) if travels == "kv" else (size - 1, 0)
    return blocks_received(size, queries, keys, direction, units)


SCHEDULE = Schedule(
    name="ring",
    summary="Ring Attention; with travelling q, BurstAttention's backward",
    build=ring,
    axes=axes,
    received=received,
    ring_axes=("ring",),
)
