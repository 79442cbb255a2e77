"""Let the planner choose settings that are `"auto"`, and predict a job's memory.

Within the engine, only this module uses the planner. The functions import the planner lazily, so the engine also runs
without the planner.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from .base import hosts as machines
from .base.errors import ConfigError
from .base.log import log_once
from .core.compiler.compile import Recipe
from .core.compiler.program.shape import Shape
from .core.settings import CONFIGURATION, UNREADABLE, SequenceParallelConfig
from .guards import out_of_memory
from .guards.agreement import all_gather_objects, together

if TYPE_CHECKING:
    from .deepspeed.config import DeepSpeedJson
    from .planner.lengths import Costs
    from .planner.machine import Machine
    from .planner.request import Job as Job
    from .planner.request import Model as Model


def job_of(json: DeepSpeedJson) -> Job:
    """Return the planner's description of a job that uses this DeepSpeed JSON."""
    from .planner.request import Job

    return Job.of(json)


def named_machine(config: SequenceParallelConfig) -> Machine | None:
    """Return the machine named in a configuration, or None.

    Raises:
        ConfigError: No machine has this name, or the machine's file is invalid.
    """
    if config.machine == "auto":
        return None
    from .planner.machine import Machine

    return Machine.load(config.machine)


def fewest_head_chunks(recipe: Recipe, ulysses: int, local: Shape, *of_call: Any) -> int:
    """Return the smallest number of head chunks that saves memory, for `Runtime`.

    Args:
        of_call: The mask, the shards, the kernel setting, and whether tensors are on a GPU.
    """
    from .planner import attention_memory

    mask, shards, kernel, on_gpu = of_call
    # does not depend on the chosen kernel, since installed packages may differ between ranks
    workspace = attention_memory.planned_kernel(kernel, local.dtype, local.head_dim, on_gpu)
    return attention_memory.fewest_head_chunks(recipe, ulysses, local, mask, shards, workspace)


def planned_by_all(
    world: dist.ProcessGroup,
    config: SequenceParallelConfig,
    machine: Machine | None,
    job: Job | None,
    call: str,
) -> SequenceParallelConfig:
    """Return the planned configuration.

    Every rank plans for all ranks' hosts, and then all ranks compare their results.

    Args:
        world: The group of all ranks.
        config: The configuration.
        machine: The machine named in the configuration.
        job: The job to plan for, or None if unknown.
        call: The user's call, for error messages.
    """
    from .planner.auto import line_of, resolve_with_plan

    hosts = hosts_of_all(world)
    with together(world, UNREADABLE, CONFIGURATION, call=call) as agreed:
        resolved, plan = resolve_with_plan(config, job, len(hosts), lambda: detected_machine(hosts, machine))
        compared = {f"planned {name}": value for name, value in resolved.settings().items()}
        agreed.value = compared | {"tokens": plan.request.seq}  # compared because each rank reads the length separately
    log_once(line_of(plan))
    if job and job.documents and not plan.request.job.documents:
        log_once(f"sequence_parallel: planned for one sequence, not for its {len(job.documents)} documents")
    return resolved


def costs_of_all(
    world: dist.ProcessGroup, config: SequenceParallelConfig, dtype: str, job_with_model: Callable[[Job], Job]
) -> Costs:
    """Return the estimated costs of a model's samples, identical on all ranks. The call is collective.

    Args:
        config: The resolved configuration.
        dtype: The model's dtype.
        job_with_model: A function that adds the model's sizes to a job.

    Raises:
        ConfigError: The machine has no rates for the model's dtype, or the model's sizes cannot be determined.
    """
    from .planner.lengths import Costs
    from .planner.request import Job

    hosts = hosts_of_all(world)
    with together(world, "estimating the cost of samples", "cost of samples", call="sp.packs") as agreed:
        job = job_with_model(Job(dtype="float32" if dtype == "float64" else dtype))
        if job.model is None:
            raise ConfigError(f"samples are dealt by the sizes of a model; {job.uncounted}, leave tokens_per_rank out")
        costs = Costs.of(config, job, len(hosts), detected_machine(hosts, named_machine(config)))
        agreed.value = {"model": str(costs.step.model), "work": str(costs.work)}
    return costs


def hosts_of_all(world: dist.ProcessGroup) -> list[machines.Host]:
    """Return each rank's host, indexed by rank. The call is collective."""
    return [host for _, host in all_gather_objects(world, ("SequenceParallel", machines.this_host()))]


def advise_on_memory(model: nn.Module, sp: Any, job_with_sizes: Callable[[nn.Module], Job]) -> None:
    """Make this rank's out-of-memory errors include the planner's prediction for the job.

    Args:
        model: The model. Neither the model nor `sp` is kept alive.
        sp: The SequenceParallel with which the model trains.
        job_with_sizes: A function that returns the planner's inputs, including the model's sizes.
    """
    out_of_memory.advise = functools.partial(_memory_in_words, weakref.ref(model), weakref.ref(sp), job_with_sizes)


def _memory_in_words(
    model_ref: weakref.ref[nn.Module], sp_ref: weakref.ref[Any], job_with_sizes: Callable[[nn.Module], Job]
) -> str:
    """Return a text with the predicted memory for the sequence length of the last forward pass, or "" if unknown."""
    from .planner.auto import memory_in_words

    model, sp = model_ref(), sp_ref()
    last = sp.runtime.last_bound.get("forward") if sp is not None else None
    if model is None or sp is None or last is None:
        return ""
    (batch, tokens, *_), *_ = last[0][0]  # the shape of q
    job = dataclasses.replace(job_with_sizes(model), batch=batch)
    machine = detected_machine([machines.this_host()], named_machine(sp.config))
    return memory_in_words(sp.config, job, tokens * sp.size, sp.topology.world_size, machine)


def detected_machine(hosts: Sequence[machines.Host], named: Machine | None = None) -> Machine:
    """Guess the machine if the config names no machine.

    Every rank computes the same guess. With accelerators, the guess is the preset for rank 0's device, with the
    smallest device memory on any rank. Without accelerators, the guess is a machine with the cores and memory of the
    smallest host.

    Args:
        hosts: Each rank's host, indexed by rank.
        named: The machine named in the config, which is returned with the actual number of ranks per node.
    """
    from .planner.machine import Machine

    per_node, device = machines.ranks_per_host(hosts), hosts[0].device
    if named is not None:
        return dataclasses.replace(named, per_node=per_node)
    if device:
        machine = Machine.guessed(device)
        memory = min(host.device_memory for host in hosts) or machine.memory
        return dataclasses.replace(machine, per_node=per_node, memory=memory, host_memory=min(h.memory for h in hosts))
    cores = {name: {core for host in hosts if host.name == name for core in host.cores} for name, *_ in hosts}
    return Machine.of_cores(min(map(len, cores.values())), min(host.memory for host in hosts), per_node)
