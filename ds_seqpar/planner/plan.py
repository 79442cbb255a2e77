"""Which configuration is the fastest that fits: estimates for all that is legal, the closed form for those that they
leave, the simulator for the best of these. Pure, and without a clock: the same on all ranks. Torch-free."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from .. import limits
from ..compiler import schedules
from ..compiler.masks import Mask
from ..config import even_ulysses
from ..deepspeed_json import Offload
from ..errors import ConfigError
from .candidates import Candidate, candidates, check_given, degrees, refusal, shapes
from .footprint import Footprint, fits, footprint, rank_bytes
from .request import Request
from .search import (
    DIRECTIONS,
    Estimate,
    Estimator,
    Prediction,
    config_of_candidate,
    least_memory,
    least_received_bytes,
    least_seconds_with_overlap,
    memory_options,
    predict,
    simulated_instructions,
    with_head_stages,
    with_simulated_time,
)

FINALISTS = 6
FAR = 1.25  # times the best: what is guessed to take longer is not looked at
ORDERED = 3  # of which overlap is tried, too
STAGED = 3  # of which stages of heads are tried, too
ALIKE = 1.005  # times within so much of one another are taken for equal, and the plainer is preferred
EACH = 2  # candidates of every size, Ulysses degree and schedule that get as far as the closed form
STEPS, STEPS_EACH = 4000, 80  # of ranks, that the closed form looks at; at least, and of each size and Ulysses degree
OVERLAPPED = 16  # inner ranks up to which the order of overlap is found, which takes the time of 100 steps
SIMULATED = 15_000  # instructions, of all finalists together
SECONDS = operator.attrgetter("seconds")
SAME = "in time and memory the same as"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlanResult:
    """ranked: the fastest first, all that fit and were looked at to the end. rejected: what was not chosen, and why,
    as sentences with how many they are about. simulated: whether the best is; else its time is its closed form's.
    legal: how many configurations there are; considered: of different plans."""

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
        """The "sequence_parallel" section of the best."""
        return section_of(self.best)


def section_of(one: Prediction) -> dict[str, Any]:
    """What a JSON has to say for it: size, ulysses and schedule always, others where they are not the default."""
    settings, plain = one.config.settings(), type(one.config)().settings()
    found = {name: settings[name] for name in ("size", "ulysses", "schedule")}
    for name, value in settings.items():
        if name in found or value == plain[name]:
            continue
        if name == "layout" and value == one.candidate.schedule.default_layout:
            continue
        if one.candidate.inner == 1 and name in one.candidate.own:
            continue
        found[name] = list(value) if isinstance(value, tuple) else value
    return found


def plan(request: Request) -> PlanResult:
    """Raises ConfigError where nothing fits, with the nearest that would."""
    choice = find_plan(request)
    if not choice.ranked:
        raise ConfigError(nothing_fits(request, choice.rejected))
    return choice


def find_plan(request: Request) -> PlanResult:
    """The same; where nothing fits nothing is ranked."""
    check_given(request.given, request.world, request.heads)
    search = _Search(request)
    finalists = search.by_lower_bound()
    ranked = search.finals(finalists)
    return PlanResult(
        request=request,
        ranked=tuple(ranked),
        rejected=tuple(search.reasons(ranked)),
        simulated=bool(ranked) and ranked[0].simulated,
        legal=search.legal,
        considered=search.considered,
    )


class _Search:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.refused: Counter[tuple[str, str]] = Counter()  # (who, why) -> how many
        self.found: list[Prediction] = []
        self.numbers: dict[tuple, Prediction] = {}  # by what they come out with
        self.steps = 0  # that the closed form has looked at
        self.most = self.most_steps()
        self.room = SIMULATED  # instructions that may still be simulated
        self.lost: list[Prediction] = []
        self.bounds: list[Prediction] = []  # finalists by their closed form
        self.legal = self.considered = 0
        self.dropped: Counter[int] = Counter()  # size -> candidates of which others of its kind receive less

    def most_steps(self) -> int:
        """How many steps the closed form may look at. Notes sizes that are too large."""
        every = list(degrees(self.request.world, self.request.heads, self.request.given))
        largest = max((size for size, _ in every), default=0)
        if largest < self.request.world and not (self.request.sizes or "size" in self.request.given):
            why = f"at most {limits.PLANNED:,} ranks share a sequence, and {limits.FOLLOWED:,} run its schedule"
            self.refused[f"more than {largest} ranks", why] += 1
        return max(STEPS, STEPS_EACH * len(every))

    # ---- by estimates

    def distinct(self) -> Iterator[Candidate]:
        """One candidate of each plan that is legal."""
        seen: set[tuple] = set()
        request, documents = self.request, bool(self.request.documents)
        asked = request.world, request.heads, request.given
        many = sum(1 for _ in shapes(*asked)) > limits.SHAPES
        if many:
            why = f"there are more than {limits.SHAPES:,} shapes without them"
            self.refused["other layouts and placements", why] += 1
        for candidate in candidates(*asked, plain=many):
            if reason := self.illegal(candidate):
                self.refuse(candidate, reason)
                continue
            self.legal += 1
            key = candidate.plan_key(documents)
            if key not in seen:
                seen.add(key)
                self.considered += 1
                yield candidate

    def illegal(self, candidate: Candidate) -> str:
        """Why it is not looked at, or ""."""
        request = self.request
        if request.sizes and candidate.size not in request.sizes:
            return "a step's sequences cannot be shared among such groups"
        if candidate.overlap and candidate.inner > OVERLAPPED:
            return f"the order of overlap is found on {OVERLAPPED} inner ranks at most"
        return refusal(candidate, request.seq, bool(request.documents))

    def sized(self) -> Iterator[Candidate]:
        """Those of sizes that memory leaves a chance."""
        least: dict[int, Footprint] = {}
        for candidate in self.distinct():
            if candidate.size not in least:
                least[candidate.size] = least_memory(self.request, candidate.size)
            needed = rank_bytes(least[candidate.size], self.request.room)
            if needed > self.request.limit:
                self.refuse(candidate, self.request.memory_shortage(needed))
            else:
                yield candidate

    def estimated(self) -> list[Estimate]:
        """The best of each size and Ulysses degree and then others, the most promising first, and few of a kind."""
        kinds: Counter[tuple] = Counter()
        first, then, last = list[Estimate](), list[Estimate](), list[Estimate]()
        for entry in sorted(map(Estimator(self.request), self.sized()), key=_promise):
            candidate = entry.candidate
            kind = *candidate.degree, candidate.schedule.name, candidate.has_default_layout
            kinds.update((candidate.degree, kind))
            if kinds[candidate.degree] == 1:
                first.append(entry)
            elif kinds[kind] <= (EACH if candidate.has_default_layout else 1):
                (then if candidate.has_default_layout else last).append(entry)
            else:
                self.dropped[candidate.size] += 1
        return first + then + last

    # ---- by the closed form

    def by_lower_bound(self) -> list[Prediction]:
        """Those that fit, the fastest first."""
        for estimate in self.estimated():
            self.look(estimate)
        return sorted(self.found, key=SECONDS)

    def look(self, estimate: Estimate) -> None:
        """At its closed form, if that may be among the best."""
        candidate = estimate.candidate
        if why := self.hopeless(estimate):
            self.refuse(candidate, why)
            return
        one = predict(self.request, candidate)
        if isinstance(one, str):
            self.refused[str(candidate), one] += 1
            return
        self.steps += estimate.bound_steps + (candidate.inner**2 // 2 if candidate.overlap else 0)
        if (same := self.numbers.setdefault(_numbers(one), one)) is not one:
            self.refused[str(candidate), f"{SAME} {same.candidate}"] += 1
        else:
            self.found.append(one)

    def hopeless(self, estimate: Estimate) -> str:
        """Why it need not be looked at beside what is found, or ""."""
        best = sorted(map(SECONDS, self.found))[:FINALISTS]
        if len(best) == FINALISTS and estimate.least_seconds > best[-1]:
            return "computing attention alone takes longer than all that others do"
        if best and (self.steps + estimate.bound_steps > self.most or estimate.seconds > FAR * best[0]):
            return "receives so much that it is expected to be slower"
        return ""

    def refuse(self, candidate: Candidate, why: str) -> None:
        self.refused[f"{candidate.size} ranks", why] += 1

    # ---- by the simulator

    def finals(self, found: list[Prediction]) -> list[Prediction]:
        """The best, the fastest first. Those that are too many to simulate stay at their closed form; they are taken
        to be slower than it by as much as any of the others is."""
        finalists = found[:FINALISTS]
        self.lost, self.bounds = found[FINALISTS:], finalists
        ranked: list[Prediction] = []
        slower = 1.0
        for one in finalists:
            exact = self.simulate(one)
            slower = max(slower, exact.seconds / one.seconds) if exact else slower
            ranked.append(exact or one)
        for one in [] if "overlap" in self.request.given else self.overlapping(found):
            if exact := self.simulate(one):
                ranked.append(exact)
            else:
                self.refused["overlap", "looking for the order of its products would take too long"] += 1
        ranked += self.staging(ranked)
        ranked.sort(key=lambda one: one.seconds * (1.0 if one.simulated else slower))
        return _plainest(self.different(ranked))

    def simulate(self, one: Prediction) -> Prediction | None:
        """None where that would take more instructions than are left."""
        cost = simulated_instructions(self.request, one)
        if cost > self.room:
            return None
        self.room -= cost
        return with_simulated_time(self.request, one)

    def staging(self, ranked: list[Prediction]) -> list[Prediction]:
        """The fastest with Ulysses, in stages that hide its exchanges."""
        given = self.request.given
        if given.get("head_stages", "auto") != "auto" or given.get("overlap") is False:
            return []
        chances = [one for one in sorted(ranked, key=SECONDS) if one.config.ulysses > 1 and not one.config.overlap]
        few = [one for one in chances[:STAGED] if one.candidate.inner <= OVERLAPPED]
        found = [self.simulate(other) for one in few for other in with_head_stages(self.request, one)]
        return [one for one in found if one]

    def different(self, ranked: list[Prediction]) -> list[Prediction]:
        """One of those that come out alike: plans that the overlap pass made the same, or ways round of one length."""
        found: dict[tuple, Prediction] = {}
        for one in sorted(ranked, key=lambda one: len(section_of(one))):
            if (first := found.setdefault(_outcome(one), one)) is not one:
                self.refused[str(one.candidate), f"{SAME} {first.candidate}"] += 1
        return [one for one in ranked if one in found.values()]

    def overlapping(self, found: list[Prediction]) -> list[Prediction]:
        """Those with overlap that may be faster than the best without."""
        least = [
            (least_seconds_with_overlap(self.request, one), n) for n, one in enumerate(found) if _gathers(one.candidate)
        ]
        chances = [found[n] for bound, n in sorted(least) if bound < found[0].seconds]
        for one in chances:
            if one.candidate.inner > OVERLAPPED:
                self.refused["overlap", f"its order is looked for on {OVERLAPPED} inner ranks at most"] += 1
        chances = [one for one in chances if one.candidate.inner <= OVERLAPPED][:ORDERED]
        tried = [predict(self.request, dataclasses.replace(one.candidate, overlap=True)) for one in chances]
        return [one for one in tried if isinstance(one, Prediction)]

    def reasons(self, ranked: list[Prediction]) -> Iterator[tuple[str, str]]:
        fastest = min((one.seconds for one in self.bounds), default=1.0)
        for one in self.lost[:FINALISTS]:
            slower = one.seconds / fastest - 1
            yield str(one.candidate), f"estimated {slower:.1%} slower than the fastest; not simulated"
        if rest := len(self.lost[FINALISTS:]):
            yield f"{rest} others", "estimated slower still"
        doubles = [item for item in self.refused.items() if SAME in item[0][1]]
        for (who, why), count in [*(item for item in self.refused.items() if item not in doubles), *doubles]:
            yield (who if count == 1 else f"{who}, {count} configurations"), why
        for size, count in self.dropped.items():
            yield f"{size} ranks, {count} configurations", "others of their schedule and Ulysses degree receive less"


def _promise(estimate: Estimate) -> tuple:
    """In steps of 2 %, which estimates are off by; then by what a sequence takes of links; then the plainest."""
    candidate = estimate.candidate
    links = estimate.message_seconds * candidate.size
    return (
        round(50 * math.log(estimate.seconds)),
        links,
        len(candidate.own),
        candidate.placement != "auto",
    )


def _numbers(one: Prediction) -> tuple:
    return one.config.size, one.config.ulysses, one.forward, one.backward, one.memory.peak.total, one.config.overlap


def _outcome(one: Prediction) -> tuple:
    """What a row of the table shows."""
    seconds = [float(f"{one.time.parts[f'attention {way}']:.6g}") for way in DIRECTIONS]
    return one.config.size, one.config.ulysses, one.simulated, one.memory.peak.total, *seconds


def _gathers(candidate: Candidate) -> bool:
    return any(candidate.topology.size(axis) > 1 for axis in candidate.schedule.collective_axes)


def _plainest(ranked: list[Prediction]) -> list[Prediction]:
    """With the plainest of those that are as fast as the first in front."""
    alike = [one for one in ranked if one.simulated == ranked[0].simulated]
    alike = [one for one in alike if one.seconds <= ranked[0].seconds * ALIKE]
    first = sorted(alike, key=lambda one: (len(section_of(one)), one.config.size))[:1]
    return first + [one for one in ranked if one not in first]


def received_over_least(choice: PlanResult, one: Prediction) -> float | None:
    """Bytes that the busiest rank receives in forward over the least that there is; None where that is none."""
    least = least_received_bytes(choice.request, one)
    stages = one.config.head_stages
    return stages * one.forward.received / least if least else None


def nothing_fits(request: Request, rejected: Sequence[tuple[str, str]]) -> str:
    """What would fit, where nothing does, in one sentence. rejected: who, and why."""
    sizes = [f"{who}: {why}" for who, why in rejected if "GiB" in why]
    said = sizes[-1] if sizes else ": ".join(rejected[0]) if rejected else "there is no candidate"
    near = nearest_fits(request)
    advice = f"take {' or '.join(near)}" if near else "take a smaller model"
    tokens = f"{request.seq} tokens on {request.world} ranks"
    return f"a configuration must fit the memory and the length; got none for {tokens} ({said}), {advice}"


def nearest_fits(request: Request) -> list[str]:
    """What to change so that something fits, one thing at a time, with numbers."""
    found = []
    for times in (2, 4, 8, 16, 32):
        more = dataclasses.replace(request, world=request.world * times, given={**request.given, "size": "auto"})
        if _fits(more, more.world):
            found.append(f"{more.world} ranks")
            break
    if (away := with_optimiser_on_host(request)) is not None and _fits(away, request.world):
        found.append("zero_optimization.offload_optimizer with device cpu")
    if not request.documents:
        shorter = request.seq
        while shorter > 1024:
            shorter //= 2
            if _fits(dataclasses.replace(request, seq=shorter), request.world):
                found.append(f"{shorter} tokens")
                break
    return found


def with_optimiser_on_host(request: Request) -> Request | None:
    """The same with the optimiser in host memory, where it could go there."""
    if request.zero.optimiser_away or not (request.zero.stage and request.machine.apart):
        return None
    zero = dataclasses.replace(request.zero, offload_optimizer=Offload(device="cpu"))
    return dataclasses.replace(request, zero=zero)


def _fits(request: Request, size: int) -> bool:
    """Whether the leanest of this size fit: a ring, alone and inside Ulysses as far as it divides heads equally."""
    if rank_bytes(least_memory(request, size), request.room) > request.limit:
        return False
    for ulysses in {1, max(even_ulysses(size, *request.heads))}:
        plain = {"size": size, "ulysses": ulysses, "schedule": schedules.DEFAULT, "layout": "auto", "placement": "auto"}
        candidate = next(candidates(request.world, request.heads, plain))
        if refusal(candidate, request.seq, bool(request.documents)):
            continue
        for spared in memory_options(request, ulysses)[-3:]:
            config = config_of_candidate(request, candidate, **spared)
            if fits(footprint(request.step(config, Mask())), request.room):
                return True
    return False
