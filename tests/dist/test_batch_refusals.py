"""Batches that cannot be trained on get one clear sentence on every rank of the world, and never a hang."""

import pytest
import torch
from torch.utils.data import DistributedSampler

from tests.dist.ranks import SECONDS, WRONG, assert_all_refused, differ, everywhere, make, only_one, try_all
from tests.launch import on_warm_ranks as on_ranks


def batch(seed=0, seq=16, **other):
    """A good batch, but for what a case asks for; a name with None is left out."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 99, (2, seq), generator=generator)
    whole = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids), **other}
    return {name: x for name, x in whole.items() if x is not None}


def mask(*zeros):
    whole = torch.ones(2, 16, dtype=torch.int64)
    whole[1, list(zeros)] = 0
    return whole


def given_to_wrong(make):
    """A case in which the wrong rank's batches are made by `make`, and fail."""
    return lambda sp, rank: sp.shard_batches(make() if rank == WRONG else [batch()])


def failing_generator():
    yield batch()
    raise OSError("the disk\nis gone")


class Failing(dict):
    """A mapping that cannot be read."""

    def get(self, *args):
        raise RuntimeError("no such sample")


def window_of(steps, batches):
    def call(sp, rank):
        sp.accumulation_steps = steps
        return sp.shard_batches(batches)

    return call


def shard_batch_in_a_window(sp, rank):
    sp.accumulation_steps = 2
    return sp.shard_batch(batch())


def one_given(rank, **other):
    return batch(**(other if rank == WRONG else {}))


RESET = torch.arange(8).repeat(2).expand(2, -1)  # two documents of 8 tokens in a sequence
ONE_GROUP = {
    "no labels": (
        lambda sp, rank: sp.shard_batch(batch(labels=None)),
        everywhere("InputError", "got none", "labels=input_ids.clone()"),
    ),
    "no labels on one rank": (
        lambda sp, rank: sp.shard_batch(one_given(rank, labels=None)),
        only_one("InputError", "got none", "labels=input_ids.clone()"),
    ),
    "labels without batch": (
        lambda sp, rank: sp.shard_batch(batch(labels=torch.arange(16))),
        everywhere("InputError", "labels", "int64 (16,)"),
    ),
    # TRL#4579 and transformers lose or shift twice where labels became shift_labels; axolotl#3498: partitioned twice
    "shift_labels": (
        lambda sp, rank: sp.shard_batch(batch(shift_labels=torch.zeros(2, 16, dtype=torch.int64))),
        everywhere("InputError", "got shift_labels"),
    ),
    "sharded twice": (
        lambda sp, rank: sp.shard_batch(sp.shard_batch(batch(seq=64))),
        everywhere("InputError", "got shift_labels"),
    ),
    # TransformerEngine#3331 and #1930, accelerate#4177: a mask that was dropped or misread let padding be attended to
    "gap": (
        lambda sp, rank: sp.shard_batch(batch(attention_mask=mask(5))),
        everywhere("InputError", "attention_mask", "zeros between"),
    ),
    "gap on one rank": (
        lambda sp, rank: sp.shard_batch(one_given(rank, attention_mask=mask(3, 4))),
        only_one("InputError", "attention_mask", "zeros between"),
    ),
    # the tutorials' padding="max_length" with labels = input_ids.copy(): a loss of 4.1969 for 4.1614
    "padding that carries labels": (
        lambda sp, rank: sp.shard_batch(batch(attention_mask=mask(13, 14, 15))),
        everywhere("InputError", "labels", "got 2", "-100", "attention_mask"),
    ),
    "padding that carries labels on one rank": (
        lambda sp, rank: sp.shard_batch(one_given(rank, attention_mask=mask(13, 14, 15))),
        only_one("InputError", "labels", "got 2", "-100", "attention_mask"),
    ),
    "a generator that fails on one rank": (
        given_to_wrong(failing_generator),
        only_one("InputError", "window", "OSError: the disk is gone"),
    ),
    "a batch that cannot be read on one rank": (
        given_to_wrong(lambda: [Failing(batch())]),
        only_one("InputError", "window", "RuntimeError: no such sample"),
    ),
    "a sparse tensor on one rank": (
        given_to_wrong(lambda: [batch(weights=torch.ones(2, 16).to_sparse())]),
        only_one("InputError", "window", "RuntimeError: "),
    ),
    "a nested tensor on one rank": (
        given_to_wrong(lambda: [batch(weights=torch.nested.nested_tensor([torch.ones(3), torch.ones(5)]))]),
        only_one("InputError", "window", "RuntimeError: "),
    ),
    "a tensor without content on one rank": (
        given_to_wrong(lambda: [batch(weights=torch.ones(2, 16, device="meta"))]),
        only_one("InputError", "window", "NotImplementedError: "),
    ),
    "names that cannot be sorted on one rank": (
        given_to_wrong(lambda: [{**batch(), 3: torch.ones(2, 16)}]),
        only_one("InputError", "window", "TypeError: "),
    ),
    "complex labels on one rank": (
        given_to_wrong(lambda: [batch(labels=torch.ones(2, 16, dtype=torch.complex64))]),
        only_one("InputError", "labels", "int64", "complex64 (2, 16)"),
    ),
    "labels that are no numbers of tokens": (
        lambda sp, rank: sp.shard_batch(batch(labels=torch.ones(2, 16))),
        everywhere("InputError", "labels", "int64", "float32 (2, 16)"),
    ),
    "mask of four dims": (
        lambda sp, rank: sp.shard_batch(batch(attention_mask=torch.ones(2, 1, 16, 16))),
        everywhere("InputError", "attention_mask", "(2, 16)", "(2, 1, 16, 16)"),
    ),
    "mask that is a list on one rank": (
        lambda sp, rank: sp.shard_batch(one_given(rank, attention_mask=[[1] * 16] * 2)),
        only_one("InputError", "attention_mask", "(2, 16)", "got list"),
    ),
    # axolotl#3608 and #2495, LLaMA-Factory PR 7338: packed documents attended to one another, loss 1.83 times too large
    "documents that begin in the middle": (
        lambda sp, rank: sp.shard_batch(batch(position_ids=RESET + 1)),
        everywhere("InputError", "position_ids", "got 1", "token 0"),
    ),
    "positions that are a list on one rank": (
        lambda sp, rank: sp.shard_batch(one_given(rank, position_ids=list(range(16)))),
        only_one("InputError", "position_ids", "got list"),
    ),
    # transformers, accelerate: cumulative lengths of another micro-batch, used after an evaluation step
    "lengths of another batch": (
        lambda sp, rank: sp.shard_batch(batch(position_ids=RESET, cu_seq_lens_q=torch.tensor([0, 5, 16, 32]))),
        everywhere("InputError", "4 in position_ids", "3 others", "in cu_seq_lens_q"),
    ),
    "documents on one rank": (
        lambda sp, rank: sp.shard_batch(one_given(rank, position_ids=RESET)),
        differ("no [0] position_ids", "int64 (2, 16)"),
    ),
    "tensor of another shape": (
        lambda sp, rank: sp.shard_batch(batch(pixel_values=torch.zeros(3, 5))),
        everywhere("InputError", "(2, 16)", "pixel_values (3, 5)", "sp.shard"),
    ),
    "not a mapping on one rank": (
        lambda sp, rank: sp.shard_batch((1, 2) if rank == WRONG else batch()),
        only_one("InputError", "mapping", "got tuple"),
    ),
    "no window on one rank": (
        lambda sp, rank: sp.shard_batches(None if rank == WRONG else [batch()]),
        only_one("InputError", "mapping", "got none"),
    ),
    # axolotl#3920: peers got different batches, because their loaders' workers were seeded by global rank
    "another batch on one rank": (
        lambda sp, rank: sp.shard_batch(batch(seed=int(rank == WRONG))),
        differ("labels", "int64 (2, 16)", "seed"),
    ),
    "a sampler over all ranks": (
        lambda sp, rank: sp.shard_batches([batch(seed) for seed in DistributedSampler(range(8))][:1]),
        everywhere("DisagreementError", "DistributedSampler", "sp.sampler(dataset)"),
    ),
    "a label that is no token": (
        lambda sp, rank: sp.shard_batch(one_given(rank, labels=torch.full((2, 16), -1))),
        only_one("InputError", "-100", "got -1 at token 0"),
    ),
    "another length on one rank": (
        lambda sp, rank: sp.shard_batch(one_given(rank, **batch(seq=24))),
        differ("int64 (2, 16)", "int64 (2, 24)"),
    ),
    # verl#2857, 360-LLaMA-Factory#1: accumulation gave another loss
    "window too long": (
        window_of(2, [batch(seed) for seed in range(3)]),
        everywhere("InputError", "2 micro-batches", "got 3"),
    ),
    "window too short": (window_of(2, [batch()]), everywhere("InputError", "2 micro-batches", "got 1")),
    "one batch of a window": (
        shard_batch_in_a_window,
        everywhere("InputError", "2 micro-batches", "got 1"),
    ),
    "empty window": (
        lambda sp, rank: sp.shard_batches([]),
        everywhere("InputError", "1 micro-batch", "got 0"),
    ),
    "empty window on one rank": (
        lambda sp, rank: sp.shard_batches([batch()] if rank != WRONG else []),
        only_one("InputError", "1 micro-batch", "got 0"),
    ),
}

# two groups of two ranks, of which only the second is given something wrong: the world trains together, so all four
# raise, and say which rank it is
SECOND_GROUP = {
    "no labels": (
        lambda sp, rank: sp.shard_batch(batch(sp.data_rank, **({"labels": None} if rank == 3 else {}))),
        {
            3: ("InputError", "labels", "got none"),
            "others": ("DisagreementError", "rank 3 cannot", "labels", "got none"),
        },
    ),
    "gap": (
        lambda sp, rank: sp.shard_batch(batch(sp.data_rank, attention_mask=mask(2) if rank >= 2 else None)),
        {
            2: ("InputError", "attention_mask", "zeros between"),
            3: ("InputError", "attention_mask", "zeros between"),
            "others": ("DisagreementError", "rank 2 cannot", "attention_mask", "zeros between"),
        },
    ),
    "peers differ": (
        lambda sp, rank: sp.shard_batch(batch(10 + rank if rank >= 2 else 0)),
        {"others": ("DisagreementError", "share a sequence", "rank 2: ", "rank 3: ")},
    ),
    "fewer micro-batches": (
        lambda sp, rank: sp.shard_batches([batch(sp.data_rank)] * (2 - sp.data_rank)),
        everywhere("InputError", "micro-batches", "ranks 0-1: 2", "ranks 2-3: 1"),
    ),
    "another call in the second group": (
        lambda sp, rank: sp.shard_batch(batch(sp.data_rank)) if rank < 2 else sp.mean_loss(torch.zeros(())),
        everywhere("DisagreementError", "calls", "ranks 0-1: batches", "ranks 2-3: losses"),
    ),
    "another call in the first group": (
        lambda sp, rank: sp.shard_batch(batch(sp.data_rank)) if rank >= 2 else sp.mean_loss(torch.zeros(())),
        everywhere("DisagreementError", "calls", "ranks 2-3: batches", "ranks 0-1: losses"),
    ),
}


TABLES = {"one group": (ONE_GROUP, 4), "second of two groups": (SECOND_GROUP, 2)}


def refused_batches(name):
    table, size = TABLES[name]
    return try_all(table, make(size=size))


@pytest.mark.parametrize("name", TABLES)
def test_batches(name):
    assert_all_refused(TABLES[name][0], on_ranks(4, refused_batches, name, timeout=SECONDS))
