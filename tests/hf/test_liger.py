"""Liger's kernels with sequence parallelism, in Triton's interpreter: the numbers are those of the plain Trainer with
Liger."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from tests import scripts
from tests.dist.ranks import is_one_sentence
from tests.hf.llama import small
from tests.hf.trainers import differences

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("liger_kernel", "triton"))),
        reason="waits for liger-kernel, which `make test-all` installs, and triton, which is there on Linux",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("liger")


@pytest.fixture(scope="module")
def found(folder):
    """By ranks: what `liger_runs.py` wrote."""
    path = os.environ.get("PYTHONPATH", "")
    script = Path(__file__).with_name("liger_runs.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), path])))
        for ranks in (1, 2):
            ran = scripts.launch("torchrun", ranks, folder, script, folder, threads=1)
            assert not ran.failed, ran.stdout[-2000:] + ran.stderr[-4000:]
    return {ranks: json.loads((folder / f"{ranks}.json").read_text()) for ranks in (1, 2)}


def weights(folder):
    """By name of a run, what it trained."""
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


def test_a_trainer_with_liger_is_the_plain_trainer_with_it_and_without(found, folder):
    """Also under ZeRO-3, whose head Liger's loss reads past its hooks, and with tiles around its MLPs and norms."""
    plain, *others = found[1]["runs"] + found[2]["runs"]
    assert len(others) == 4
    for logs in others:
        for name, count in (("loss", 2), ("grad_norm", 2), ("eval_loss", 1)):
            assert len(logs[name]) == count
            assert logs[name] == pytest.approx(plain[name], rel=1e-5), name
    trained = weights(folder)
    plain, begun = trained.pop("10"), small().state_dict()
    assert len(trained) == 4
    for name, weight in plain.items():
        moved = (weight - begun[name]).abs().max()
        assert moved > 0
        for its in trained.values():
            assert (its[name] - weight).abs().max() < 1e-5 * moved, name


def test_trls_sft_trainer_with_liger_is_the_plain_one_with_it(found):
    plain, shared = (found[ranks]["trl"] for ranks in (1, 2))
    assert len(plain) == 3
    assert differences(plain, shared, rel=1e-4) == []


def test_a_whole_batch_has_the_plain_loss_and_gradients(found):
    assert found[2]["whole"]["loss"] < 1e-5
    assert max(found[2]["whole"]["gradients"]) < 1e-5


def test_what_liger_does_for_a_part_alone_is_refused(found):
    for (kind, said), expected, words in zip(
        found[2]["whole"]["refused"], ("ConfigError", "InputError"), ("loss_tiles", "token_accuracy"), strict=True
    ):
        assert kind == expected
        assert words in said
        assert is_one_sentence(said)
