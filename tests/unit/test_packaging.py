"""What is imported is declared, and what is declared is imported. A wheel of it: `test_installed.py`."""

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ds_seqpar import models
from ds_seqpar.base.compat import SEEN
from ds_seqpar.base.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
# imported inside functions, which say what to install: module -> its extra (pyarrow comes with datasets)
OPTIONAL = {
    "accelerate": "hf",
    "binpacking": "trainer",
    "matplotlib": "plot",
    "pyarrow": "trainer",
}
# flash_attn and its interface of Hopper: pip cannot build them in an environment of its own, so no extra has them.
# triton: torch's wheels for GPUs bring the release that they need
BY_HAND = {"flash_attn", "flash_attn_interface", "triton"}


def declared():
    """Extra, or "" for none -> {module: bounds} of what it requires."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    texts = {"": config["options"]["install_requires"], **config["options.extras_require"]}
    required = {name: [Requirement(line) for line in text.split("\n") if line] for name, text in texts.items()}
    return {name: {x.name.replace("-", "_"): x.specifier for x in found} for name, found in required.items()}


def imported(package):
    """Third-party modules, in functions too."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"ds_seqpar", "hf_integration"}


def test_what_is_imported_is_declared():
    known = declared()
    assert imported("ds_seqpar") - OPTIONAL.keys() - BY_HAND <= known[""].keys()
    assert imported("hf_integration") - OPTIONAL.keys() <= known[""].keys() | known["hf"].keys()
    assert {module for module, extra in OPTIONAL.items() if module not in known[extra]} == {"pyarrow"}


def test_what_is_declared_is_imported():
    known = declared()
    assert known[""].keys() | known["hf"].keys() <= imported("ds_seqpar") | imported("hf_integration")


def test_bounds_hold_the_releases_that_were_read_and_none_after_them():
    """Of packages whose private names are used; `make` installs the newest of them."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split())
    for name in SEEN.keys() - BY_HAND:
        major, minor = map(int, pins[name].split(".")[:2])
        for extra, requirements in declared().items():
            if bounds := requirements.get(name):
                assert bounds.contains(pins[name]), (name, extra)
                assert not bounds.contains(f"{major}.{minor + 1}.0"), (name, extra)
        assert any(name in requirements for requirements in declared().values()), name


ABSENT = """
import sys
sys.modules["transformers"] = None
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.models import patcher_of_class
import ds_seqpar.__main__ as command
PreTrainedModel = type("PreTrainedModel", (), {{}})
try:
    patcher_of_class(PreTrainedModel())
    from hf_integration import SequenceParallelTrainer
except ConfigError as error:
    print(error)
sys.exit(command.main(["memory", "--model", "{place}", "--seq-len", "64", "--ranks", "2"]))
"""


def test_without_transformers_a_sentence_says_what_to_install(tmp_path):
    code = ABSENT.format(place=tmp_path)
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    for said in (ran.stdout, ran.stderr):
        assert "ds_seqpar[hf]" in said
        assert "Traceback" not in said


@pytest.mark.parametrize(("name", "expected"), [("accelerate", ConfigError), ("absent", ModuleNotFoundError)])
def test_an_import_that_fails_names_the_extra_where_that_helps(name, expected, tmp_path, monkeypatch):
    (tmp_path / f"needs_{name}.py").write_text(f"import {name}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(expected, match=name):
        models.imported(f"needs_{name}")
