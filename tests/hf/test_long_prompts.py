"""Prompts on several ranks: cached forwards and `generate` of every family are those of the plain model on one."""

import itertools

import pytest

from tests.grids import cover
from tests.hf.generation import FAMILIES, SECTIONS, Case, compared, has_windows
from tests.launch import on_engine_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
FORWARDS, GENERATED = 1e-5, 1e-6  # limits for logits: in fp32, and in fp64, which `generate` returns in fp32
TURNS = (1, 2, 5, 37, 1, 1)  # tokens of further forwards on a kept cache
PROMPTS = {"one": (1,), "seven": (7,), "long": (70,), "ragged": (1, 29, 12)}
WINDOWS = (5, 20, 29, 200)  # shorter than prompts and turns, between them, as long as a prompt, longer than all


def assert_exact(world, cases):
    for found in on_ranks(world, compared, cases, timeout=600):
        assert found.keys() == {*cases}
        wrong = {case: error for case, error in found.items() if not is_exact(case, error)}
        assert wrong == {}


def is_exact(case, error):
    return isinstance(error, float) and error < (GENERATED if case.new else FORWARDS)


def forwards(world):
    """Cases that meet every pair of a family, a way to share sequences, a prompt and a window."""
    axes = {"family": [*FAMILIES], "section": [*SECTIONS[world]], "window": [*WINDOWS], "lengths": [*PROMPTS.values()]}
    points = cover(lambda point: point["window"] == WINDOWS[0] or has_windows(point["family"]), **axes)
    return [Case(**point, turns=TURNS, positions=index % 2 == 1) for index, point in enumerate(points)]


def tokens(world):
    """Cases in which families generate from each prompt, on 2 or on 4 ranks, 200 tokens from one of the prompts."""
    sections, found = itertools.cycle(SECTIONS[world]), []
    for number, family in enumerate(FAMILIES):
        for index, lengths in enumerate(PROMPTS.values()):
            if (number + index) % 2 == (world == 4):
                shape = {"window": WINDOWS[index % 3], "lengths": lengths, "sample": (number + index) % 3 == 0}
                new = 200 if (number + index) % 4 < 2 else 16
                found.append(Case(family=family, section=next(sections), new=new, **shape))
    return found


TURNED = [
    Case(family=family, section="u2", window=20, lengths=lengths, turns=(5, 2, 37), new=16, sample=sample)
    for family, lengths, sample in (("llama", (3, 11), False), ("gemma2", (9,), True), ("gpt_oss", (30, 8), True))
]


def test_families_on_two_ranks():
    cases = [
        Case(family=family, section=section, window=5, lengths=(13, 4), turns=(6, 1))
        for family, section in zip(FAMILIES, itertools.cycle(SECTIONS[2]), strict=False)
    ]
    assert_exact(2, cases)


def test_conversations():
    assert_exact(2, TURNED)


@pytest.mark.whole
def test_nothing_changes_on_one_rank():
    assert_exact(1, [Case(family=family, section="alone", lengths=(9, 30), turns=(5, 1), new=8) for family in FAMILIES])


@pytest.mark.whole
@pytest.mark.parametrize("world", [2, 3, 4])
def test_families_by_schedules_and_windows(world):
    assert_exact(world, forwards(world))


@pytest.mark.whole
@pytest.mark.parametrize("world", [2, 4])
def test_tokens_of_every_family(world):
    assert_exact(world, tokens(world))


LONG = 4096


@pytest.mark.whole
@pytest.mark.parametrize("world", [2, 4])
def test_tokens_after_a_long_prompt(world):
    sections = itertools.cycle(SECTIONS[world])
    cases = [
        Case(family=family, section=next(sections), window=300, lengths=(LONG,), new=12, chunk=500 + 300 * (at % 2))
        for at, family in enumerate(FAMILIES)
        if at % 2 == (world == 4)
    ]
    assert_exact(world, cases)
