"""Padding on the left under the Trainer: the plain Trainer's losses, but for labels that only padding could predict."""

import warnings

import pytest
import torch
from torch.nn.functional import pad

from tests.hf.llama import IGNORE
from tests.hf.trainers import make, trained
from tests.launch import on_trainer_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")


class OnTheLeft:
    """Pads on the left. first_counts: whether the first token of a row has a label."""

    def __init__(self, first_counts):
        self.first_counts = first_counts

    def __call__(self, examples):
        ids = [example["input_ids"] for example in examples]
        labels = [x.clone() for x in ids]
        for x in labels:
            x[0] = x[0] if self.first_counts else IGNORE
        longest = max(map(len, ids))

        def padded(rows, value):
            return torch.stack([pad(x, (longest - len(x), 0), value=value) for x in rows])

        mask = padded([torch.ones_like(x) for x in ids], 0)
        return {"input_ids": padded(ids, 0), "labels": padded(labels, IGNORE), "attention_mask": mask}


def losses(folder):
    """(losses, warnings of padding) of both Trainers, by whether first tokens have labels and whether it is ours."""
    found = {}
    for first_counts in (False, True):
        for sequences, section in ((2, None), (4, {"size": 2})):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                parts = {"data_collator": OnTheLeft(first_counts)}
                run = trained(make(folder, sequences, section, parts=parts, max_steps=1))
            said = [str(x.message) for x in caught if "padding on the left" in str(x.message)]
            found[first_counts, bool(section)] = run["loss"], said
    return found


def test_left_padding_is_the_plain_trainers_without_first_labels_and_is_warned_of_with_them(tmp_path):
    for rank, found in enumerate(on_ranks(2, losses, tmp_path)):
        assert found[False, True][0] == pytest.approx(found[False, False][0], rel=1e-5)
        assert found[False, True][1] == found[False, False][1] == []
        assert found[True, True][0] != pytest.approx(found[True, False][0], rel=1e-5)
        assert len(found[True, True][1]) == (rank == 0)  # of two micro-steps
