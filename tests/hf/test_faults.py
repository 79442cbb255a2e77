"""What takes a rank away while it trains: memory, a kill, a full disk. The others are told, and a run goes on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import ds_seqpar
from tests import scripts
from tests.dist.ranks import is_one_sentence
from tests.dist.test_ends import prints
from tests.faults.__main__ import Case, judged
from tests.faults.ranks import RESUMING, SAVING, TRAINING
from tests.launch import on_ranks
from tests.scripts import EXAMPLE, ROOT, save_texts
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
NEEDY, ABSENT = 1, 2**50  # the rank that asks for so many bytes
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "sequence_parallel": {"size": 2},
}
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def asks(*_):
    torch.empty(ABSENT, dtype=torch.uint8)


def plant(engine, place):
    """Let the needy rank ask for too much, in the MLP of the second layer or when the optimizer begins."""
    mlp, before = engine.module.model.layers[1].mlp, LlamaMLP.forward

    def forward(self, x):
        if self is mlp and place == "forward":
            asks()
        out = before(self, x)
        if self is mlp:
            out.register_hook(asks)
        return out

    if place == "optimizer":
        engine.optimizer.optimizer.register_step_pre_hook(asks)
    else:
        LlamaMLP.forward = forward


def out_of_memory(folder, place):
    """What the rank that has memory is told, in words; the other prints, and ends as an uncaught error ends it."""
    torch.manual_seed(0)
    engine, *_ = ds_seqpar.initialize(model=LlamaForCausalLM(LlamaConfig(**SIZES)), config=CONFIG)
    sp, ids = engine.sequence_parallel, torch.arange(32)[None] % 64
    for step in range(2):
        if step == 1 and dist.get_rank() == NEEDY:
            plant(engine, place)
        try:
            for batch in sp.shard_batches([{"input_ids": ids, "labels": ids}]):
                engine.backward(engine(**batch).loss)
                engine.step()
        except RuntimeError as error:
            prints(error, folder / "shared")
            if dist.get_rank() == NEEDY:
                os._exit(1)
            return str(error)
    raise AssertionError("nobody ran out of memory")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("forward", "in forward of layer 1 (LlamaMLP)"),
        pytest.param("backward", "in backward", marks=pytest.mark.slow),
        pytest.param("optimizer", "in the optimizer step", marks=pytest.mark.slow),
    ],
)
def test_a_rank_out_of_memory_is_told_on_all(place, words, tmp_path):
    told, (died, *_) = on_ranks(2, out_of_memory, tmp_path, place, check=False)
    assert died == "Died"
    lines = (tmp_path / "shared").read_text().splitlines()
    sentence = next(line for line in lines if "ran out of memory" in line)
    assert lines[-1] == sentence
    assert sum("Error: " in line for line in lines) == 1, lines
    needed = f"rank {NEEDY} ran out of memory {words}", "1.05e+06 GiB", "predicts 1.86 GiB a rank for 32 tokens"
    assert missing(sentence, *needed) == [], sentence
    assert is_one_sentence(sentence)
    # DeepSpeed's own calls raise what the backend says; the rank then prints nothing, since the cause is told
    assert ("ran out of memory" in told) == (place != "optimizer"), told


KILLS = [
    (2, 2, "loop", 2, SAVING, 4),
    pytest.param(2, 2, "loop", 3, RESUMING, 0, marks=pytest.mark.slow),
    pytest.param(2, 2, "Trainer", 2, SAVING, 2, marks=pytest.mark.slow),
    pytest.param(4, 4, "loop", 3, TRAINING, 5, marks=pytest.mark.slow),
    pytest.param(4, 4, "Trainer", 3, TRAINING, 3, marks=pytest.mark.slow),
    pytest.param(4, 2, "loop", 2, TRAINING, 3, marks=pytest.mark.slow),
    pytest.param(2, 4, "loop", 3, SAVING, 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "then", "driver", "stage", "phase", "step"), KILLS)
def test_a_run_goes_on_exactly_after_a_kill(ranks, then, driver, stage, phase, step):
    """A small part of `python -m tests.faults`, which also says how soon ranks end."""
    found = judged(
        Case(
            number=0, driver=driver, stage=stage, ranks=ranks, then=then, victim=1, phase=phase, step=step, share=0.5
        )
    )  # fmt: skip
    assert found["verdict"] in ("exact", "late"), found


# kills rank 0, which has the store, before its fourth step, unless torchrun has started it again
KILLED = f"""
import os, runpy, signal, sys
import transformers.trainer

class Kill(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], state.global_step) == ("0", "0", 3):
            os.kill(os.getpid(), signal.SIGKILL)

transformers.trainer.DEFAULT_CALLBACKS.append(Kill)
sys.argv[0] = "{EXAMPLE}"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def losses(text):
    return re.findall(r"\{'loss': '?([\d.]+)'?, 'grad_norm': '?([\d.]+)", text)


@pytest.mark.slow
def test_torchrun_starts_a_run_again_which_goes_on_by_itself(tmp_path, monkeypatch):
    """From the last whole checkpoint, with the losses of a run that nobody interrupts."""
    save_texts(tmp_path / "texts")
    (tmp_path / "killed.py").write_text(KILLED)
    config = ROOT / "ds_configs" / "zero2_sp2_dp.json"
    given = {"data": tmp_path / "texts", "seq_len": 64, "documents": 8, "eval_documents": 1, "max_steps": 6}
    given |= {"save_steps": 2, "eval_strategy": "no", "logging_steps": 1, "gradient_accumulation_steps": 1}
    words = [str(x) for name, value in given.items() for x in (f"--{name}", value)] + ["--deepspeed", str(config)]
    whole = scripts.run(2, tmp_path, EXAMPLE, *words, "--output_dir", tmp_path / "whole")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--max-restarts", "1"]
    more = [*options, tmp_path / "killed.py", *words, "--output_dir", tmp_path / "killed"]
    ran = scripts.launch("torchrun", 2, tmp_path, *more, threads=1)
    assert not ran.failed, ran.stderr[-3000:]
    expected = losses(whole.stdout)
    assert len(expected) == 6
    assert losses(ran.stdout) == [*expected[:3], *expected[2:]]


def test_a_command_whose_output_finds_no_room_says_so():
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("waits for a system that has /dev/full")
    with full.open("w") as output:
        command = [sys.executable, "-m", "ds_seqpar", "schema"]
        ran = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=100)
    assert ran.returncode == 2
    assert "No space left" in ran.stderr
    assert is_one_sentence(ran.stderr.strip())
