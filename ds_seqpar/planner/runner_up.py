"""What would have to change for the second best to win. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .machine import Machine, Wire
from .question import Question
from .search import Prediction, predict

TIMES = (2, 4, 8)


def to_win(question: Question, best: Prediction, other: Prediction) -> str:
    """The smallest of a few changes, of links and of the length, with which `other` is predicted to be faster than
    `best`; "" where none is enough. By closed forms, in proportion to what was found for both as things are."""
    now = [predict(question, one.candidate) for one in (best, other)]
    if any(isinstance(one, str) for one in now):
        return ""
    scales = [
        it.seconds / one.seconds for it, one in zip((best, other), now, strict=True) if isinstance(one, Prediction)
    ]
    for words, changed in changes(question):
        then = [predict(changed, one.candidate) for one in (best, other)]
        took = [one.seconds * scale for one, scale in zip(then, scales, strict=True) if isinstance(one, Prediction)]
        if len(took) == 2 and took[1] < took[0]:
            return words
    return ""


def changes(question: Question) -> Iterator[tuple[str, Question]]:
    """Small ones first."""
    machine = question.machine
    several = question.world > machine.per_node
    for times in TIMES:
        for word, factor in (("slower", 1 / times), ("faster", float(times))):
            if several:
                yield f"links between nodes {times} times {word}", _with(question, between(machine, factor))
            yield f"links inside nodes {times} times {word}", _with(question, inside(machine, factor))
        if not question.documents:
            yield f"sequences {times} times as long", dataclasses.replace(question, seq=question.seq * times)
            if question.seq % (times * 2 * question.world) == 0:
                yield f"sequences 1/{times} as long", dataclasses.replace(question, seq=question.seq // times)


def _with(question: Question, machine: Machine) -> Question:
    return dataclasses.replace(question, machine=machine)


def between(machine: Machine, factor: float) -> Machine:
    """With links between nodes of so many times the rate, and a node's shared one with them."""
    uplink = None if machine.uplink is None else machine.uplink * factor
    return dataclasses.replace(machine, between=_scaled(machine.between, factor), uplink=uplink)


def inside(machine: Machine, factor: float) -> Machine:
    return dataclasses.replace(machine, inside=_scaled(machine.inside, factor))


def _scaled(wire: Wire, factor: float) -> Wire:
    return dataclasses.replace(wire, rate=wire.rate * factor)
