"""Drawn attention on real ranks in reused processes: right, or refused in one sentence on all ranks, nothing else."""

import contextlib

import pytest

from tests.fuzz import cases, ranks
from tests.fuzz.run import Pools, fuzz


@pytest.mark.parametrize("count", [60, pytest.param(400, marks=pytest.mark.whole)])
def test_attention_on_real_ranks(count, record_property):
    with contextlib.closing(Pools()) as pools:
        fuzz(
            cases.cases(),
            count,
            lambda case: ranks.verdict(case, *pools.call(case["ranks"], ranks.run, case)),
            record_property,
        )
