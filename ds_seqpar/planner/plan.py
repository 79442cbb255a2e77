"""Search for configurations that fit in memory, and rank them by a rough estimate of their time.

The search does not depend on the clock or the environment, so all ranks find the same result. This module does not
import torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..analysis.memory import free_head_chunk_counts
from ..base.errors import ConfigError
from ..core.compiler import schedules
from ..core.compiler.sharding.heads import even_ulysses
from ..core.compiler.sharding.layout import divisors, multiple
from ..core.compiler.sharding.masks import CAUSAL
from ..core.settings import MEMORY_SETTINGS, SequenceParallelConfig
from ..deepspeed.config import Offload
from . import limits
from .estimate import Estimate, estimate
from .footprint import Footprint, fits, footprint, rank_bytes
from .request import Request

LISTED = 12  # maximum number of configurations in a result
SIMILAR = 0.05  # estimates are treated as equal if their logarithms round to the same multiple of SIMILAR
GIB = 2**30
# memory-saving settings, added one after another in this order, before head chunks
TILES: tuple[dict[str, Any], ...] = ({"loss_tiles": "auto"}, {"mlp_tiles": "auto"})
# tried last, cheapest first, each in addition to all of the settings above
LAST_RESORTS: tuple[dict[str, Any], ...] = (
    {"save_qkv_after_all_to_all": False},
    {"offload_checkpoints": True},
    {"recompute_attention": True},
    {"offload_checkpoints": True, "recompute_attention": True},
)


def rough(seconds: float) -> int:
    """Round an estimate on a logarithmic scale, so that configurations with similar times get the same number."""
    return round(math.log(seconds) / SIMILAR)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """A configuration with its predicted time and memory."""

    config: SequenceParallelConfig  # without any "auto" values
    spared: Mapping[str, Any]  # memory settings that the configuration needs in order to fit
    estimate: Estimate
    seconds: float  # estimated seconds per sequence
    # total seconds for which all ranks' links are occupied by one sequence's messages in one layer's attention
    links: float
    memory: Footprint  # memory used on a rank and its host

    @property
    def key(self) -> tuple:
        """Sort key for results: rounded time, number of memory settings, use of links, number of other settings."""
        return rough(self.seconds), len(self.spared), self.links, len(self.config.section())

    @classmethod
    def of(
        cls, request: Request, config: SequenceParallelConfig, spared: Mapping[str, Any], memory: Footprint
    ) -> Planned:
        found = estimate(request.step(config), request.machine)
        inside, between = request.machine.inside.rate, request.machine.between.rate
        links = sum(one.inside / inside + one.between / between for one in (found.forward, found.backward))
        seconds = request.seconds_a_sequence(found.seconds, config)
        return cls(
            config=config, spared=spared, estimate=found, seconds=seconds, links=links * config.size, memory=memory
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlanResult:
    """The result of a search for configurations."""

    request: Request
    ranked: tuple[Planned, ...]  # the best configurations, fastest first; empty if nothing fits
    rejected: tuple[tuple[str, str], ...]  # (rejected configurations, reason)

    @property
    def best(self) -> Planned:
        return self.ranked[0]


def plan(request: Request) -> PlanResult:
    """Return the ranked configurations for a request.

    Raises:
        ConfigError: No configuration fits. The message suggests the smallest changes that would help.
    """
    result = find_plan(request)
    if not result.ranked:
        raise ConfigError(nothing_fits(request, result.rejected))
    return result


def find_plan(request: Request) -> PlanResult:
    """Return the result of `plan`, with an empty `ranked` if nothing fits."""
    # raises an error for settings that are never compatible
    SequenceParallelConfig(**request.given).resolve(request.world, request.heads)
    rejected: Counter[tuple[str, str]] = Counter()
    distinct: dict[tuple, tuple[float, SequenceParallelConfig]] = {}
    for config in candidates(request, rejected):
        share = multiple(config.layout, config.size, config.ulysses)
        if not request.job.documents and request.seq % share:
            rejected[f"{config.size} ranks", f"a length that is a multiple of {share} is needed"] += 1
            continue
        try:
            found = estimate(request.step(config), request.machine)
        except ConfigError as reason:  # the schedule has no plan for this mask
            rejected[name_of(config), str(reason)] += 1
            continue
        seconds = request.seconds_a_sequence(found.seconds, config)
        # keep the first of equal candidates
        distinct.setdefault((config.size, config.ulysses, found), (seconds, config))
    ranked: list[Planned] = []
    for seconds, config in sorted(distinct.values(), key=lambda one: one[0]):
        if len(ranked) >= LISTED and rough(seconds) > rough(ranked[LISTED - 1].seconds):
            rejected["others", "estimated to be slower"] += 1
        elif isinstance(fitting := in_memory(request, config), str):
            rejected[name_of(config), fitting] += 1
        else:
            ranked = sorted([*ranked, Planned.of(request, *fitting)], key=lambda planned: planned.key)
    reasons = ((who if count == 1 else f"{who}, {count} configurations", why) for (who, why), count in rejected.items())
    return PlanResult(request=request, ranked=tuple(ranked[:LISTED]), rejected=tuple(reasons))


def candidates(request: Request, rejected: Counter[tuple[str, str]]) -> Iterator[SequenceParallelConfig]:
    """Yield the valid configurations for a request, without memory settings.

    All sizes, all Ulysses sizes that divide the heads equally, and all schedules are combined, unless the request fixes
    them. Each schedule is used with its own shape, layout and rank order. Invalid combinations are counted in
    `rejected`.
    """
    given = dict(request.given)
    if given.get("head_chunks") == "auto":
        del given["head_chunks"]
    for size in request.sizes or _given(given, "size", divisors(request.world)):
        if size > limits.MAX_PLANNED_RANKS:
            rejected[f"{size} ranks", f"at most {limits.MAX_PLANNED_RANKS:,} ranks share a sequence"] += 1
            continue
        for ulysses in _given(given, "ulysses", even_ulysses(size, *request.heads)):
            # with a single rank, there is nothing to schedule
            several = 1 < size // ulysses <= limits.MAX_COMPARED_RANKS
            # the default schedule first
            names = dict.fromkeys((schedules.DEFAULT, *(schedules.SCHEDULES if several else ())))
            for schedule in _given(given, "schedule", names):
                try:
                    limits.check_followed(size // ulysses, bool(given.get("overlap")))
                    settings = {**given, "size": size, "ulysses": ulysses, "schedule": schedule}
                    yield SequenceParallelConfig(**settings).resolve(request.world, request.heads)
                except ConfigError as reason:
                    is_given = given.get("schedule", "auto") != "auto"
                    rejected[schedule, str(reason) if is_given else "does not take such ranks and settings"] += 1


def _given(given: Mapping[str, Any], name: str, every: Iterable[Any]) -> Iterable[Any]:
    return every if given.get(name, "auto") == "auto" else [given[name]]


def in_memory(
    request: Request, config: SequenceParallelConfig
) -> tuple[SequenceParallelConfig, dict[str, Any], Footprint] | str:
    """Return a configuration that fits in memory, with its memory settings and footprint. If nothing fits, return the
    reason.

    As few memory settings as possible are added to `config`.
    """
    least = math.inf
    for spared in memory_options(request, config.ulysses):
        try:
            chosen = dataclasses.replace(config, **spared).resolve(request.world, request.heads)
            memory = footprint(dataclasses.replace(request.step(chosen), mask=CAUSAL))  # other masks need less memory
        except ConfigError as error:
            return str(error)
        if fits(memory, request.budget):
            return chosen, spared, memory
        least = min(least, rank_bytes(memory, request.budget))
    if least <= request.budget.limit:
        return "what would have to leave the device does not fit the host"
    return f"needs at least {least / GIB:.1f} GiB on each rank, which has {request.budget.limit / GIB:.1f}"


def memory_options(request: Request, ulysses: int) -> list[dict[str, Any]]:
    """Return combinations of memory settings in the order in which to try them, from the fastest to the slowest.

    No combination changes a setting that the request fixes.
    """
    given = {name for name in MEMORY_SETTINGS if name in request.given}
    if request.given.get("head_chunks") == "auto":
        given.remove("head_chunks")
    if request.job.objective.head != "logits":  # trl's head is already tiled and does not support other tiles
        given.add("loss_tiles")
    head_chunks = [{"head_chunks": n} for n in free_head_chunk_counts(*request.heads, ulysses) if n > 1]
    options: list[dict[str, Any]] = [{}]
    for tried in (*TILES, *head_chunks):
        if not tried.keys() & given:
            options.append({**options[-1], **tried})
    before_last_resorts = options[-1]
    for tried in LAST_RESORTS if request.job.checkpointing else ():
        can_offload = request.machine.gpus or "offload_checkpoints" not in tried
        has_effect = can_offload and (ulysses > 1 or "save_qkv_after_all_to_all" not in tried)
        if has_effect and not tried.keys() & given:
            options.append({**before_last_resorts, **tried})
    return options


# ---- words for the user


def name_of(config: SequenceParallelConfig) -> str:
    """Return a short description of a resolved configuration, without its memory settings."""
    section, cp_size = config.section(), config.size // config.ulysses
    shown = {name: value for name, value in section.items() if name not in (*MEMORY_SETTINGS, "size", "ulysses")}
    schedule = shown.pop("schedule")
    own = [f"{name} {'x'.join(map(str, value)) if isinstance(value, list) else value}" for name, value in shown.items()]
    shape = [f"Ulysses {config.ulysses}"] * (config.ulysses > 1) + [schedule] * (cp_size > 1)
    return ", ".join([f"{config.size} rank{'s' * (config.size > 1)}: {' x '.join(shape) or 'alone'}", *own])


def settings_in_words(spared: Mapping[str, Any]) -> list[str]:
    """Return the memory settings in the form in which they are printed for the user."""
    plain_text = {
        "recompute_attention": "attention runs twice",
        "save_qkv_after_all_to_all False": "heads are exchanged again",
    }
    texts = [name if value is True else f"{name} {value}" for name, value in spared.items()]
    return [plain_text.get(text, text) for text in texts]


# ---- if nothing fits


def nothing_fits(request: Request, rejected: tuple[tuple[str, str], ...]) -> str:
    """Return the error message, with alternatives, for a request for which no configuration fits."""
    too_large = [f"{configurations}: {why}" for configurations, why in rejected if "GiB" in why]
    reason = too_large[-1] if too_large else ": ".join(rejected[0]) if rejected else "there is no candidate"
    changes = nearest_fits(request)
    advice = f"take {' or '.join(changes)}" if changes else "take a smaller model"
    tokens = f"{request.seq} tokens on {request.world} ranks"
    return f"a configuration must fit the memory and the length; got none for {tokens} ({reason}), {advice}"


def nearest_fits(request: Request) -> list[str]:
    """Return changes to a request. Each change alone would make some configuration fit.

    If ranks cannot share the requested length equally, the only suggested change is a longer sequence. For other
    lengths, the suggested changes are more ranks, an offloaded optimizer, and a shorter sequence.
    """
    if (length := fitting_length(request)) > request.seq:
        return [f"{length} tokens"]
    changes = []
    for world in (times * request.world for times in (2, 4, 8, 16, 32)):
        if world > limits.MAX_RANKS:
            break
        larger = dataclasses.replace(request, world=world, sizes=(), given={**request.given, "size": "auto"})
        if length := fitting_length(larger):
            changes.append(f"{world} ranks" + f" with {length} tokens" * (length != request.seq))
            break
    if (offloaded := with_optimizer_on_host(request)) is not None and fitting_length(offloaded) == request.seq:
        changes.append("zero_optimization.offload_optimizer with device cpu")
    shorter = 1 if request.job.documents else request.seq
    while shorter > 1024:
        shorter //= 2
        if 0 < (length := fitting_length(with_length(request, shorter))) < request.seq:
            changes.append(f"{length} tokens")
            break
    return changes


def with_length(request: Request, seq: int) -> Request:
    return dataclasses.replace(request, job=dataclasses.replace(request.job, seq=seq))


def with_optimizer_on_host(request: Request) -> Request | None:
    """Return the request with the optimizer in host memory, or None if the optimizer cannot be moved to host memory."""
    zero = request.job.zero
    if zero.optimizer_away or not (zero.stage and request.machine.gpus):
        return None
    zero = dataclasses.replace(zero, offload_optimizer=Offload(device="cpu"))
    return dataclasses.replace(request, job=dataclasses.replace(request.job, zero=zero))


def fitting_length(request: Request) -> int:
    """Return the requested length, rounded up until ranks can share it equally, or 0 if that length does not fit.

    The given schedule, or a ring, is tried on the largest number of ranks that can share a sequence.
    """
    settings = {name: value for name, value in request.given.items() if value != "auto"}
    narrow = dataclasses.replace(request, given={"schedule": schedules.DEFAULT, **settings})
    configs = list(candidates(narrow, Counter()))
    widest = [config for config in configs if config.size == max(config.size for config in configs)]
    for config in (*widest[:1], *widest[1:][-1:]):  # smallest and largest Ulysses size
        share = 1 if request.job.documents else multiple(config.layout, config.size, config.ulysses)
        length = -(-request.seq // share) * share
        if length <= limits.MAX_TOKENS and not isinstance(in_memory(with_length(narrow, length), config), str):
            return length
    return 0
