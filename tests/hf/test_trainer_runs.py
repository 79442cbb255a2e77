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

from hf_integration import unpatch_attention
from tests.hf.llama import IGNORE, small
from tests.hf.trainers import collate, documents, make, mean_of_steps, trained
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
# section -> sequences that a group of 4 ranks' worth takes a micro-step, so that all work on four: the plain one alone
SHARED = {None: 4, 1: 1, 2: 2, 4: 4}
SIZES = (1, 2, 4)


def section(size):
    return size and {"size": size}


def run(folder, size, **changes):
    trainer = make(folder, SHARED[size], section(size), eval_strategy="steps", eval_steps=4, **changes)
    return trained(trainer)


def runs(folder, sizes, changes):
    """One run a size, in the same processes."""
    return {size: run(f"{folder}/{size}", size, **changes) for size in sizes}


def alone(function, folder, *args):
    """What the plain Trainer makes of it, on one rank that takes the sequences of all others."""
    return on_ranks(1, function, folder / "plain", (None,), *args)[0][None]


# three micro-steps an epoch make windows of two and one
FULL = {"include_num_input_tokens_seen": "non_padding", "max_steps": 4, "eval_on_start": True}


@pytest.mark.parametrize(
    ("stage", "sizes"), [(3, (2,)), *(pytest.param(stage, SIZES, marks=pytest.mark.slow) for stage in (2, 3))]
)
def test_losses_norms_evaluation_and_counts_are_the_plain_trainers(stage, sizes, tmp_path):
    """transformers#46775, #48167; deepspeed#5248, #6841; verl#2857: scales wrong by the SP size. Ragged labels and
    lengths, padding, two micro-steps and in the last window of an epoch one, AdamW, clipping."""
    changes = {"stage": stage, **FULL, "parts": {"train_dataset": documents(12)}}
    plain = alone(runs, tmp_path, changes)
    assert len(plain["loss"]) == 4
    assert len(plain["eval_loss"]) == 2
    assert plain["eval_loss"][-1] < plain["eval_loss"][0] - 0.1  # it learns
    assert max(plain["grad_norm"]) > 1.0  # clipped, or equal norms would not say that clipping is right
    for found in on_ranks(4, runs, tmp_path, sizes, changes, timeout=200):
        for size, shared in found.items():
            for name, rel in (("loss", 1e-5), ("grad_norm", 1e-5), ("eval_loss", 1e-5), ("learning_rate", 0)):
                assert shared[name] == pytest.approx(plain[name], rel=rel), (size, name)
            assert shared.counts == plain.counts, size


@pytest.mark.slow
def test_bf16_runs_agree_to_its_rounding(tmp_path):
    plain = alone(runs, tmp_path, {"bf16": True})
    for found in on_ranks(4, runs, tmp_path, (2, 4), {"bf16": True}):
        for size in (2, 4):
            assert found[size]["loss"] == pytest.approx(plain["loss"], rel=1e-3)
            assert found[size]["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-2)
            assert found[size]["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-3)


def dealt(folder, size, strategies):
    """By strategy the examples of each batch that this rank has read in two epochs, and what the run logged."""
    found = {}
    for strategy in strategies:
        read = []

        def collator(examples, read=read):
            read.append([example["input_ids"].tolist() for example in examples])
            return collate(examples)

        parts = {"train_dataset": documents(19), "data_collator": collator}
        epochs = {"max_steps": -1, "num_train_epochs": 2, "train_sampling_strategy": strategy}
        found[strategy] = trained(make(f"{folder}/{strategy}", 2, section(size), parts=parts, **epochs)), read
    return found


def test_groups_read_the_examples_that_as_many_plain_ranks_read(tmp_path):
    """Two groups of two ranks beside two plain ranks. Both strategies batch by what a device takes in a step, and
    batch_rebalance deals each process a list of its own. The last step of an epoch has fewer examples."""
    batches = {"group_by_length": 10, "batch_rebalance": 12}
    plain = on_ranks(2, dealt, tmp_path / "plain", None, tuple(batches))
    for rank, shared in enumerate(on_ranks(4, dealt, tmp_path / "shared", 2, tuple(batches))):
        for strategy, number in batches.items():
            (run, read), (expected, examples) = shared[strategy], plain[rank // 2][strategy]
            assert read == examples, strategy
            assert len(examples) == number, strategy
            assert run["loss"] == pytest.approx(expected["loss"], rel=1e-4), strategy
            assert run.counts == expected.counts, strategy


def accuracy(prediction):
    counted = prediction.label_ids[:, 1:] != IGNORE
    found = prediction.predictions
    right = (found if found.ndim == 2 else found.argmax(-1))[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float((right & counted).sum() / counted.sum())}


def best(logits, labels):
    return logits.argmax(-1)


class Counts(TrainerCallback):
    """Evaluation steps: what is said of them a second is no number of them where a clock is set meanwhile."""

    def __init__(self):
        self.steps = 0

    def on_prediction_step(self, args, state, control, **kwargs):
        self.steps += 1


def evaluations(folder, size, counts, preprocess=None):
    """For sets of these sizes: loss, steps, accuracy, and what predict returns."""
    parts = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": preprocess}
    trainer = make(folder, SHARED[size], section(size), stage=3, parts=parts)
    found, counted = {}, Counts()
    trainer.add_callback(counted)
    for count in counts:
        counted.steps = 0
        metrics, steps = trainer.evaluate(documents(count, seed=count)), counted.steps
        predicted = trainer.predict(documents(count, seed=count))
        assert predicted.metrics["test_loss"] == metrics["eval_loss"]
        found[count] = metrics["eval_loss"], steps, metrics["eval_accuracy"], predicted.predictions, predicted.label_ids
    return found


def evaluations_by_size(folder, sizes, *args):
    return {size: evaluations(f"{folder}/{size}", size, *args) for size in sizes}


@pytest.mark.parametrize(
    ("sizes", "counts"), [((2,), (1, 7)), pytest.param(SIZES, (1, 6, 7, 8), marks=pytest.mark.slow)], ids=str
)
def test_evaluation_counts_every_sequence_once(sizes, counts, tmp_path):
    """Sets that do not divide are filled up with sequences from the start; transformers counts those, and weighs the
    last step by rank. Four sequences a step: 1 and 7 leave a remainder, and 1 is fewer than there are groups."""
    ranks = on_ranks(4, evaluations_by_size, tmp_path, sizes, counts, timeout=200)
    plain, model = alone(evaluations_by_size, tmp_path, sorted({*counts, 8})), small().eval()
    expected = {count: mean_of_steps(model, documents(count, seed=count), 4) for count in plain}
    assert plain[8][0] == pytest.approx(expected[8], rel=1e-5)
    for size in sizes:
        for found in (by_size[size] for by_size in ranks):
            for count, (loss, steps, right, predictions, labels) in found.items():
                assert loss == pytest.approx(expected[count], rel=1e-5), (size, count)
                assert steps == math.ceil(count / 4)
                assert right == pytest.approx(plain[count][2])
                # as many rows as sequences, each padded to what its ranks can share
                whole, truth = plain[count][3:]
                assert len(predictions) == count
                assert (labels[:, : truth.shape[1]] == truth).all()
                assert (labels[:, truth.shape[1] :] == IGNORE).all()
                gap = np.abs(predictions[:, : truth.shape[1]] - whole)[truth != IGNORE]
                assert gap.max() < 1e-4


def test_logits_are_reduced_before_they_are_gathered(tmp_path):
    plain = alone(evaluations_by_size, tmp_path, (7,), best)
    for found in on_ranks(2, evaluations_by_size, tmp_path, (2,), (7,), best):
        _, _, right, predictions, labels = found[2][7]
        assert predictions.shape == labels.shape
        assert right == plain[7][2]


class Unsized(torch.utils.data.IterableDataset):
    """Documents without a length, and a number of them that does not divide."""

    def __init__(self, count):
        self.documents = documents(count)

    def __iter__(self):
        return iter(self.documents)


class Sized(Unsized):
    def __len__(self):
        return len(self.documents)


def streaming(count):
    """A streaming data set in files, three of them for two groups."""
    lists = [{name: x.tolist() for name, x in example.items()} for example in documents(count)]
    return Dataset.from_list(lists).to_iterable_dataset(num_shards=3).with_format("torch")


STREAMS = {"unsized": Unsized, "sized": Sized, "streaming": streaming}


def streamed(folder, size, names):
    """For each kind of stream: the run on it, and the loss and number of held-out sequences."""
    own_batches = {"dispatch_batches": False}  # plain ranks cannot be dealt batches of different lengths
    found = {}
    for name in names:
        parts = {"train_dataset": STREAMS[name](10)}
        trainer = make(f"{folder}/{name}", 2, section(size), parts=parts, max_steps=2, accelerator_config=own_batches)
        run, metrics = trained(trainer), trainer.evaluate(STREAMS[name](7)) if size else {}
        samples = round(metrics.get("eval_samples_per_second", 0) * metrics.get("eval_runtime", 0))
        found[name] = (
            run,
            metrics.get("eval_loss"),
            samples,
            mean_of_steps(unpatch_attention(trainer.model), documents(7), 4),
        )
    return found


@pytest.mark.parametrize("names", [["streaming"], pytest.param(list(STREAMS), marks=pytest.mark.slow)], ids=len)
def test_iterable_data_sets(names, tmp_path):
    """The stream ends within the second window, is filled up, and begins again; evaluation counts a sequence once."""
    # plain ranks would take whole files of a streaming data set: other sequences than they are dealt by default
    plain = on_ranks(2, streamed, tmp_path / "plain", None, ["unsized", "sized"][: len(names)])[0]
    plain["streaming"] = plain["unsized"]
    for shared in on_ranks(4, streamed, tmp_path / "shared", 2, names):
        for name, (run, loss, samples, expected) in shared.items():
            assert run["loss"] == pytest.approx(plain[name][0]["loss"], rel=1e-4), name
            assert run.counts[:4] == plain[name][0].counts[:4], name
            assert loss == pytest.approx(expected, rel=1e-5), name
            assert samples == 7, name


def without_labels(folder, size, sequences):
    """Training where no token counts, then logits of examples that have no labels at all."""
    silent = [{**example, "labels": torch.full_like(example["labels"], IGNORE)} for example in documents(16)]
    parts = {"train_dataset": silent, "eval_dataset": silent[:6] + documents(2)}
    trainer = make(folder, sequences, section(size), stage=3, parts=parts, max_steps=2, eval_strategy="epoch")
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


def of_states(folder, size):
    """A run on examples that depend on what was read before."""
    data = Counting()
    parts = {"train_dataset": data, "eval_dataset": data, "data_collator": Drawing()}
    run = trained(make(folder, 2, section(size), parts=parts, max_steps=2, gradient_accumulation_steps=1))
    return run["loss"], run["grad_norm"], data.read


def test_no_data_set_and_no_collator_is_tried_before_its_batches_come(tmp_path):
    ((losses, norms, read),) = on_ranks(1, of_states, tmp_path / "plain", None)
    for shared in on_ranks(2, of_states, tmp_path / "shared", 2):
        assert shared == (pytest.approx(losses, rel=1e-5), pytest.approx(norms, rel=1e-5), read)


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
