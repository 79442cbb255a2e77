"""The Trainer on packed documents, and on every family: what the plain Trainer logs on the same documents."""

import functools

import pytest
from transformers import DataCollatorWithFlattening

from hf_integration import PackingCollator
from tests.dist.ranks import is_one_sentence, refusal
from tests.hf.families import FAMILIES, model_of
from tests.hf.trainers import FIGURES, case, compare, documents, make
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
NAMES = sorted(FAMILIES)
STEPS = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
PACKED = case(ours={"data_collator": PackingCollator()})
FLATTENED = case(ours={"data_collator": DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)})


@pytest.mark.parametrize("shapes", [[(2, 2)], pytest.param([(4, 2), (4, 4)], marks=pytest.mark.slow)], ids=["2", "4"])
def test_packed_is_what_one_document_a_row_is(shapes, tmp_path):
    """The same documents and optimizer steps: end to end on 2 or 4 ranks, beside padded rows on one.
    TransformerEngine#1930, axolotl#3608: documents saw one another."""
    compare(tmp_path, {"packed": PACKED, "flattened with lengths": FLATTENED}, *shapes, only=FIGURES, stage=3, **STEPS)


def of_family(name):
    return {"model": model_of(name, 11)}


def steps_of(name, **changes):
    # Adam makes much of gradients that are next to nothing: at a larger rate their rounding shows in later norms
    return case(parts=functools.partial(of_family, name), learning_rate=1e-4, batch=2, only=FIGURES, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("names", [NAMES[:5], NAMES[5:10], NAMES[10:]], ids="-".join)
def test_three_steps_of_every_family_are_the_plain_trainers(tmp_path, names):
    how = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "stage": 3}
    compare(tmp_path, {name: steps_of(name) for name in names}, (4, 4), **how)


def test_experts_in_two_groups_are_those_of_two_plain_ranks(tmp_path):
    """Megatron#3672: a loss for balanced experts that is off by the ranks of a sequence. The plain Trainer adds up the
    loss for their balance over ranks and micro-steps."""
    compare(tmp_path, {"experts": steps_of("qwen3_moe", max_steps=2) | {"batch": 4}}, (4, 2), alone=False)


def unclear(folder):
    """Packs of several documents, two at a time in two groups, of which the last are repeated."""
    data = [[first, second] for first, second in zip(documents(10), documents(10, seed=6), strict=True)]
    trainer = make(folder, 4, {"size": 1}, 3, parts={"data_collator": PackingCollator(), "eval_dataset": data[:6]})
    return refusal(trainer.evaluate)


def test_packs_whose_repetitions_cannot_be_told_are_refused(tmp_path):
    told = on_ranks(2, unclear, tmp_path)
    assert {kind for kind, _ in told} == {"InputError", "DisagreementError"}
    for _, sentence in told:
        assert "per_device_eval_batch_size=1" in sentence
        assert is_one_sentence(sentence)
