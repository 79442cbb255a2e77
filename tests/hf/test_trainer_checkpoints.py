"""Runs that stop and go on, with as many ranks a sequence or others; the folders they leave; the best of them."""

import contextlib
import io
import json
import signal
import subprocess
import sys

import deepspeed
import pytest
import torch
import torch.distributed as dist
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_integration import unpatch_attention
from tests.hf.trainers import documents, make, trained
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
STOP, END = 4, 6  # an epoch has three steps of 4 sequences: both lie within the second
SAVED = f"checkpoint-{STOP}"


def run_of(folder, size, sequences, stage, how):
    """The log of a run on these ranks; how: that of the Trainer's `train`."""
    steps = 4 // (dist.get_world_size() // size) // sequences
    saving = {} if how else {"save_strategy": "steps", "save_steps": STOP}
    trainer = make(
        folder, sequences, {"size": size}, stage, parts={"train_dataset": documents(12)}, max_steps=END,
        gradient_accumulation_steps=steps, weight_decay=0.3, **saving,
    )  # fmt: skip
    return trained(trainer, **how)


@pytest.mark.parametrize(
    ("written", "others"),
    [
        ((2, 2, 2, 3), [(2, 2, 2, 3), (2, 1, 1, 3), (4, 2, 1, 2)]),
        *(
            pytest.param(
                (4, 4, 2, stage), [(4, size, size // 2 or 1, stage) for size in (4, 2, 1)], marks=pytest.mark.slow
            )
            for stage in (2, 3)
        ),
        *(
            pytest.param((4, 2, 1, x), [(2, 1, 2, x % 3 + 1), (2, 2, 2, (x + 1) % 3 + 1)], marks=pytest.mark.slow)
            for x in (1, 2, 3)
        ),
    ],
)
def test_a_run_goes_on_as_if_it_had_not_stopped_with_other_ranks_and_another_stage_too(written, others, tmp_path):
    """(ranks, size, sequences of a group, stage). deepspeed#6691: resumed like a fresh start."""
    world, *how = written
    whole, resumed = on_ranks(world, run_of, tmp_path, *how, {})[0], {"resume_from_checkpoint": f"{tmp_path}/{SAVED}"}
    for world, *how in others:
        for found in on_ranks(world, run_of, tmp_path, *how, resumed):
            # the state that is loaded brings the log of the first steps along
            assert len(found["loss"]) == len(whole["loss"]) == END
            same = (world, *how) == written
            for figure, rel in (("loss", 1e-5), ("grad_norm", 1e-4), ("learning_rate", 0)):
                assert found[figure] == (whole[figure] if same else pytest.approx(whole[figure], rel=rel)), (world, how)
            assert found.counts[:4] == whole.counts[:4]


ALONE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    logits = model(torch.arange(1, 9)[None]).logits[0, -1].tolist()
    there = [name.split(".")[0] for name, module in sys.modules.items() if module]
    ours = [name for name in there if name in ("ds_seqpar", "hf_integration", "deepspeed")]
    print(json.dumps([logits, ours, model.config._attn_implementation]))
"""


def trained_and_used(folder, stage):
    """Trains, keeps the best of two evaluations, saves, and generates: (logits of the trained model, tokens with its
    patch, tokens without)."""
    trainer = make(
        folder, 2, {"size": 2}, stage, max_steps=2, save_strategy="steps", save_steps=1, eval_strategy="steps",
        eval_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss", learning_rate=0.1,
        parts={"eval_dataset": documents(4, seed=9)},
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    best = trainer.state.best_model_checkpoint
    scores = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    model, prompt = trainer.model.eval(), torch.arange(1, 9)[None]
    tokens = [model.generate(prompt, max_new_tokens=6, do_sample=False).tolist()]
    unpatch_attention(model)
    tokens.append(model.generate(prompt, max_new_tokens=6, do_sample=False).tolist())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        logits = model(prompt).logits[0, -1].tolist()
    return {"best": best, "scores": scores, "tokens": tokens, "logits": logits}


def alone(*folders):
    """Runs it in a forked rank, where nothing of ours can be imported any more."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("ds_seqpar", "hf_integration", "deepspeed")]:
        del sys.modules[name]
    sys.modules["ds_seqpar"] = sys.modules["hf_integration"] = None
    sys.argv = ["-c", *folders]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(ALONE, {})
    return said.getvalue()


@pytest.mark.parametrize(
    ("stage", "how"), [(3, "forked"), *(pytest.param(stage, "started", marks=pytest.mark.slow) for stage in (2, 3))]
)
def test_the_best_model_is_loaded_saved_generates_and_is_read_without_us(stage, how, tmp_path):
    for found in on_ranks(2, trained_and_used, tmp_path, stage):
        assert len(found["scores"]) == 2
        step = min(found["scores"], key=found["scores"].get)
        assert found["best"] == f"{tmp_path}/checkpoint-{step}"
        assert found["tokens"][0] == found["tokens"][1]
        assert len(found["tokens"][0][0]) == 14
    folders = found["best"], str(tmp_path)  # a checkpoint is a model's folder too
    texts = [file.read_text() for file in tmp_path.glob("*config.json")]
    assert texts
    for text in texts:
        assert "ds_seqpar" not in text
        assert "sequence_parallel" not in text
    if how == "forked":
        (said,) = on_ranks(1, alone, *folders, keep=None)
    else:
        ran = subprocess.run([sys.executable, "-c", ALONE, *folders], cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[-3000:]
        said = ran.stdout
    for line in said.splitlines()[-2:]:
        logits, ours, attention = json.loads(line)
        assert logits == pytest.approx(found["logits"], abs=1e-5)
        assert ours == []
        assert attention == "sdpa"


def stopped_early(folder):
    """A step so large that the loss grows: the second evaluation in a row without a better one ends all ranks."""
    trainer = make(
        folder, 4, {"size": 2}, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", learning_rate=5.0, lr_scheduler_type="constant",
        parts={"callbacks": [EarlyStoppingCallback(early_stopping_patience=2)]},
    )  # fmt: skip
    run = trained(trainer)
    return run["eval_loss"], run.counts[0], trainer.evaluate()["eval_loss"]


def test_early_stopping_sees_the_evaluation_loss(tmp_path):
    """transformers#48167: an evaluation loss that is cp times too large feeds early stopping."""
    for losses, steps, best in on_ranks(2, stopped_early, tmp_path):
        assert steps == len(losses) < 12
        assert min(losses[-2:]) > min(losses)
        assert best == pytest.approx(min(losses), rel=1e-6)


class Ends(TrainerCallback):
    def on_step_end(self, *_, **__):
        self.handler = signal.getsignal(signal.SIGTERM)
        raise KeyError("ended")


def handlers_around_a_failure(folder):
    """Whether training handles SIGTERM, and whether the handler after a training that raises is that of before."""
    before, ends = signal.getsignal(signal.SIGTERM), Ends()
    trainer = make(folder, 1, {"size": 1}, enable_jit_checkpoint=True, parts={"callbacks": [ends]})
    with pytest.raises(KeyError, match="ended"):
        trainer.train()
    return ends.handler != before, signal.getsignal(signal.SIGTERM) == before


def test_a_training_that_raises_gives_the_handler_of_sigterm_back(tmp_path):
    assert on_ranks(1, handlers_around_a_failure, tmp_path) == [(True, True)]
