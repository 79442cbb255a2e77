"""Prompts on several ranks: cached forwards and `generate` of every family are those of the plain model on one."""

import pytest

from tests.grids import cover, few_then_rest
from tests.hf.generation import FAMILIES, SECTIONS, Case, compared
from tests.launch import on_engine_ranks as on_ranks

LIMIT = 1e-5
TURNS = (1, 2, 5, 37, 1, 1)


def assert_exact(world, cases):
    for found in on_ranks(world, compared, cases, timeout=600):
        assert {case: error for case, error in found.items() if not (isinstance(error, float) and error < LIMIT)} == {}


def test_try():
    cases = [Case(family=f, section="alone", lengths=(1, 9, 5), turns=(3, 1), new=12) for f in FAMILIES]
    assert_exact(1, cases)
    cases = [Case(family=f, section="zigzag", lengths=(1, 9, 5), turns=TURNS) for f in FAMILIES if f != "laguna"]
    assert_exact(2, cases)
