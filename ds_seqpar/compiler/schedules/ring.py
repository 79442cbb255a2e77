"""Ring Attention (Liu et al., 2023), and BurstAttention's rings: the q-travelling one and the double one."""

from __future__ import annotations

from collections.abc import Mapping

from ..plan import Counted, Pattern
from ..topology import Axes, Topology
from .base import Own, Schedule, blocks_received
from .rotation import Round, rotation


def ring(topology: Topology, pattern: Pattern, direction: str, travels: str = "kv") -> Counted:
    """Every key/value block goes round all ranks whose queries need it; in step t rank p holds that of p - t.

    travels="q" in backward is BurstAttention's (section 3.1): q, do, lse and delta go round instead of k, v and their
    gradients: 3 large tensors for 4. They go the other way, in step t rank p holds those of p + t.
    """
    size = topology.size("ring")
    way = Round(
        size=size,
        there=lambda unit, t: (unit + t) % size,
        here=lambda rank, t: (rank - t) % size,
        keys=lambda rank: ((rank,), (rank,)),
    )
    return rotation(way.facing(travels), size, direction, travels, pattern)


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
