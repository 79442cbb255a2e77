"""trl's DPOTrainer and KTOTrainer with the mixin before them log what they log alone."""

import numpy as np
import peft
import pytest
from datasets import Dataset

from tests.dist.ranks import not_refused
from tests.hf import trl_runs
from tests.hf.llama import with_lora
from tests.hf.trl_runs import experts, lora, policy, reference
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
ALL_LOSSES = {"loss_type": list(LOSSES), "loss_weights": [1 / (i + 1) for i in range(len(LOSSES))]}
BEFORE = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 5}
SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 2}


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
    return {"eval_dataset": {name: trl_runs.examples("DPO", 5, i) for i, name in enumerate("ab")}, **reference()}


def dpo(parts=reference, **changes):
    return {"kind": "DPO", "parts": parts, **changes}


def kto(parts=reference, **changes):
    return {"kind": "KTO", "parts": parts, **changes}


COVER = {
    "all losses of DPO": dpo(label_smoothing=0.1, **ALL_LOSSES),
    "adapters, ZeRO-3": dpo(
        lora, stage=3, gradient_accumulation_steps=2, use_weighting=True, ld_alpha=0.5, max_length=24
    ),
    "computed before": dpo(dict, **BEFORE),
    "KTO": kto(lora, stage=3),
}
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
}
OF_TWO_GROUPS = {
    **COVER,
    **{name: CASES[name] for name in ("aot", "experts", "KTO, unpaired")},
    "KTO, metrics": kto(measured),
}


@pytest.mark.parametrize(
    ("cases", "groups"),
    [
        ({name: {**given, "max_steps": 2, "eval_steps": 2} for name, given in COVER.items()}, 1),
        pytest.param(CASES, 1, marks=pytest.mark.slow),
        pytest.param(OF_TWO_GROUPS, 2, marks=pytest.mark.slow),
    ],
    ids=["cover", "all", "two groups"],
)
def test_all_that_is_logged_is_the_plain_trainers(cases, groups, tmp_path):
    trl_runs.compare(tmp_path, cases, groups)


@pytest.mark.slow
def test_runs_that_stop_go_on_and_predict_as_the_plain_trainers(tmp_path):
    cases = {"DPO": dpo(lora), "KTO": kto(reference, stage=3)}
    cases = {name: {**given, "prediction_loss_only": True} for name, given in cases.items()}
    trl_runs.compare(tmp_path, cases, run=trl_runs.stopped)


def virtual_tokens():
    return {"peft_config": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)}


def in_memory():
    return {"train_dataset": trl_runs.examples("DPO", 8, 1), **reference()}


def half_of_the_margins():
    rows = list(trl_runs.examples("Reward", 16, 1))
    return {"train_dataset": Dataset.from_list([*rows[:8], *({**row, "margin": None} for row in rows[8:])])}


# what is wrong -> (the Trainer, words of the sentence)
REFUSED = {
    "virtual tokens": (kto(virtual_tokens), ["prompt learning", "use LoRA"]),
    "no file of log-probabilities": (dpo(in_memory, **BEFORE), ["precompute_ref_log_probs", "save_to_disk"]),
    "tiles of a loss in chunks": (
        dpo(deepspeed_changes={"sequence_parallel": {"size": 2, "loss_tiles": 2}}),
        ["sequence_parallel.loss_tiles"],
    ),
    "offloading by trl": (dpo(activation_offloading=True), ["activation_offloading=True", "offload_checkpoints"]),
    "margins of some rows": (
        {"kind": "Reward", "parts": half_of_the_margins},
        ["ForPreference", "NoneType"],
    ),
}


def test_each_is_refused_by_every_rank_before_the_first_step(tmp_path):
    trl_runs.save_examples(tmp_path)
    cases = {name: case for name, (case, _) in REFUSED.items()}
    for found in on_ranks(2, trl_runs.refused, tmp_path, cases):
        assert not_refused(found, REFUSED) == {}
