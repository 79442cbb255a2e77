"""The Trainer with `tokens_per_rank`: what the plain Trainer logs of the same samples, by its arguments alone."""

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset, load_from_disk
from torch.utils.data import IterableDataset
from transformers import ByT5Tokenizer

from benchmarks.lengths.__main__ import KINDS, samples
from hf_integration import SequenceParallelMixin
from tests import grids
from tests.dist.ranks import is_one_sentence, refusal
from tests.hf import trl_runs
from tests.hf.llama import IGNORE, gap, small, weights
from tests.hf.trainers import documents, fields, make, split, trained
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


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "changes"), [(2, [ONE, STREAM]), (3, [{}])])
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


@pytest.mark.slow
def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path):
    for whole, resumed in on_ranks(2, halves, str(tmp_path), timeout=200):
        assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert resumed.counts[:2] == whole.counts[:2]


COUNT, LONGEST = 40, 128  # 16 samples a step: 3 steps an epoch, the last of 8 samples


def data_of(kind):
    """Samples of a kind of the benchmark's, with a share of whose labels does not count."""
    draw, found = torch.Generator().manual_seed(7), []
    for tokens in samples(kind, scale=32768 // LONGEST, count=COUNT):
        ids = torch.randint(3, 64, (tokens,), generator=draw)
        found.append({"input_ids": ids, "labels": ids.where(torch.rand(tokens, generator=draw) < 0.7, IGNORE)})
    return found


def cell(folder, kind, stage, trainer, groups, size=None, **changes):
    """A Trainer on a kind of samples: transformers' own, trl's SFTTrainer, or that with its own packing.

    ZeRO-3 gathers all parameters, and tiles have 16 tokens, of which ranks then have different numbers.
    """
    section = size and {"size": size, "tokens_per_rank": LONGEST * 5 // 4 // size}
    sgd = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    how, model = sgd | changes, small(vocab_size=300, pad_token_id=0, hidden_size=16, intermediate_size=24, head_dim=4)
    data, held_out = data_of(kind), documents(16, seed=9)
    if stage == 3:
        how["deepspeed_changes"] = split()
        section = section and section | {"mlp_tiles": "auto", "loss_tiles": "auto" if trainer == "Trainer" else 1}
    if trainer == "Trainer":
        parts = {"train_dataset": data, "eval_dataset": held_out}
        return make(folder, 8 // groups, section, stage, model, parts, **how)
    import trl

    rows, eval_rows = (
        Dataset.from_list([{name: x.tolist() for name, x in sample.items()} for sample in samples])
        for samples in (data, held_out)
    )
    how |= {"bf16": False, "packing": trainer == "SFT packing", "eval_packing": False, "max_length": LONGEST}
    of_class = type("Shared", (SequenceParallelMixin, trl.SFTTrainer), {}) if size else trl.SFTTrainer
    return of_class(
        model=model,
        args=trl.SFTConfig(str(folder), **fields(8 // groups, section, stage, **how)),
        processing_class=ByT5Tokenizer(extra_ids=0),
        train_dataset=rows,
        eval_dataset=eval_rows,
    )


def cells(folder, cases):
    """What each run logs, its weights, and what a run logs that goes on from a checkpoint amid its epoch."""
    found = []
    for number, case in enumerate(cases):
        place, again = f"{folder}/{number}", None
        stops = {"save_strategy": "steps", "save_steps": 2} if "size" in case else {}
        trainer = cell(place, **case, **stops)
        run = trained(trainer), weights(trainer.model)
        if stops:
            again = trained(cell(place, **case, **stops), resume_from_checkpoint=f"{place}/checkpoint-2")
        found.append((*run, again))
    return found


AXES = {
    "kind": tuple(KINDS),
    "stage": (2, 3),
    "trainer": ("Trainer", "SFT", "SFT packing"),
    "shape": ((2, 2), (4, 4), (4, 2), (8, 8), (8, 4), (8, 2)),  # ranks, and those of a group
}
FEW = [{"kind": "code", "stage": 3, "trainer": "SFT packing", "shape": (2, 2)}]


@pytest.mark.parametrize("cases", grids.grouped(("shape",), few=FEW, large=lambda case: case["shape"][0] == 8, **AXES))
def test_the_trainers_of_every_kind_of_samples_train_as_plain_ones(cases, tmp_path):
    (ranks, size), *_ = (case["shape"] for case in cases)
    plain = [{name: case[name] for name in ("kind", "stage", "trainer")} | {"groups": ranks // size} for case in cases]
    expected = on_ranks(ranks // size, cells, f"{tmp_path}/plain", plain, timeout=900)[0]
    for found in on_ranks(ranks, cells, str(tmp_path), [{**case, "size": size} for case in plain], timeout=3000):
        for case, of_plain, packed in zip(cases, expected, found, strict=True):
            for run in (packed[0], packed[2]):  # the resumed one has logged the first steps too
                for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
                    if name == "eval_loss" and case["trainer"] != "Trainer" and ranks > size:
                        continue  # trl's weighs ranks alike, however many tokens each has
                    assert run[name] == pytest.approx(of_plain[0][name], rel=1e-5), (case, name)
                assert run.counts[:2] == of_plain[0].counts[:2], case
            assert gap(packed[1], of_plain[1]) < 1e-5, case


PAIRS = {
    "DPO": {"kind": "DPO", "parts": trl_runs.reference},
    "Reward": {"kind": "Reward", "center_rewards_coefficient": 0.01},
    "DPO, ZeRO-3": {"kind": "DPO", "parts": trl_runs.reference, "deepspeed_changes": split(), "loss_type": ["ipo"]},
}


def pairs(folder, cases, size=None):
    """What each run logs of an epoch whose last batch, of one group, has one pair, and its weights."""
    found = []
    for name in cases:
        given = {"parts": dict, "deepspeed_changes": {}, **PAIRS[name]}
        rows = load_from_disk(f"{folder}/{given['kind']} train").select(range(13))
        section = {"sequence_parallel": {"size": size, "tokens_per_rank": 120 // size}} if size else {}
        changes = {
            "parts": lambda parts=given["parts"], rows=rows: {**parts(), "train_dataset": rows},
            "deepspeed_changes": {**given["deepspeed_changes"], **section},
        }
        how = {"gradient_accumulation_steps": 2, "max_steps": 3, "eval_steps": 3}
        trainer = trl_runs.made(folder, size=size, **{**how, **given, **changes})
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if {"loss", "eval_loss"} & entry.keys()]
        found.append((logs, weights(trainer.model)))
    return found


@pytest.mark.parametrize(
    ("groups", "cases"),
    [(1, ["DPO"]), *(pytest.param(groups, list(PAIRS), marks=pytest.mark.slow) for groups in (1, 2))],
)
def test_pairs_train_as_those_of_plain_trainers(groups, cases, tmp_path):
    for way in ("plain", "shared"):
        trl_runs.save_examples(tmp_path / way)
    expected = on_ranks(groups, pairs, str(tmp_path / "plain"), cases, timeout=400)[0]
    for found in on_ranks(2 * groups, pairs, str(tmp_path / "shared"), cases, 2, timeout=400):
        for case, (plain, plain_weights), (logs, of_rank) in zip(cases, expected, found, strict=True):
            assert len(logs) == len(plain) == 4
            for entry, of_plain in zip(logs, plain, strict=True):
                for figure in {"loss", "grad_norm", "learning_rate", "eval_loss", "num_tokens"} & of_plain.keys():
                    assert entry[figure] == pytest.approx(of_plain[figure], rel=1e-5), (case, figure)
            assert gap(of_rank, plain_weights) < 1e-5


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
    few = {**SECTION, "tokens_per_rank": 28}
    found["got 59"] = refusal(make(folder, 4, few, 2, parts={"train_dataset": long}).train)
    others = {"train_dataset": documents(8, seed=dist.get_rank())}
    found["samples of a step"] = refusal(make(folder, 4, SECTION, 2, parts=others).train)
    short = {"deepspeed_changes": {"sequence_parallel": {**SECTION, "tokens_per_rank": 8}}}
    found["8 tokens each"] = refusal(trl_runs.made(folder, "DPO", 2, trl_runs.reference, **short).train)
    found["KTOTrainer"] = refusal(trl_runs.made(folder, "KTO", 2, trl_runs.reference, **short).train)
    found["loss_type aot"] = refusal(
        trl_runs.made(folder, "DPO", 2, trl_runs.reference, loss_type=["aot"], **short).train
    )
    return found


def test_what_cannot_be_packed_is_refused(tmp_path):
    trl_runs.save_examples(tmp_path)
    for found in on_ranks(2, refused, tmp_path, timeout=120):
        for word, (_, sentence) in found.items():
            assert missing(sentence or "", word) == [], (word, sentence)
            assert is_one_sentence(sentence)
