"""What to change where nothing fits: the nearest that does. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .candidates import frames, refusal
from .footprint import footprint
from .question import Question
from .search import attention_of, ladder, least_memory


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
    """Whether the leanest of this size fits: Ulysses as far as heads go, with everything that spares."""
    if least_memory(question, size).peak.total > question.limit:
        return False
    for frame in frames(question.world, question.heads, {**question.given, "size": size, "placement": "auto"}):
        gathers = frame.inner > 1 and frame.schedule.collective_axes
        if gathers or refusal(frame, question.seq, bool(question.documents)):
            continue
        for sparing in reversed(ladder(question, frame.ulysses)):
            config = frame.config(question.heads, **sparing)
            figures = attention_of(question, frame, config)
            found = footprint(question.step(config), figures)
            if found.peak.total <= question.limit and question.hosted(found.host):
                return True
    return False
