"""trl's RewardTrainer with the mixin before it logs what it logs alone, and goes on where it stopped."""

import numpy as np
import pytest
import torch

from tests.hf import trl_runs
from tests.hf.trl_runs import lora, made

pytestmark = pytest.mark.usefixtures("compiled")
SAVED = {"save_strategy": "steps", "save_steps": 2, "eval_steps": 2, "max_steps": 4}
BEST = {**SAVED, "load_best_model_at_end": True, "metric_for_best_model": "eval_spread", "save_total_limit": 1}


class OnTheLeft:
    """A collator that pads on the left, so that scores lie at the end of all rows."""

    def __init__(self, examples_of):
        self.collate = examples_of

    def __call__(self, examples):
        batch = self.collate(examples)
        for at, real in enumerate(batch["attention_mask"].sum(1).tolist()):
            shift = batch["input_ids"].shape[1] - real
            for name in ("input_ids", "attention_mask"):
                batch[name][at] = batch[name][at].roll(shift)
        return batch


def on_the_left():
    from trl.trainer.reward_trainer import DataCollatorForPreference

    return {"data_collator": OnTheLeft(DataCollatorForPreference(pad_token_id=0)), **adapters()}


def adapters():
    return lora("SEQ_CLS")


def spread(prediction):
    scores = prediction.predictions
    return {"spread": float(np.std(scores)), "sum": float(np.abs(scores).sum()), "scores": len(scores.flatten())}


def measured():
    return {"compute_metrics": spread}


def reward(parts=dict, **changes):
    return {"kind": "Reward", "parts": parts, **changes}


COVER = {"adapters, left": reward(on_the_left, stage=3, center_rewards_coefficient=0.1, max_steps=2, eval_steps=2)}
CASES = {
    "full": reward(gradient_accumulation_steps=2),
    "full, ZeRO-3": reward(stage=3, drops=["margin"], gradient_checkpointing=True, pad_to_multiple_of=16),
    "adapters": reward(adapters, drops=["margin"], center_rewards_coefficient=0.1),
    "left": reward(on_the_left, max_length=24),
    "metrics": reward(measured),
}


@pytest.mark.parametrize(
    ("cases", "groups"),
    [
        (COVER, 1),
        pytest.param(CASES, 1, marks=pytest.mark.whole),
        pytest.param({name: CASES[name] for name in ("full", "left")}, 2, marks=pytest.mark.whole),
    ],
    ids=["cover", "all", "two groups"],
)
def test_all_that_is_logged_is_the_plain_trainers(cases, groups, tmp_path):
    trl_runs.compare(tmp_path, cases, groups)


def stopped(folder, cases, size):
    """What is logged by runs that stop and go on, with what they predict then."""
    found = {}
    for name, given in cases.items():
        trainer = made(f"{folder}", size=size, **given, **BEST)
        trainer.train()
        best = trainer.state.best_global_step, trainer.state.best_metric
        log, trainer = trainer.state.log_history, made(f"{folder}", size=size, **given, **{**BEST, "max_steps": 6})
        trainer.train(resume_from_checkpoint=True)
        predicted = trainer.predict(trainer.eval_dataset)
        scores = torch.as_tensor(predicted.predictions).flatten().tolist()
        last = {"step": 6, "best": best[1], **{f"score {i}": x for i, x in enumerate(scores)}, **predicted.metrics}
        found[name] = [*log, *trainer.state.log_history, {**last, "best step": best[0]}]
    return found


@pytest.mark.whole
def test_runs_that_stop_go_on_and_predict_as_the_plain_trainers(tmp_path):
    trl_runs.compare(tmp_path, {"ZeRO-3": reward(measured, stage=3)}, groups=2, run=stopped)
