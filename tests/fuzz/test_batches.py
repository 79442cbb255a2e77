"""Drawn windows for `sp.shard_batches` on real ranks: every rank gets its part, or all are told one sentence."""

import contextlib

import pytest

from tests.fuzz import batches, ranks
from tests.fuzz.run import Pools, fuzz


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.whole)])
def test_windows_on_real_ranks(count, record_property):
    with contextlib.closing(Pools()) as pools:
        fuzz(
            batches.cases(),
            count,
            lambda case: ranks.verdict(case, *pools.call(case["ranks"], batches.run, case)),
            record_property,
        )
