"""The benchmark of preference and RL losses, for real and small: it ends where contenders do not do the same work."""

import pytest

from benchmarks.preferences.__main__ import arguments, compared

SMALL = "--hidden 32 --intermediate 32 --heads 4 --kv-heads 2 --layers 1"


@pytest.mark.slow  # eight sets of ranks
@pytest.mark.parametrize("task", ["dpo", "grpo"])
def test_all_do_the_work_of_trls_head(task):
    rows = [*compared(arguments(SMALL.split()), task, 96, 64)]
    assert [row[:4] for row in rows] == [[task, "64", "96", world] for world in (1, 2, 2, 2)]
    assert all(float(seconds) > 0 for *_, seconds, _, _, _ in rows)


@pytest.mark.slow
def test_a_contender_that_needs_more_memory_says_so():
    args = arguments([*SMALL.split(), "--memory", "0.01"])
    assert [row[7] for row in compared(args, "dpo", 96, 64)] == ["more than 0.01 GiB"] + 3 * ["more than 0.005 GiB"]
