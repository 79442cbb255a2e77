"""Process-free tests: one thread each, and hypothesis without clocks or stored examples, the same on every run."""

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "unit", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unit")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)
