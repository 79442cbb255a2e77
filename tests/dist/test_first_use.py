"""A model that takes a rank's tokens for a whole sequence is refused: one without sequence parallel attention, and one
that does not read its tokens' positions."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from ds_seqpar.base.errors import ConfigError
from tests.dist.ranks import lacking, make, refusal
from tests.launch import on_each_of

SEQ, VOCABULARY = 16, 32
BATCH = {"input_ids": torch.arange(SEQ)[None], "labels": torch.arange(SEQ)[None]}


class Model(nn.Module):
    """One layer of a user's own."""

    def __init__(self, sp=None, reads=True):
        super().__init__()
        self.sp, self.reads = sp, reads
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 8), nn.Embedding(SEQ, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids, position_ids, shift_labels, num_items_in_batch, **_):
        if not self.reads:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.tokens(input_ids) + self.positions(position_ids)
        attend = nn.functional.scaled_dot_product_attention if self.sp is None else self.sp.attention
        x = attend(*[x.unflatten(2, (1, 8))] * 3).flatten(2)
        losses = nn.functional.cross_entropy(self.head(x).flatten(0, 1), shift_labels.flatten(), reduction="sum")
        return losses / num_items_in_batch


def step(sp, model):
    return sp.mean_loss([model(**batch) for batch in sp.shard_batches([BATCH])])


@on_each_of(2)
def test_who_takes_a_shard_for_a_whole_sequence_is_refused():
    torch.manual_seed(0)
    model = Model()
    assert lacking(refusal(step, make(), model), "ConfigError", "no attention", "patch_attention") == []
    sp = make()
    unread = Model(sp, reads=False)
    for _ in range(2):  # a loop that catches it is told again
        assert lacking(refusal(step, sp, unread), "ConfigError", "position_ids", "from 0") == []


@on_each_of(2)
def test_who_reads_positions_once_gets_plain_ones_from_then_on():
    sp = make()
    torch.manual_seed(0)
    model = Model(sp)
    [batch] = sp.shard_batches([BATCH])
    positions = batch["position_ids"]
    assert type(positions.to("cpu").clone()[:, 1:]) is type(positions)  # a copy has still to be read
    assert model(**batch).isfinite()
    [batch] = sp.shard_batches([BATCH])
    assert type(batch["position_ids"]) is torch.Tensor
    first = step(sp, model)
    assert step(sp, model) == first
    # a compiled graph reads them too
    sp = make()
    compiled = torch.compile(Model(sp), backend="aot_eager")
    [batch] = sp.shard_batches([BATCH])
    assert sp.mean_loss(compiled(**batch)) > 0


@on_each_of(2)
def test_every_way_of_reading_counts():
    methods = [getattr(torch.Tensor, name) for name in ("tolist", "numpy", "data_ptr", "share_memory_")]
    for read in (*methods, np.asarray, copy.copy, copy.deepcopy, lambda x: x + 1, lambda x: [*x[0]]):
        sp = make()
        read(sp.shard_batches([BATCH])[0]["position_ids"])
        assert type(sp.shard_batches([BATCH])[0]["position_ids"]) is torch.Tensor
    for is_sharded_before in (True, False):  # or asks for them itself
        sp = make()
        batches = sp.shard_batches([BATCH]) if is_sharded_before else []
        sp.position_ids(SEQ)
        batches = batches or sp.shard_batches([BATCH])
        assert sp.mean_loss(Model(sp, reads=False)(**batches[0])) > 0


@on_each_of(2)
def test_one_rank_has_whole_sequences():
    sp = make(size=1)
    assert step(sp, Model()) > 0
    with pytest.raises(ConfigError):
        step(make(size=2), Model())
