"""trl's trainers of preferences and rollouts with pictures: with the mixin they log what they log alone."""

import contextlib
import copy
import functools

import peft
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hf_integration import SequenceParallelMixin
from hf_integration.look.small import small_copy
from tests.dist.ranks import not_refused, refusal
from tests.hf.media_types import model_of
from tests.hf.processors import PROCESSORS, drawn
from tests.hf.test_trainer_pictures import projections
from tests.hf.test_trainer_rl import Keyed, figures, keyed_noise, same
from tests.hf.trainers import fields, split
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
slow = pytest.mark.slow
LENGTH, ENDS = 5, [1, *range(30, 50)]  # of completions; the tokens that end one
TEXTS = {"GRPO": (), "RLOO": (), "KTO": ("completion",), "DPO": ("chosen", "rejected")}  # columns of answers
ROLLS_OUT = ("GRPO", "RLOO")
WIDER = "RLOO", "qwen2_5_vl", 3e-5  # a norm differs by 2e-5 where all else is equal; in fp64 it was not compared


def say(role, words):
    return [{"role": role, "content": " ".join(map(str, words))}]


def rows(kind, count, first, pictures=None, other=0):
    """Prompts with one picture or two, for preferences also with none.

    pictures: of each, instead; other: threes are other pictures of the same sizes.
    """
    found = []
    for number in range(first, first + count):
        some = number % 2 + 1 if kind in ROLLS_OUT else (1, 0, 2, 0)[number % 4]
        row = {"prompt": say("user", range(3, 4 + number % 5))}
        row["images"] = [drawn(number + at + other) for at in range(some if pictures is None else pictures)]
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
    """Pictures play a part."""
    rows = zip(images, completion_ids, strict=True)
    return [sum(x % 2 for x in ids) / LENGTH + sum(picture.width for picture in some) / 1000 for some, ids in rows]


def trainer_of(folder, kind, name="llava", size=None, stage=2, way="full", data=rows, **changes):
    """A plain trainer, or one in which `size` ranks share sequences.

    Args:
        folder: Where it writes.
        kind: "DPO", "KTO", "GRPO" or "RLOO".
        name: The type of the model.
        size: Of a group.
        stage: Of ZeRO.
        way: "full" or "lora".
        data: Makes rows.
        **changes: Of its configuration.
    """
    import trl

    plain, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    unset_hf_deepspeed_config()  # by that of the trainer before, models would be made in parts
    torch.manual_seed(3)
    model, rolls_out = small_copy(model_of(name))[0].train(), kind in ROLLS_OUT
    how = {"max_steps": 2, "bf16": False, "adam_epsilon": 1e-2, "eval_strategy": "steps", "eval_steps": 2}
    own = {f"{part}_dataset": data(kind, count, first) for part, count, first in (("train", 24, 0), ("eval", 4, 30))}
    if rolls_out:
        how |= {"num_generations": 2, "max_completion_length": LENGTH, "temperature": 0.9, "beta": 0.0}
        how |= {"num_iterations": 2, "num_generations_eval": 2}  # the second time, ratios are not 1
        own["reward_funcs"] = [words, shapes]
        model.generation_config.eos_token_id = ENDS
    if way == "lora":
        how |= {"beta": 0.1}
        given = {"r": 4, "lora_alpha": 1, "init_lora_weights": False}  # of numbers that are not 0, and are small
        own["peft_config"] = peft.LoraConfig(**given, target_modules=projections(model))
    elif not rolls_out:
        own["ref_model"] = copy.deepcopy(model)
        for p in own["ref_model"].parameters():
            p.data += 0.02 * torch.randn_like(p)
    how |= {"deepspeed_changes": split()} if stage == 3 else {}
    section = size and {"size": size, "ulysses": 1, "prove": "never", **changes.pop("section", {})}
    given = fields(4 if rolls_out else 2, section, stage, **(how | changes))
    del given["deepspeed"]["train_batch_size"]  # DeepSpeed counts ranks while a reference is loaded in parts
    bases = [SequenceParallelMixin] * bool(size) + [Numbered] * rolls_out + [plain]
    return type("Tried", tuple(bases), {})(
        model=model, args=config(str(folder), **given), processing_class=PROCESSORS[name](model.config), **own
    )


def runs(folder, cases, size=None):
    """Of each case: (what is logged, the table of completions, the rows that this rank generates)."""
    found = []
    for at, (kind, name, stage, way, *changes) in enumerate(cases):
        with keyed_noise() if kind in ROLLS_OUT else contextlib.nullcontext([]) as generated:
            trainer = trainer_of(f"{folder}/{at}", kind, name, size, stage, way, **dict(*changes))
            trainer.train()
        logs = getattr(trainer, "_logs", {})
        tables = {name: dict(x) if isinstance(x, dict) else [*x] for name, x in logs.items() if name != "images"}
        own = sum(len(prompts) / (size if together else 1) for together, prompts in generated)
        found.append((figures(trainer.state.log_history), tables, own))
    return found


def assert_as_plain(folder, cases, groups=1, size=2):
    """Assert that groups of ranks log what as many plain processes log, and that none generates what another does."""
    plain = on_ranks(groups, runs, folder / "plain", cases, timeout=400)
    shared = on_ranks(groups * size, runs, folder / "shared", cases, size, timeout=400)
    for at, case in enumerate(cases):
        for rank, found in enumerate(shared):
            (history, tables, _), (of_trl, trls_tables, _) = found[at], plain[rank // size][at]
            assert len(history) == len(of_trl) > 2
            for entry, trls in zip(history, of_trl, strict=True):
                wrong = {k: (entry.get(k), trls[k]) for k in trls if not same(entry.get(k), trls[k])}
                if case[:2] == WIDER[:2] and "grad_norm" in wrong:
                    assert entry["grad_norm"] == pytest.approx(wrong.pop("grad_norm")[1], rel=WIDER[2])
                assert not wrong, (case, rank, wrong)
            assert same(tables, trls_tables), (case, tables, trls_tables)
        generated = sum(found[at][2] for found in shared)
        assert generated == sum(found[at][2] for found in plain), case


KINDS = ("DPO", "GRPO", "RLOO", "KTO")
FEW = [("DPO", "qwen2_5_vl", 2, "lora"), ("GRPO", "qwen3_vl", 3, "full"), ("RLOO", "gemma3", 2, "lora")]
FEW += [("KTO", "idefics3", 2, "full")]


@pytest.mark.parametrize(
    ("cases", "groups"),
    [
        (FEW[:2], 1),
        pytest.param(FEW[2:], 1, marks=slow),
        *(
            pytest.param([(kind, name, stage, way) for stage in (2, 3) for way in ("full", "lora")], 1, marks=slow)
            for kind in KINDS
            for name in PROCESSORS
        ),
        pytest.param([(kind, "qwen3_vl", 3, "lora") for kind in KINDS], 2, marks=slow),
    ],
)
def test_all_that_is_logged_is_trls(tmp_path, cases, groups):
    assert_as_plain(tmp_path, cases, groups)


@pytest.mark.slow
def test_rows_are_generated_together_and_in_parts_and_rewarded_by_groups(tmp_path):
    apart = {"ds3_gather_for_generation": False}
    cases = [("GRPO", "qwen3_vl", 3, "full", apart), ("RLOO", "llava", 2, "full", {"steps_per_generation": 4})]
    assert_as_plain(tmp_path, cases)


# ---- what is wrong


def drops(kind, count, first):
    """Rows without pictures on one rank."""
    return rows(kind, count, first, pictures=0 if dist.get_rank() else 1)


def others(kind, count, first):
    """Rows with other pictures of the same sizes on one rank."""
    return rows(kind, count, first, pictures=1, other=3 * dist.get_rank())


# what is wrong -> (of `trainer_of`, words of the sentence)
WRONG = {
    **{
        f"{kind}, pictures on one rank": (
            functools.partial(trainer_of, kind=kind, size=2, data=drops),
            ["rank", "whole batches"],
        )
        for kind in KINDS
    },
    **{
        f"{kind}, other pictures on one rank": (
            functools.partial(trainer_of, kind=kind, size=2, data=others),
            ["rank", "pixel_values"],
        )
        for kind in KINDS
    },
    **{
        f"{kind}, a prompt that is cut": (
            functools.partial(trainer_of, kind=kind, size=2, max_length=20, data=functools.partial(rows, pictures=1)),
            ["pixel_values", "got one without an answer", "max_length=20"],
        )
        for kind in ("DPO", "KTO")
    },
    "prompts once": (
        functools.partial(trainer_of, kind="DPO", size=2, section={"shared_prompts": True}),
        ["shared_prompts", "without pictures"],
    ),
    "vLLM": (
        functools.partial(trainer_of, kind="GRPO", size=2, use_vllm=True, vllm_mode="server"),
        ["prompts of text", "use_vllm"],
    ),
}


def try_wrong(folder, names):
    """What is said of each, by name: (kind, sentence, steps made)."""
    found, made = {}, []
    for name in names:
        made.clear()

        def attempt(name=name):
            made.append(WRONG[name][0](f"{folder}/{name}"))
            made[-1].train()

        found[name] = *refusal(attempt), sum(trainer.state.global_step for trainer in made)
    return found


@pytest.mark.slow
def test_wrong_uses_end_in_a_sentence_on_every_rank(tmp_path):
    for found in on_ranks(2, try_wrong, tmp_path, [*WRONG]):
        assert not_refused(found, WRONG) == {}


def miscounted(folder):
    """What is raised where a model finds more placeholders than features."""
    trainer = trainer_of(folder, "DPO", size=2, max_length=None)
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
    assert on_ranks(2, miscounted, tmp_path) == [0, 0]
