"""The search for the fastest configuration that fits: estimates for all legal candidates, lower bounds for the
promising ones, the simulator for the best of these. It reads no clock and no environment, so all ranks find the same
configuration. Does not import torch."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..errors import ConfigError
from . import limits
from .candidates import Candidate, candidates, check_given, refusal, shapes, ulysses_sizes
from .footprint import Footprint, rank_bytes
from .nearest import nothing_fits
from .request import Request
from .search import (
    DIRECTIONS,
    Estimate,
    Estimator,
    Prediction,
    least_memory,
    least_received_bytes,
    least_seconds_with_overlap,
    predict,
    simulated_instructions,
    with_head_chunks,
    with_simulated_time,
)

FINALISTS = 6  # predictions with the best bounds, which are simulated
FAR = 1.25  # candidates whose estimate is more than this times the best get no lower bound
ORDERED = 3  # predictions with which overlap is tried too
STAGED = 3  # predictions with which head chunks are tried too
ALIKE = 1.005  # predictions whose times differ by a smaller ratio count as equally fast; the plainer one is preferred
EACH = 2  # candidates per size, Ulysses size and schedule that get a lower bound
# steps that lower bounds may visit: the least limit, and the limit per pair of a size and a Ulysses size
STEPS, STEPS_EACH = 4000, 80
OVERLAPPED = 16  # CP ranks up to which overlap is tried: finding the order of products takes the time of 100 steps
SIMULATED = 15_000  # instructions that the simulator may execute in one plan
SECONDS = operator.attrgetter("seconds")
SAME = "in time and memory the same as"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlanResult:
    """The result of a search."""

    request: Request
    ranked: tuple[Prediction, ...]  # the finalists, the fastest first; () if nothing fits
    rejected: tuple[tuple[str, str], ...]  # (which configurations, why)
    simulated: bool  # whether the best one was simulated; else its time is a lower bound
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
    ranked = search.simulate_finalists(search.by_lower_bound())
    return PlanResult(
        request=request,
        ranked=tuple(ranked),
        rejected=tuple(search.reasons()),
        simulated=bool(ranked) and ranked[0].simulated,
        legal=search.legal,
        considered=search.considered,
    )


class _Search:
    """The state of one search."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.refused: Counter[tuple[str, str]] = Counter()  # (which configurations, why) -> how many
        self.predictions: list[Prediction] = []  # with times by lower bounds
        self.by_numbers: dict[tuple, Prediction] = {}  # `_numbers` -> the first prediction that has them
        self.steps = 0  # steps that lower bounds have visited
        self.steps_allowed = self.count_allowed_steps()
        self.instructions_left = SIMULATED
        self.finalists: list[Prediction] = []  # with times by lower bounds
        self.not_simulated: list[Prediction] = []
        self.legal = self.considered = 0
        # size -> number of candidates dropped because others of their kind receive less
        self.dropped: Counter[int] = Counter()

    def count_allowed_steps(self) -> int:
        """Return how many steps lower bounds may visit. Record in `refused` that larger sizes cannot be planned."""
        sizes = list(ulysses_sizes(self.request.world, self.request.heads, self.request.given))
        largest = max((size for size, _ in sizes), default=0)
        if largest < self.request.world and not (self.request.sizes or "size" in self.request.given):
            schedule_limit = f"{limits.MAX_CP_RANKS:,} run its schedule"
            why = f"at most {limits.MAX_PLANNED_RANKS:,} ranks share a sequence, and {schedule_limit}"
            self.refused[f"more than {largest} ranks", why] += 1
        return max(STEPS, STEPS_EACH * len(sizes))

    # ---- by estimates

    def distinct_candidates(self) -> Iterator[Candidate]:
        """Yield the legal candidates; of those with equal plans only the first."""
        keys: set[tuple] = set()
        request, documents = self.request, bool(self.request.documents)
        shape_args = request.world, request.heads, request.given
        many = sum(1 for _ in shapes(*shape_args)) > limits.MAX_SHAPES
        if many:
            why = f"there are more than {limits.MAX_SHAPES:,} shapes without them"
            self.refused["other layouts and rank orders", why] += 1
        for candidate in candidates(*shape_args, plain=many):
            if reason := self.illegal(candidate):
                self.refuse(candidate, reason)
                continue
            self.legal += 1
            key = candidate.plan_key(documents)
            if key not in keys:
                keys.add(key)
                self.considered += 1
                yield candidate

    def illegal(self, candidate: Candidate) -> str:
        """Return why a candidate is not considered; "" if it is."""
        request = self.request
        if request.sizes and candidate.size not in request.sizes:
            return "a step's sequences cannot be shared among such groups"
        if candidate.overlap and candidate.cp_size > OVERLAPPED:
            return f"the order of overlap is found on {OVERLAPPED} CP ranks at most"
        return refusal(candidate, request.seq, bool(request.documents))

    def fitting_sizes(self) -> Iterator[Candidate]:
        """Yield the distinct candidates of sizes at which a configuration may fit the memory."""
        of_size: dict[int, Footprint] = {}
        for candidate in self.distinct_candidates():
            if candidate.size not in of_size:
                of_size[candidate.size] = least_memory(self.request, candidate.size)
            needed = rank_bytes(of_size[candidate.size], self.request.budget)
            if needed > self.request.limit:
                self.refuse(candidate, self.request.memory_shortage(needed))
            else:
                yield candidate

    def ordered_estimates(self) -> list[Estimate]:
        """Return the estimates to consider: the best of each size and Ulysses size, then others with the schedule's
        default layout, then the rest. Each of these three groups has the most promising first, and few of one kind."""
        counts: Counter[tuple] = Counter()
        first, second, last = list[Estimate](), list[Estimate](), list[Estimate]()
        for estimate in sorted(map(Estimator(self.request), self.fitting_sizes()), key=_promise):
            candidate = estimate.candidate
            group = *candidate.size_and_ulysses, candidate.schedule.name, candidate.has_default_layout
            counts.update((candidate.size_and_ulysses, group))
            if counts[candidate.size_and_ulysses] == 1:
                first.append(estimate)
            elif counts[group] <= (EACH if candidate.has_default_layout else 1):
                (second if candidate.has_default_layout else last).append(estimate)
            else:
                self.dropped[candidate.size] += 1
        return first + second + last

    # ---- by lower bounds

    def by_lower_bound(self) -> list[Prediction]:
        """Return the predictions that fit, sorted by their lower bounds, the fastest first."""
        for estimate in self.ordered_estimates():
            self.consider(estimate)
        return sorted(self.predictions, key=SECONDS)

    def consider(self, estimate: Estimate) -> None:
        """Predict a candidate if it may be among the best; else record why not."""
        candidate = estimate.candidate
        if reason := self.why_hopeless(estimate):
            self.refuse(candidate, reason)
            return
        prediction = predict(self.request, candidate)
        if isinstance(prediction, str):
            self.refused[str(candidate), prediction] += 1
            return
        self.steps += estimate.bound_steps + (candidate.cp_size**2 // 2 if candidate.overlap else 0)
        if (same := self.by_numbers.setdefault(_numbers(prediction), prediction)) is not prediction:
            self.refused[str(candidate), f"{SAME} {same.candidate}"] += 1
        else:
            self.predictions.append(prediction)

    def why_hopeless(self, estimate: Estimate) -> str:
        """Return why a candidate cannot, or is unlikely to, be among the best; "" if it may."""
        best = sorted(map(SECONDS, self.predictions))[:FINALISTS]
        if len(best) == FINALISTS and estimate.least_seconds > best[-1]:
            return "computing attention alone takes longer than all that others do"
        if best and (self.steps + estimate.bound_steps > self.steps_allowed or estimate.seconds > FAR * best[0]):
            return "receives so much that it is expected to be slower"
        return ""

    def refuse(self, candidate: Candidate, why: str) -> None:
        self.refused[f"{candidate.size} ranks", why] += 1

    # ---- by the simulator

    def simulate_finalists(self, predictions: list[Prediction]) -> list[Prediction]:
        """Return the ranked finalists. One that takes too long to simulate keeps its lower bound; it is ranked as if it
        were slower than that by the largest ratio among the others."""
        self.finalists, self.not_simulated = predictions[:FINALISTS], predictions[FINALISTS:]
        ranked: list[Prediction] = []
        slower = 1.0
        for prediction in self.finalists:
            simulated = self.simulate(prediction)
            slower = max(slower, simulated.seconds / prediction.seconds) if simulated else slower
            ranked.append(simulated or prediction)
        for prediction in [] if "overlap" in self.request.given else self.with_overlap(predictions):
            if simulated := self.simulate(prediction):
                ranked.append(simulated)
            else:
                self.refused["overlap", "looking for the order of its products would take too long"] += 1
        ranked += self.in_head_chunks(ranked)
        ranked.sort(key=lambda prediction: prediction.seconds * (1.0 if prediction.simulated else slower))
        return _plainest(self.without_duplicates(ranked))

    def simulate(self, prediction: Prediction) -> Prediction | None:
        """Return the prediction with simulated time; None if that would take more instructions than are left."""
        cost = simulated_instructions(self.request, prediction)
        if cost > self.instructions_left:
            return None
        self.instructions_left -= cost
        return with_simulated_time(self.request, prediction)

    def in_head_chunks(self, ranked: list[Prediction]) -> list[Prediction]:
        """Return the fastest predictions with Ulysses, simulated in head chunks that hide its exchanges."""
        given = self.request.given
        if given.get("head_chunks", "auto") != "auto" or given.get("overlap") is False:
            return []
        with_ulysses = [
            prediction
            for prediction in sorted(ranked, key=SECONDS)
            if prediction.config.ulysses > 1 and not prediction.config.overlap
        ]
        chosen = [prediction for prediction in with_ulysses[:STAGED] if prediction.candidate.cp_size <= OVERLAPPED]
        chunked_by_heads = [
            self.simulate(chunked) for prediction in chosen for chunked in with_head_chunks(self.request, prediction)
        ]
        return [prediction for prediction in chunked_by_heads if prediction]

    def without_duplicates(self, ranked: list[Prediction]) -> list[Prediction]:
        """Return the ranked predictions; of those with equal outcomes only the one with the shortest section. The
        overlap pass may give two candidates the same plan, and rings in different orders may take equally long."""
        kept: dict[tuple, Prediction] = {}
        for prediction in sorted(ranked, key=lambda prediction: len(prediction.config.section())):
            if (first := kept.setdefault(_outcome(prediction), prediction)) is not prediction:
                self.refused[str(prediction.candidate), f"{SAME} {first.candidate}"] += 1
        return [prediction for prediction in ranked if prediction in kept.values()]

    def with_overlap(self, predictions: list[Prediction]) -> list[Prediction]:
        """Return predictions with overlap, for candidates that may then be faster than the best one without."""
        gathering = [prediction for prediction in predictions if _gathers(prediction.candidate)]
        bounds = sorted(
            (least_seconds_with_overlap(self.request, prediction), index) for index, prediction in enumerate(gathering)
        )
        chances = [gathering[index] for bound, index in bounds if bound < predictions[0].seconds]
        for prediction in chances:
            if prediction.candidate.cp_size > OVERLAPPED:
                self.refused["overlap", f"its order is looked for on {OVERLAPPED} CP ranks at most"] += 1
        chances = [prediction for prediction in chances if prediction.candidate.cp_size <= OVERLAPPED][:ORDERED]
        tried = [
            predict(self.request, dataclasses.replace(prediction.candidate, overlap=True)) for prediction in chances
        ]
        return [prediction for prediction in tried if isinstance(prediction, Prediction)]

    def reasons(self) -> Iterator[tuple[str, str]]:
        """Yield (which configurations, why they were rejected)."""
        fastest = min((prediction.seconds for prediction in self.finalists), default=1.0)
        for prediction in self.not_simulated[:FINALISTS]:
            slower = prediction.seconds / fastest - 1
            yield str(prediction.candidate), f"estimated {slower:.1%} slower than the fastest; not simulated"
        if others := len(self.not_simulated[FINALISTS:]):
            yield f"{others} others", "estimated slower still"
        for (configurations, why), count in sorted(
            self.refused.items(), key=lambda item: SAME in item[0][1]
        ):  # duplicates last
            yield (configurations if count == 1 else f"{configurations}, {count} configurations"), why
        for size, count in self.dropped.items():
            yield f"{size} ranks, {count} configurations", "others of their schedule and Ulysses size receive less"


def _promise(estimate: Estimate) -> tuple:
    """Return the sort key of an estimate: time in steps of 2 %, since its error is larger; then the time of links that
    a sequence takes; then the plainest first."""
    candidate = estimate.candidate
    plainness = len(candidate.options), candidate.rank_order != "auto"
    return round(50 * math.log(estimate.seconds)), estimate.message_seconds * candidate.size, *plainness


def _numbers(prediction: Prediction) -> tuple:
    # of candidates with equal lower bounds and footprints one is enough
    return (
        prediction.config.size,
        prediction.config.ulysses,
        prediction.forward,
        prediction.backward,
        prediction.memory.peak.total,
        prediction.config.overlap,
    )


def _outcome(prediction: Prediction) -> tuple:
    # the numbers that the command's table shows of a prediction
    seconds = [float(f"{prediction.time.seconds_by_item[f'attention {direction}']:.6g}") for direction in DIRECTIONS]
    return (
        prediction.config.size,
        prediction.config.ulysses,
        prediction.simulated,
        prediction.memory.peak.total,
        *seconds,
    )


def _gathers(candidate: Candidate) -> bool:
    # overlap replaces collectives by single messages
    return any(candidate.topology.size(axis) > 1 for axis in candidate.schedule.collective_axes)


def _plainest(ranked: list[Prediction]) -> list[Prediction]:
    # moves the plainest of the predictions that are about as fast as the first to the front
    alike = [prediction for prediction in ranked if prediction.simulated == ranked[0].simulated]
    alike = [prediction for prediction in alike if prediction.seconds <= ranked[0].seconds * ALIKE]
    first = sorted(alike, key=lambda prediction: (len(prediction.config.section()), prediction.config.size))[:1]
    return first + [prediction for prediction in ranked if prediction not in first]


def received_over_least(result: PlanResult, prediction: Prediction) -> float | None:
    """Return the bytes that the busiest rank receives in forward, divided by the least that any schedule needs; None if
    that is 0."""
    least = least_received_bytes(result.request, prediction)
    return prediction.config.head_chunks * prediction.forward.received / least if least else None
