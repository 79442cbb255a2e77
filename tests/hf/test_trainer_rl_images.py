"""trl's trainers of preferences and rollouts with images: with the mixin they log what they log alone."""

import copy
import functools

import peft
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset

from hf_integration.look.small import small_copy
from tests.hf.images import projections
from tests.hf.media_types import model_of
from tests.hf.processors import PROCESSORS, drawn
from tests.hf.rollouts import Keyed
from tests.hf.trainers import ROLLS_OUT, assert_refused, build, case, compare, split
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
slow = pytest.mark.slow
LENGTH, ENDS = 5, [1, *range(30, 50)]  # of completions; the tokens that end one
TEXTS = {"GRPO": (), "RLOO": (), "KTO": ("completion",), "DPO": ("chosen", "rejected")}  # columns of answers
WIDER = {("RLOO", "qwen2_5_vl"): {"grad_norm": 3e-5}}  # by 2e-5 where all else is equal; in fp64 it was not compared


def say(role, words):
    return [{"role": role, "content": " ".join(map(str, words))}]


def rows(kind, count, first, images=None, other=0):
    """Prompts with one image or two, for preferences also with none.

    images: of each, instead; other: threes are other images of the same sizes.
    """
    found = []
    for number in range(first, first + count):
        some = number % 2 + 1 if kind in ROLLS_OUT else (1, 0, 2, 0)[number % 4]
        row = {"prompt": say("user", range(3, 4 + number % 5))}
        row["images"] = [drawn(number + at + other) for at in range(some if images is None else images)]
        for at, name in enumerate(TEXTS[kind]):
            length = (number * (at + 3)) % 7 + 1
            row[name] = say("assistant", ((number + at) * x % 60 + 5 for x in range(1, length + 1)))
        found.append(row | ({"label": number % 3 > 0} if kind == "KTO" else {}))
    return Dataset.from_list(found)


class Numbered(Keyed):
    first = 60  # the token of a prompt's first completion


def words(completions, **_):
    """How many different tokens a completion has."""
    return [len({*x[0]["content"].split()}) / LENGTH for x in completions]


def shapes(images, completion_ids, **_):
    """Images play a part."""
    rows = zip(images, completion_ids, strict=True)
    return [sum(x % 2 for x in ids) / LENGTH + sum(image.width for image in some) / 1000 for some, ids in rows]


def parts(kind, name, way, data):
    """A Trainer's own arguments."""
    model = small_copy(model_of(name))[0].train()
    own = {"model": model, "processing_class": PROCESSORS[name](model.config)}
    own |= {f"{part}_dataset": data(kind, count, first) for part, count, first in (("train", 24, 0), ("eval", 4, 30))}
    if kind in ROLLS_OUT:
        own |= {"reward_funcs": [words, shapes], "between": [Numbered]}
        model.generation_config.eos_token_id = ENDS
    if way == "lora":
        given = {"r": 4, "lora_alpha": 1, "init_lora_weights": False}  # of numbers that are not 0, and are small
        own["peft_config"] = peft.LoraConfig(**given, target_modules=projections(model))
    elif kind not in ROLLS_OUT:
        own["ref_model"] = copy.deepcopy(model)
        for p in own["ref_model"].parameters():
            p.data += 0.02 * torch.randn_like(p)
    return own


def imaged(kind, name="llava", stage=2, way="full", groups=1, data=rows, **changes):
    """A case of a type of model, trained in full or with adapters."""
    how = {"max_steps": 2, "gradient_accumulation_steps": 2, "adam_epsilon": 1e-2, "eval_strategy": "steps"}
    how |= {"eval_steps": 2, "section": {"ulysses": 1, "prove": "never", **changes.pop("section", {})}}
    how |= {"batch": (4 if kind in ROLLS_OUT else 2) * groups, "rel": WIDER.get((kind, name), 1e-5)}
    if kind in ROLLS_OUT:  # the second time, ratios are not 1
        how |= {"max_completion_length": LENGTH, "beta": 0.0, "num_iterations": 2, "num_generations_eval": 2}
    how |= {"beta": 0.1} if way == "lora" else {}
    how |= {"deepspeed_changes": split()} if stage == 3 else {}
    return case(kind, functools.partial(parts, kind, name, way, data), stage=stage, **(how | changes))


KINDS = ("DPO", "GRPO", "RLOO", "KTO")
FEW = [("DPO", "qwen2_5_vl", 2, "lora"), ("GRPO", "qwen3_vl", 3, "full"), ("RLOO", "gemma3", 2, "lora")]
FEW += [("KTO", "idefics3", 2, "full")]


@pytest.mark.parametrize(
    ("cases", "groups"),
    [
        pytest.param(FEW, 1, marks=slow),
        *(
            pytest.param([(kind, name, stage, way) for stage in (2, 3) for way in ("full", "lora")], 1, marks=slow)
            for kind in KINDS
            for name in PROCESSORS
        ),
        pytest.param([(kind, "qwen3_vl", 3, "lora") for kind in KINDS], 2, marks=slow),
    ],
)
def test_all_that_is_logged_is_trls(tmp_path, cases, groups):
    compare(tmp_path, {" ".join(map(str, given)): imaged(*given, groups) for given in cases}, (2 * groups, 2))


@pytest.mark.slow
def test_rows_are_generated_together_and_in_parts_and_rewarded_by_groups(tmp_path):
    together = imaged("GRPO", "qwen3_vl", 3, ds3_gather_for_generation=False)
    compare(tmp_path, {"together": together, "parts": imaged("RLOO", steps_per_generation=4)}, (2, 2))


def drops(kind, count, first):
    """Rows without images on one rank."""
    return rows(kind, count, first, images=0 if dist.get_rank() else 1)


def others(kind, count, first):
    """Rows with other images of the same sizes on one rank."""
    return rows(kind, count, first, images=1, other=3 * dist.get_rank())


CUT = {"max_length": 20, "data": functools.partial(rows, images=1)}
# what is wrong -> (the case, words of the sentence)
WRONG = {
    **{f"{kind}, images on one rank": (imaged(kind, data=drops), ["rank", "whole batches"]) for kind in KINDS},
    **{f"{kind}, other images on one rank": (imaged(kind, data=others), ["rank", "pixel_values"]) for kind in KINDS},
    **{
        f"{kind}, a prompt that is cut": (
            imaged(kind, **CUT),
            ["pixel_values", "got one without an answer", "max_length=20"],
        )
        for kind in ("DPO", "KTO")
    },
    "prompts once": (imaged("DPO", section={"shared_prompts": True}), ["shared_prompts", "without images"]),
    "vLLM": (imaged("GRPO", use_vllm=True, vllm_mode="server"), ["prompts of text", "use_vllm"]),
}


@pytest.mark.slow
def test_wrong_uses_end_in_a_sentence_on_every_rank(tmp_path):
    assert_refused(tmp_path, __name__)


def miscounted(folder):
    """What is raised where a model finds more placeholders than features."""
    trainer = build(folder, imaged("DPO", max_length=None), 2)
    collate = trainer.data_collator

    def with_one_more(examples):
        batch = collate(examples)
        batch["input_ids"][:, 0] = trainer.model.config.image_token_id
        return batch

    trainer.data_collator = with_one_more
    with pytest.raises(ValueError, match="do not match"):
        trainer.train()
    return trainer.state.global_step


@pytest.mark.slow
def test_a_wrong_count_of_placeholders_is_an_error_of_all(tmp_path):
    assert on_ranks(2, miscounted, f"{tmp_path}/miscounted") == [0, 0]
