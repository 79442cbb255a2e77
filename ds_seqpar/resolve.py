"""Every "auto" of a configuration replaced, by each rank for itself, and agreed on."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .config import SequenceParallelConfig
from .errors import ConfigError, SeqParError, as_error
from .runtime.agreement import agree, gathered
from .runtime.devices import Host, own_host, shared_by

if TYPE_CHECKING:
    from .planner.auto import Job
    from .planner.machine import Machine

WHAT = "sequence parallel configuration"


def agreed(
    world: dist.ProcessGroup,
    given: object,
    heads: tuple[int, int] | None,
    job: Job | None,
    error: SeqParError | None,
) -> SequenceParallelConfig:
    """The configuration with every "auto" replaced. Raises on every rank where one rank's does not fit, or where one
    has an error already. Where the settings ask for a plan each rank plans for itself, and rank 0 says what is
    chosen."""
    settings: dict[str, Any] = {}
    try:
        config, ranks = _config(given), dist.get_world_size()
        resolved = config.resolve(ranks, heads)
        settings = {**config.settings(), "heads": heads}
    except Exception as reason:  # a schedule of one's own may raise anything
        error = error or _unreadable(reason)
    agree(world, WHAT, settings, error=error, call="SequenceParallel")
    return _planned(world, config, heads, job) if config.asks_for_plan else resolved


def _planned(
    world: dist.ProcessGroup, config: SequenceParallelConfig, heads: tuple[int, int] | None, job: Job | None
) -> SequenceParallelConfig:
    """By the planner, on every rank for the same hosts."""
    from .planner.auto import line_of, planned  # most runs need none of the planner

    hosts: list[Host] = [host for _, host in gathered(world, ("SequenceParallel", own_host()))]
    error, found, choice = None, {}, None
    try:
        resolved, choice = planned(config, job, heads, len(hosts), functools.partial(seen, hosts=hosts))
        found = {f"planned {name}": value for name, value in resolved.settings().items()}
        if choice:  # by what each rank has read
            found |= {"tokens": choice.request.seq}
    except Exception as reason:
        error = _unreadable(reason)
    agree(world, WHAT, found, error=error, call="SequenceParallel")
    if choice and dist.get_rank() == 0:
        print(line_of(choice), file=sys.stderr, flush=True)
    return resolved


def _unreadable(reason: Exception) -> SeqParError:
    return as_error("SequenceParallel needs a configuration that can be read; reading it failed", reason)


def _config(given: object) -> SequenceParallelConfig:
    if given is None:
        return SequenceParallelConfig()
    if not isinstance(given, SequenceParallelConfig):
        raise ConfigError(
            f"SequenceParallel needs a SequenceParallelConfig; got {type(given).__name__}, "
            "make one by SequenceParallelConfig.from_dict or from_deepspeed"
        )
    return given


def seen(dtype: str, hosts: Sequence[Host]) -> Machine:
    """The machine that is supposed for the planner where nobody says which, the same on all ranks: by the name of rank
    0's accelerator, with the memory that is there; without accelerators by the smallest host's cores and memory."""
    from .planner.machine import Machine
    from .planner.processors import processors

    per_node, device = shared_by(hosts), hosts[0].device
    if device:
        machine = Machine.supposed(device, dtype)
        memory = min(host.device_memory for host in hosts) or machine.memory
        return dataclasses.replace(machine, per_node=per_node, memory=memory, host_memory=min(h.memory for h in hosts))
    cores = {name: {core for host in hosts if host.name == name for core in host.cores} for name, *_ in hosts}
    return processors(min(map(len, cores.values())), min(host.memory for host in hosts), per_node)
