"""The Trainer on types that no table has: with LoRA, checkpoints and tiles under ZeRO-3, what the plain Trainer logs;
saved, and resumed. Models with a state, or an index, train whole too."""

import pytest
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.hf.every_type import tiny
from tests.hf.llama import with_lora
from tests.hf.trainers import make, split, trained
from tests.launch import on_ranks

# experts, a latent, chunks, positions that are learned, keywords that get lost, a head past the base model
TYPES = (
    "mixtral", "olmoe", "deepseek_v3", "llama4_text", "gpt2", "nemotron", "opt", "gemma", "minimax_m2", "starcoder2",
)  # fmt: skip
SECTION = {"size": 2, "mlp_tiles": "auto", "loss_tiles": 2}
STATES = ("qwen3_next", "nemotron_h", "deepseek_v3")  # and latents
GROUPS = TYPES[:5], TYPES[5:], STATES[:2]
INDEX = ("deepseek_v32", "glm_moe_dsa", "deepseek_v4")  # latents that an index picks, one for two layers, entries


def projections(model):
    """The names of all linear layers but routers, the head, and what peft refuses, or cannot run."""
    refused = {"nemotron_h": {"out_proj"}, "deepseek_v4": {"o_a_proj"}}.get(model.config.model_type, set())
    names = {name.rpartition(".")[2] for name, x in model.named_modules() if isinstance(x, (nn.Linear, Conv1D))}
    return sorted(names - {"gate", "router", "lm_head"} - refused)


def runs(folder, names, section, lora, stage, steps=3):
    """Type -> what the steps log; and what the last log again, resumed after the second."""
    found = {}
    for name in names:
        given = {
            "max_steps": steps, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-4,
            "gradient_checkpointing": stage == 3, "eval_strategy": "steps", "eval_steps": steps,
            "deepspeed_changes": split() if stage == 3 else {},
        }  # fmt: skip
        place, logs = f"{folder}/{name}", []
        for how in ({}, {"resume_from_checkpoint": f"{place}/checkpoint-2"}):
            model = tiny(name)
            model.config.get_text_config().output_router_logits = False  # of experts: test_trainer_packs.py
            model = with_lora(model, *projections(model)) if lora else model
            trainer = make(place, 2, section, stage, model=model, **given)
            logs.append(trained(trainer, **how))
        found[name] = logs
    return found


@pytest.mark.parametrize(
    ("names", "section", "how"),
    [
        (STATES[:1], {"size": 2}, (False, 2)),
        (INDEX[:1], {"size": 2, "prove": "never"}, (False, 3)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (STATES[1:], {"size": 2}, (False, 2)),
                *((names, SECTION, (True, 3)) for names in GROUPS),
                *(((name,), SECTION, (*how, 5)) for name in INDEX for how in ((True, 3), (False, 3), (False, 2))),
            ]
        ),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else None,
)
def test_a_type_that_nobody_listed_trains_as_the_plain_trainer_does(tmp_path, names, section, how):
    plain = on_ranks(1, runs, tmp_path / "plain", names, None, *how, timeout=400)[0]
    for found in on_ranks(2, runs, tmp_path / "shared", names, section, *how, timeout=500):
        for name in names:
            for run, wanted in zip(found[name], plain[name], strict=True):
                for figure in ("loss", "grad_norm", "eval_loss"):
                    assert run[figure] == pytest.approx(wanted[figure], rel=1e-5), (name, figure)
