"""The Trainer's numbers are those of the plain Trainer, however many ranks share a sequence."""

import functools
import math

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from transformers import TrainerCallback, default_data_collator

from hf_integration import SequenceParallelTrainer, unpatch_attention
from tests.hf.llama import IGNORE
from tests.hf.trainers import FIGURES, accuracy, case, collate, compare, documents, make, mean_of_steps, trained
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
SIZES = [(4, 1), (4, 2), (4, 4)]


class Counts(TrainerCallback):
    """Evaluation steps: what is said of them a second is no number of them where a clock is set meanwhile."""

    def __init__(self):
        self.steps = 0

    def on_prediction_step(self, args, state, control, **kwargs):
        self.steps += 1


def evaluated(counts, trainer):
    """Of sets of these sizes: loss, accuracy, and what is predicted of real tokens.

    Sets that do not divide are filled up with sequences from the start; transformers counts those, and weighs the last
    step by rank, where it has several. Of 4 sequences a step 1 and 7 leave a remainder, and 1 is fewer than groups.
    """
    found, counted, model = {}, Counts(), trainer.accelerator.unwrap_model(trainer.model)
    trainer.add_callback(counted)
    for count in counts:
        counted.steps, examples = 0, documents(count, seed=count)
        metrics = trainer.evaluate(examples)
        assert counted.steps == math.ceil(count / 4)
        if not isinstance(trainer, SequenceParallelTrainer):
            assert metrics["eval_loss"] == pytest.approx(mean_of_steps(model, examples, 4), rel=1e-5)
        output = trainer.predict(examples)
        assert output.metrics["test_loss"] == metrics["eval_loss"]
        assert len(output.predictions) == count
        found[count] = metrics["eval_loss"], metrics["eval_accuracy"], []
        for logits, labels, example in zip(output.predictions, output.label_ids, examples, strict=True):
            length = len(example["labels"])  # each row is padded to what its ranks can share
            assert labels[:length].tolist() == example["labels"].tolist()
            assert (labels[length:] == IGNORE).all()
            found[count][2].append(logits[:length])
    return found


def best(logits, labels):
    return logits.argmax(-1)


def twelve(**parts):
    return {"train_dataset": documents(12), "compute_metrics": accuracy, **parts}


# three micro-steps an epoch make windows of two and one
FULL = {"include_num_input_tokens_seen": "non_padding", "max_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
REDUCED = functools.partial(twelve, preprocess_logits_for_metrics=best)
TO_ROUNDING = {"loss": 1e-3, "grad_norm": 1e-2, "eval_loss": 1e-3, "train_loss": 1e-3}
IN_BF16 = case(bf16=True, eval_strategy="steps", eval_steps=4, rel=TO_ROUNDING)


def full(*counts, parts=twelve, **changes):
    return case(parts=parts, **{**FULL, **changes}, eval_on_start=True, then=functools.partial(evaluated, counts))


@pytest.mark.parametrize(
    ("shapes", "cases"),
    [
        ([(4, 2)], {"ZeRO-3": full(1, 7, stage=3), "argmax": full(7, parts=REDUCED, max_steps=1)}),
        pytest.param(SIZES, {f"ZeRO-{x}": full(1, 6, 7, 8, stage=x) for x in (2, 3)}, marks=pytest.mark.slow),
        pytest.param(SIZES[1:], {"bf16": IN_BF16}, marks=pytest.mark.slow),
    ],
    ids=["few", "all", "bf16"],
)
def test_losses_norms_evaluation_and_counts_are_the_plain_trainers(shapes, cases, tmp_path):
    """transformers#46775, #48167; deepspeed#5248, #6841; verl#2857: scales wrong by the SP size. Ragged labels and
    lengths, padding, two micro-steps and in the last window of an epoch one, AdamW, clipping."""
    for name, plain in compare(tmp_path, cases, *shapes).items():
        norms, losses = ([x[figure] for x in plain["log"] if figure in x] for figure in ("grad_norm", "eval_loss"))
        assert name == "argmax" or losses[-1] < losses[0] - 0.1  # it learns
        assert max(norms) > 1.0  # clipped, or equal norms would not say that clipping is right


class Reads:
    """A collator that notes the examples of each batch."""

    def __init__(self):
        self.read = []

    def __call__(self, examples):
        self.read.append([example["input_ids"].tolist() for example in examples])
        return collate(examples)


def read(trainer):
    return trainer.data_collator.read


def nineteen():
    return {"train_dataset": documents(19), "data_collator": Reads()}


def test_groups_read_the_examples_that_as_many_plain_ranks_read(tmp_path):
    """Two groups of two ranks beside two plain ranks. Both strategies batch by what a device takes in a step, and
    batch_rebalance deals each process a list of its own. The last step of an epoch has fewer examples."""
    batches = {"group_by_length": 10, "batch_rebalance": 12}
    cases = {name: case(parts=nineteen, train_sampling_strategy=name) for name in batches}
    plain = compare(tmp_path, cases, (4, 2), alone=False, max_steps=-1, num_train_epochs=2, then=read, rel=1e-4)
    assert {name: len(found["then"]) for name, found in plain.items()} == batches


class Unsized(torch.utils.data.IterableDataset):
    """Documents without a length, and a number of them that does not divide."""

    def __init__(self, count):
        self.documents = documents(count)

    def __iter__(self):
        return iter(self.documents)


class Sized(Unsized):
    def __len__(self):
        return len(self.documents)


def streaming(count=10):
    """A streaming data set in files, three of them for two groups."""
    lists = [{name: x.tolist() for name, x in example.items()} for example in documents(count)]
    return {"train_dataset": Dataset.from_list(lists).to_iterable_dataset(num_shards=3).with_format("torch")}


UNSIZED = {"train_dataset": Unsized(10)}
STREAMS = {
    "streaming": case(parts=UNSIZED, ours=streaming),
    "unsized": case(parts=UNSIZED),
    "sized": case(parts={"train_dataset": Sized(10)}),
}
HELD_OUT = {"unsized": Unsized, "sized": Sized, "streaming": lambda count: streaming(count)["train_dataset"]}


def held_out(name, trainer):
    """Assert that each sequence of such a stream counts once."""
    if isinstance(trainer, SequenceParallelTrainer):
        metrics = trainer.evaluate(HELD_OUT[name](7))
        expected = mean_of_steps(unpatch_attention(trainer.model), documents(7), 4)
        assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
        assert round(metrics["eval_samples_per_second"] * metrics["eval_runtime"]) == 7


@pytest.mark.parametrize("names", [["streaming"], pytest.param(list(STREAMS), marks=pytest.mark.slow)], ids=len)
def test_iterable_data_sets(names, tmp_path):
    """The stream ends within the second window, is filled up, and begins again; evaluation counts a sequence once."""
    # plain ranks cannot be dealt batches of different lengths, and would take whole files of a streaming data set:
    # other sequences than they are dealt by default
    cases = {name: {**STREAMS[name], "then": functools.partial(held_out, name)} for name in names}
    own_batches = {"accelerator_config": {"dispatch_batches": False}}
    compare(tmp_path, cases, (4, 2), alone=False, max_steps=2, rel=1e-4, only=FIGURES, **own_batches)


def without_labels(folder, size, sequences):
    """Training where no token counts, then logits of examples that have no labels at all."""
    silent = [{**example, "labels": torch.full_like(example["labels"], IGNORE)} for example in documents(16)]
    parts = {"train_dataset": silent, "eval_dataset": silent[:6] + documents(2)}
    trainer = make(folder, sequences, size and {"size": size}, stage=3, parts=parts, max_steps=2, eval_strategy="epoch")
    run = trained(trainer)
    trainer.data_collator = default_data_collator
    bare = [{"input_ids": torch.arange(i, i + 23)} for i in range(5)]
    return run["loss"], run["grad_norm"], run["eval_loss"], trainer.predict(bare).predictions


def test_nothing_to_learn_is_nothing_and_not_nan(tmp_path):
    """axolotl#3026, Megatron#1764: NaN where all tokens of a rank, or of a step, are masked."""
    _, _, held_out, plain = on_ranks(1, without_labels, tmp_path / "plain", None, 8)[0]
    # the plain one takes all examples in one step; ours two, and before 5.23 the Trainer kept the NaN of the silent one
    if Version(transformers.__version__).release < (5, 23):
        held_out = [math.nan]
    for losses, norms, evaluated, predictions in on_ranks(2, without_labels, tmp_path / "shared", 2, 4):
        assert losses == norms == [0, 0]
        assert len(evaluated) == 1
        assert evaluated == pytest.approx(held_out[:1], rel=1e-5, nan_ok=True)
        assert np.abs(predictions[:, :23] - plain).max() < 1e-4


class Augmented(torch.utils.data.Dataset):
    """Draws tokens: what peers get depends on their random state alone."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        ids = torch.randint(1, 64, (24,))
        return {"input_ids": ids, "labels": ids.clone()}


class Restless(torch.utils.data.Dataset):
    """Draws as many numbers as an example has tokens: groups, which read different ones, draw apart."""

    def __init__(self):
        self.examples = [torch.full((8 + i,), i + 1) for i in range(16)]

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, i):
        torch.rand(len(self.examples[i]))
        return {"input_ids": self.examples[i], "labels": self.examples[i]}


class Counting(torch.utils.data.Dataset):
    """A curriculum: the more examples were read, the more of their labels count."""

    def __init__(self):
        self.documents, self.read = documents(16), 0

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, i):
        self.read += 1
        self.documents[i]["labels"][self.read + 4 :] = IGNORE
        return self.documents[i]


class Drawing:
    """A collator with a generator of its own, which changes rows in place."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, examples):
        for example in examples:
            ids = example["input_ids"]
            ids[torch.rand(ids.shape, generator=self.generator) < 0.3] = 5
        return collate(examples)


def counting():
    data = Counting()
    return {"train_dataset": data, "eval_dataset": data, "data_collator": Drawing()}


def count(trainer):
    return trainer.train_dataset.read


def test_no_data_set_and_no_collator_is_tried_before_its_batches_come(tmp_path):
    """Examples depend on what was read before."""
    given = case(parts=counting, max_steps=2, gradient_accumulation_steps=1, only=FIGURES, then=count)
    compare(tmp_path, {"counting": given}, (2, 2), batch=2)


def drawn(folder, data, **changes):
    """The whole batches that a rank's group trained on."""
    trainer = make(folder, 2, {"size": 2}, parts={"train_dataset": data}, **changes)
    load, seen = trainer.get_batch_samples, []

    def spy(*given):
        shards, items = load(*given)
        seen.extend(trainer.sp.gather(shard["input_ids"], 1).tolist() for shard in shards)
        return shards, items

    trainer.get_batch_samples = spy
    trainer.train()
    return seen


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_of_a_sequence_draw_the_same_numbers(workers, tmp_path):
    """axolotl#3920: workers were seeded by rank, and peers got different batches. Groups have workers of their own."""
    ranks = on_ranks(4, functools.partial(drawn, dataloader_num_workers=workers, max_steps=1), tmp_path, Augmented())
    assert len(ranks[0]) == 2
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert (ranks[0] != ranks[2]) or not workers


def test_groups_share_out_every_epoch_however_much_they_draw(tmp_path):
    """The sampler that groups by length draws from each rank's own state: apart, groups would train on some examples
    twice and on others not at all."""
    epochs = {"max_steps": -1, "num_train_epochs": 2, "train_sampling_strategy": "group_by_length"}
    ranks = on_ranks(4, functools.partial(drawn, **epochs), tmp_path, Restless())
    batches = [[row[0] for batch in ranks[group] for row in batch] for group in (0, 2)]
    assert [len(seen) for seen in batches] == [16, 16]
    for first in (0, 8):
        assert sorted(batches[0][first : first + 8] + batches[1][first : first + 8]) == list(range(1, 17))
