"""Ring Attention (Liu et al., 2023): every key/value block visits every rank whose queries need it."""

from __future__ import annotations

from ..plan import Compute, Move, Needed, Plan, Step
from ..topology import Topology


def ring(topology: Topology, needed: Needed, direction: str) -> Plan:
    """k/v travels from rank to rank; queries stay, and so does the gradient of a rank's own product.

    In step t rank p holds kv block p - t. A block stops at the last rank that needs it. Backward retraces the same
    hops; the gradient of visitors' products rides one hop behind its block, and the last visitor sends it home, so a
    block that visits all ranks costs A - 1 hops of k/v and A - 1 of its gradient.
    """
    size = topology.size(*topology.inner_axes)
    visits = [[t for t in range(size) if needed((block + t) % size, block)] for block in range(size)]
    last = [max(steps, default=0) for steps in visits]
    first = [min((t for t in steps if t > 0), default=size) for steps in visits]  # the first visit to another rank
    steps = []
    for t in range(max(last) + 1):
        moves, computes, results = [], [], []
        for block in range(size):
            here, there = (block + t) % size, (block + t + 1) % size
            if t < last[block]:
                moves.append(Move(src=here, dst=there, kind="kv", key=(block,)))
            if t in visits[block]:
                computes.append(Compute(rank=here, q=(here,), kv=(block,)))
            if direction == "backward" and first[block] <= t <= last[block]:
                home = block if t == last[block] else there
                results.append(Move(src=here, dst=home, kind="dkv", key=(block,)))
        steps.append(Step(moves=tuple(moves), computes=tuple(computes), results=tuple(results)))
    return Plan(name="ring", direction=direction, size=size, steps=tuple(steps))
