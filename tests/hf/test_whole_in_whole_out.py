"""A step of a whole batch costs what one of a sharded batch costs. Its numbers: test_conformance.py."""

import pytest
import torch

from tests.dist.ranks import make
from tests.hf.families import collated
from tests.hf.llama import MODES, small
from tests.launch import on_each_of
from tests.live import Live

pytestmark = pytest.mark.usefixtures("compiled")
SECTION = MODES["u2r2"]


def cost(sp, model, batch):
    """Elements that arrived, and what attention did, in a step that uses the loss alone."""
    sp.comm.received.clear()
    with torch.profiler.profile() as profile:
        model(**batch).loss.backward()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    labels = [event.name for event in events if event.name.startswith("ds_seqpar ")]
    return dict(sp.comm.received), [label for label in labels if " agree" not in label]


@on_each_of(4)
def test_a_step_by_its_loss_costs_what_a_sharded_one_costs():
    """The same elements, transfers and products, in the same order."""
    sp = make(**SECTION)
    model = small().patch_attention(sp)
    for kind in ("odd", "packed", "left", "right"):
        batch = collated(kind)
        assert cost(sp, model, batch) == cost(sp, model, sp.shard_batch(batch)), kind


@on_each_of(4)
def test_a_step_by_its_loss_holds_whole_ids_and_labels_beside():
    """Bytes after a forward, and at most in backward. Logits of local tokens alone are four times the ids here."""
    sp = make(**SECTION)
    model, found = small().patch_attention(sp), {}
    ids = torch.randint(3, 64, (2, 512), generator=torch.Generator().manual_seed(1))
    for name in ("whole", "sharded") * 2:  # the first of each is a warm-up
        batch = {"input_ids": ids, "labels": ids.clone()}
        batch = batch if name == "whole" else sp.shard_batch(batch)
        model.zero_grad()
        with Live() as live:
            loss = model(**batch).loss
            after = live.settled()
            live.restart()
            loss.backward()
            found[name] = after, live.peak
    for whole, sharded in zip(found["whole"], found["sharded"], strict=True):
        assert whole - sharded <= 4 * ids.nbytes, (whole, sharded, ids.nbytes)
