"""Drawn loops with an Accelerator do on groups of ranks what the plain script does on as many processes."""

import pytest

from tests.fuzz import loops
from tests.fuzz.run import Tried


@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_accelerators_count_groups(count, record_property):
    tried = Tried(loops.try_one)
    for seed in range(count):
        tried.add(loops.case(seed))
    tried.report(record_property)
