"""Finds the fastest configuration that fits: estimates for all legal candidates, lower bounds for the promising ones,
the simulator for the best of these. It reads no clock and no environment, so all ranks find the same. Imports no
torch."""

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
ALIKE = 1.005  # predictions whose times differ by less count as equally fast, and the plainer one is preferred
EACH = 2  # candidates of a size, Ulysses size and schedule that get a lower bound
STEPS, STEPS_EACH = 4000, 80  # that lower bounds may visit: at least, and for each pair of a size and a Ulysses size
OVERLAPPED = 16  # CP ranks up to which overlap is tried: finding the order of products takes the time of 100 steps
SIMULATED = 15_000  # instructions that the simulator executes in one plan
SECONDS = operator.attrgetter("seconds")
SAME = "in time and memory the same as"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlanResult:
    """What the planner found. ranked: the finalists, the fastest first; () where nothing fits. rejected: (which
    configurations, why). simulated: whether the best one was; else its time is a lower bound. legal: how many legal
    configurations there are. considered: how many of them differ in what they do."""

    request: Request
    ranked: tuple[Prediction, ...]
    rejected: tuple[tuple[str, str], ...]
    simulated: bool
    legal: int
    considered: int

    @property
    def best(self) -> Prediction:
        return self.ranked[0]

    @property
    def section(self) -> dict[str, Any]:
        """The "sequence_parallel" section of the best configuration."""
        return self.best.config.section()


def plan(request: Request) -> PlanResult:
    """The ranked configurations for a request. Raises ConfigError where none fits, and names the nearest that would."""
    result = find_plan(request)
    if not result.ranked:
        raise ConfigError(nothing_fits(request, result.rejected))
    return result


def find_plan(request: Request) -> PlanResult:
    """As `plan`, but where nothing fits the result has nothing ranked."""
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
    """One search, with what it has found so far."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.refused: Counter[tuple[str, str]] = Counter()  # (which configurations, why) -> how many
        self.predictions: list[Prediction] = []  # by lower bounds
        self.by_numbers: dict[tuple, Prediction] = {}  # `_numbers` -> the first prediction that has them
        self.steps = 0  # that lower bounds have visited
        self.steps_allowed = self.count_allowed_steps()
        self.instructions_left = SIMULATED
        self.finalists: list[Prediction] = []  # by lower bounds
        self.not_simulated: list[Prediction] = []
        self.legal = self.considered = 0
        self.dropped: Counter[int] = Counter()  # size -> candidates, of which others of their kind receive less

    def count_allowed_steps(self) -> int:
        """How many steps lower bounds may visit. Notes sizes that are too large to plan."""
        sizes = list(ulysses_sizes(self.request.world, self.request.heads, self.request.given))
        largest = max((size for size, _ in sizes), default=0)
        if largest < self.request.world and not (self.request.sizes or "size" in self.request.given):
            few = f"{limits.MAX_CP_RANKS:,} run its schedule"
            why = f"at most {limits.MAX_PLANNED_RANKS:,} ranks share a sequence, and {few}"
            self.refused[f"more than {largest} ranks", why] += 1
        return max(STEPS, STEPS_EACH * len(sizes))

    # ---- by estimates

    def distinct_candidates(self) -> Iterator[Candidate]:
        """The legal candidates, of those with equal plans the first."""
        keys: set[tuple] = set()
        request, documents = self.request, bool(self.request.documents)
        asked = request.world, request.heads, request.given
        many = sum(1 for _ in shapes(*asked)) > limits.MAX_SHAPES
        if many:
            why = f"there are more than {limits.MAX_SHAPES:,} shapes without them"
            self.refused["other layouts and rank orders", why] += 1
        for candidate in candidates(*asked, plain=many):
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
        """Why a candidate is not considered; "" where it is."""
        request = self.request
        if request.sizes and candidate.size not in request.sizes:
            return "a step's sequences cannot be shared among such groups"
        if candidate.overlap and candidate.cp_size > OVERLAPPED:
            return f"the order of overlap is found on {OVERLAPPED} CP ranks at most"
        return refusal(candidate, request.seq, bool(request.documents))

    def fitting_sizes(self) -> Iterator[Candidate]:
        """The distinct candidates of sizes with which something may fit the memory."""
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
        """The estimates to look at: the best of each size and Ulysses size, then others with the schedule's own
        layout, then the rest. Each part has the most promising first, and few of one kind."""
        kinds: Counter[tuple] = Counter()
        first, then, last = list[Estimate](), list[Estimate](), list[Estimate]()
        for entry in sorted(map(Estimator(self.request), self.fitting_sizes()), key=_promise):
            candidate = entry.candidate
            kind = *candidate.ulysses_size, candidate.schedule.name, candidate.has_default_layout
            kinds.update((candidate.ulysses_size, kind))
            if kinds[candidate.ulysses_size] == 1:
                first.append(entry)
            elif kinds[kind] <= (EACH if candidate.has_default_layout else 1):
                (then if candidate.has_default_layout else last).append(entry)
            else:
                self.dropped[candidate.size] += 1
        return first + then + last

    # ---- by lower bounds

    def by_lower_bound(self) -> list[Prediction]:
        """The predictions that fit, by their lower bounds, the fastest first."""
        for estimate in self.ordered_estimates():
            self.consider(estimate)
        return sorted(self.predictions, key=SECONDS)

    def consider(self, estimate: Estimate) -> None:
        """Predicts a candidate that may be among the best."""
        candidate = estimate.candidate
        if why := self.why_hopeless(estimate):
            self.refuse(candidate, why)
            return
        one = predict(self.request, candidate)
        if isinstance(one, str):
            self.refused[str(candidate), one] += 1
            return
        self.steps += estimate.bound_steps + (candidate.cp_size**2 // 2 if candidate.overlap else 0)
        if (same := self.by_numbers.setdefault(_numbers(one), one)) is not one:
            self.refused[str(candidate), f"{SAME} {same.candidate}"] += 1
        else:
            self.predictions.append(one)

    def why_hopeless(self, estimate: Estimate) -> str:
        """Why a candidate cannot, or will hardly, be among the best; "" where it may."""
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
        """The ranked finalists. One that takes too long to simulate keeps its lower bound; it is ranked as if it were
        slower than that by the largest ratio among the others."""
        self.finalists, self.not_simulated = predictions[:FINALISTS], predictions[FINALISTS:]
        ranked: list[Prediction] = []
        slower = 1.0
        for one in self.finalists:
            exact = self.simulate(one)
            slower = max(slower, exact.seconds / one.seconds) if exact else slower
            ranked.append(exact or one)
        for one in [] if "overlap" in self.request.given else self.with_overlap(predictions):
            if exact := self.simulate(one):
                ranked.append(exact)
            else:
                self.refused["overlap", "looking for the order of its products would take too long"] += 1
        ranked += self.in_head_chunks(ranked)
        ranked.sort(key=lambda one: one.seconds * (1.0 if one.simulated else slower))
        return _plainest(self.without_duplicates(ranked))

    def simulate(self, one: Prediction) -> Prediction | None:
        """The prediction with simulated time; None where the simulation would take more instructions than are left."""
        cost = simulated_instructions(self.request, one)
        if cost > self.instructions_left:
            return None
        self.instructions_left -= cost
        return with_simulated_time(self.request, one)

    def in_head_chunks(self, ranked: list[Prediction]) -> list[Prediction]:
        """The fastest predictions with Ulysses, simulated in head chunks that hide its exchanges."""
        given = self.request.given
        if given.get("head_chunks", "auto") != "auto" or given.get("overlap") is False:
            return []
        with_ulysses = [one for one in sorted(ranked, key=SECONDS) if one.config.ulysses > 1 and not one.config.overlap]
        few = [one for one in with_ulysses[:STAGED] if one.candidate.cp_size <= OVERLAPPED]
        chunked_by_heads = [
            self.simulate(head_chunks) for one in few for head_chunks in with_head_chunks(self.request, one)
        ]
        return [one for one in chunked_by_heads if one]

    def without_duplicates(self, ranked: list[Prediction]) -> list[Prediction]:
        """The ranked predictions, of those with equal outcomes the one with the shortest section. The overlap pass may
        make one plan of two, and rings in different orders may take equally long."""
        kept: dict[tuple, Prediction] = {}
        for one in sorted(ranked, key=lambda one: len(one.config.section())):
            if (first := kept.setdefault(_outcome(one), one)) is not one:
                self.refused[str(one.candidate), f"{SAME} {first.candidate}"] += 1
        return [one for one in ranked if one in kept.values()]

    def with_overlap(self, predictions: list[Prediction]) -> list[Prediction]:
        """Predictions with overlap, of candidates that may then be faster than the best without."""
        gathering = [one for one in predictions if _gathers(one.candidate)]
        bounds = sorted((least_seconds_with_overlap(self.request, one), n) for n, one in enumerate(gathering))
        chances = [gathering[n] for bound, n in bounds if bound < predictions[0].seconds]
        for one in chances:
            if one.candidate.cp_size > OVERLAPPED:
                self.refused["overlap", f"its order is looked for on {OVERLAPPED} CP ranks at most"] += 1
        chances = [one for one in chances if one.candidate.cp_size <= OVERLAPPED][:ORDERED]
        tried = [predict(self.request, dataclasses.replace(one.candidate, overlap=True)) for one in chances]
        return [one for one in tried if isinstance(one, Prediction)]

    def reasons(self) -> Iterator[tuple[str, str]]:
        """(which configurations, why they lost)."""
        fastest = min((one.seconds for one in self.finalists), default=1.0)
        for one in self.not_simulated[:FINALISTS]:
            slower = one.seconds / fastest - 1
            yield str(one.candidate), f"estimated {slower:.1%} slower than the fastest; not simulated"
        if others := len(self.not_simulated[FINALISTS:]):
            yield f"{others} others", "estimated slower still"
        for (who, why), count in sorted(self.refused.items(), key=lambda item: SAME in item[0][1]):  # duplicates last
            yield (who if count == 1 else f"{who}, {count} configurations"), why
        for size, count in self.dropped.items():
            yield f"{size} ranks, {count} configurations", "others of their schedule and Ulysses size receive less"


def _promise(estimate: Estimate) -> tuple:
    """The order of estimates: by time in steps of 2 %, since they are off by more; then by what a sequence takes of
    links; then the plainest first."""
    candidate = estimate.candidate
    plainness = len(candidate.options), candidate.rank_order != "auto"
    return round(50 * math.log(estimate.seconds)), estimate.message_seconds * candidate.size, *plainness


def _numbers(one: Prediction) -> tuple:
    """What a lower bound and a footprint say of a candidate: of candidates with equal numbers one is enough."""
    return one.config.size, one.config.ulysses, one.forward, one.backward, one.memory.peak.total, one.config.overlap


def _outcome(one: Prediction) -> tuple:
    """The figures that the command's table shows of a prediction."""
    seconds = [float(f"{one.time.seconds_by_item[f'attention {way}']:.6g}") for way in DIRECTIONS]
    return one.config.size, one.config.ulysses, one.simulated, one.memory.peak.total, *seconds


def _gathers(candidate: Candidate) -> bool:
    """Whether the schedule has collectives, which overlap replaces by single messages."""
    return any(candidate.topology.size(axis) > 1 for axis in candidate.schedule.collective_axes)


def _plainest(ranked: list[Prediction]) -> list[Prediction]:
    """The ranked predictions, with the plainest of those that are about as fast as the first in front."""
    alike = [one for one in ranked if one.simulated == ranked[0].simulated]
    alike = [one for one in alike if one.seconds <= ranked[0].seconds * ALIKE]
    first = sorted(alike, key=lambda one: (len(one.config.section()), one.config.size))[:1]
    return first + [one for one in ranked if one not in first]


def received_over_least(result: PlanResult, one: Prediction) -> float | None:
    """Bytes that the busiest rank receives in forward, over the least that any schedule needs; None: it needs none."""
    least = least_received_bytes(result.request, one)
    return one.config.head_chunks * one.forward.received / least if least else None
