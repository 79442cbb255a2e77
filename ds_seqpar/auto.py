"""The one door to the planner, which chooses what a configuration leaves to `"auto"`. It is imported in functions: the
engine runs without it."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from .config.settings import CONFIGURATION, UNREADABLE, SequenceParallelConfig
from .errors import as_seqpar_error
from .runtime import devices
from .runtime.agreement import all_gather_objects, assert_ranks_agree

if TYPE_CHECKING:
    from .config.deepspeed_json import DeepSpeedJson
    from .planner.auto import Job as Job
    from .planner.machine import Machine
    from .planner.request import Model as Model

Orders: TypeAlias = Mapping[str, tuple[str, ...]]  # of kernels, by case: see `planner.machine.Machine`


def job_of(json: DeepSpeedJson) -> Job:
    """Return the planner's job of a DeepSpeed JSON."""
    from .planner.auto import Job

    return Job.of(json)


def measured_orders(machine: str, device: torch.device) -> Orders:
    """The orders of kernels that the machine's file has for this kind of device; {} where it has none."""
    if machine == "auto":
        return {}
    from .planner.machine import Machine

    return Machine.load(machine).kernels.get(devices.device_name(device), {})


def warn_of_unmeasured_device(machine: str, device: torch.device) -> None:
    from .planner.machine import Machine

    if measured := Machine.load(machine).kernels:
        line = f"sequence_parallel: {machine} has the order of kernels of {', '.join(measured)}, none of this device"
        print(f"{line}, {devices.device_name(device)}; the built-in order holds", file=sys.stderr, flush=True)


def planned_by_all(
    world: dist.ProcessGroup,
    config: SequenceParallelConfig,
    heads: tuple[int, int] | None,
    job: Job | None,
    call: str,
) -> SequenceParallelConfig:
    """Return the configuration that the planner makes. Every rank plans for the hosts of all ranks, then they compare.

    Args:
        call: What the user called, for errors.
    """
    from .planner.auto import line_of, resolve_with_plan

    hosts: list[devices.Host] = [
        host for _, host in all_gather_objects(world, ("SequenceParallel", devices.this_host()))
    ]
    error, compared, plan = None, {}, None
    try:
        detect = functools.partial(detected_machine, hosts=hosts)
        resolved, plan = resolve_with_plan(config, job, heads, len(hosts), detect)
        compared = {f"planned {name}": value for name, value in resolved.settings().items()}
        if plan:  # each rank has read the length for itself
            compared |= {"tokens": plan.request.seq}
    except Exception as reason:
        error = as_seqpar_error(UNREADABLE, reason)
    assert_ranks_agree(world, CONFIGURATION, compared, error=error, call=call)
    if plan and dist.get_rank() == 0:
        print(line_of(plan), file=sys.stderr, flush=True)
    return resolved


def detected_machine(dtype: str, hosts: Sequence[devices.Host]) -> Machine:
    """Guess the machine when the config names none. Every rank computes the same guess.

    With accelerators it is the preset of rank 0's device, with the least memory of all; without, a machine of the
    smallest host's cores and memory.

    Args:
        dtype: A dtype that the machine must have rates of.
        hosts: The host of each rank, by rank.
    """
    from .planner.machine import Machine

    per_node, device = devices.ranks_per_host(hosts), hosts[0].device
    if device:
        machine = Machine.guessed(device, dtype)
        memory = min(host.device_memory for host in hosts) or machine.memory
        return dataclasses.replace(machine, per_node=per_node, memory=memory, host_memory=min(h.memory for h in hosts))
    cores = {name: {core for host in hosts if host.name == name for core in host.cores} for name, *_ in hosts}
    return Machine.of_cores(min(map(len, cores.values())), min(host.memory for host in hosts), per_node)
