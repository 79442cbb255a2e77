"""What to change where nothing fits: the nearest that does. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..compiler import schedules
from ..compiler.masks import Mask
from ..config import even_ulysses
from .candidates import candidates, refusal
from .footprint import footprint
from .question import Question
from .search import configured
from .sparing import ladder, least_memory


def shortage(question: Question, rejected: Sequence[tuple[str, str]]) -> str:
    """What would fit, where nothing does, in one sentence. rejected: who, and why."""
    sizes = [f"{who}: {why}" for who, why in rejected if "GiB" in why]
    said = sizes[-1] if sizes else ": ".join(rejected[0]) if rejected else "there is no candidate"
    near = nearest_fits(question)
    advice = f"take {' or '.join(near)}" if near else "take a smaller model"
    tokens = f"{question.seq} tokens on {question.world} ranks"
    return f"a configuration must fit the memory and the length; got none for {tokens} ({said}), {advice}"


def nearest_fits(question: Question) -> list[str]:
    """What to change so that something fits, one thing at a time, with numbers."""
    found = []
    for times in (2, 4, 8, 16, 32):
        more = dataclasses.replace(question, world=question.world * times, given={**question.given, "size": "auto"})
        if _fits(more, more.world):
            found.append(f"{more.world} ranks")
            break
    if not question.documents:
        shorter = question.seq
        while shorter > 1024:
            shorter //= 2
            if _fits(dataclasses.replace(question, seq=shorter), question.world):
                found.append(f"{shorter} tokens")
                break
    return found


def _fits(question: Question, size: int) -> bool:
    """Whether the leanest of this size fit: a ring, alone and inside Ulysses as far as it divides heads equally."""
    if least_memory(question, size).peak.total > question.limit:
        return False
    for ulysses in {1, max(even_ulysses(size, *question.heads))}:
        plain = {"size": size, "ulysses": ulysses, "schedule": schedules.DEFAULT, "layout": "auto", "placement": "auto"}
        candidate = next(candidates(question.world, question.heads, plain))
        if refusal(candidate, question.seq, bool(question.documents)):
            continue
        for sparing in ladder(question, ulysses)[-3:]:
            config = configured(question, candidate, **sparing)
            found = footprint(question.step(config, Mask()))
            if found.peak.total <= question.limit and question.hosted(found.host):
                return True
    return False
