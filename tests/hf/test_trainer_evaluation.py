"""A prediction_step of the user's own gives the mean token loss; one that fails on a rank is told to all."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.dist.ranks import is_one_sentence, refusal
from tests.hf.llama import small
from tests.hf.trainers import documents, make, mean_of_steps
from tests.launch import on_trainer_ranks as on_ranks

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
    """Makes a loss of its own, of whole logits and labels."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            logits = model(**inputs).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten()), None, None


class FailsOnOne:
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)[0]
        if self.args.process_index == 1:
            raise KeyError("weights")
        return loss, None, None


class FailsBefore:
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        if self.args.process_index == 1:
            raise KeyError("weights")
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)


def evaluated(folder, size):
    """Evaluation losses of an untrained model, by class."""
    found = {}
    groups = dist.get_world_size() // size
    for own in (CallsTheModel, ComputesItsLoss, *([ShiftsLabels] if groups == 1 else [])):  # a mean of its own group's
        for order in ("before", "between"):  # of a class that extends ours, or that was there
            trainer = make(folder, 4 // groups, {"size": size}, stage=3, parts={order: [own]})
            found[own.__name__, order] = trainer.evaluate(documents(7, seed=9))["eval_loss"]
    return found


@pytest.mark.parametrize(
    ("ranks", "size"), [(2, 2), *(pytest.param(4, size, marks=pytest.mark.slow) for size in (2, 4))]
)
def test_a_prediction_step_of_ones_own_gives_the_mean_token_loss(ranks, size, tmp_path):
    """NaN where a rank has no label; else its own mean, averaged as if ranks had as many labels."""
    expected = mean_of_steps(small(pad_token_id=0).eval(), documents(7, seed=9), 4)
    for found in on_ranks(ranks, evaluated, tmp_path, size):
        assert len(found) == 6 if ranks == size else 4
        assert found == pytest.approx(dict.fromkeys(found, expected), rel=1e-5)


def failed(folder):
    """The sentence of an evaluation whose prediction_step fails on one rank, before it calls the model and after."""
    trainers = [make(folder, 4, {"size": 2}, stage=3, parts={"before": [own]}) for own in (FailsOnOne, FailsBefore)]
    return [refusal(trainer.evaluate)[1] for trainer in trainers]


def test_a_prediction_step_that_fails_on_one_rank_is_told_to_all(tmp_path):
    for said in on_ranks(2, failed, tmp_path):
        for sentence in said:
            assert is_one_sentence(sentence)
            assert "prediction_step failed" in sentence
            assert "'weights'" in sentence
