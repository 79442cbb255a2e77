"""Masks and shards of any length on real ranks: compiled graphs, and what is refused on every rank."""

import functools
import gc

import numpy
import torch
from torch._dynamo.utils import counters

from ds_seqpar.core.compiler.sharding.layout import Run
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, FULL, Mask
from ds_seqpar.core.compiler.sharding.shards import EvenShards, UnevenShards
from tests import oracle
from tests.dist.ranks import (
    WRONG,
    assert_all_refused,
    attend,
    differ,
    everywhere,
    lacking,
    leaves,
    make,
    only_one,
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


def runs_of(*lengths):
    """One run a rank, of so many tokens each."""
    starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
    return [[Run(start, 1, length)] if length else [] for start, length in zip(starts, lengths, strict=True)]


# shards of 2 CP ranks, with the lengths of (queries, keys)
TWO = (
    (UnevenShards(runs_of(31, 12)), (43, 43)),
    (UnevenShards(runs_of(3, 10), runs_of(29, 14)), (13, 43)),
    (UnevenShards(runs_of(22, 21), runs_of(4, 9)), (43, 13)),
    (UnevenShards(runs_of(24, 0)), (24, 24)),
)


def tensors(queries, keys, heads=HEADS):
    """(q, k, v, do) of these lengths."""
    q, _, _, do = oracle.tensors(2, queries, heads, seed=1)
    _, k, v, _ = oracle.tensors(2, keys, heads, seed=2)
    return q, k, v, do


def held(sp, shards, side):
    """The global positions of this rank's tokens."""
    inner, ulysses_rank = sp.runtime.rank, sp.topology.index(sp.rank, "ulysses")
    return torch.tensor(
        oracle.positions_by_ulysses_rank(shards, side, inner, sp.config.ulysses)[ulysses_rank], dtype=torch.int64
    )


def attend_shards(sp, shards, whole, mask, **options):
    """What `sp.attention` gives, the leaves, and the positions of q and of k/v."""
    places = [held(sp, shards, side) for side in ("q", "kv")]
    local = [
        x.index_select(1, at).requires_grad_() for x, at in zip(whole[:3], (places[0], *places[1:] * 2), strict=True)
    ]
    return sp.attention(*local, mask=mask, shards=shards, **options), local, places


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


# ---- what is refused


def attention(sp, tokens=4, keys=None, dim=8, **options):
    """sp.attention with good local tensors, but for what a case asks for."""
    q, k, v = (
        oracle.tensors(1, n, (4, 2), dim)[i].requires_grad_() for i, n in enumerate((tokens, *[keys or tokens] * 2))
    )
    return sp.attention(q, k, v, **options)


def asked(**options):
    return lambda sp, rank: attention(sp, **options)


def instead(usual, wrong):
    """The wrong rank is given something else than the others."""
    return lambda sp, rank: attention(sp, **(wrong if rank == WRONG else usual))


SHARDS = UnevenShards(runs_of(4, 3, 5, 4))
EVEN = UnevenShards(runs_of(4, 4, 4, 4))
WINDOW = {"mask": Mask(window=5)}

# name -> (what a rank calls, what it is to be told); 4 ranks with 4 tokens each
REFUSED = {
    "windows": (instead(WINDOW, {"mask": Mask(window=6)}), differ("window 5", "window 6")),
    "a mask on one rank": (instead({}, WINDOW), differ("no mask")),
    "documents": (instead({"mask": Mask(documents=(0, 5))}, {"mask": Mask(documents=(0, 6))}), differ("2 documents")),
    "parents": (
        instead({"mask": Mask(documents=(0, 5))}, {"mask": Mask(documents=(0, 5), parents=(-1, 0))}),
        differ("2 documents with parents"),
    ),
    "causal or not": (instead({"mask": FULL}, {"mask": Mask(causal=False, window=5)}), differ("window 5")),
    "documents beyond the sequence": (asked(mask=Mask(documents=(0, 4, 16))), everywhere("at 16")),
    "one rank's documents": (instead({}, {"mask": Mask(documents=(0, 99))}), only_one("at 99")),
    "a tensor for a mask": (asked(mask=torch.ones(4, 4, dtype=torch.bool)), everywhere("got a tensor")),
    "one rank's word for a mask": (instead({}, {"mask": "window"}), only_one("got 'window'")),
    "an array for a mask": (asked(mask=numpy.ones((9, 9))), everywhere("got array([")),
    "shards of other ranks": (asked(shards=UnevenShards(runs_of(4, 12))), everywhere("2 ranks")),
    "a list for shards": (asked(shards=runs_of(4, 4, 4, 4)), everywhere("got list")),
    "one rank's tensor for shards": (instead({"shards": EVEN}, {"shards": torch.zeros(4)}), only_one("got Tensor")),
    "a named layout for shards": (asked(shards=EvenShards("zigzag", 16, 4)), everywhere("got EvenShards")),
    "shards": (instead({"shards": EVEN}, {"shards": UnevenShards(runs_of(3, 4, 5, 4))}), differ("shards 'of 4 ranks")),
    "shards on one rank": (instead({}, {"shards": EVEN}), differ("no shards")),
    "one rank's head_dim": (instead({"shards": EVEN}, {"shards": EVEN, "dim": 16}), differ("q '(1, 4, 16)")),
    "one rank's tokens": (instead({"shards": EVEN}, {"shards": EVEN, "tokens": 5}), only_one("5 and 5")),
    "one rank's keys": (instead({"shards": EVEN}, {"shards": EVEN, "keys": 5}), only_one("4 and 5")),
    "keys of another length without shards": (asked(keys=5), everywhere("k (1, 5, 2, 8)")),
}
EACH = [{"tokens": tokens} for tokens in (4, 3, 5, 4)]

FULL_IS_REFUSED = "distflash", "causal"
CANNOT = {
    "full": (asked(mask=FULL), everywhere(*FULL_IS_REFUSED, kind="ConfigError")),
    "one rank's mask": (instead({}, {"mask": FULL}), only_one(*FULL_IS_REFUSED, kind="ConfigError")),
}


@on_each_of(4)
def test_what_does_not_fit_is_refused_on_every_rank():
    ring = make(ulysses=1)
    assert_all_refused(REFUSED, ring)
    good = attention(ring, **EACH[ring.rank], shards=SHARDS, mask=Mask(documents=(0, 4, 15)))
    assert good.shape == (1, EACH[ring.rank]["tokens"], 4, 8)
    assert_all_refused(CANNOT, make(ulysses=1, schedule="distflash"))


@on_each_of(4)
def test_members_tokens_must_be_their_own():
    """Where two Ulysses ranks share a CP rank's tokens, each has its own number of them."""
    sp = make(ulysses=2)
    shards = UnevenShards(runs_of(5, 6))
    right = [(2, 3), (3, 3)][sp.runtime.rank][sp.topology.index(sp.rank, "ulysses")]
    assert attention(sp, right, shards=shards).shape[1] == right
    kind = "InputError" if sp.rank == WRONG else "DisagreementError"
    refused = refusal(attention, sp, right + (sp.rank == WRONG), shards=shards)
    assert lacking(refused, kind, "shards", "3 of q", "4 and 4") == []


@on_each_of(2)
def test_backward_does_not_need_the_caller_to_keep_mask_and_shards():
    sp, whole = make(), tensors(*TWO[0][1])
    shards, mask = UnevenShards(runs_of(31, 12)), Mask(window=4)
    expected = oracle.dense(*whole, mask=mask)[1]
    out, local, (at, _) = attend_shards(sp, shards, whole, mask)
    del shards, mask
    gc.collect()
    out.backward(whole[3].index_select(1, at))
    oracle.assert_exact([local[0].grad], [expected.index_select(1, at)])


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

    for shards, lengths in TWO[:2]:
        whole = tensors(*lengths)
        at = [held(sp, shards, side) for side in ("q", "kv", "kv")]
        out = function(*(x.index_select(1, p) for x, p in zip(whole[:3], at, strict=True)), shards)
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
