"""What "auto" is: what is to be trained, as ranks know it when they start, what is planned for it, and the line that
says so. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .. import limits
from ..compiler.layout import divisors
from ..config import MEMORY_SETTINGS, PLAN_REQUESTS, PLANNED_FOR, SequenceParallelConfig
from ..deepspeed_json import Zero, dtype_of
from ..errors import SECTION, ConfigError
from .footprint import taken
from .machine import Machine
from .plan import Choice, chosen, plan
from .request import Model, Request
from .search import Prediction, in_words, leanest, predict

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """model: its numbers. seq: tokens of the longest sequence, None where nobody knows them. documents: the lengths of
    those that it is a pack of. window: of attention of all layers, in tokens. batch: sequences that a group of ranks
    trains at once. steps: how often, of an optimiser step. sequences: of the step; None leaves the number free, and all
    ranks share one. dtype, zero, checkpointing: as in `planner.request`."""

    model: Model | None = None
    seq: int | None = None
    documents: tuple[int, ...] = ()
    window: int | None = None
    batch: int | None = None
    steps: int | None = None
    sequences: int | None = None
    dtype: str = "bfloat16"
    zero: Zero = dataclasses.field(default_factory=Zero)
    checkpointing: bool = False

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Job:
        """What a DeepSpeed JSON says. What it leaves to a Trainer ("auto") is not known."""
        names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
        batch, steps, sequences = (x if isinstance(x := content.get(name), int) else None for name in names)
        zero = Zero.of(content.get("zero_optimization", {}))
        return cls(batch=batch, steps=steps, sequences=sequences, dtype=dtype_of(content), zero=zero)

    def sizes(self, world: int) -> tuple[int, ...]:
        """Ranks that may share a sequence so that a step has the sequences that it must have."""
        if self.sequences is None:
            return (world,)
        each = (self.batch or 1) * (self.steps or 1)
        found = [(size, self.sequences, world // size * each) for size in divisors(world)]
        exact = self.batch is not None and self.steps is not None
        return tuple(size for size, wanted, got in found if (wanted == got if exact else wanted % got == 0)) or (world,)


class Planned(NamedTuple):
    """config: resolved. choice: what was found, None where nothing was to be planned."""

    config: SequenceParallelConfig
    choice: Choice | None


def planned(
    config: SequenceParallelConfig,
    job: Job | None,
    heads: tuple[int, int] | None,
    world: int,
    seen: Callable[[str], Machine],
) -> Planned:
    """The configuration with every "auto" replaced: by the planner where it `asks_for_plan`, else as `config.resolve`
    says. seen: what the machine is supposed to be, for a dtype.

    Raises ConfigError for what `resolve` or the planner refuses, and where a plan is asked for without a model or a
    length.
    """
    resolved = config.resolve(world, heads)
    if not config.asks_for_plan:
        return Planned(resolved, None)
    said = next((name for name in PLANNED_FOR if getattr(config, name) != "auto"), "memory")
    if job is None or job.model is None:
        raise ConfigError(
            f"{SECTION}.{said} plans for a model whose numbers are known; got {getattr(config, said)} without a model, "
            f"let initialize make the SequenceParallel of a transformers model, or leave {said} out"
        )
    seq = config.seq_len if config.seq_len != "auto" else job.seq
    if seq is None:
        raise ConfigError(
            f"{SECTION}.{said} plans for a length that is known; got {getattr(config, said)!r} and data that does not "
            f"say how long its sequences are, say seq_len too, or leave {said} out"
        )
    choice = choose(request_of(config, job, seq, world, seen(job.dtype)))
    best = choice.best.config
    chosen = (*config.unsaid, *(("head_stages",) if config.head_stages == "auto" else ()))
    kept = {name: getattr(config, name) for name in ("head_stages", *PLAN_REQUESTS) if name not in chosen}
    return Planned(dataclasses.replace(best, **kept), choice)


def request_of(config: SequenceParallelConfig, job: Job, seq: int, world: int, seen: Machine) -> Request:
    assert job.model is not None
    machine = seen
    if config.machine != "auto":
        machine = dataclasses.replace(Machine.load(config.machine), per_node=seen.per_node)
    documents = job.documents if sum(job.documents) == seq and len(job.documents) <= limits.DOCUMENTS else ()
    share = 2 * world  # of zigzag's chunks; what is missing is padded
    return Request(
        model=job.model, machine=machine, world=world, seq=seq if documents else -(-seq // share) * share,
        documents=documents, window=job.window, batch=job.batch or 1, dtype=job.dtype, zero=job.zero,
        checkpointing=job.checkpointing, given=given_of(config), sequences=job.sequences,
        sizes=job.sizes(world) if config.size == "auto" else (),
    )  # fmt: skip


def given_of(config: SequenceParallelConfig) -> dict[str, Any]:
    """What is no choice any more. Stages that are "auto" are chosen with whether they hide exchanges."""
    left = {*PLAN_REQUESTS, *config.unsaid}
    if config.head_stages == "auto" and not config.overlap:
        left.add("overlap")
    return {name: value for name, value in config.settings().items() if name not in left}


def choose(request: Request) -> Choice:
    """The fastest that should fit. Where nothing does, the fastest without regard to memory, with every setting that
    saves some: the reader of the line may judge, since a machine may only be supposed."""
    choice = chosen(request)
    if choice.ranked:
        return choice
    lean = {name: value for name, value in leanest(request, 1).items() if name != "head_stages"}
    anyway = dataclasses.replace(request, regardless=True)
    choice = plan(dataclasses.replace(anyway, given={**request.given, **lean}))
    ranked = choice.ranked
    if "head_stages" not in request.given:
        lean |= leanest(request, choice.best.config.ulysses)
        found = predict(dataclasses.replace(anyway, given={**request.given, **lean}), choice.best.candidate)
        ranked = (found, *ranked[1:]) if isinstance(found, Prediction) else ranked
    return dataclasses.replace(choice, request=anyway, ranked=ranked)


def line_of(choice: Choice) -> str:
    """One line for a person: the choice, its predicted time and memory, and the runner-up with its ratio."""
    request, best = choice.request, choice.best
    machine, needed = request.machine, taken(best.memory, request.room)
    what = f"{request.seq} tokens" + (f" in {len(request.documents)} documents" if request.documents else "")
    line = (
        f'{SECTION}: "auto" for {what} on {request.world} ranks of {machine.name}, {machine.per_node} a node, is '
        f"{best.candidate}, predicted {best.seconds:.3g} s a sequence"
    )
    spared = spared_by(choice)
    if spared is not None:
        line += f", with {' and '.join(in_words(spared)) or 'nothing that spares memory'}"
    if needed > machine.usable:
        line += f" and {needed / GIB:.1f} GiB a rank where the machine has {machine.usable / GIB:.1f}"
        line += "" if request.checkpointing or spared is None else ", gradient checkpointing would spare most"
    elif spared is not None:
        line += f", {needed / GIB:.3g} of {machine.usable / GIB:.3g} GiB a rank"
    for other in choice.ranked[1:2]:
        line += f"; next is {other.candidate}, {other.seconds / best.seconds:.2f} times as long"
    return line


def spared_by(choice: Choice) -> dict[str, Any] | None:
    """What was chosen of the settings that spare memory; None where none was to be chosen."""
    left = [name for name in MEMORY_SETTINGS if name not in choice.request.given]
    plain, best = SequenceParallelConfig(), choice.best.config
    changed = {name: getattr(best, name) for name in left if getattr(best, name) != getattr(plain, name)}
    return changed if left else None
