"""Losses of one's own in the Trainer, from whole outputs: the numbers are those of the plain Trainer."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM, Trainer

from hf_integration import SequenceParallelMixin
from tests.hf.llama import IGNORE, small
from tests.hf.test_trainer_runs import accuracy
from tests.hf.trainers import documents, make, trained
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
SECTION = {"size": 2, "ulysses": 1}


def by_items(outputs, labels, num_items_in_batch=None):
    """Token losses, and a penalty of the logits' scale, over the Trainer's count."""
    logits, targets = outputs.logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    penalty = logits.logsumexp(-1).pow(2)[targets != IGNORE].sum()
    return (losses.sum() + 1e-2 * penalty) / (num_items_in_batch or (targets != IGNORE).sum())


def focal(outputs, labels, num_items_in_batch=None):
    """A mean by batch, which takes no count."""
    logps = outputs.logits[:, :-1].log_softmax(-1)
    targets, counted = labels[:, 1:].clamp(min=0), labels[:, 1:] != IGNORE
    picked = torch.gather(logps, 2, targets[..., None]).squeeze(2)
    return -((1 - picked.exp()) ** 2 * picked * counted).sum() / counted.sum().clamp(min=1)


class OwnLoss:
    """The commonest change to a Trainer: a loss from the logits, shifted by itself."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(**inputs)
        logits, targets = output.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = F.cross_entropy(logits, targets)
        return (loss, output) if return_outputs else loss


class Weighted:
    """A loss that takes a column of its own from the inputs, and the model's beside it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weights = inputs.pop("weights")
        loss, output = super().compute_loss(model, inputs, True, num_items_in_batch)
        means = (output.logits.float().mean(2) * (inputs["labels"] != IGNORE)).mean(1)
        loss = loss + (means * weights).sum().square()
        return (loss, output) if return_outputs else loss


def weighted(examples):
    from tests.hf.trainers import collate

    return {**collate(examples), "weights": torch.stack([x["weights"] for x in examples])}


def with_weights(count, seed):
    return [{**x, "weights": x["input_ids"].float().mean()} for x in documents(count, seed)]


def deaf():
    """Its loss is the mean of a micro-batch, which the Trainer divides by the micro-steps."""
    model = small(pad_token_id=0)
    model.accepts_loss_kwargs = False
    return model


class AddingForCausalLM(LlamaForCausalLM):
    """Adds a z-loss of the tokens that count, and a penalty on parameters."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        output = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
        if labels is not None:
            z = output.logits[:, :-1].logsumexp(-1)[labels[:, 1:] != IGNORE].pow(2).mean()
            output.loss = output.loss + 1e-2 * z + 1e-3 * self.lm_head.weight.pow(2).sum()
        return output


def adding():
    torch.manual_seed(0)
    return AddingForCausalLM(small(pad_token_id=0).config)


# what a run has of its own -> what `make` is given
LOSSES = {
    "smoothing": lambda: {"label_smoothing_factor": 0.1},
    "a function by items": lambda: {"parts": {"compute_loss_func": by_items}},
    "a function of a mean": lambda: {"parts": {"compute_loss_func": focal}},
    "a method": lambda: {"kind": OwnLoss},
    "a model that takes no count": lambda: {"model": deaf()},
    "a model that adds terms": lambda: {"model": adding()},
    "a method with a column": lambda: {
        "kind": Weighted,
        "label_names": ["labels", "weights"],
        "remove_unused_columns": False,
        "parts": {
            "data_collator": weighted,
            "train_dataset": with_weights(32, 5),
            "eval_dataset": with_weights(8, 9),
        },
    },
}


def kind_of(own, shared):
    bases = (*([own] if own else []), *([SequenceParallelMixin] if shared else []), Trainer)
    return type("ScheduleOptions", bases, {"__module__": "users"})


def runs(folder, names, section, stage):
    """By name of the loss: what is logged, and what predict gives."""
    found = {}
    for name in names:
        given = LOSSES[name]()
        metric = None if name == "a method with a column" else accuracy
        given["parts"] = {"compute_metrics": metric, **given.get("parts", {})}
        given["kind"] = kind_of(given.get("kind"), section is not None)
        trainer = make(f"{folder}/{name}", 2, section, stage=stage, max_steps=2, **given)
        logs, output = trained(trainer).logs, trainer.predict(trainer.eval_dataset)
        logs |= {name: [value] for name, value in output.metrics.items() if name in ("test_loss", "test_accuracy")}
        found[name] = logs, output.predictions, output.label_ids
    return found


def columns(labels):
    return labels if isinstance(labels, tuple) else (labels,)


@pytest.mark.parametrize(
    ("groups", "stage"), [(1, 2), *(pytest.param(2, stage, marks=pytest.mark.slow) for stage in (2, 3))]
)
def test_a_loss_of_ones_own_gives_the_plain_numbers(groups, stage, tmp_path):
    plain = on_ranks(groups, runs, tmp_path / "plain", list(LOSSES), None, stage)[0]
    for found in on_ranks(2 * groups, runs, tmp_path / "shared", list(LOSSES), SECTION, stage):
        for name, (logs, predictions, labels) in found.items():
            its_logs, its_predictions, its_labels = plain[name]
            assert logs.keys() == its_logs.keys()
            for key in logs:
                assert logs[key] == pytest.approx(its_logs[key], rel=2e-4), (name, key)
            for row, (x, mine, its) in enumerate(zip(documents(12, 9), predictions, its_predictions, strict=False)):
                real = len(x["input_ids"])  # of padding everybody may compute something else
                assert np.abs(mine[:real] - its[:real]).max() < 1e-4, (name, row)
            for mine, its in zip(columns(labels), columns(its_labels), strict=True):
                assert np.array_equal(mine, its), name


def repeated(folder, names, section, counts):
    """By name of the loss and number of examples: evaluation losses, where the last batch repeats some of them."""
    found = {}
    for name in names:
        given = LOSSES[name]()
        given["kind"] = kind_of(given.get("kind"), section is not None)
        trainer = make(f"{folder}/{name}", 2, section, stage=3, **given)
        for count in counts:
            found[name, count] = trainer.evaluate(with_weights(count, seed=9))["eval_loss"]
    return found


OWN = [name for name in LOSSES if not name.startswith("a model")]  # of whose own loss each example counts once


@pytest.mark.parametrize(
    ("names", "counts"),
    [
        (["a function by items", "a method with a column"], (5, 6)),
        pytest.param(OWN, (5, 6, 7), marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_an_evaluation_whose_last_batch_repeats_examples_gives_the_plain_loss(names, counts, tmp_path):
    """Of 6 examples, two groups of 2 leave one with repetitions alone; of 5 and 7, with fewer than another."""
    plain = on_ranks(2, repeated, tmp_path / "plain", names, None, counts)[0]
    assert len(plain) == len(counts) * len(names)
    for found in on_ranks(4, repeated, tmp_path / "shared", names, SECTION, counts):
        assert found == pytest.approx(plain, rel=2e-4)
