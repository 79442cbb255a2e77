"""Every "auto" of a configuration replaced by the planner: each rank plans for itself, and rank 0 says what."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from .config import CONFIGURATION, UNREADABLE, SequenceParallelConfig
from .errors import as_error
from .runtime.agreement import agree, gathered
from .runtime.devices import Host, own_host, shared_by

if TYPE_CHECKING:
    from .planner.auto import Job
    from .planner.machine import Machine


def planned_by_all(
    world: dist.ProcessGroup, config: SequenceParallelConfig, heads: tuple[int, int] | None, job: Job | None
) -> SequenceParallelConfig:
    """The configuration as the planner chooses it, on every rank for the same hosts. Collective over the world."""
    from .planner.auto import line_of, planned  # most runs need none of the planner

    hosts: list[Host] = [host for _, host in gathered(world, ("SequenceParallel", own_host()))]
    error, found, choice = None, {}, None
    try:
        resolved, choice = planned(config, job, heads, len(hosts), functools.partial(seen, hosts=hosts))
        found = {f"planned {name}": value for name, value in resolved.settings().items()}
        if choice:  # by what each rank has read
            found |= {"tokens": choice.request.seq}
    except Exception as reason:
        error = as_error(UNREADABLE, reason)
    agree(world, CONFIGURATION, found, error=error, call="SequenceParallel")
    if choice and dist.get_rank() == 0:
        print(line_of(choice), file=sys.stderr, flush=True)
    return resolved


def seen(dtype: str, hosts: Sequence[Host]) -> Machine:
    """The machine to plan for where nobody says which, the same on all ranks. It is that of rank 0's accelerator, by
    its name, with the memory that is there. Without accelerators it has the smallest host's cores and memory."""
    from .planner.machine import Machine
    from .planner.processors import processors

    per_node, device = shared_by(hosts), hosts[0].device
    if device:
        machine = Machine.supposed(device, dtype)
        memory = min(host.device_memory for host in hosts) or machine.memory
        return dataclasses.replace(machine, per_node=per_node, memory=memory, host_memory=min(h.memory for h in hosts))
    cores = {name: {core for host in hosts if host.name == name for core in host.cores} for name, *_ in hosts}
    return processors(min(map(len, cores.values())), min(host.memory for host in hosts), per_node)
