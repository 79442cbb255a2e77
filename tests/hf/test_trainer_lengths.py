"""The Trainer with `tokens_per_rank`: what the plain Trainer logs of the same samples, by its arguments alone."""

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.dist.ranks import is_one_sentence, refusal
from tests.hf.llama import gap, weights
from tests.hf.trainers import documents, make, trained
from tests.launch import on_trainer_ranks as on_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
SECTION = {"size": 2, "tokens_per_rank": 40}
# 37 examples, 4 a batch of all, 2 batches a step: the last step of an epoch has one batch, whose end is repeated
GIVEN = {"max_steps": 7, "eval_strategy": "steps", "eval_steps": 7, "optim": "sgd", "learning_rate": 0.1}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(documents(64))


def run(folder, sequences, section, stage, as_stream=False, **changes):
    data = Stream() if as_stream else documents(37)
    trainer = make(folder, sequences, section, stage, parts={"train_dataset": data}, **{**GIVEN, **changes})
    found = trained(trainer)
    return found, weights(trainer.model)


def runs(folder, cases):
    return [run(f"{folder}/{number}", *case[:-1], **case[-1]) for number, case in enumerate(cases)]


def same(found, plain):
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert len(plain[0][name]) == len(found[0][name])
        assert found[0][name] == pytest.approx(plain[0][name], rel=1e-5), name
    assert found[0].counts == plain[0].counts
    assert gap(found[1], plain[1]) < 1e-5


# plain ranks take their own examples of a stream, as groups do
STREAM = {"as_stream": True, "max_steps": 3, "eval_steps": 3, "accelerator_config": {"dispatch_batches": False}}


ONE = {"gradient_accumulation_steps": 1, "max_steps": 5, "eval_steps": 5}


@pytest.mark.parametrize(("stage", "changes"), [pytest.param(2, [ONE, STREAM], marks=pytest.mark.slow), (3, [{}])])
def test_two_ranks_train_as_one_plain_rank(stage, changes, tmp_path):
    cases = [(4, None, stage, of_case) for of_case in changes]
    plain = on_ranks(1, runs, tmp_path / "plain", cases)[0]
    packed = [(sequences, SECTION, *rest) for sequences, _, *rest in cases]
    for found in on_ranks(2, runs, tmp_path, packed, timeout=300):
        for one, of_plain in zip(found, plain, strict=True):
            same(one, of_plain)


@pytest.mark.slow
def test_two_groups_train_as_two_plain_ranks(tmp_path):
    cases = [(2, None, 2, {}), (2, None, 3, STREAM), (2, None, 3, {"train_sampling_strategy": "group_by_length"})]
    plain = on_ranks(2, runs, tmp_path / "plain", cases)[0]
    packed = [(sequences, SECTION, *rest) for sequences, _, *rest in cases]
    for found in on_ranks(4, runs, tmp_path, packed, timeout=400):
        for one, of_plain in zip(found, plain, strict=True):
            same(one, of_plain)


def halves(folder):
    """What a run logs in its last steps, and one that goes on from a checkpoint in the middle of the epoch."""
    given = {**GIVEN, "eval_strategy": "no", "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    parts = {"train_dataset": documents(37)}
    whole = trained(make(folder, 4, SECTION, 2, parts=parts, **given))
    again = make(folder, 4, SECTION, 2, parts=parts, **given)
    return whole, trained(again, resume_from_checkpoint=f"{folder}/checkpoint-2")


def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path):
    for whole, resumed in on_ranks(2, halves, str(tmp_path), timeout=200):
        assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert resumed.counts[:2] == whole.counts[:2]


REFUSED = {
    "label_smoothing_factor": ("label_smoothing_factor", 0.1),
    "batch_rebalance": ("train_sampling_strategy", "batch_rebalance"),
    "include_num_input_tokens_seen": ("include_num_input_tokens_seen", "all"),
}


def refused(folder):
    found = {}
    for word, (name, value) in REFUSED.items():
        parts = {"train_dataset": documents(8)}
        found[word] = refusal(make(folder, 4, SECTION, 2, parts=parts, **{name: value}).train)
    long = [{"input_ids": torch.arange(1, 60), "labels": torch.arange(1, 60)}] * 8
    found["got 59"] = refusal(
        make(folder, 4, {**SECTION, "tokens_per_rank": 28}, 2, parts={"train_dataset": long}).train
    )
    return found


def test_what_cannot_be_packed_is_refused(tmp_path):
    for found in on_ranks(2, refused, tmp_path, timeout=120):
        for word, (_, sentence) in found.items():
            assert missing(sentence or "", word) == [], (word, sentence)
            assert is_one_sentence(sentence)
