"""Process-free tests: hypothesis without clocks or stored examples, the same on every run."""

import dataclasses
import json

import pytest
from hypothesis import HealthCheck, settings

from ds_seqpar.core.compiler import schedules
from tests.unit.commands import LLAMA


def pytest_configure(config):
    few = "not slow" in config.getoption("markexpr")
    settings.register_profile(
        "unit",
        max_examples=25 if few else 100,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("unit")


@pytest.fixture
def replace_schedule(monkeypatch):
    """A function that lets another builder stand in for a schedule, until the test ends."""

    def replace(name, builder):
        monkeypatch.setitem(schedules.SCHEDULES, name, dataclasses.replace(schedules.SCHEDULES[name], build=builder))

    return replace


@pytest.fixture
def place(tmp_path):
    """A folder with the config.json of a small LLaMA."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return tmp_path
