"""Batches that cannot be trained on get one clear sentence on every rank of the world, and never a hang.

What says where documents lie is in test_packs.py.
"""

import pytest
import torch
from torch.utils.data import DistributedSampler

from ds_seqpar.data.inputs import refused, replicated, row, tokens
from tests.dist.ranks import SECONDS, WRONG, assert_all_refused, differ, everywhere, make, only_one
from tests.launch import on_each_of


def batch(seed=0, seq=16, **other):
    """A good batch, but for what a case asks for; a name with None is left out."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 99, (2, seq), generator=generator)
    whole = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids), **other}
    return {name: x for name, x in whole.items() if x is not None}


def cut(rows, seq):
    """The first rows and tokens of a good batch."""
    return {name: x[:rows, :seq] for name, x in batch().items()}


def mask(*zeros):
    whole = torch.ones(2, 16, dtype=torch.int64)
    whole[1, list(zeros)] = 0
    return whole


def given(declared=None, **other):
    """A case in which every rank's batch has something else."""
    return lambda sp, rank: sp.shard_batch(batch(**other), inputs=declared)


def one_given(declared=None, **other):
    """A case in which only the wrong rank's batch has it."""
    return lambda sp, rank: sp.shard_batch(batch(**(other if rank == WRONG else {})), inputs=declared)


def one_window(make):
    """A case in which the wrong rank's batches are made by `make`."""
    return lambda sp, rank: sp.shard_batches(make() if rank == WRONG else [batch()])


def failing_generator():
    yield batch()
    raise OSError("the disk\nis gone")


class Failing(dict):
    """A mapping that cannot be read."""

    def get(self, *args):
        raise RuntimeError("no such sample")


def nested():
    return [batch(labels=torch.nested.nested_tensor([torch.ones(3), torch.ones(5)]))]


def of_two(call):
    """A case in which a window has two micro-batches."""

    def configured(sp, rank):
        sp.accumulation_steps = 2
        return call(sp)

    return configured


WEIGHTS = {"weights": tokens()}
PADDED = {"attention_mask": mask(13, 14, 15)}
COMPLEX = torch.ones(2, 16, dtype=torch.complex64)
ONE_GROUP = {
    "no labels": (given(labels=None), everywhere("got none")),
    "labels without batch": (given(labels=torch.arange(16)), everywhere("int64 (16,)")),
    # TRL#4579 and transformers lose or shift twice where labels became shift_labels; axolotl#3498: partitioned twice
    "shift_labels": (given(shift_labels=torch.zeros(2, 16, dtype=torch.int64)), everywhere("got shift_labels")),
    "sharded twice": (lambda sp, rank: sp.shard_batch(sp.shard_batch(batch(seq=64))), everywhere("got shift_labels")),
    # TransformerEngine#3331 and #1930, accelerate#4177: a mask that was dropped or misread let padding be attended to
    "gap": (given(attention_mask=mask(5)), everywhere("zeros between")),
    # the tutorials' padding="max_length" with labels = input_ids.copy(): a loss of 4.1969 for 4.1614
    "padding that carries labels, on one rank": (one_given(**PADDED), only_one("got 2")),
    "a generator that fails": (one_window(failing_generator), only_one("OSError: the disk is gone")),
    "a batch that cannot be read": (one_window(lambda: [Failing(batch())]), only_one("RuntimeError: no such sample")),
    "a sparse tensor": (one_given(WEIGHTS, weights=torch.ones(2, 16).to_sparse()), only_one("RuntimeError: ")),
    "a nested tensor": (one_window(nested), only_one("RuntimeError: ")),
    "a tensor without content": (
        one_given(WEIGHTS, weights=torch.ones(2, 16, device="meta")), only_one("NotImplementedError")
    ),
    "names that cannot be sorted": (one_window(lambda: [{**batch(), 3: torch.ones(2, 16)}]), only_one("got 3 float")),
    "complex labels": (one_given(labels=COMPLEX), only_one("complex64 (2, 16)")),
    "labels in fp32": (given(labels=torch.ones(2, 16)), everywhere("float32 (2, 16)")),
    "mask of four dims": (given(attention_mask=torch.ones(2, 1, 16, 16)), everywhere("(2, 1, 16, 16)")),
    "mask that is a list": (one_given(attention_mask=[[1] * 16] * 2), only_one("got list")),
    # Megatron's and Automodel's, whose labels are shifted before: off by one here
    "a mask of losses": (given(loss_mask=torch.ones(2, 16)), everywhere("got loss_mask", "tokens(shifted=True)")),
    "weights of losses": (one_given(loss_scale=torch.ones(2, 16)), only_one("got loss_scale", "tokens(shifted=True)")),
    "a list of tensors": (given(videos=[torch.zeros(3)]), everywhere("got videos list", "'videos': tokens()")),
    "a tensor of another shape": (given(WEIGHTS, weights=torch.zeros(3, 5)), everywhere("weights", "float32 (3, 5)")),
    "no tensor": (given(WEIGHTS, weights=[1.0]), everywhere("weights", "(2, 16) from dim 0 on", "got list")),
    "a number of each row of others": (
        given({"scores": row()}, scores=torch.zeros(3)), everywhere("scores", "(2,)", "got float32 (3,)")
    ),
    "refused by name": (given({"videos": refused("no {}, leave it")}, videos=1), everywhere("no videos, leave it")),
    "declared otherwise": (
        given({"input_ids": replicated()}), everywhere("got input_ids as replicated and as tokens", kind="ConfigError")
    ),
    "declared by no spec": (given({"weights": 1}), everywhere("got int for 'weights'", kind="ConfigError")),
    "declared by no name": (given([tokens()]), everywhere("by name", "got list", kind="ConfigError")),
    # a group without a sequence left, as at the end of an epoch; torch's sentence was of a storage
    "no rows on one rank": (one_window(lambda: [cut(0, 16)]), only_one("got 0 rows of 16 tokens")),
    "no tokens": (lambda sp, rank: sp.shard_batches([cut(2, 0)]), everywhere("one token", "got 2 rows of 0 tokens")),
    "not a mapping": (
        lambda sp, rank: sp.shard_batch((1, 2) if rank == WRONG else batch()),
        only_one("got tuple"),
    ),
    "no window": (one_window(lambda: None), only_one("mapping", "got none")),
    # axolotl#3920: peers got different batches, because their loaders' workers were seeded by global rank
    "another batch": (one_given(seed=1), differ("labels", "int64 (2, 16)", "seed")),
    "a sampler over all ranks": (
        lambda sp, rank: sp.shard_batches([batch(seed) for seed in DistributedSampler(range(8))][:1]),
        everywhere("DistributedSampler", "sp.sampler(dataset)", kind="DisagreementError"),
    ),
    "a label that is no token": (one_given(labels=torch.full((2, 16), -1)), only_one("-100", "got -1 at token 0")),
    "another length": (one_given(seq=24), differ("int64 (2, 16)", "int64 (2, 24)")),
    # verl#2857, 360-LLaMA-Factory#1: accumulation gave another loss
    "window too long": (of_two(lambda sp: sp.shard_batches([batch()] * 3)), everywhere("2 micro-batches", "got 3")),
    "window too short": (of_two(lambda sp: sp.shard_batches([batch()])), everywhere("2 micro-batches", "got 1")),
    "one batch of a window": (of_two(lambda sp: sp.shard_batch(batch())), everywhere("2 micro-batches", "got 1")),
    "empty window on one rank": (one_window(list), only_one("1 micro-batch", "got 0")),
}  # fmt: skip
GAP = ("attention_mask", "zeros between")
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
        {**dict.fromkeys((2, 3), ("InputError", *GAP)), "others": ("DisagreementError", "rank 2 cannot", *GAP)},
    ),
    "peers differ": (
        lambda sp, rank: sp.shard_batch(batch(10 + rank if rank >= 2 else 0)),
        everywhere("share a sequence", "rank 2: ", "rank 3: ", kind="DisagreementError"),
    ),
    "fewer micro-batches": (
        lambda sp, rank: sp.shard_batches([batch(sp.data_rank)] * (2 - sp.data_rank)),
        everywhere("ranks 0-1: micro-batches 2", "ranks 2-3: micro-batches 1", kind="DisagreementError"),
    ),
    "another call in the second group": (
        lambda sp, rank: sp.shard_batch(batch(sp.data_rank)) if rank < 2 else sp.mean_loss(torch.zeros(())),
        everywhere("calls", "ranks 0-1: batches", "ranks 2-3: losses", kind="DisagreementError"),
    ),
    "another call in the first group": (
        lambda sp, rank: sp.shard_batch(batch(sp.data_rank)) if rank >= 2 else sp.mean_loss(torch.zeros(())),
        everywhere("calls", "ranks 2-3: batches", "ranks 0-1: losses", kind="DisagreementError"),
    ),
}
TABLES = {"one group": (ONE_GROUP, 4), "second of two groups": (SECOND_GROUP, 2)}


@pytest.mark.parametrize("name", TABLES)
@on_each_of(4, timeout=SECONDS)
def test_batches(name):
    table, size = TABLES[name]
    assert_all_refused(table, make(size=size))
