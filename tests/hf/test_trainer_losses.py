"""Losses of one's own in the Trainer, from whole outputs: the numbers are those of the plain Trainer."""

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from tests.hf.llama import IGNORE, small
from tests.hf.trainers import accuracy, build, case, collate, compare, documents
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")


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
    return {**collate(examples), "weights": torch.stack([x["weights"] for x in examples])}


def with_weights(count, seed):
    return [{**x, "weights": x["input_ids"].float().mean()} for x in documents(count, seed)]


def deaf():
    """Its loss is the mean of a micro-batch, which the Trainer divides by the micro-steps."""
    model = small(pad_token_id=0)
    model.accepts_loss_kwargs = False
    return {"model": model, "compute_metrics": accuracy}


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
    return {"model": AddingForCausalLM(small(pad_token_id=0).config), "compute_metrics": accuracy}


def column():
    data = {"train_dataset": with_weights(32, 5), "eval_dataset": with_weights(8, 9)}
    return {**data, "data_collator": weighted, "before": [Weighted]}


def own(**parts):
    return case(parts={"compute_metrics": accuracy, **parts})


OWN = {
    "smoothing": own() | {"label_smoothing_factor": 0.1},
    "a function by items": own(compute_loss_func=by_items),
    "a function of a mean": own(compute_loss_func=focal),
    "a method": own(before=[OwnLoss]),
    "a method with a column": case(parts=column, label_names=["labels", "weights"], remove_unused_columns=False),
}
OF_MODELS = {"a model that takes no count": case(parts=deaf), "a model that adds terms": case(parts=adding)}


def predicted(trainer):
    """Metrics, logits of real tokens (of padding everybody may compute something else), and labels."""
    output = trainer.predict(trainer.eval_dataset)
    metrics = {name: x for name, x in output.metrics.items() if name in ("test_loss", "test_accuracy")}
    rows = zip(output.predictions, trainer.eval_dataset, strict=True)
    return metrics, [logits[: len(x["input_ids"])] for logits, x in rows], output.label_ids


@pytest.mark.parametrize(
    ("groups", "stage"), [(1, 2), *(pytest.param(2, stage, marks=pytest.mark.slow) for stage in (2, 3))]
)
def test_a_loss_of_ones_own_gives_the_plain_numbers(groups, stage, tmp_path):
    # an epsilon as large as gradients: else steps are made of the signs of what rounding has left
    how = {"stage": stage, "max_steps": 2, "section": {"ulysses": 1}, "then": predicted, "adam_epsilon": 1e-2}
    how["rel"] = 1e-4
    compare(tmp_path, OWN | OF_MODELS, (2 * groups, 2), batch=2 * groups, alone=False, **how)


def repeated(folder, names, counts, size=None):
    """By name and number of examples: evaluation losses of untrained models."""
    found = {}
    for name in names:
        trainer = build(f"{folder}/{name}", {**OWN[name], "stage": 3, "section": {"ulysses": 1}}, size)
        for count in counts:
            found[name, count] = trainer.evaluate(with_weights(count, seed=9))["eval_loss"]
    return found


@pytest.mark.parametrize(
    ("names", "counts"),
    [
        (["a function by items", "a method with a column"], (5, 6)),
        pytest.param([*OWN], (5, 6, 7), marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_an_evaluation_whose_last_batch_repeats_examples_gives_the_plain_loss(names, counts, tmp_path):
    """Of 6 examples, two groups of 2 leave one with repetitions alone; of 5 and 7, with fewer than another. Of a
    model's own loss no example counts once."""
    plain = on_ranks(2, repeated, tmp_path / "plain", names, counts)[0]
    assert len(plain) == len(counts) * len(names)
    for found in on_ranks(4, repeated, tmp_path / "shared", names, counts, 2):
        assert found == pytest.approx(plain, rel=1e-5)
