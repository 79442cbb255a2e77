"""A wheel in an environment of its own, without the checkout: what it carries, what its imports load and start, that
all of its modules can be imported, and that its doctor runs."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.launch import free_port
from tests.unit.test_imports import MODULES

ROOT = Path(__file__).resolve().parents[2]
SHARED = ("ds_configs", "examples")
TINY = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
TINY |= {"intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
IMPORTS = """
import contextlib, importlib, importlib.metadata, io, json, pkgutil, sys
started, kinds = [], ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "os.exec")
sys.addaudithook(lambda kind, arguments: started.append(repr((kind, arguments))) if kind in kinds else None)
(command,) = importlib.metadata.entry_points(group="console_scripts", name="ds-seqpar")
command.load()
found = {"commands": [name for name in ("torch", "numpy", "deepspeed", "transformers") if name in sys.modules]}
for name in [name for name in sys.modules if name.startswith("ds_seqpar")]:
    del sys.modules[name]
import torch
import ds_seqpar
ds_seqpar.SequenceParallel
found["bare"] = [name for name in ("torch._dynamo", "transformers") if name in sys.modules]
found["ours"] = [name for name in sys.modules if name.startswith("ds_seqpar.")]
ds_seqpar.initialize
found["trains"] = [name for name in sys.modules if name.startswith("ds_seqpar.")]
import transformers
started.clear()
import hf_integration
found |= {"groups": torch.distributed.is_initialized(), "CUDA": torch.cuda.is_initialized(), "started": [*started]}
found["places"] = [ds_seqpar.__file__, hf_integration.__file__]
found["modules"] = ["ds_seqpar", "hf_integration"]
for package in (ds_seqpar, hf_integration):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
        found["modules"].append(module.name)
from ds_seqpar.planner.machine import Machine
Machine.guessed("")  # reads its file
from ds_seqpar.cli.main import main
with contextlib.redirect_stdout(io.StringIO()) as out:
    found["code"] = main(["doctor", "--quick", "--json", *sys.argv[1:]])
found["doctor"] = json.loads(out.getvalue() or "[]")
with contextlib.redirect_stdout(io.StringIO()) as out:
    main(["plan", *sys.argv[1:3], "--seq-len", "1K", "--ranks", "2"])
found["plan"] = out.getvalue()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment, with its requirements taken from this one."""
    folder = tmp_path_factory.mktemp("installed")
    source, env = folder / "source", folder / "env"
    for name in ("ds_seqpar", "hf_integration", *SHARED):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ran(sys.executable, "-m", "venv", "--without-pip", env)
    (own,) = env.glob("lib/python*/site-packages")
    (own / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", env / "bin" / "python"]
    ran(*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile", source)
    shutil.rmtree(source)
    return env


def ran(*words):
    """The output of a process that does not see the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [*map(str, words)]
    done = subprocess.run(words, cwd="/", env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def seen(installed, compiled):
    """What a process of that environment sees of its imports, and what the doctor says in it."""
    (installed / "config.json").write_text(json.dumps(TINY))
    stage = "--set=zero_optimization.stage=0", "--set=bf16.enabled=false"
    return json.loads(ran(installed / "bin" / "python", "-c", IMPORTS, "--model", installed, *stage).splitlines()[-1])


def test_the_command_and_the_files_that_come_with_it(installed):
    assert "rank" in ran(installed / "bin" / "ds-seqpar", "show", "--size", "2")
    for name in SHARED:
        carried = installed / "share" / "ds_seqpar" / name
        files = [path for path in (ROOT / name).rglob("*") if path.is_file() and path.suffix != ".pyc"]
        assert len(files) > 5
        assert [path for path in files if not (carried / path.relative_to(ROOT / name)).exists()] == []


def test_every_module_is_in_it_and_can_be_imported(seen, installed):
    assert all(Path(place).is_relative_to(installed) for place in seen["places"])
    assert {*seen["modules"]} == {*MODULES}


def test_its_doctor_examines_a_model(seen):
    assert seen["code"] == 0, seen["doctor"]
    passed = {finding["check"] for finding in seen["doctor"] if finding["status"] == "pass"}
    assert {"kernels", "batches", "loss and gradients", "optimizer step"} <= passed


def test_its_planner_plans_and_its_examples_are_copied(seen, installed, tmp_path):
    assert "ulysses" in seen["plan"]
    ran(installed / "bin" / "ds-seqpar", "examples", tmp_path / "copied")
    assert (tmp_path / "copied" / "examples" / "launch" / "slurm.sh").is_file()
    assert (tmp_path / "copied" / "ds_configs" / "demo.json").is_file()


TRAINS = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from hf_integration import SequenceParallelTrainer
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**{sizes}))
data = [dict(input_ids=torch.arange(32), labels=torch.arange(32))] * 4
section = dict(sequence_parallel=dict(size=2), train_micro_batch_size_per_gpu="auto", zero_optimization=dict(stage=2))
args = TrainingArguments(sys.argv[1], max_steps=1, deepspeed=section, report_to=[], use_cpu=True, save_strategy="no")
loss = SequenceParallelTrainer(model=model, args=args, train_dataset=data).train().training_loss
assert 3 < loss < 6, loss
"""


@pytest.mark.slow
def test_its_trainer_trains_on_two_ranks(installed, tmp_path, compiled):
    script = tmp_path / "train.py"
    script.write_text(TRAINS.format(sizes={name: x for name, x in TINY.items() if name != "model_type"}))
    launch = "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()
    ran(installed / "bin" / "python", *launch, script, tmp_path / "out")


def test_who_attends_or_trains_loads_no_planner_and_no_command(seen):
    assert len(seen["ours"]) > 20
    assert not [name for name in seen["trains"] if name.split(".")[1] in ("planner", "cli")]


def test_commands_import_no_torch_until_they_run_something(seen):
    assert seen["commands"] == []


def test_importing_starts_nothing(seen):
    assert seen["bare"] == [], "the compiler, which takes seconds, or a library that only some use"
    assert not seen["groups"], "a process group"
    assert not seen["CUDA"], "a CUDA context"
    assert not seen["started"], "processes"
