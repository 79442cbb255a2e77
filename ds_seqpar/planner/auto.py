"""Replace "auto" settings with the planner's choices, and describe the choices to the user.

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..base.errors import SECTION, ConfigError
from ..core.settings import MEMORY_SETTINGS, PLAN_REQUESTS, PLANNED_FOR, SequenceParallelConfig
from . import limits
from .footprint import Footprint, fits, footprint, rank_bytes
from .machine import Machine
from .plan import GIB, PlanResult, find_plan, memory_options, name_of, nearest_fits, plan, settings_in_words
from .request import Job, Request

SAVES = 0.95  # settings after which more than this fraction of the memory is still needed are not worth suggesting


def resolve_with_plan(
    config: SequenceParallelConfig, job: Job | None, world: int, detect_machine: Callable[[], Machine]
) -> tuple[SequenceParallelConfig, PlanResult]:
    """Replace every "auto" value in a configuration with the planner's choice.

    Args:
        config: Configuration for which `asks_for_plan` is true.
        job: Job to plan for, if known.
        world: Number of ranks in the job.
        detect_machine: Function that returns a description of the machine on which the ranks run.

    Returns:
        The configuration without "auto" values, and the planner's result.

    Raises:
        ConfigError: The planner rejects the configuration, or the model or the length is unknown.
    """
    asking = next((name for name in PLANNED_FOR if getattr(config, name) != "auto"), "memory")
    if job is None or job.model is None:
        raise ConfigError(
            f"{SECTION}.{asking} plans for a model whose numbers are known; got {getattr(config, asking)} without a "
            f"model, let initialize make the SequenceParallel of a transformers model, or leave {asking} out"
        )
    seq = config.seq_len if config.seq_len != "auto" else job.seq
    if seq is None:
        raise ConfigError(
            f"{SECTION}.{asking} plans for a length that is known; got {getattr(config, asking)!r} and data that does "
            f"not say how long its sequences are, say seq_len too, or leave {asking} out"
        )
    result = plan_even_if_too_large(request_of(config, job, seq, world, detect_machine()))
    planned = (*config.auto_fields, *(("head_chunks",) if config.head_chunks == "auto" else ()))
    kept = {name: getattr(config, name) for name in ("head_chunks", *PLAN_REQUESTS) if name not in planned}
    return dataclasses.replace(result.best.config, **kept), result


def request_of(config: SequenceParallelConfig, job: Job, seq: int, world: int, machine: Machine) -> Request:
    """Return the planner's input for a job.

    If the zigzag layout cannot divide the length equally, the length is rounded up, as it would be by padding.
    """
    few = len(job.documents) <= limits.MAX_DOCUMENTS and seq <= limits.MAX_PACKED_TOKENS
    documents = job.documents if few and sum(job.documents) == seq else ()
    share = 2 * world  # number of chunks in the zigzag layout
    job = dataclasses.replace(job, seq=seq if documents else -(-seq // share) * share, documents=documents)
    sizes = job.sizes(world) if config.size == "auto" else ()
    open_settings = {*PLAN_REQUESTS, *config.auto_fields}
    given = {name: value for name, value in config.settings().items() if name not in open_settings}
    return Request(job=job, machine=machine, world=world, given=given, sizes=sizes)


def plan_even_if_too_large(request: Request) -> PlanResult:
    """Return the plan for a request, even if no configuration is predicted to fit.

    If no configuration fits, the result is the fastest configuration with every memory-saving setting. The machine's
    memory may be only a guess. `line_of` reports the shortage to the user.
    """
    result = find_plan(request)
    if result.ranked:
        return result
    machine = dataclasses.replace(request.machine, host_memory=1e24)
    unlimited = dataclasses.replace(request, machine=machine, memory=2**62)
    saving = {name: value for name, value in memory_options(request, 1)[-1].items() if name != "head_chunks"}
    best = plan(dataclasses.replace(unlimited, given={**request.given, **saving})).best.config
    saving = memory_options(request, best.ulysses)[-1]  # this combination includes head chunks
    shape = {name: getattr(best, name) for name in ("size", "ulysses", "schedule")}
    result = plan(dataclasses.replace(unlimited, given={**request.given, **shape, **saving}))
    return dataclasses.replace(result, request=request)


def line_of(result: PlanResult) -> str:
    """Return a line for the user with the chosen configuration, its estimated time and memory, and the second-best
    configuration.
    """
    request, best = result.request, result.best
    machine, needed = request.machine, rank_bytes(best.memory, request.budget)
    documents = f" in {len(request.job.documents)} documents" if request.job.documents else ""
    line = (
        f'{SECTION}: "auto" for {request.seq} tokens{documents} on {request.world} ranks of {machine.name}, '
        f"{machine.per_node} a node, is {name_of(best.config)}, estimated {best.seconds:.3g} s a sequence"
    )
    saving = chosen_memory_settings(result)
    if saving is not None:
        line += f", with {' and '.join(settings_in_words(saving)) or 'nothing that spares memory'}"
    if needed > machine.usable:
        line += f" and {needed / GIB:.1f} GiB a rank where the machine has {machine.usable / GIB:.1f}"
        line += "" if request.job.checkpointing or saving is None else ", gradient checkpointing would spare most"
    elif saving is not None:
        line += f", {needed / GIB:.3g} of {machine.usable / GIB:.3g} GiB a rank"
    for other in result.ranked[1:2]:
        line += f"; next is {name_of(other.config)}, {other.seconds / best.seconds:.2f} times as long"
    no_images = ["images are not counted"] if request.model.tower and request.job.images is None else []
    return "; ".join([line, *no_images, *request.model.not_counted])


def chosen_memory_settings(result: PlanResult) -> dict[str, Any] | None:
    """Return the memory settings that the planner changed from their defaults, or None if the user fixed all of
    them.
    """
    planned = [name for name in MEMORY_SETTINGS if name not in result.request.given]
    defaults, best = SequenceParallelConfig(), result.best.config
    changed = {name: getattr(best, name) for name in planned if getattr(best, name) != getattr(defaults, name)}
    return changed if planned else None


def most_sparing(config: SequenceParallelConfig, request: Request) -> tuple[list[str], Footprint]:
    """Return the names of unused memory-saving settings, and the memory of a step that uses all of them."""
    job = dataclasses.replace(request.job, checkpointing=True)
    others, defaults = dataclasses.replace(request, job=job, given={}), SequenceParallelConfig()
    saving = {
        name: value
        for name, value in memory_options(others, config.ulysses)[-1].items()
        if getattr(config, name) == getattr(defaults, name)
    }
    words = [*(() if request.job.checkpointing else ("gradient checkpointing",)), *settings_in_words(saving)]
    return words, footprint(others.step(dataclasses.replace(config, **saving)))


def what_would_fit(config: SequenceParallelConfig, request: Request) -> str:
    """Return advice for a user whose step does not fit in memory."""
    words, sparing = most_sparing(config, request)
    if words and fits(sparing, request.budget):
        return f"it fits with {', '.join(words)}: turn them on (--set memory=auto chooses the settings)"
    changes = nearest_fits(request)
    spared = ", with --set memory=auto" * bool(words)
    return f"take {' or '.join(changes)}{spared}" if changes else "take a smaller model"


def memory_in_words(config: SequenceParallelConfig, job: Job, seq: int, world: int, machine: Machine) -> str:
    """Return a clause that states a step's predicted memory and the settings that would reduce it."""
    if job.model is None:
        return ""
    request = request_of(config, job, seq, world, machine)
    config = dataclasses.replace(config, head_chunks=1) if config.head_chunks == "auto" else config
    now = footprint(request.step(config)).peak.total
    words, sparing = most_sparing(config, request)
    least = sparing.peak.total
    predicted = f"`python -m ds_seqpar memory` predicts {now / GIB:.3g} GiB a rank for {seq:,} tokens"
    predicted += " without images" * (job.model.tower is not None)
    if not words or least > SAVES * now:
        return f"{predicted}, and little less with other settings: take a larger size, a higher ZeRO stage or less data"
    return f"{predicted}, and {least / GIB:.3g} GiB with {', '.join(words)}: turn them on, or take a larger size"
