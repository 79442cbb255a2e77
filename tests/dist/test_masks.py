"""Masks and shards of any length on real ranks: compiled graphs."""

import copy
import dataclasses
import functools
import gc

import numpy
import torch
from torch._dynamo.utils import counters

from ds_seqpar.core.compiler.sharding.masks import CAUSAL, FULL, Mask
from ds_seqpar.core.compiler.sharding.shards import UnevenShards
from tests import oracle
from tests.attention_cases import positions
from tests.dist.ranks import (
    attend,
    lacking,
    leaves,
    make,
    refusal,
)
from tests.launch import on_each_of

SEQ, HEADS = 48, (8, 4)


@on_each_of(2)
def test_causal_and_full_are_masks_too():
    sp, (q, k, v, _) = make(), oracle.tensors(1, 8, (4, 2))
    for mask in (CAUSAL, FULL):
        assert torch.equal(sp.attention(q, k, v, mask=mask), sp.attention(q, k, v, mask.causal))


# ---- shards of any length


# of 2 CP ranks, and the numbers of queries and keys
SHARDS = (
    (UnevenShards([[(0, 1, 31)], [(31, 1, 12)]]), (43, 43)),
    (UnevenShards([[(0, 1, 3)], [(3, 1, 10)]], [[(0, 1, 29)], [(29, 1, 14)]]), (13, 43)),
)


def held(sp, shards, lengths):
    """(whole q, k, v and do), and this rank's positions of each."""
    (q, _, _, do), (_, k, v, _) = (oracle.tensors(2, n, HEADS, seed=n) for n in lengths)
    here, there = (positions(sp, shards, side) for side in ("q", "kv"))
    return (q, k, v, do), (here, there, there, here)


# ---- documents with parents


def rows(lengths, parents, q, k, v, do):
    """(out, dq, dk, dv) of the documents, each in a row of its own behind copies of those that it sees."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    pieces, outs = [x.split(lengths, dim=1) for x in leaves], []
    for document in range(len(lengths)):
        path = [document]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        row = (torch.cat([of[number] for number in path], 1) for of in pieces)
        outs.append(oracle.attention(*row)[:, -lengths[document] :])
    out = torch.cat(outs, 1)
    return out.detach(), *torch.autograd.grad(out, leaves, do)


@on_each_of(4)
def test_documents_with_parents_are_rows_that_repeat_them():
    """And position_ids go on from a parent's end."""
    for lengths, parents, settings in (
        ((13, 5, 4, 7, 6, 3, 9), (-1, 0, 1, 1, 0, -1, 5), {"layout": "balanced"}),
        ((16, 4, 4, 4), (-1, 0, 0, 0), {"layout": "zigzag", "ulysses": 2, "rotate_forward": "q"}),
        ((3, 1, 2, 3, 1), (-1, 0, 1, 2, 0), {"schedule": "mesh", "layout": "contiguous", "ulysses": 1}),
    ):
        sp, whole = make(**settings), oracle.tensors(1, sum(lengths), HEADS)
        placement = sp.place(sum(lengths), lengths, parents=parents)
        found = attend(sp, *whole, placement=placement, mask=placement.mask)
        oracle.assert_exact(found, rows(lengths, parents, *whole), lengths, least=1.0)
        ids = sp.gather(sp.position_ids(0, placement)[None], 1, placement)[0].split(lengths)
        before = []
        for number, length in enumerate(lengths):
            before.append(0 if parents[number] < 0 else before[parents[number]] + lengths[parents[number]])
            assert torch.equal(ids[number], before[number] + torch.arange(length))
        assert placement.longest == max(map(sum, zip(before, lengths, strict=True)))


@on_each_of(2)
def test_backward_does_not_need_the_caller_to_keep_mask_and_shards():
    sp, (shards, lengths), mask = make(), SHARDS[0], Mask(window=4)
    whole, at = held(sp, shards, lengths)
    expected = oracle.dense(*whole, mask=mask)[1]
    local = [x.index_select(1, p).requires_grad_() for x, p in zip(whole[:3], at, strict=False)]
    out = sp.attention(*local, mask=dataclasses.replace(mask), shards=copy.copy(shards))
    gc.collect()
    out.backward(whole[3].index_select(1, at[3]))
    oracle.assert_exact([local[0].grad], [expected.index_select(1, at[0])])


# ---- compiled


@on_each_of(2, timeout=200, keep=None)
def test_masks_are_compiled():
    """A function that is given another mask at each call, one that makes its mask itself, and wrong masks."""
    sp, whole = make(), oracle.tensors(1, SEQ, (4, 2))
    q, k, v, do = whole
    doubled = q, k, v, do / 2  # the compiled functions give twice attention's result

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def given(q, k, v, mask):
        return sp.attention(q, k, v, mask=mask) * 2.0

    @functools.partial(torch.compile, backend="aot_eager")
    def made(q, k, v, mask):
        return sp.attention(q, k, v, mask=Mask(window=6)) * 2.0

    fields_of_given = (
        {"window": 5},
        {"window": 5},
        {"documents": (0, 7, 30)},
        {"window": 5, "blocks": ((2, 11), (12, 20))},
        {},
    )
    for function, fields in (*((given, fields) for fields in fields_of_given), (made, {"window": 6})):

        def way(*tensors, function=function, fields=fields):
            out = function(*tensors, Mask(**fields))
            gc.collect()  # the mask is the caller's, who has dropped it
            return out

        out, *grads = attend(sp, *doubled, way=way)
        oracle.assert_exact([out / 2, *grads], oracle.dense(*whole, mask=Mask(**fields)), fields)
        assert function is made or not sum(counters["graph_break"].values())
    loose = torch.compile(lambda *given, **options: sp.attention(*given, **options) * 1.0, backend="aot_eager")
    for options, kind, word in (
        ({"mask": "window"}, "InputError", "got 'window'"),
        ({"mask": Mask(window=3 + sp.rank)}, "DisagreementError", "window 4"),
        ({"shards": [[(0, 1, 4)]] * 2}, "InputError", "UnevenShards"),
    ):
        assert lacking(refusal(loose, *leaves(sp, q, k, v), **options), kind, word) == []


@on_each_of(2, timeout=200, keep=None)
def test_shards_are_compiled():
    """Of any length; other shards at the second call."""
    sp = make(ulysses=1)

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def function(q, k, v, shards):
        return sp.attention(q, k, v, shards=shards) * 1.0

    for shards, lengths in SHARDS:
        whole, at = held(sp, shards, lengths)
        out = function(*(x.index_select(1, p) for x, p in zip(whole[:3], at, strict=False)), shards)
        assert (out - oracle.attention(*whole[:3]).index_select(1, at[0])).abs().max() < 1e-10


@on_each_of(2)
def test_lengths_and_dims_may_be_numbers_of_arrays_and_tensors():
    sp = make(ulysses=1)
    for number in (numpy.int64, torch.tensor):
        assert sp.place(number(16)) is None
        placed = sp.place(number(17), number([9, 8]))
        assert placed == sp.place(17, (9, 8))
        assert torch.equal(sp.position_ids(number(16)), sp.position_ids(16))
        x = torch.arange(34).view(2, 17)
        assert torch.equal(sp.gather(sp.shard(x, number(1), placed), number(1), placed), x)
    for wrong in (torch.tensor([16]) == 16, 16.0, numpy.array([16, 16])):
        assert lacking(refusal(sp.place, wrong), "InputError", "a whole number of tokens") == []
