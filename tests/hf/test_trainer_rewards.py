"""trl's RewardTrainer with the mixin before it logs what it logs alone, and goes on where it stopped."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.hf import trl_runs
from tests.hf.every_type import config_of, enlivened
from tests.hf.trl_runs import lora

pytestmark = pytest.mark.usefixtures("compiled")


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


def routed():
    """A model of no tested family, which is proved."""
    torch.manual_seed(0)
    config = copy.deepcopy(config_of("mixtral"))
    config.update({"num_labels": 1, "pad_token_id": 0, "vocab_size": 384, "output_router_logits": False})
    return {"model": enlivened(AutoModelForSequenceClassification.from_config(config).float())}


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
    "experts": reward(routed, max_steps=2, eval_steps=2),
}


@pytest.mark.parametrize(
    ("cases", "groups"),
    [
        (COVER, 1),
        pytest.param(CASES, 1, marks=pytest.mark.slow),
        pytest.param({name: CASES[name] for name in ("full", "left")}, 2, marks=pytest.mark.slow),
    ],
    ids=["cover", "all", "two groups"],
)
def test_all_that_is_logged_is_the_plain_trainers(cases, groups, tmp_path):
    trl_runs.compare(tmp_path, cases, groups)


@pytest.mark.slow
def test_runs_that_stop_go_on_and_predict_as_the_plain_trainers(tmp_path):
    trl_runs.compare(
        tmp_path,
        {"ZeRO-3": reward(measured, stage=3, metric_for_best_model="eval_spread")},
        groups=2,
        run=trl_runs.stopped,
    )
