"""Drawn loops with an Accelerator do on groups of ranks what the plain script does on as many processes."""

import pytest

from tests.fuzz import loops
from tests.fuzz.run import fuzz


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.whole)])
def test_accelerators_count_groups(count, record_property):
    fuzz(loops.cases(), count, loops.try_one, record_property)
