"""Ring Attention (Liu et al., 2023), and BurstAttention's rings: the q-travelling one and the double one."""

from __future__ import annotations

from ..plan import Pattern, StepsOf
from ..topology import Topology
from .rotation import Round, rotation


def ring(topology: Topology, pattern: Pattern, direction: str, travels: str = "kv") -> StepsOf:
    """Every key/value block goes round all ranks whose queries need it; in step t rank p holds that of p - t.

    travels="q" in backward is BurstAttention's (section 3.1): q, do, lse and delta go round instead of k, v and their
    gradients: 3 large tensors for 4.
    """
    size = topology.size("ring")
    way = Round(
        size=size,
        there=lambda unit, t: (unit + t) % size,
        here=lambda rank, t: (rank - t) % size,
        keys=lambda rank: ((rank,), (rank,)),
    )
    return rotation(way, size, direction, travels, pattern)
