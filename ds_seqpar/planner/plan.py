"""The search for the fastest configuration that fits: of all legal candidates those whose rough estimate is near the
best get a price. It reads no clock and no environment, so all ranks find the same configuration. Does not import
torch."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ..compiler import schedules
from ..compiler.overlap.timeline import Timeline
from ..compiler.program.shape import ITEMSIZE
from ..compiler.sharding.heads import free_head_chunk_counts
from ..compiler.sharding.layout import multiple
from ..config.deepspeed_json import Offload
from ..config.settings import even_ulysses
from ..errors import ConfigError
from . import limits
from .candidates import Candidate, candidates, check_given, refusal, ulysses_sizes
from .estimate import Estimate, Estimator
from .predict import Prediction, Predictor, least_memory, predict
from .price import DIRECTIONS, call_of, timeline_of
from .request import Request

FAR = 1.25  # candidates whose estimate is more than this times the best price so far get none
TRIED = 2  # candidates of a size, Ulysses size and schedule of which one must fit
STEPS = 800  # steps that a rank has in all candidates with a price together
VARIED = 3  # the fastest candidates that are tried with overlap too, and in head chunks
LISTED = 12  # most configurations of a result
ALIKE = 1.005  # predictions whose times differ by a smaller ratio count as equally fast; the plainer one is preferred
OVERLAPPED = 16  # CP ranks up to which overlap is tried: ordering the products takes time that grows with their cube
SECONDS = operator.attrgetter("seconds")
SAME = "in time and memory the same as"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlanResult:
    """The result of a search."""

    request: Request
    ranked: tuple[Prediction, ...]  # the best ones, the fastest first; () if nothing fits
    rejected: tuple[tuple[str, str], ...]  # (which configurations, why)
    legal: int  # number of legal configurations
    considered: int  # number of legal configurations with different plans

    @property
    def best(self) -> Prediction:
        return self.ranked[0]

    @property
    def section(self) -> dict[str, Any]:
        """The "sequence_parallel" section of the best configuration, as in the DeepSpeed JSON."""
        return self.best.config.section()


def plan(request: Request) -> PlanResult:
    """Return the ranked configurations for a request.

    Raises:
        ConfigError: If none fits; the message names the nearest change with which one would.
    """
    result = find_plan(request)
    if not result.ranked:
        raise ConfigError(nothing_fits(request, result.rejected))
    return result


def find_plan(request: Request) -> PlanResult:
    """Return the result of `plan`, with empty `ranked` if nothing fits."""
    check_given(request.given, request.world, request.heads)
    search = _Search(request)
    ranked = search.ranked()
    return PlanResult(
        request=request, ranked=tuple(ranked[:LISTED]), rejected=tuple(search.reasons(ranked)), legal=search.legal,
        considered=search.considered,
    )  # fmt: skip


class _Search:
    """The state of one search."""

    def __init__(self, request: Request) -> None:
        self.request, self.predict = request, Predictor(request)
        self.refused: Counter[tuple[str, str]] = Counter()  # (which configurations, why) -> how many
        self.legal = self.considered = 0

    def refuse(self, candidate: Candidate, why: str) -> None:
        self.refused[f"{candidate.size} ranks", why] += 1

    # ---- what is worth a price

    def distinct_candidates(self) -> Iterator[Candidate]:
        """Yield the legal candidates that may fit the memory; of those with equal plans only the first."""
        request, documents = self.request, bool(self.request.documents)
        keys, least_bytes = set[tuple](), dict[int, int]()
        for candidate in candidates(request.world, request.heads, request.given):
            if reason := self.illegal(candidate):
                self.refuse(candidate, reason)
                continue
            self.legal += 1
            key = candidate.plan_key(documents)
            if key in keys:
                continue
            keys.add(key)
            self.considered += 1
            if (size := candidate.size) not in least_bytes:
                least_bytes[size] = least_memory(request, size)
            if least_bytes[size] > request.limit:
                self.refuse(candidate, request.memory_shortage(least_bytes[size]))
            else:
                yield candidate

    def illegal(self, candidate: Candidate) -> str:
        """Return why a candidate is not considered; "" if it is."""
        request = self.request
        if request.sizes and candidate.size not in request.sizes:
            return "a step's sequences cannot be shared among such groups"
        if candidate.overlap and candidate.cp_size > OVERLAPPED:
            return f"the order of overlap is found on {OVERLAPPED} CP ranks at most"
        return refusal(candidate, request.seq, bool(request.documents))

    def by_promise(self) -> list[Estimate]:
        """Return the estimates, the most promising first; before all others the best of each size and Ulysses size."""
        shapes, best, others = set[tuple](), list[Estimate](), list[Estimate]()
        for estimate in sorted(map(Estimator(self.request), self.distinct_candidates()), key=_promise):
            shape = estimate.candidate.size, estimate.candidate.ulysses
            (others if shape in shapes else best).append(estimate)
            shapes.add(shape)
        return best + others

    # ---- by price

    def priced(self) -> list[Prediction]:
        """Return the predictions of promising candidates that fit, one of each kind, the fastest first."""
        predictions, tried, steps, fastest = list[Prediction](), Counter[tuple](), STEPS, math.inf
        for seconds, _, candidate in self.by_promise():
            kind = candidate.size, candidate.ulysses, candidate.schedule.name, candidate.has_default_layout
            if tried[kind] == TRIED:
                self.refuse(candidate, "others of their schedule and Ulysses size receive less")
            elif seconds > FAR * fastest or (predictions and candidate.steps > steps):
                self.refuse(candidate, "receives so much that it is expected to be slower")
            elif prediction := self.predicted(candidate):
                predictions.append(prediction)
                fastest, steps, tried[kind] = min(fastest, prediction.seconds), steps - candidate.steps, TRIED
            else:
                tried[kind] += 1
        return sorted(predictions, key=SECONDS)

    def ranked(self) -> list[Prediction]:
        """Return the predictions that fit, the plainest of the fastest first."""
        plain = self.priced()
        predictions = self.without_duplicates([*plain, *self.with_overlap(plain), *self.in_head_chunks(plain)])
        alike = [prediction for prediction in predictions if prediction.seconds <= predictions[0].seconds * ALIKE]
        first = sorted(alike, key=lambda prediction: (len(prediction.config.section()), prediction.config.size))[:1]
        return first + [prediction for prediction in predictions if prediction not in first]

    def predicted(self, candidate: Candidate, **settings: Any) -> Prediction | None:
        prediction = self.predict(candidate, **settings)
        if isinstance(prediction, str):
            self.refused[str(candidate), prediction] += 1
            return None
        return prediction

    def with_overlap(self, plain: Sequence[Prediction]) -> Iterator[Prediction]:
        """Yield the fastest of those that gather, with overlap."""
        if "overlap" in self.request.given:
            return
        gathering = [prediction.candidate for prediction in plain if prediction.candidate.gathers]
        few = [candidate for candidate in gathering if candidate.cp_size <= OVERLAPPED]
        if len(few) < len(gathering):
            self.refused["overlap", f"its order is looked for on {OVERLAPPED} CP ranks at most"] += 1
        for candidate in few[:VARIED]:
            if prediction := self.predicted(dataclasses.replace(candidate, overlap=True)):
                yield prediction

    def in_head_chunks(self, plain: Sequence[Prediction]) -> Iterator[Prediction]:
        """Yield the fastest with Ulysses in head chunks that hide its exchanges, and send no more bytes."""
        given = self.request.given
        if given.get("head_chunks", "auto") != "auto" or given.get("overlap") is False:
            return
        chosen = [prediction for prediction in plain if prediction.config.ulysses > 1 and not prediction.config.overlap]
        for prediction in chosen[:VARIED]:
            if (candidate := prediction.candidate).cp_size <= OVERLAPPED:
                for head_chunks in free_head_chunk_counts(*self.request.heads, candidate.ulysses)[1:]:
                    settings = {**prediction.spared, "head_chunks": head_chunks}
                    if chunked := self.predicted(dataclasses.replace(candidate, overlap=True), **settings):
                        yield chunked

    def without_duplicates(self, predictions: Sequence[Prediction]) -> list[Prediction]:
        """Return the predictions, the fastest first; of those with equal outcomes only the one with the shortest
        section. The overlap pass may give two candidates the same plan, and rings in different orders may take equally
        long."""
        kept: dict[tuple, Prediction] = {}
        for prediction in sorted(predictions, key=lambda prediction: len(prediction.config.section())):
            if (first := kept.setdefault(_outcome(prediction), prediction)) is not prediction:
                self.refused[str(prediction.candidate), f"{SAME} {first.candidate}"] += 1
        return sorted(kept.values(), key=SECONDS)

    def reasons(self, ranked: Sequence[Prediction]) -> Iterator[tuple[str, str]]:
        """Yield (which configurations, why they were rejected)."""
        for prediction in ranked[LISTED : 2 * LISTED]:
            yield str(prediction.candidate), f"{prediction.seconds / ranked[0].seconds - 1:.1%} slower than the fastest"
        if others := len(ranked[2 * LISTED :]):
            yield f"{others} others", "slower still"
        for (configurations, why), count in sorted(self.refused.items(), key=lambda item: SAME in item[0][1]):
            yield (configurations if count == 1 else f"{configurations}, {count} configurations"), why
        sizes = [size for size, _ in ulysses_sizes(self.request.world, self.request.heads, self.request.given)]
        if max(sizes, default=0) < self.request.world and not (self.request.sizes or "size" in self.request.given):
            most = f"at most {limits.MAX_PLANNED_RANKS:,} ranks share a sequence, and {limits.MAX_CP_RANKS:,} run its"
            yield f"more than {max(sizes, default=0)} ranks", f"{most} schedule"


def _promise(estimate: Estimate) -> tuple:
    """Return the sort key of an estimate: time in steps of 2 %, since its error is larger; then the time of links that
    a sequence takes; then the plainest first."""
    candidate = estimate.candidate
    plainness = len(candidate.options), candidate.rank_order != "auto"
    return round(50 * math.log(estimate.seconds)), estimate.message_seconds * candidate.size, *plainness


def _outcome(prediction: Prediction) -> tuple:
    # the numbers that the command's table shows of a prediction
    seconds = [float(f"{prediction.time.seconds_by_item[f'attention {direction}']:.6g}") for direction in DIRECTIONS]
    return prediction.config.size, prediction.config.ulysses, prediction.memory.peak.total, *seconds


# ---- what is said of a result


def timelines(request: Request, prediction: Prediction) -> dict[str, Timeline]:
    """Return direction -> timeline of all ranks in one layer's attention: for one head chunk, or for all head chunks
    where they hide one another's exchanges."""
    call = call_of(request.step(prediction.config))
    return {direction: timeline_of(request.machine, call, direction) for direction in DIRECTIONS}


def received_over_least(result: PlanResult, prediction: Prediction) -> float | None:
    """Return the bytes that the busiest rank receives in one layer's forward, divided by the least that any schedule
    needs for full attention with this Ulysses size; None if that is 0.

    With any schedule a rank needs at least 4 S D sqrt(Hq Hkv / (U P)) bytes, some of which it holds already. Here S is
    tokens, D the bytes of head_dim elements, Hq and Hkv the numbers of query and key/value heads, U the Ulysses size
    and P the ranks of a sequence. A causal mask lowers the bound by sqrt(2)."""
    request, config = result.request, prediction.config
    (q_heads, kv_heads), shares = request.heads, config.ulysses * config.size
    token = request.model.head_dim * ITEMSIZE[request.dtype] * request.batch * request.seq
    least = token * (4 * math.sqrt(q_heads * kv_heads / shares) - 2 * (q_heads + kv_heads) / shares)
    return prediction.forward.received / least if least > 0 else None


# ---- where nothing fits


def nothing_fits(request: Request, rejected: Sequence[tuple[str, str]]) -> str:
    """Return the message for a request that nothing fits, with what would fit. `rejected` is that of PlanResult."""
    too_large = [f"{configurations}: {why}" for configurations, why in rejected if "GiB" in why]
    reason = too_large[-1] if too_large else ": ".join(rejected[0]) if rejected else "there is no candidate"
    changes = nearest_fits(request)
    advice = f"take {' or '.join(changes)}" if changes else "take a smaller model"
    tokens = f"{request.seq} tokens on {request.world} ranks"
    return f"a configuration must fit the memory and the length; got none for {tokens} ({reason}), {advice}"


def nearest_fits(request: Request) -> list[str]:
    """Return changes with each of which something fits: a length that can be shared; or more ranks, an offloaded
    optimizer, or a shorter sequence."""
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
    if (offloaded := with_optimiser_on_host(request)) is not None and fitting_length(offloaded) == request.seq:
        changes.append("zero_optimization.offload_optimizer with device cpu")
    shorter = 1 if request.documents else request.seq
    while shorter > 1024:
        shorter //= 2
        if 0 < (length := fitting_length(dataclasses.replace(request, seq=shorter))) < request.seq:
            changes.append(f"{length} tokens")
            break
    return changes


def with_optimiser_on_host(request: Request) -> Request | None:
    """Return the request with the optimizer in host memory; None if it cannot be there, or is there already."""
    if request.zero.optimiser_away or not (request.zero.stage and request.machine.apart):
        return None
    zero = dataclasses.replace(request.zero, offload_optimizer=Offload(device="cpu"))
    return dataclasses.replace(request, zero=zero)


def fitting_length(request: Request) -> int:
    """Return the request's length, or the next one that ranks can share, if the given schedule, or a ring, fits on as
    many ranks as can share a sequence; else 0."""
    wanted = {"schedule": schedules.DEFAULT} | {name: value for name, value in request.given.items() if value != "auto"}
    shapes = [
        pair for pair in ulysses_sizes(request.world, request.heads, wanted) if pair[0] in (request.sizes or pair)
    ]
    size = max((size for size, _ in shapes), default=0)
    if not size or least_memory(request, size) > request.limit:
        return 0
    ulysses_choices = [ulysses for shape_size, ulysses in shapes if shape_size == size]
    even_choices = [
        ulysses for ulysses in ulysses_choices if ulysses in even_ulysses(size, *request.heads)
    ] or ulysses_choices
    for ulysses in sorted({min(even_choices), max(even_choices)}):
        candidate = next(candidates(request.world, request.heads, {**wanted, "size": size, "ulysses": ulysses}), None)
        if candidate is None:  # given settings that fit no shape
            continue
        share = 1 if request.documents else multiple(candidate.layout, size, ulysses)
        length = -(-request.seq // share) * share
        if length > limits.MAX_TOKENS:
            continue
        if isinstance(predict(dataclasses.replace(request, seq=length), candidate), Prediction):
            return length
    return 0
