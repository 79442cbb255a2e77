"""docs/api.md has every public name, and shows the docstring of that very object."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import ds_seqpar
import hf_integration

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
SHOW = r"^::: (\S+)$"


@pytest.mark.parametrize("package", [ds_seqpar, hf_integration])
def test_the_page_lists_the_public_names(package):
    (table,) = re.findall(rf"\| from `{package.__name__}` \|.*?\n(?=\n)", PAGE, re.DOTALL)
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(package.__all__)
    (part,) = re.findall(rf"^## {package.__name__}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    shown = {name.rpartition(".")[2]: name for name in re.findall(SHOW, part, re.MULTILINE)}
    assert shown.keys() - {"Sharding"} == set(package.__all__)  # whose methods a SequenceParallel has
    for name, path in shown.items() - {("Sharding", shown.get("Sharding"))}:
        found = pkgutil.resolve_name(":".join(path.rsplit(".", 1)))
        assert found is getattr(package, name)
        assert found.__doc__


def test_modules_that_are_shown_are_there():
    assert all(importlib.import_module(name.rpartition(".")[0]) for name in re.findall(SHOW, PAGE, re.MULTILINE))
