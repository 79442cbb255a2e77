"""The Trainer on types that no table has: with LoRA, checkpoints and tiles under ZeRO-3, what the plain Trainer logs;
saved, and resumed. Models with a state train whole too."""

import pytest
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.hf.every_type import tiny
from tests.hf.llama import with_lora
from tests.hf.trainers import make, trained
from tests.launch import on_ranks

# experts, a latent, chunks, positions that are learned, keywords that get lost, a head past the base model
TYPES = (
    "mixtral", "olmoe", "deepseek_v3", "llama4_text", "gpt2", "nemotron", "opt", "gemma", "minimax_m2", "starcoder2",
)  # fmt: skip
SECTION = {"size": 2, "mlp_tiles": "auto", "loss_tiles": 2}
STATES = ("qwen3_next", "nemotron_h", "deepseek_v3")  # and latents
GROUPS = TYPES[:5], TYPES[5:], STATES[:2]


def projections(model):
    """The names of all linear layers but routers, the head, and what peft refuses of Mamba-2."""
    refused = {"out_proj"} if model.config.model_type == "nemotron_h" else set()
    names = {name.rpartition(".")[2] for name, x in model.named_modules() if isinstance(x, (nn.Linear, Conv1D))}
    return sorted(names - {"gate", "router", "lm_head"} - refused)


def runs(folder, names, section, lora=True):
    """Type -> what three steps log; and what the third logs again, resumed after the second."""
    found = {}
    for name in names:
        given = {
            "max_steps": 3, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-4,
            "gradient_checkpointing": lora, "eval_strategy": "steps", "eval_steps": 3,
        }  # fmt: skip
        place, logs = f"{folder}/{name}", []
        for how in ({}, {"resume_from_checkpoint": f"{place}/checkpoint-2"}):
            model = tiny(name)
            model.config.get_text_config().output_router_logits = False  # of experts: test_trainer_packs.py
            model = with_lora(model, *projections(model)) if lora else model
            trainer = make(place, 2, section, 3 if lora else 2, model=model, **given)
            logs.append(trained(trainer, **how))
        found[name] = logs
    return found


@pytest.mark.parametrize(
    ("names", "section", "lora"),
    [
        (STATES[:1], {"size": 2}, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(STATES[1:], {"size": 2}, False), *((names, SECTION, True) for names in GROUPS)]
        ),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, tuple) else None,
)
def test_a_type_that_nobody_listed_trains_as_the_plain_trainer_does(tmp_path, names, section, lora):
    plain = on_ranks(1, runs, tmp_path / "plain", names, None, lora, timeout=400)[0]
    for found in on_ranks(2, runs, tmp_path / "shared", names, section, lora, timeout=500):
        for name in names:
            for run, wanted in zip(found[name], plain[name], strict=True):
                for figure in ("loss", "grad_norm", "eval_loss"):
                    assert run[figure] == pytest.approx(wanted[figure], rel=1e-5), (name, figure)
