"""Process-free tests: one thread each, and hypothesis without clocks or stored examples, the same on every run."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from ds_seqpar import schedules

settings.register_profile(
    "unit", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unit")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def run_as_ring(monkeypatch):
    """A function that lets another builder stand in for the "ring" schedule, until the test ends."""

    def stand_in(builder):
        monkeypatch.setitem(schedules.SCHEDULES, "ring", builder)
        schedules.build.cache_clear()
        schedules._build.cache_clear()

    yield stand_in
    monkeypatch.undo()
    schedules.build.cache_clear()
    schedules._build.cache_clear()
