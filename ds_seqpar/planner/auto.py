"""Replacement of settings that are "auto" by the planner: a `Job` describes what is to be trained, `resolve_with_plan`
replaces the settings, and `line_of` describes the choice to the user. Does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..compiler.sharding.layout import divisors
from ..config.deepspeed_json import DeepSpeedJson, Zero
from ..config.settings import MEMORY_SETTINGS, PLAN_REQUESTS, PLANNED_FOR, SequenceParallelConfig
from ..errors import SECTION, ConfigError
from . import limits
from .footprint import Footprint, fits, footprint, rank_bytes
from .machine import Machine
from .plan import PlanResult, find_plan, nearest_fits, plan
from .predict import Prediction, most_saving_settings, predict, settings_in_words
from .request import Model, Objective, Request

GIB = 2**30
SAVES = 0.95  # of the memory; settings that leave more than that are not worth naming


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What ranks know of a training run when they start; a `Request` is made from it once the length is known."""

    model: Model | None = None
    seq: int | None = None  # tokens of the longest sequence; None: not known
    documents: tuple[int, ...] = ()  # their lengths in tokens, if that sequence is a pack
    window: int | None = None  # attention's window in tokens, the same in all layers
    batch: int | None = None  # examples that a group of ranks trains at once
    steps: int | None = None  # micro-batches of an optimizer step
    sequences: int | None = None  # of an optimizer step; None: any number, and then all ranks share each sequence
    # as in `Request`
    dtype: str = "bfloat16"
    zero: Zero = dataclasses.field(default_factory=Zero)
    optimizer_states: int = 2
    checkpointing: bool = False
    objective: Objective = dataclasses.field(default_factory=Objective)

    @classmethod
    def of(cls, json: DeepSpeedJson) -> Job:
        """Return the job of a DeepSpeed JSON. What the JSON leaves to a Trainer ("auto") counts as not known."""
        (sequences, batch, steps), zero = json.batch_sizes, json.known.zero_optimization
        return cls(
            batch=batch, steps=steps, sequences=sequences, dtype=json.known.dtype, zero=zero,
            optimizer_states=json.optimizer_states,
        )  # fmt: skip

    def sizes(self, world: int) -> tuple[int, ...]:
        """Return the numbers of ranks that may share a sequence, such that an optimizer step has `sequences`
        sequences."""
        if self.sequences is None:
            return (world,)
        sequences_per_group = (self.batch or 1) * (self.steps or 1)
        exact = self.batch is not None and self.steps is not None
        trained = {size: world // size * sequences_per_group for size in divisors(world)}
        return tuple(
            size
            for size, count in trained.items()
            if (self.sequences == count if exact else self.sequences % count == 0)
        ) or (world,)

    def request(
        self, machine: Machine, world: int, given: Mapping[str, Any], sizes: tuple[int, ...], memory: int | None = None
    ) -> Request:
        """Return the planner's input for this job, whose model and length are known. For the arguments see
        `Request`."""
        assert self.model is not None
        assert self.seq is not None
        return Request(
            model=self.model, machine=machine, world=world, seq=self.seq, documents=self.documents, window=self.window,
            batch=self.batch or 1, dtype=self.dtype, zero=self.zero, checkpointing=self.checkpointing, given=given,
            sequences=self.sequences, sizes=sizes, memory=memory, objective=self.objective,
            optimizer_states=self.optimizer_states,
        )  # fmt: skip


class Planned(NamedTuple):
    """A configuration, and the plan that chose it."""

    config: SequenceParallelConfig  # without any "auto"
    plan: PlanResult


def resolve_with_plan(
    config: SequenceParallelConfig,
    job: Job | None,
    world: int,
    detect_machine: Callable[[str], Machine],
) -> Planned:
    """Replace every "auto" of a configuration by the planner.

    Args:
        config: The configuration, which `asks_for_plan`.
        job: What is to be trained, if anything is known of it.
        world: Ranks of the job.
        detect_machine: Returns the machine of these ranks, given a dtype that it must have rates of.

    Raises:
        ConfigError: If the planner refuses the configuration, or the model or the length is not known.
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
    result = plan_even_if_too_large(request_of(config, job, seq, world, detect_machine(job.dtype)))
    planned = (*config.auto_fields, *(("head_chunks",) if config.head_chunks == "auto" else ()))
    kept = {name: getattr(config, name) for name in ("head_chunks", *PLAN_REQUESTS) if name not in planned}
    return Planned(dataclasses.replace(result.best.config, **kept), result)


def request_of(config: SequenceParallelConfig, job: Job, seq: int, world: int, machine: Machine) -> Request:
    """Return the planner's input for a job. A length that zigzag cannot share equally is rounded up, as padding
    would."""
    few = len(job.documents) <= limits.MAX_DOCUMENTS and seq <= limits.MAX_PACKED_TOKENS
    documents = job.documents if few and sum(job.documents) == seq else ()
    share = 2 * world  # zigzag's chunks
    seq = seq if documents else -(-seq // share) * share
    sizes = job.sizes(world) if config.size == "auto" else ()
    return dataclasses.replace(job, seq=seq, documents=documents).request(machine, world, fixed_settings(config), sizes)


def fixed_settings(config: SequenceParallelConfig) -> dict[str, Any]:
    """Return the settings that the planner must take as they are. With head_chunks "auto" it also decides about
    overlap, with which head chunks hide exchanges."""
    open_settings = {*PLAN_REQUESTS, *config.auto_fields}
    if config.head_chunks == "auto" and not config.overlap:
        open_settings.add("overlap")
    return {name: value for name, value in config.settings().items() if name not in open_settings}


def plan_even_if_too_large(request: Request) -> PlanResult:
    """Return the fastest configuration that is predicted to fit. If none is, return the fastest with every setting that
    saves memory: the machine's memory may only be guessed, and `line_of` tells the user that it is too little."""
    result = find_plan(request)
    if result.ranked:
        return result
    saving = {name: value for name, value in most_saving_settings(request, 1).items() if name != "head_chunks"}
    without_limit = dataclasses.replace(request, ignores_memory=True, given={**request.given, **saving})
    result = plan(without_limit)
    ranked = result.ranked
    if "head_chunks" not in request.given:
        saving |= most_saving_settings(request, result.best.config.ulysses)
        without_limit = dataclasses.replace(without_limit, given={**request.given, **saving})
        chunked = predict(without_limit, result.best.candidate)
        ranked = (chunked, *ranked[1:]) if isinstance(chunked, Prediction) else ranked
    return dataclasses.replace(result, request=dataclasses.replace(request, ignores_memory=True), ranked=ranked)


def line_of(result: PlanResult) -> str:
    """Return one line for the user: what was chosen, its predicted time and memory, and the next best."""
    request, best = result.request, result.best
    machine, needed = request.machine, rank_bytes(best.memory, request.budget)
    data = f"{request.seq} tokens" + (f" in {len(request.documents)} documents" if request.documents else "")
    line = (
        f'{SECTION}: "auto" for {data} on {request.world} ranks of {machine.name}, {machine.per_node} a node, is '
        f"{best.candidate}, predicted {best.seconds:.3g} s a sequence"
    )
    saving = chosen_memory_settings(result)
    if saving is not None:
        line += f", with {' and '.join(settings_in_words(saving)) or 'nothing that spares memory'}"
    if needed > machine.usable:
        line += f" and {needed / GIB:.1f} GiB a rank where the machine has {machine.usable / GIB:.1f}"
        line += "" if request.checkpointing or saving is None else ", gradient checkpointing would spare most"
    elif saving is not None:
        line += f", {needed / GIB:.3g} of {machine.usable / GIB:.3g} GiB a rank"
    for runner_up in result.ranked[1:2]:
        line += f"; next is {runner_up.candidate}, {runner_up.seconds / best.seconds:.2f} times as long"
    return "; ".join([line, *request.model.not_counted])


def chosen_memory_settings(result: PlanResult) -> dict[str, Any] | None:
    """Return the memory settings that the planner chose and that differ from the defaults; None if it had none to
    choose."""
    planned = [name for name in MEMORY_SETTINGS if name not in result.request.given]
    defaults, best = SequenceParallelConfig(), result.best.config
    changed = {name: getattr(best, name) for name in planned if getattr(best, name) != getattr(defaults, name)}
    return changed if planned else None


def most_sparing(config: SequenceParallelConfig, request: Request) -> tuple[list[str], Footprint]:
    """Return (what spares memory and is not on yet, in words; the memory of a step with all of it)."""
    others, defaults = dataclasses.replace(request, checkpointing=True, given={}), SequenceParallelConfig()
    saving = {
        name: value
        for name, value in most_saving_settings(others, config.ulysses).items()
        if getattr(config, name) == getattr(defaults, name)
    }
    words = [*(() if request.checkpointing else ("gradient checkpointing",)), *settings_in_words(saving)]
    return words, footprint(others.step(dataclasses.replace(config, **saving)))


def what_would_fit(config: SequenceParallelConfig, request: Request) -> str:
    """Return what to do where the memory of a step does not fit, as an order to the user."""
    words, sparing = most_sparing(config, request)
    if words and fits(sparing, request.budget):
        return f"it fits with {', '.join(words)}: turn them on (--set memory=auto chooses the settings)"
    changes = nearest_fits(request)
    spared = ", with --set memory=auto" * bool(words)
    return f"take {' or '.join(changes)}{spared}" if changes else "take a smaller model"


def memory_in_words(config: SequenceParallelConfig, job: Job, seq: int, world: int, machine: Machine) -> str:
    """Return a clause: the memory that a step is predicted to need, and with which settings it needs less."""
    if job.model is None:
        return ""
    request = request_of(config, job, seq, world, machine)
    config = dataclasses.replace(config, head_chunks=1) if config.head_chunks == "auto" else config
    now = footprint(request.step(config)).peak.total
    words, sparing = most_sparing(config, request)
    least = sparing.peak.total
    predicted = f"`python -m ds_seqpar memory` predicts {now / GIB:.3g} GiB a rank for {seq:,} tokens"
    if not words or least > SAVES * now:
        return f"{predicted}, and little less with other settings: take a larger size, a higher ZeRO stage or less data"
    return f"{predicted}, and {least / GIB:.3g} GiB with {', '.join(words)}: turn them on, or take a larger size"
