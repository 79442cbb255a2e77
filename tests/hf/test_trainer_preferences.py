"""trl's DPOTrainer, KTOTrainer and RewardTrainer with the mixin before them log what they log alone, and go on where
they stopped."""

import copy

import numpy as np
import peft
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, MixtralConfig, MixtralForCausalLM

from tests.hf.every_type import config_of, enlivened
from tests.hf.llama import with_lora
from tests.hf.trainers import assert_refused, case, compare, lora, policy, reference, texts, untimed

pytestmark = pytest.mark.usefixtures("compiled")
LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
ALL_LOSSES = {"loss_type": list(LOSSES), "loss_weights": [1 / (i + 1) for i in range(len(LOSSES))]}
BEFORE = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 5}
SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 2}


def experts(seed=0):
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=300, hidden_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0, router_aux_loss_coef=0.1,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def own_adapter():
    """A model that has adapters already, of which trl makes a copy for the reference."""
    return {"model": with_lora(policy(), "q_proj", "v_proj")}


def of_experts():
    return {"model": experts(), "ref_model": experts(seed=1)}


def adapted_experts():
    return {"model": experts(), **lora()}


def of_real_tokens(prediction):
    """Outputs at padding are not the plain model's."""
    real = prediction.label_ids > 0
    return {"logits": float(np.abs(prediction.predictions[real]).mean()), "tokens": int(real.sum())}


def measured():
    return {"compute_metrics": of_real_tokens, **reference()}


def two_sets():
    return {"eval_dataset": {name: texts("DPO", 5, i) for i, name in enumerate("ab")}, **reference()}


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


def with_spread():
    return {"compute_metrics": spread}


def dpo(parts=reference, **changes):
    return case("DPO", parts, **changes)


def kto(parts=reference, **changes):
    return case("KTO", parts, **changes)


def reward(parts=dict, **changes):
    return case("Reward", parts, **changes)


def predicted(trainer):
    """What the Trainer predicts of its examples for evaluation: its metrics, and scores where there are any."""
    found = trainer.predict(trainer.eval_dataset)
    return untimed([found.metrics]), () if found.predictions is None else np.asarray(found.predictions)


# a run that stops, whose best model predicts when it has gone on
STOPS = {"save_strategy": "steps", "save_steps": 2, "eval_steps": 2, "max_steps": 4, "save_total_limit": 1}
STOPS |= {"load_best_model_at_end": True, "resume_at": True, "again": {"max_steps": 6}, "then": predicted}
COVER = {
    "all losses of DPO": dpo(label_smoothing=0.1, **ALL_LOSSES),
    "adapters, ZeRO-3": dpo(
        lora, stage=3, gradient_accumulation_steps=2, use_weighting=True, ld_alpha=0.5, max_length=24
    ),
    "computed before": dpo(dict, **BEFORE),
    "KTO": kto(lora, stage=3),
    "Reward, left": reward(on_the_left, stage=3, center_rewards_coefficient=0.1),
}
FEW = {name: COVER[name] for name in ("adapters, ZeRO-3", "KTO", "Reward, left")}
CASES = {
    **{name: dpo(loss_type=name, label_smoothing=0.1) for name in LOSSES},
    **{name: dpo(f_divergence_type=name) for name in ("forward_kl", "js_divergence", "alpha_divergence")},
    "a copy of an adapter": dpo(own_adapter),
    "synced": dpo(stage=3, **SYNCED),
    "computed before, ZeRO-3": dpo(stage=3, ld_alpha=0.5, **BEFORE),
    "experts": dpo(of_experts),
    "experts, adapters": dpo(adapted_experts, stage=3, gradient_checkpointing=True),
    "metrics": dpo(measured),
    "two sets": dpo(two_sets),
    "the end of rows": dpo(max_length=16, truncation_mode="keep_end", pad_to_multiple_of=16, padding_free=True),
    "KTO, a reference": kto(),
    "KTO, adapters, computed before": kto(lora, **BEFORE),
    "KTO, unpaired": kto(loss_type="apo_zero_unpaired", train_sampling_strategy="random"),
    "KTO, weights": kto(
        gradient_accumulation_steps=2, desirable_weight=1.5, undesirable_weight=0.5, max_length=16, pad_to_multiple_of=8
    ),
    "KTO, a copy of an adapter": kto(own_adapter, stage=3, gradient_checkpointing=True, **BEFORE),
    "KTO, synced": kto(**SYNCED),
    "KTO, computed before, ZeRO-3": kto(dict, stage=3, **BEFORE),
    "KTO, experts": kto(of_experts, router_aux_loss_coef=0.3),
    "Reward": reward(gradient_accumulation_steps=2),
    "Reward, ZeRO-3": reward(stage=3, drops=["margin"], gradient_checkpointing=True, pad_to_multiple_of=16),
    "Reward, adapters": reward(adapters, drops=["margin"], center_rewards_coefficient=0.1),
    "Reward, cut": reward(on_the_left, max_length=24),
    "Reward, metrics": reward(with_spread),
    "Reward, experts": reward(routed, max_steps=2, eval_steps=2),
}
OF_TWO_GROUPS = {
    **COVER,
    **{name: CASES[name] for name in ("aot", "experts", "KTO, unpaired", "Reward", "Reward, cut")},
    "KTO, metrics": kto(measured),
}


@pytest.mark.parametrize(
    ("cases", "groups", "changes"),
    [
        (FEW, 1, {"max_steps": 2, "eval_steps": 2}),
        pytest.param(COVER | CASES, 1, {}, marks=pytest.mark.slow),
        pytest.param(OF_TWO_GROUPS, 2, {}, marks=pytest.mark.slow),
    ],
    ids=["few", "all", "two groups"],
)
def test_all_that_is_logged_is_the_plain_trainers(cases, groups, changes, tmp_path):
    compare(tmp_path, cases, (2 * groups, 2), batch=4 * groups, **changes)


@pytest.mark.slow
def test_runs_that_stop_go_on_and_predict_as_the_plain_trainers(tmp_path):
    margins = {"prediction_loss_only": True, "metric_for_best_model": "eval_rewards/margins"}
    compare(tmp_path, {"DPO": dpo(lora), "KTO": kto(stage=3)}, (2, 2), **STOPS, **margins)
    rewards = {"Reward": reward(with_spread, stage=3)}
    compare(tmp_path / "rewards", rewards, (4, 2), batch=8, **STOPS, metric_for_best_model="eval_spread")


def virtual_tokens():
    return {"peft_config": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)}


def in_memory():
    return {"train_dataset": texts("DPO", 8, 1), **reference()}


def half_of_the_margins():
    rows = list(texts("Reward", 16, 1))
    return {"train_dataset": Dataset.from_list([*rows[:8], *({**row, "margin": None} for row in rows[8:])])}


# what is wrong -> (the case, words of the sentence)
WRONG = {
    "virtual tokens": (kto(virtual_tokens), ["prompt learning", "use LoRA"]),
    "no file of log-probabilities": (dpo(in_memory, **BEFORE), ["precompute_ref_log_probs", "save_to_disk"]),
    "tiles of a loss in chunks": (dpo(section={"loss_tiles": 2}), ["sequence_parallel.loss_tiles"]),
    "offloading by trl": (dpo(activation_offloading=True), ["activation_offloading=True", "offload_checkpoints"]),
    "margins of some rows": (reward(half_of_the_margins), ["ForPreference", "NoneType"]),
}


def test_each_is_refused_by_every_rank_before_the_first_step(tmp_path):
    assert_refused(tmp_path, __name__)
