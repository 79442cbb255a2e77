"""A prediction_step of the user's own gives the mean token loss, or is refused before the first step."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import Trainer

from hf_integration import SequenceParallelMixin, SequenceParallelTrainer
from tests.dist.ranks import is_one_sentence
from tests.hf.llama import small
from tests.hf.trainers import documents, make, mean_of_steps
from tests.launch import on_ranks

pytestmark = pytest.mark.usefixtures("compiled")


class CallsTheModel:
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            return model(**inputs).loss.detach(), None, None


class ComputesItsLoss:
    """As trl's trainers: no num_items_in_batch; and it looks at the mask."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        assert inputs["attention_mask"].shape == inputs["input_ids"].shape
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return loss, None if prediction_loss_only else outputs.logits, inputs["labels"]


class ShiftsLabels:
    """Makes a loss of its own, of this rank's labels."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            logits = model(**inputs).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten()), None, None


class Averages:
    """The mean of this rank's token losses, whatever other ranks have."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            logits = model(**inputs).logits
        losses = F.cross_entropy(logits.flatten(0, 1), inputs["shift_labels"].flatten(), reduction="sum")
        return losses / (inputs["shift_labels"] != -100).sum().clamp(min=1), None, None


class FailsOnOne:
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)[0]
        if self.args.process_index == 1:
            raise KeyError("weights")
        return loss, None, None


def before(own):
    """A class that extends ours, as the two-line change makes it."""
    return type("Before", (own, SequenceParallelTrainer), {})


def behind(own):
    """The mixin before a class that was there."""
    return type("Behind", (SequenceParallelMixin, own, Trainer), {})


def evaluated(folder, size):
    """Evaluation losses of an untrained model, by class."""
    found = {}
    for own in (CallsTheModel, ComputesItsLoss):
        for order in (before, behind):
            sequences = 4 * size // dist.get_world_size()
            trainer = make(folder, sequences, {"size": size}, stage=3, kind=order(own))
            found[own.__name__, order.__name__] = trainer.evaluate(documents(7, seed=9))["eval_loss"]
    return found


@pytest.mark.parametrize(
    ("ranks", "size"), [(2, 2), *(pytest.param(4, size, marks=pytest.mark.whole) for size in (2, 4))]
)
def test_a_prediction_step_of_ones_own_gives_the_mean_token_loss(ranks, size, tmp_path):
    """NaN where a rank has no label; else its own mean, averaged as if ranks had as many labels."""
    expected = mean_of_steps(small(pad_token_id=0).eval(), documents(7, seed=9), 4)
    for found in on_ranks(ranks, evaluated, tmp_path, size):
        assert len(found) == 4
        assert found == pytest.approx(dict.fromkeys(found, expected), rel=1e-5)


def tried(folder, size):
    """(sentence, steps made) of training and of evaluating with each wrong class; the loss where it is meant."""
    said = {}
    for own in (ShiftsLabels, Averages, FailsOnOne):
        for name, call in (("train", lambda t: t.train()), ("evaluate", lambda t: t.evaluate())):
            trainer = make(folder, 4, {"size": size}, kind=before(own), stage=3)
            try:
                call(trainer)
            except ValueError as error:
                said[own.__name__, name] = str(error), trainer.state.global_step
    meant = make(folder, 4, {"size": size}, kind=before(Averages), stage=3, parts={"check_loss": False})
    return said, meant.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("ranks", "size"), [(2, 2), *(pytest.param(4, size, marks=pytest.mark.whole) for size in (1, 2, 4))]
)
def test_an_evaluation_that_would_be_wrong_is_refused_before_the_first_step(ranks, size, tmp_path):
    for said, meant in on_ranks(ranks, tried, tmp_path, size):
        assert len(said) == 6
        for (own, _), (sentence, steps) in said.items():
            assert is_one_sentence(sentence)
            assert steps == 0
            assert "prediction_step" in sentence
            assert "check_loss=False" in sentence
            assert ("'weights'" in sentence) == (own == "FailsOnOne")
        assert 3 < meant < 6
