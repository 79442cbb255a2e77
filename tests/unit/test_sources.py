"""The lines of other packages' sources that models of their operators follow still read as in `tests/sources.json`.

The headers of torch are in every wheel, also in that for CPUs. Other sources are compared where an environment variable
names a folder that has them.
"""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
SOURCES = json.loads((TESTS / "sources.json").read_text(encoding="utf-8"))
TORCH = Path(torch.__file__).parent


def folder_of(package):
    """Where a package's source is, or skips."""
    if package == "torch":
        return TORCH
    if not (given := os.environ.get(SOURCES[package]["variable"])):
        pytest.skip(f"waits for {SOURCES[package]['variable']}, a folder with the source of {package}")
    return Path(given)


def joined(text):
    return " ".join(text.split())


@pytest.mark.parametrize("package", SOURCES)
def test_lines_that_models_follow_are_those_of_the_source(package):
    folder, changed = folder_of(package), []
    for name, file in SOURCES[package]["files"].items():
        text = (folder / name).read_bytes()
        if hashlib.sha256(text).hexdigest() == file["sha256"]:
            continue
        text = joined(text.decode())
        changed += [
            f"{name} has no longer {line!r}: look at {model}"
            for model, lines in file["lines"].items()
            for line in lines
            if joined(line) not in text
        ]
    assert changed == []


def test_copies_say_which_version_they_are_of():
    for package in SOURCES.values():
        assert package["version"]
        for file in package["files"].values():
            assert len(file["sha256"]) == 64
            assert all(file["lines"].values())


def test_every_model_that_lines_are_for_is_there():
    """`module:name` of a test or of the product."""
    for package in SOURCES.values():
        for file in package["files"].values():
            for model in file["lines"]:
                path, _, name = model.partition(":")
                text = (TESTS.parent / path).read_text(encoding="utf-8")
                assert f"def {name}(" in text or f"class {name}" in text, model


def test_a_line_that_changed_names_its_model(monkeypatch):
    """So that the first test can fail."""
    (name, file), *_ = SOURCES["torch"]["files"].items()
    wrong = {
        "version": "0",
        "files": {name: {"sha256": "0" * 64, "lines": {**file["lines"], "a model": ["int gone;"]}}},
    }
    monkeypatch.setitem(SOURCES, "torch", wrong)
    with pytest.raises(AssertionError, match=r"int gone.*a model"):
        test_lines_that_models_follow_are_those_of_the_source("torch")
