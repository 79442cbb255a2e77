"""The machine of ranks that work on processors, where nobody measured it. Torch-free."""

from __future__ import annotations

import dataclasses

from .machine import Machine, Table

CORE = "cpu"  # the preset whose rates are those of one core


def processors(cores: int, memory: int, per_node: int) -> Machine:
    """Hosts of so many cores and bytes, which `per_node` ranks each share equally."""
    core, share = Machine.load(CORE), cores / per_node

    def scaled(table: Table) -> Table:
        return tuple((tokens, rate * share) for tokens, rate in table)

    return dataclasses.replace(
        core,
        name="these hosts",
        about=f"{cores} cores and {memory / 2**30:.0f} GiB each, rates supposed",
        per_node=per_node,
        attention={
            dtype: {way: {kind: scaled(table) for kind, table in kinds.items()} for way, kinds in ways.items()}
            for dtype, ways in core.attention.items()
        },
        gemm={dtype: rate * share for dtype, rate in core.gemm.items()},
        memory_rate=core.memory_rate * share,
        elementwise_rate=core.elementwise_rate * share,
        offload_rate=core.offload_rate * share,
        host_memory=float(memory),
        host_rate=core.host_rate * cores,
        memory=memory / per_node,
    )
