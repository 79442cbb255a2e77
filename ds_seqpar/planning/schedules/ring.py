"""Ring Attention (Liu et al., 2023), and BurstAttention's rings: the q-travelling one and the double one."""

from __future__ import annotations

from ..plan import Needed, Plan
from ..topology import Topology
from .rotation import rotation


def ring(topology: Topology, needed: Needed, direction: str, travels: str = "kv") -> Plan:
    """Every key/value block goes round all ranks whose queries need it; in step t rank p holds that of p - t.

    travels="q" in backward is BurstAttention's (section 3.1): q, do, lse and delta go round instead of k, v and their
    gradients: 3 large tensors for 4.
    """
    size = topology.size("ring")
    paths = [[(rank + t) % size for t in range(size)] for rank in range(size)]
    return rotation("ring", direction, travels, [((r,), (r,)) for r in range(size)], paths, needed)
