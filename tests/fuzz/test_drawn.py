"""Drawn attention, batches and command lines: each is right, or told in one sentence on every rank, and none hangs."""

import contextlib

import pytest

from tests.fuzz import batches, cases, commands, ranks, shell, virtual
from tests.fuzz.run import Pools, Tried, fuzz


def counts(few, many):
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])


@counts(30, 400)
def test_attention_on_virtual_ranks(count, record_property):
    fuzz(cases.cases(virtual=True), count, virtual.try_one, record_property)


@counts(12, 300)
def test_attention_on_real_ranks(count, record_property):
    on_real_ranks(cases.cases(), ranks.run, count, record_property)


@counts(10, 200)
def test_windows_on_real_ranks(count, record_property):
    on_real_ranks(batches.cases(), batches.run, count, record_property)


def on_real_ranks(drawn, run, count, record_property):
    with contextlib.closing(Pools()) as pools:
        fuzz(drawn, count, lambda case: ranks.verdict(case, *pools.call(case["ranks"], run, case)), record_property)


@counts(15, 300)
def test_commands(count, record_property):
    """No traceback, no hang, little memory."""
    tried = Tried(shell.try_one)
    for seed in range(count):
        tried.add(commands.case(seed))
    tried.report(record_property)
