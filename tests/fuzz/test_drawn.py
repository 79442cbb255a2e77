"""Drawn attention, batches and command lines: each is right, or told in one sentence on every rank, and none hangs.

tests/unit/test_exact.py has the attention of virtual ranks.
"""

import contextlib
import random

import pytest

from tests.attention_cases import drawn_for_ranks
from tests.fuzz import batches, commands, ranks, shell
from tests.fuzz.run import Pools, Tried, fuzz


def counts(few, many):
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])


@counts(12, 400)
def test_attention_on_real_ranks(count, record_property):
    dice, numbers = random.Random(count), (4,) if count < 100 else (2, 3, 4)  # ranks of each number must be started
    with on_real_ranks(ranks.run) as tried:
        for _ in range(count):
            tried.add(drawn_for_ranks(dice, numbers))
    tried.report(record_property)


@counts(10, 200)
def test_windows_on_real_ranks(count, record_property):
    with on_real_ranks(batches.run) as tried:
        fuzz(batches.cases(), count, tried)
    tried.report(record_property)


@contextlib.contextmanager
def on_real_ranks(run):
    with contextlib.closing(Pools()) as pools:
        yield Tried(lambda case: ranks.verdict(case, *pools.call(case["ranks"], run, case)))


@counts(15, 300)
def test_commands(count, record_property):
    """No traceback, no hang, little memory."""
    tried = Tried(shell.try_one)
    for seed in range(count):
        tried.add(commands.case(seed))
    tried.report(record_property)
