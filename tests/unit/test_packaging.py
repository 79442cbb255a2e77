"""What is imported is declared, what is declared is imported, and a wheel of it works where nothing else is."""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ds_seqpar import models
from ds_seqpar.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
# imported inside functions, which say what to install: module -> its extra (pyarrow comes with datasets)
OPTIONAL = {
    "accelerate": "hf",
    "binpacking": "trainer",
    "flash_attn": "flash",
    "matplotlib": "plot",
    "pyarrow": "trainer",
}


def declared():
    """Extra, or "" for none -> the modules of what it requires."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    texts = {"": config["options"]["install_requires"], **config["options.extras_require"]}
    return {name: set(re.findall(r"^[\w-]+", text.replace("-", "_"), re.M)) for name, text in texts.items()}


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
    assert imported("ds_seqpar") - OPTIONAL.keys() <= known[""]
    assert imported("hf_integration") - OPTIONAL.keys() <= known[""] | known["hf"]
    assert {module for module, extra in OPTIONAL.items() if module not in known[extra]} == {"pyarrow"}


def test_what_is_declared_is_imported():
    known = declared()
    assert known[""] | known["hf"] <= imported("ds_seqpar") | imported("hf_integration")


ABSENT = """
import sys
sys.modules["transformers"] = None
from ds_seqpar.errors import ConfigError
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


@pytest.mark.whole
def test_a_wheel_in_an_empty_environment(tmp_path):
    """With its requirements taken from this environment."""
    source, env = tmp_path / "source", tmp_path / "env"
    for name in ("ds_seqpar", "hf_integration", "ds_configs", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words):
        words = [*map(str, words)]
        ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
        return ran.stdout

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source)
    run(sys.executable, "-m", "venv", "--without-pip", env)
    python, (wheel,) = env / "bin" / "python", tmp_path.glob("*.whl")
    run(*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (own / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    run(*pip, "--python", python, "check")
    assert run(python, "-c", "import ds_seqpar; print(ds_seqpar.__file__)").startswith(str(own))
    for command in ([env / "bin" / "ds-seqpar"], [python, "-m", "ds_seqpar"]):
        assert "rank" in run(*command, "show", "--size", "2")
    run(python, "-c", "from ds_seqpar.planner.machine import Machine; Machine.guessed('', 'bfloat16')")
    for name in ("ds_configs", "examples"):
        carried = env / "share" / "ds_seqpar" / name
        files = [path.relative_to(ROOT / name) for path in (ROOT / name).rglob("*") if path.suffix != ".pyc"]
        assert [path for path in files if not (carried / path).exists() and path.name != "__pycache__"] == []
    code = "import hf_integration as a, ds_seqpar.hf as b; assert a.Packs is b.Packs; assert a.__all__ == b.__all__"
    run(python, "-c", code)
