"""Liger's kernels with sequence parallelism, in Triton's interpreter: the numbers are those of the plain Trainer with
Liger."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests import scripts
from tests.dist.ranks import is_one_sentence

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("liger_kernel", "triton"))),
        reason="waits for liger-kernel and triton, which `make test-all` installs",
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By ranks: what `liger_runs.py` wrote."""
    folder, path = tmp_path_factory.mktemp("liger"), os.environ.get("PYTHONPATH", "")
    script = Path(__file__).with_name("liger_runs.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), path])))
        for ranks in (1, 2):
            ran = scripts.launch("torchrun", ranks, folder, script, folder, threads=1)
            assert not ran.failed, ran.stdout[-2000:] + ran.stderr[-4000:]
    return {ranks: json.loads((folder / f"{ranks}.json").read_text()) for ranks in (1, 2)}


def test_a_trainer_with_liger_is_the_plain_trainer_with_it(found):
    """Also under ZeRO-3, whose head Liger's loss reads past its hooks, and with tiles around its MLPs and norms."""
    plain, *others = found[1]["runs"] + found[2]["runs"]
    assert len(others) == 3
    for logs in others:
        for name, count in (("loss", 2), ("grad_norm", 2), ("eval_loss", 1)):
            assert len(logs[name]) == count
            assert logs[name] == pytest.approx(plain[name], rel=1e-5), name


def test_a_whole_batch_has_the_plain_loss_and_gradients(found):
    assert found[2]["whole"]["loss"] < 1e-5
    assert found[2]["whole"]["gradients"] < 1e-5


def test_what_liger_does_for_a_part_alone_is_refused(found):
    for (kind, said), expected, words in zip(
        found[2]["whole"]["refused"], ("ConfigError", "InputError"), ("loss_tiles", "token_accuracy"), strict=True
    ):
        assert kind == expected
        assert words in said
        assert is_one_sentence(said)
