"""Drawn loops with an Accelerator do on groups of ranks what the plain script does on as many processes."""

import pytest

from tests.fuzz import loops
from tests.fuzz.run import fuzz
from tests.launch import RankFailure, on_ranks


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.whole)])
def test_accelerators_count_groups(count, record_property):
    fuzz(loops.cases(), count, compared, record_property)


def compared(case):
    """(what it came to, None or what differs)"""
    groups = case["ranks"] // case["size"]
    try:
        plain = on_ranks(groups, loops.run, case, 1, keep="accelerate")
        found = on_ranks(case["ranks"], loops.run, case, case["size"], keep="accelerate")
    except RankFailure as failure:
        return "failed", str(failure)
    for rank, shared in enumerate(found):
        if fault := loops.faults(plain[rank // case["size"]], shared):
            return "failed", f"rank {rank}: {fault}"
    return f"right, {groups} groups of {case['size']}", None
