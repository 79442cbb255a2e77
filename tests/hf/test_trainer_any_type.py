"""The Trainer on types that no table has: with LoRA, checkpoints and tiles under ZeRO-3, what the plain Trainer logs;
saved, and resumed. Models with a state, or an index, train whole too."""

import functools

import pytest
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.hf.every_type import tiny
from tests.hf.llama import with_lora
from tests.hf.trainers import FIGURES, case, compare, split

# experts, a latent, chunks, positions that are learned, keywords that get lost, a head past the base model
TYPES = (
    "mixtral", "olmoe", "deepseek_v3", "llama4_text", "gpt2", "nemotron", "opt", "gemma", "minimax_m2", "starcoder2",
)  # fmt: skip
SECTION = {"mlp_tiles": "auto", "loss_tiles": 2}
STATES = ("qwen3_next", "nemotron_h", "deepseek_v3")  # and latents
GROUPS = TYPES[:5], TYPES[5:], STATES[:2]
INDEX = ("deepseek_v32", "glm_moe_dsa", "deepseek_v4")  # latents that an index picks, one for two layers, entries


def projections(model):
    """The names of all linear layers but routers, the head, and what peft refuses, or cannot run."""
    refused = {"nemotron_h": {"out_proj"}, "deepseek_v4": {"o_a_proj"}}.get(model.config.model_type, set())
    names = {name.rpartition(".")[2] for name, x in model.named_modules() if isinstance(x, (nn.Linear, Conv1D))}
    return sorted(names - {"gate", "router", "lm_head"} - refused)


def of_type(name, lora):
    model = tiny(name)
    model.config.get_text_config().output_router_logits = False  # of experts: test_trainer_packs.py
    return {"model": with_lora(model, *projections(model)) if lora else model}


@pytest.mark.parametrize(
    ("names", "section", "lora", "stage", "steps"),
    [
        (INDEX[:1], {"prove": "never"}, False, 3, 3),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in [
                (STATES, {}, False, 2, 3),
                *((names, SECTION, True, 3, 3) for names in GROUPS),
                *(((name,), SECTION, *how, 5) for name in INDEX for how in ((True, 3), (False, 3), (False, 2))),
            ]
        ),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else None,
)
def test_a_type_that_nobody_listed_trains_as_the_plain_trainer_does(tmp_path, names, section, lora, stage, steps):
    given = {"max_steps": steps, "eval_strategy": "steps", "eval_steps": steps, "resume_at": 2}
    given |= {"learning_rate": 1e-4, "gradient_checkpointing": stage == 3, "only": FIGURES, "stage": stage}
    given |= {"deepspeed_changes": split() if stage == 3 else {}, "section": section}
    cases = {name: case(parts=functools.partial(of_type, name, lora), **given) for name in names}
    compare(tmp_path, cases, (2, 2), batch=2, timeout=500)
