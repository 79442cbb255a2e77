"""The Trainer with `tokens_per_rank`: what the plain Trainer logs of the same samples, by its arguments alone."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from benchmarks.lengths.__main__ import KINDS, samples
from tests import grids
from tests.hf.llama import IGNORE, small, weights
from tests.hf.trainers import FIGURES, assert_refused, case, compare, documents, reference, rows_of, split, texts

pytestmark = pytest.mark.usefixtures("compiled")


def trained(trainer):
    return weights(trainer.model)


# what is compared of all cases, whose weights show gradients by SGD
COMPARED = {"only": FIGURES, "then": trained, "eval_strategy": "steps"}
SGD = {"optim": "sgd", "learning_rate": 0.1}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(documents(64))


def ragged():
    """4 a batch of all, 2 batches a step: the last step of an epoch has one batch, whose end is repeated."""
    return {"train_dataset": documents(37)}


def packed(parts=ragged, steps=7, **changes):
    return case(parts=parts, max_steps=steps, eval_steps=steps, **SGD, **changes)


# plain ranks take their own examples of a stream, as groups do
STREAM = packed({"train_dataset": Stream()}, steps=3, accelerator_config={"dispatch_batches": False})
OF_ONE = {
    "one batch a step": packed(steps=5, gradient_accumulation_steps=1),
    "a stream": STREAM,
    "ZeRO-3": packed(stage=3),
    "resumed amid an epoch": packed(steps=4, resume_at=2),
}
OF_TWO = {
    "two batches a step": packed(),
    "a stream": {**STREAM, "stage": 3},
    "by length": packed(stage=3, train_sampling_strategy="group_by_length"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "ranks"), [(OF_ONE, 2), (OF_TWO, 4)])
def test_groups_train_as_plain_ranks(cases, ranks, tmp_path):
    compare(tmp_path, cases, (ranks, 2), alone=False, **COMPARED, section={"tokens_per_rank": 40})


COUNT, LONGEST = 40, 128  # 16 samples a step: 3 steps an epoch, the last of 8 samples


def data_of(kind, trainer):
    """Samples of a kind of the benchmark's, with a share of whose labels does not count."""
    draw, found = torch.Generator().manual_seed(7), []
    for tokens in samples(kind, scale=32768 // LONGEST, count=COUNT):
        ids = torch.randint(3, 64, (tokens,), generator=draw)
        found.append({"input_ids": ids, "labels": ids.where(torch.rand(tokens, generator=draw) < 0.7, IGNORE)})
    model = small(vocab_size=300, pad_token_id=0, hidden_size=16, intermediate_size=24, head_dim=4)
    data = {"train_dataset": found, "eval_dataset": documents(16, seed=9)}
    return {"model": model, **{name: x if trainer == "Trainer" else rows_of(x) for name, x in data.items()}}


def sampled(kind, stage, trainer, shape):
    """A case of transformers' Trainer, of trl's SFTTrainer, or that with its own packing.

    ZeRO-3 gathers all parameters, and tiles have 16 tokens, of which ranks then have different numbers.
    """
    how = {"bf16": False, "packing": trainer == "SFT packing", "eval_packing": False, "max_length": LONGEST}
    how = {"max_steps": 4, "eval_steps": 4, "resume_at": 2, **SGD, **(how if trainer != "Trainer" else {})}
    section = {"tokens_per_rank": LONGEST * 5 // 4 // shape[1]}
    if stage == 3:
        how["deepspeed_changes"] = split()
        section |= {"mlp_tiles": "auto", "loss_tiles": "auto" if trainer == "Trainer" else 1}
    return case(trainer.split()[0], functools.partial(data_of, kind, trainer), stage=stage, section=section, **how)


AXES = {
    "kind": tuple(KINDS),
    "stage": (2, 3),
    "trainer": ("Trainer", "SFT", "SFT packing"),
    "shape": ((2, 2), (4, 4), (4, 2), (8, 8), (8, 4), (8, 2)),  # ranks, and those of a group
}
FEW = [{"kind": "code", "stage": 3, "trainer": "SFT packing", "shape": (2, 2)}]


@pytest.mark.parametrize("cases", grids.grouped(("shape",), few=FEW, large=lambda case: case["shape"][0] == 8, **AXES))
def test_the_trainers_of_every_kind_of_samples_train_as_plain_ones(cases, tmp_path):
    given = {f"{number}": sampled(**case) for number, case in enumerate(cases)}
    compare(tmp_path, given, cases[0]["shape"], batch=8, **COMPARED, timeout=3000)


def thirteen(kind):
    return {"train_dataset": texts(kind, 48, 5).select(range(13)), **(reference() if kind == "DPO" else {})}


def pairs(kind, **changes):
    """Of an epoch whose last batch, of one group, has one pair."""
    how = {"gradient_accumulation_steps": 2, "max_steps": 3, "eval_steps": 3}
    return case(kind, functools.partial(thirteen, kind), **how, **changes)


PAIRS = {
    "DPO": pairs("DPO"),
    "Reward": pairs("Reward", center_rewards_coefficient=0.01),
    "DPO, ZeRO-3": pairs("DPO", deepspeed_changes=split(), loss_type=["ipo"]),
}


@pytest.mark.parametrize(
    ("groups", "names"),
    [(1, ["DPO"]), *(pytest.param(groups, list(PAIRS), marks=pytest.mark.slow) for groups in (1, 2))],
)
def test_pairs_train_as_those_of_plain_trainers(groups, names, tmp_path):
    how = {**COMPARED, "only": (*FIGURES, "num_tokens"), "section": {"tokens_per_rank": 60}}
    compare(tmp_path, {name: PAIRS[name] for name in names}, (2 * groups, 2), batch=4 * groups, **how)


def short(kind="DPO", **changes):
    return case(kind, reference, section={"tokens_per_rank": 8}, **changes)


def of(parts, tokens_per_rank=40, **changes):
    return case(parts=parts, section={"tokens_per_rank": tokens_per_rank}, **changes)


LONG = [{"input_ids": torch.arange(1, 60), "labels": torch.arange(1, 60)}] * 8
# what is wrong -> (the case, or what makes it; words of the sentence)
WRONG = {
    "smoothing": (of(ragged, label_smoothing_factor=0.1), ["label_smoothing_factor"]),
    "rebalanced": (of(ragged, train_sampling_strategy="batch_rebalance"), ["batch_rebalance"]),
    "counted": (of(ragged, include_num_input_tokens_seen="all"), ["include_num_input_tokens_seen"]),
    "too long": (of({"train_dataset": LONG}, 28), ["got 59"]),
    "others": (lambda: of({"train_dataset": documents(8, seed=dist.get_rank())}), ["samples of a step"]),
    "short": (short(), ["8 tokens each"]),
    "KTO": (short("KTO"), ["KTOTrainer"]),
    "a loss of all": (short(loss_type=["aot"]), ["loss_type aot"]),
}


def test_what_cannot_be_packed_is_refused(tmp_path):
    assert_refused(tmp_path, __name__)
