"""`ds-seqpar tune` measures the best plans on real ranks, by the real engine, and prints what can be pasted."""

import contextlib
import io
import json

import pytest

from ds_seqpar.base.errors import KernelError
from ds_seqpar.cli.main import main
from ds_seqpar.core.runtime import kernels
from ds_seqpar.deepspeed.config import read_config
from ds_seqpar.kernels.flash import CpuFlash
from tests.launch import on_ranks
from tests.unit.commands import LLAMA
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
FP32 = ["--set", "bf16.enabled=false", "--set", "zero_optimization.stage=1"]


class Again(CpuFlash):
    name = "again"


class Never(CpuFlash):
    name = "never"

    def forward(self, *_, **__):
        raise KernelError("never takes these blocks")


def command(words):
    """On a rank: (exit code, stdout, stderr) of the command, beside a kernel that fails and a second fast one."""
    out, err = io.StringIO(), io.StringIO()
    kernels.register(Never())
    kernels.register(Again())
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        return main(["tune", *map(str, words)]), out.getvalue(), err.getvalue()


def test_plans_and_kernels_are_measured_and_the_fastest_can_be_pasted(tmp_path):
    """A pack of two documents; the first rank alone prints."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "lengths").write_text("24 40")
    words = ["--model", tmp_path, "--documents", tmp_path / "lengths", "--set", "size=2", "--top", 2, "--json", *FP32]
    (code, out, err), (_, silent, _) = on_ranks(2, command, words, patience=None, timeout=200)
    assert (code, silent) == (0, ""), err
    assert missing(err, "tune: 1 of 2, 2 ranks: ", "tune: 2 of 2, ", "kernel again: ", " s a step") == []
    assert "kernel never: cannot run: never takes these blocks" in err
    found = json.loads(out)
    ranked = found["ranked"]
    assert [one["section"].get("kernel") for one in ranked].count("again") == 1
    assert len(ranked) == 3
    times = [one["measured"]["seconds_a_step"] for one in ranked]
    assert times == sorted(times)
    assert {one["measured"]["memory"] for one in ranked} == {None}  # which of a CPU rank is not known
    assert all(one["memory"]["total"] > 0 for one in ranked)
    assert found["deepspeed_json"]["sequence_parallel"] == found["section"] == ranked[0]["section"]
    found["deepspeed_json"]["sequence_parallel"].pop("kernel", None)  # which may be one of the test
    assert read_config(found["deepspeed_json"]).size == 2


REFUSED = [
    (["--top", "many"], ("--top", "many")),
    (["--set", "size=2"], ("size 2 on 1 ranks",)),
    (["--memory", "0.001"], ("needs at least", "GiB")),
    (["--set", "fp16=3"], ("fp16",)),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=str)
def test_what_cannot_be_measured_is_answered_with_one_sentence(capsys, tmp_path, monkeypatch, words, said):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert main(["tune", "--model", str(tmp_path), "--seq-len", "64", *FP32, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert missing(err.splitlines()[-1], "ds-seqpar: ", *said) == []
