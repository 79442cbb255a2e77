"""Which configuration is the fastest that fits: bounds for all that is legal, the closed form for those that they
leave, the simulator for the best of these. Pure, and without a clock: the same on all ranks. Torch-free."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .. import limits
from ..errors import ConfigError
from .advice import shortage
from .candidates import Frame, checked, frames, refusal, shapes
from .needs import Footprint
from .question import Question
from .search import DIRECTIONS, Candidate, Guess, Guesser, floor, instructions, looked_at, overlapped, simulated
from .sparing import least_memory

FINALISTS = 6
FAR = 1.25  # times the best: what is guessed to take longer is not looked at
ORDERED = 3  # of which overlap is tried, too
ALIKE = 1.005  # times within so much of one another are taken for equal, and the plainer is preferred
EACH = 2  # frames of every size, Ulysses degree and schedule that get as far as the closed form
STEPS = 4000  # of ranks, that the closed form looks at: seconds of the planner's own time
OVERLAPPED = 16  # inner ranks up to which the order of overlap is found, which takes the time of 100 steps
SIMULATED = 15_000  # instructions, of all finalists together
SAME = "in all that counts the same as"
GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """ranked: the fastest first, all that fit and were looked at to the end. rejected: what was not chosen, and why,
    as sentences with how many they are about. simulated: whether the best is; else its time is its closed form's.
    legal: how many configurations there are; considered: of different plans."""

    question: Question
    ranked: tuple[Candidate, ...]
    rejected: tuple[tuple[str, str], ...]
    simulated: bool
    legal: int
    considered: int

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    @property
    def section(self) -> dict[str, Any]:
        """The "sequence_parallel" section of the best."""
        return section_of(self.best)


def section_of(candidate: Candidate) -> dict[str, Any]:
    """What a JSON has to say for it: size, ulysses and schedule always, others where they are not the default."""
    settings, plain = candidate.config.settings(), type(candidate.config)().settings()
    found = {name: settings[name] for name in ("size", "ulysses", "schedule")}
    for name, value in settings.items():
        if name in found or value == plain[name]:
            continue
        if name == "layout" and value == candidate.frame.schedule.default_layout:
            continue
        if candidate.frame.inner == 1 and name in candidate.frame.own:
            continue
        found[name] = list(value) if isinstance(value, tuple) else value
    return found


def plan(question: Question) -> Choice:
    """Raises ConfigError where nothing fits, with the nearest that would."""
    choice = chosen(question)
    if not choice.ranked:
        raise ConfigError(shortage(question, choice.rejected))
    return choice


def chosen(question: Question) -> Choice:
    """The same; where nothing fits nothing is ranked."""
    checked(question.given, question.world, question.heads)
    search = _Search(question)
    finalists = search.closed()
    ranked = search.finals(finalists)
    return Choice(
        question=question,
        ranked=tuple(ranked),
        rejected=tuple(search.reasons(ranked)),
        simulated=bool(ranked) and ranked[0].simulated,
        legal=search.legal,
        considered=search.considered,
    )


class _Search:
    def __init__(self, question: Question) -> None:
        self.question = question
        self.refused: Counter[tuple[str, str]] = Counter()  # (who, why) -> how many
        self.lost: list[Candidate] = []
        self.bounds: list[Candidate] = []  # finalists by their closed form
        self.legal = self.considered = 0
        self.dropped: Counter[int] = Counter()  # size -> frames of which others of its kind receive less

    # ---- by bounds

    def distinct(self) -> Iterator[Frame]:
        """One frame of each plan that is legal."""
        seen: set[tuple] = set()
        question = self.question
        asked = question.world, question.heads, question.given
        many = sum(1 for _ in shapes(*asked)) > limits.SHAPES
        if many:
            self.refused[
                "other layouts and placements", f"there are more than {limits.SHAPES:,} shapes without them"
            ] += 1
        for frame in frames(*asked, plain=many):
            if question.sizes and frame.size not in question.sizes:
                self.refused[f"{frame.size} ranks", "a step's sequences cannot be shared among such groups"] += 1
                continue
            if question.given.get("overlap") and frame.inner > OVERLAPPED:
                self.refused[
                    f"{frame.size} ranks", f"the order of overlap is found on {OVERLAPPED} inner ranks at most"
                ] += 1
                continue
            if reason := refusal(frame, question.seq, bool(question.documents)):
                self.refused[f"{frame.size} ranks", reason] += 1
                continue
            self.legal += 1
            key = frame.same(bool(question.documents))
            if key not in seen:
                seen.add(key)
                self.considered += 1
                yield frame

    def sized(self) -> Iterator[Frame]:
        """Those of sizes that memory leaves a chance."""
        fits: dict[int, Footprint] = {}
        for frame in self.distinct():
            if frame.size not in fits:
                fits[frame.size] = least_memory(self.question, frame.size)
            needed = fits[frame.size].peak.total
            if needed > self.question.limit:
                reason = f"{needed / GIB:.1f} GiB a rank are needed at least, there are {self.question.limit / GIB:.1f}"
                self.refused[f"{frame.size} ranks", reason] += 1
            else:
                yield frame

    def guessed(self) -> list[Guess]:
        """The best of each size and Ulysses degree and then others, the most promising first, and few of a kind."""
        guesser = Guesser(self.question)
        found = [guesser(frame) for frame in self.sized()]
        kinds: Counter[tuple] = Counter()
        first, then, last = list[Guess](), list[Guess](), list[Guess]()
        for entry in sorted(found, key=_promise):
            frame = entry.frame
            kinds[frame.size, frame.ulysses] += 1
            kinds[frame.size, frame.ulysses, frame.schedule.name, frame.plain] += 1
            if kinds[frame.size, frame.ulysses] == 1:
                first.append(entry)
            elif kinds[frame.size, frame.ulysses, frame.schedule.name, frame.plain] <= (EACH if frame.plain else 1):
                (then if frame.plain else last).append(entry)
            else:
                self.dropped[frame.size] += 1
        return first + then + last

    # ---- by the closed form

    def closed(self) -> list[Candidate]:
        """Those that fit, the fastest first."""
        found: list[Candidate] = []
        same: dict[tuple, Candidate] = {}
        steps = 0
        for guess in self.guessed():
            frame = guess.frame
            best = sorted(one.seconds for one in found)[:FINALISTS]
            if len(best) == FINALISTS and guess.least > best[-1]:
                self.refuse(frame, "its products alone take longer than the whole of others")
                continue
            if best and (steps + guess.work > STEPS or guess.seconds > FAR * best[0]):
                self.refuse(frame, "by what it receives it is expected to be slower")
                continue
            steps += guess.work + (frame.inner**2 // 2 if self.question.given.get("overlap") else 0)
            candidate = looked_at(self.question, frame, self.question.given.get("overlap", False))
            if isinstance(candidate, str):
                self.refused[str(frame), candidate] += 1
            elif (key := _numbers(candidate)) in same:
                self.refused[str(frame), f"{SAME} {same[key].frame}"] += 1
            else:
                same[key] = candidate
                found.append(candidate)
        return sorted(found, key=lambda one: one.seconds)

    def refuse(self, frame: Frame, why: str) -> None:
        self.refused[f"{frame.size} ranks", why] += 1

    # ---- by the simulator

    def finals(self, found: list[Candidate]) -> list[Candidate]:
        """The best, the fastest first. Those that are too many to simulate stay at their closed form; they are taken
        to be slower than it by as much as any of the others is."""
        finalists, room = found[:FINALISTS], SIMULATED
        self.lost, self.bounds = found[FINALISTS:], finalists
        ranked: list[Candidate] = []
        slower = 1.0
        for one in finalists:
            if (cost := instructions(self.question, one)) <= room:
                room -= cost
                ranked.append(simulated(self.question, one))
                slower = max(slower, ranked[-1].seconds / one.seconds)
            else:
                ranked.append(one)
        for one in [] if "overlap" in self.question.given else self.overlapping(found):
            if (cost := instructions(self.question, one)) <= room:
                room -= cost
                ranked.append(simulated(self.question, one))
            else:
                self.refused["overlap", "it would take too long to find its order"] += 1
        ranked.sort(key=lambda one: one.seconds * (1.0 if one.simulated else slower))
        return _plainest(self.different(ranked))

    def different(self, ranked: list[Candidate]) -> list[Candidate]:
        """One of those that come out alike: plans that the overlap pass made the same, or ways round of one length."""
        found: dict[tuple, Candidate] = {}
        for one in sorted(ranked, key=lambda one: len(section_of(one))):
            if (first := found.setdefault(_outcome(one), one)) is not one:
                self.refused[str(one.frame), f"{SAME} {first.frame}"] += 1
        return [one for one in ranked if one in found.values()]

    def overlapping(self, found: list[Candidate]) -> list[Candidate]:
        """Those with overlap that may be faster than the best without."""
        least = [(overlapped(self.question, one), n) for n, one in enumerate(found) if _gathers(one.frame)]
        chances = [found[n] for bound, n in sorted(least) if bound < found[0].seconds]
        for one in chances:
            if one.frame.inner > OVERLAPPED:
                self.refused["overlap", f"its order is looked for on {OVERLAPPED} inner ranks at most"] += 1
        chances = [one for one in chances if one.frame.inner <= OVERLAPPED][:ORDERED]
        tried = [looked_at(self.question, one.frame, True) for one in chances]
        return [one for one in tried if isinstance(one, Candidate)]

    def reasons(self, ranked: list[Candidate]) -> Iterator[tuple[str, str]]:
        fastest = min((one.seconds for one in self.bounds), default=1.0)
        for one in self.lost[:FINALISTS]:
            yield str(one.frame), f"{one.seconds / fastest:.3f} times the least that the best takes, at least"
        if rest := len(self.lost[FINALISTS:]):
            yield f"{rest} more", "slower than these, by their bounds"
        doubles = [item for item in self.refused.items() if SAME in item[0][1]]
        for (who, why), count in [*(item for item in self.refused.items() if item not in doubles), *doubles]:
            yield (who if count == 1 else f"{who} ({count})"), why
        for size, count in self.dropped.items():
            yield f"{size} ranks ({count})", "others of their schedule and Ulysses degree receive less"


def _promise(guess: Guess) -> tuple:
    """In steps of 2 %, which a guess is not better than; then by what a sequence takes of links, and the plainest."""
    links = guess.moved * guess.frame.size
    return round(50 * math.log(guess.seconds)), links, len(guess.frame.own), guess.frame.placement != "auto"


def _numbers(one: Candidate) -> tuple:
    return one.config.size, one.config.ulysses, one.forward, one.backward, one.memory.peak.total, one.config.overlap


def _outcome(one: Candidate) -> tuple:
    """What a row of the table shows."""
    seconds = [float(f"{one.time.parts[f'attention {way}']:.6g}") for way in DIRECTIONS]
    return one.config.size, one.config.ulysses, one.simulated, one.memory.peak.total, *seconds


def _gathers(frame: Frame) -> bool:
    return any(frame.topology.size(axis) > 1 for axis in frame.schedule.collective_axes)


def _plainest(ranked: list[Candidate]) -> list[Candidate]:
    """With the plainest of those that are as fast as the first in front."""
    alike = [one for one in ranked if one.simulated == ranked[0].simulated]
    alike = [one for one in alike if one.seconds <= ranked[0].seconds * ALIKE]
    first = sorted(alike, key=lambda one: (len(section_of(one)), one.config.size))[:1]
    return first + [one for one in ranked if one not in first]


def over_floor(choice: Choice, candidate: Candidate) -> float | None:
    """Bytes that the busiest rank receives in forward over the least that there is; None where that is none."""
    least = floor(choice.question, candidate)
    stages = candidate.config.head_stages
    return stages * candidate.forward.received / least if least else None
