"""The Trainer on packed documents, and on every family: what the plain Trainer logs on the same documents."""

import pytest
import torch.distributed as dist
from transformers import DataCollatorWithFlattening

from hf_integration import PackingCollator
from tests.dist.ranks import is_one_sentence, refusal
from tests.hf.families import FAMILIES, model_of
from tests.hf.trainers import documents, make, trained
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
NAMES = sorted(FAMILIES)
STEPS = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
COLLATORS = {
    "padded": None,
    "packed": PackingCollator,
    "flattened with lengths": lambda: DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
}


def runs(folder, cases, **changes):
    """(size of a group, None: plain; collator) -> its Run. Eight sequences a step, whatever shares them."""
    found = {}
    for size, name in cases:
        section, parts, sequences = size and {"size": size}, {}, 4 * (size or 1) // dist.get_world_size()
        if COLLATORS[name] is not None:
            parts["data_collator"] = COLLATORS[name]()
        found[size, name] = trained(
            make(f"{folder}/{size}{name}", sequences, section, 3, parts=parts, **STEPS | changes)
        )
    return found


def same(found, plain, rel):
    for name in ("loss", "grad_norm", "eval_loss"):
        assert len(plain[name]) == len(found[name]) == 2
        assert found[name] == pytest.approx(plain[name], rel=rel), name


@pytest.mark.parametrize(
    "cases",
    [
        {(2, "flattened with lengths"): 2, (2, "packed"): 2},
        pytest.param({(2, "flattened with lengths"): 4, (4, "packed"): 4}, marks=pytest.mark.slow),
    ],
    ids=["two", "four"],
)
def test_packed_is_what_one_document_a_row_is(cases, tmp_path):
    """The same documents and optimizer steps: end to end on 2 or 4 ranks, beside padded rows on one. cases: the ranks
    of each. TransformerEngine#1930, axolotl#3608: documents saw one another."""
    plain = on_ranks(1, runs, tmp_path / "plain", [(None, "padded")])[0][None, "padded"]
    for case, ranks in cases.items():
        for found in on_ranks(ranks, runs, tmp_path, [case], timeout=300):
            same(found[case], plain, 1e-5)


def three_steps(folder, names, size):
    """Family -> what three steps of two micro-steps under ZeRO-3 log."""
    found = {}
    for name in names:
        model, section = model_of(name, 11), size and {"size": size}
        # Adam makes much of gradients that are next to nothing: at a larger rate their rounding shows in later norms
        given = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "learning_rate": 1e-4}
        found[name] = trained(make(f"{folder}/{name}{size}", 2, section, 3, model=model, **given))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("names", [NAMES[:5], NAMES[5:10], NAMES[10:]], ids="-".join)
def test_three_steps_of_every_family_are_the_plain_trainers(tmp_path, names):
    plain = on_ranks(1, three_steps, tmp_path / "plain", names, None, timeout=300)[0]
    for found in on_ranks(4, three_steps, tmp_path, names, 4, timeout=400):
        for name in names:
            for figure in ("loss", "grad_norm", "eval_loss"):
                assert found[name][figure] == pytest.approx(plain[name][figure], rel=1e-5), (name, figure)


def two_groups(folder, size):
    """Of a model with experts, whose plain Trainer adds up the loss for their balance over ranks and micro-steps."""
    model, section = model_of("qwen3_moe", 11), size and {"size": size}
    return trained(make(f"{folder}/{size}", 2, section, 2, model=model, max_steps=2, learning_rate=1e-4))


def test_experts_in_two_groups_are_those_of_two_plain_ranks(tmp_path):
    """Megatron#3672: a loss for balanced experts that is off by the ranks of a sequence."""
    plain = on_ranks(2, two_groups, tmp_path / "plain", None, timeout=300)[0]
    for found in on_ranks(4, two_groups, tmp_path, 2, timeout=300):
        for figure in ("loss", "grad_norm"):
            assert found[figure] == pytest.approx(plain[figure], rel=1e-5), figure


def unclear(folder):
    """Packs of several documents, two at a time in two groups, of which the last are repeated."""
    data = [[first, second] for first, second in zip(documents(10), documents(10, seed=6), strict=True)]
    trainer = make(folder, 4, {"size": 1}, 3, parts={"data_collator": PackingCollator(), "eval_dataset": data[:6]})
    return refusal(trainer.evaluate)


def test_packs_whose_repetitions_cannot_be_told_are_refused(tmp_path):
    told = on_ranks(2, unclear, tmp_path, timeout=120)
    assert {kind for kind, _ in told} == {"InputError", "DisagreementError"}
    for _, sentence in told:
        assert "per_device_eval_batch_size=1" in sentence
        assert is_one_sentence(sentence)
