"""What `make demo` runs on a machine with no GPU, one, two, three and eight, and that nothing but it sees GPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_seqpar.deepspeed.config import read_config
from examples import demo

ROOT = Path(__file__).parents[2]
FP32, AUTO, TWO = (demo.CONFIGS / f"{name}.json" for name in ("demo", "demo_auto_bf16", "zero2_sp2_dp"))


@pytest.mark.parametrize(
    ("devices", "given", "expected"),
    [
        (0, {}, (4, FP32, False)),
        (1, {}, (4, FP32, False)),
        (2, {}, (2, AUTO, True)),
        (3, {}, (2, AUTO, True)),
        (4, {}, (4, AUTO, True)),
        (8, {}, (4, AUTO, True)),
        (0, {"ranks": 2}, (2, AUTO, False)),
        (2, {"ranks": 4}, (4, FP32, False)),
        (8, {"ranks": 8}, (8, AUTO, True)),
        (8, {"ranks": 3}, (3, AUTO, True)),
        (8, {"config": FP32}, (4, FP32, False)),
        (8, {"config": AUTO}, (4, AUTO, True)),
        (0, {"config": TWO}, (4, TWO, False)),
        (1, {"config": AUTO}, (4, AUTO, False)),
        (3, {"config": AUTO}, (3, AUTO, True)),
        (2, {"config": AUTO, "ranks": 3}, (3, AUTO, False)),
        (8, {"config": TWO, "ranks": 2}, (2, TWO, False)),  # "auto" is for the Trainer to fill in
    ],
)
def test_choice(devices, given, expected):
    found = demo.choose(devices, **given)
    assert (found.ranks, found.config, found.on_gpus) == expected
    assert found.ranks % read_config(found.config).resolve(found.ranks, heads=(8, 2)).size == 0
    assert ("GPUs" in str(found)) is found.on_gpus
    assert str(found.ranks) in str(found)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"ranks": 0}, "RANKS"),
        ({"ranks": -4, "config": FP32}, "RANKS"),
        ({"config": Path("absent.json")}, "absent.json"),
    ],
)
def test_what_cannot_be_run_ends_it_with_a_sentence(given, word):
    with pytest.raises(SystemExit, match=word):
        demo.choose(8, **given)


def test_gpus_are_those_that_the_user_left_in_sight():
    choice = demo.Choice(2, AUTO, on_gpus=True)
    for visible, include in ((None, "localhost:0,1"), ("", "localhost:0,1"), ("3, 5,6", "localhost:3,5")):
        words, changes = demo.command(choice, "out", visible)
        assert words[words.index("--include") + 1] == include
        assert changes == {}
    with pytest.raises(SystemExit, match="GPU-8932"):
        demo.command(choice, "out", "GPU-8932")


SEEN = "import os; print(sorted((name, os.environ[name]) for name in {names}))"


@pytest.mark.slow  # DeepSpeed's launcher takes long to start; tests/hf starts it too
def test_cpu_ranks_see_no_gpu(tmp_path):
    """By the launcher itself: it numbers devices in CUDA_VISIBLE_DEVICES, whatever was there."""
    (tmp_path / "rank.py").write_text(SEEN.format(names=list(demo.HIDDEN)))
    words, changes = demo.command(demo.Choice(2, FP32, on_gpus=False), "out", None)
    script = next(number for number, word in enumerate(words) if word.endswith("finetune_llama.py"))
    ran = subprocess.run(
        [*words[:script], str(tmp_path / "rank.py")],
        cwd=tmp_path, env={**os.environ, **changes}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.count(str(sorted(demo.HIDDEN.items()))) == 2


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ([], "--out runs/demo"),
        (["RANKS=2"], "--ranks 2 --out runs/demo"),
        (["RANKS=8", "CONFIG=x.json", "OUT=y"], "--ranks 8 --config x.json --out y"),
    ],
)
def test_make_hands_over_what_is_asked_for(given, options):
    done = subprocess.run(
        ["make", "--dry-run", "--assume-old=.venv/.ready", "VENV=.", "demo", *given],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.search(rf"examples/demo\.py\s+{options}$", re.sub(" +", " ", done.stdout), re.M), done.stdout


def test_the_tests_see_no_gpu():
    """Hidden before torch was imported, from launched processes too."""
    assert {name: os.environ[name] for name in demo.HIDDEN} == demo.HIDDEN
    assert not torch.cuda.is_available()
    code = SEEN.format(names=["CUDA_VISIBLE_DEVICES"])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1", "PYTHONPATH": str(ROOT / "tests" / "hidden")}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "0" not in ran.stdout
