"""Drawn command lines with drawn files: an answer, or one sentence and code 2; no traceback, no hang, little memory."""

import pytest

from tests.fuzz import commands, shell
from tests.fuzz.run import Tried


@pytest.mark.parametrize("count", [100, pytest.param(400, marks=pytest.mark.whole)])
def test_commands(count, record_property):
    tried = Tried(shell.try_one)
    for seed in range(count):
        tried.add(commands.case(seed))
    tried.report(record_property)
