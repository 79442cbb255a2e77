"""Masks and shards of any length over real gloo processes: equal to dense attention, or one sentence on every rank."""

import functools
import gc
import itertools

import numpy
import pytest
import torch
from torch._dynamo.utils import counters

from ds_seqpar.compiler.sharding.layout import Run
from ds_seqpar.compiler.sharding.masks import CAUSAL, FULL, Mask
from ds_seqpar.compiler.sharding.shards import EvenShards, UnevenShards
from tests import oracle
from tests.dist.ranks import (
    WRONG,
    assert_all_refused,
    assert_exact,
    attend,
    differ,
    everywhere,
    lacking,
    leaves,
    make,
    only_one,
    refusal,
)
from tests.grids import cover, whole
from tests.launch import on_each_of

SEQ, HEADS = 48, (8, 4)
MASKS = {
    "window": Mask(window=7),
    "window of two": Mask(window=2),
    "documents": Mask(documents=(0, 5, 24, 31)),
    "both": Mask(window=9, documents=(0, 20, 21, 40)),
    "not causal": Mask(causal=False, window=6, documents=(0, 17)),
}
SETTINGS = {
    "ring": {"schedule": "ring"},
    "ring, q travels": {"schedule": "ring", "layout": "striped", "rotate_forward": "q", "rotate_backward": "q"},
    "mesh": {"schedule": "mesh", "mesh": [1, 2, 1]},
    "distflash": {"schedule": "distflash"},
}
RANKS = {
    **{name: {**SETTINGS[name], "ulysses": 2} for name in SETTINGS},
    "four in a mesh": {"schedule": "mesh", "mesh": [2, 2, 1], "ulysses": 1},
    "four in a ring": {"schedule": "ring", "overlap": True, "ulysses": 1},
    "four in distflash": {"schedule": "distflash", "ulysses": 1},
}
PAIRS = [
    (name, word) for name in RANKS for word in MASKS if MASKS[word].causal or RANKS[name]["schedule"] != "distflash"
]


# every third pair has all settings and all masks
@pytest.mark.parametrize(
    "cases", [PAIRS[::3], pytest.param(PAIRS[1::3] + PAIRS[2::3], marks=pytest.mark.whole)], ids=["few", "rest"]
)
@on_each_of(4)
def test_masks_are_exact_on_every_kind_of_schedule(cases):
    for name, pairs in itertools.groupby(cases, lambda case: case[0]):
        sp = make(**RANKS[name])
        for _, word in pairs:
            assert_exact(sp, oracle.tensors(2, SEQ, HEADS), mask=MASKS[word])


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


# name -> shards of 2 CP ranks, (queries, keys)
TWO = {
    "other lengths": (UnevenShards(runs_of(31, 12)), (43, 43)),
    "more keys than queries": (UnevenShards(runs_of(3, 10), runs_of(29, 14)), (13, 43)),
    "more queries than keys": (UnevenShards(runs_of(22, 21), runs_of(4, 9)), (43, 13)),
    "a rank without queries": (UnevenShards(runs_of(0, 24), runs_of(20, 4)), (24, 24)),
    "a rank without anything": (UnevenShards(runs_of(24, 0)), (24, 24)),
    "several runs": (UnevenShards([[Run(0, 1, 5), Run(30, 1, 10)], [Run(5, 1, 25)]]), (40, 40)),
    "every other token": (UnevenShards([[Run(0, 2, 12)], [Run(1, 2, 11)]]), (23, 23)),
    "one token": (UnevenShards(runs_of(0, 1), runs_of(13, 8)), (1, 21)),
}
FOUR = {
    "other lengths": (UnevenShards(runs_of(3, 17, 9, 14)), (43, 43)),
    "ranks without queries": (UnevenShards(runs_of(0, 11, 0, 6), runs_of(5, 17, 12, 9)), (17, 43)),
    "several runs": (
        UnevenShards([[Run(0, 1, 5), Run(30, 1, 10)], [Run(5, 1, 5)], [Run(25, 1, 5)], [Run(10, 1, 15)]]),
        (40, 40),
    ),
}
OF_SHARDS = {"causal": CAUSAL, "full": FULL, "window": Mask(window=6), "documents": Mask(documents=(0, 3, 11))}


def tensors(queries, keys):
    """(q, k, v, do) of these lengths."""
    q, _, _, do = oracle.tensors(2, queries, HEADS, seed=1)
    _, k, v, _ = oracle.tensors(2, keys, HEADS, seed=2)
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


def shards_gap(sp, shards, whole, mask):
    """The greatest error of this rank's part of (out, dq, dk, dv)."""
    out, local, (q, kv) = attend_shards(sp, shards, whole, mask)
    out.backward(whole[3].index_select(1, q))
    gaps = []
    parts = zip((out.detach(), *(x.grad for x in local)), oracle.dense(*whole, mask=mask), (q, q, kv, kv), strict=True)
    for mine, all_of_it, at in parts:
        assert mine.shape == (2, len(at), *all_of_it.shape[2:])
        # a rank may hold none, and what it holds may have no gradient
        gaps.append(float((mine - all_of_it.index_select(1, at)).abs().sum() / all_of_it.abs().max().clamp(min=1e-3)))
    return max(gaps)


def backwards_only(shards, lengths, mask):
    """Whether no rank's queries see keys of a later rank: what distflash can do."""
    seen, ranks = oracle.seen(mask, *map(range, lengths)), range(shards.size)
    at = {side: [torch.tensor([p for p in places(shards, side, r)]).long() for r in ranks] for side in ("q", "kv")}
    return not any(seen[at["q"][i]][:, at["kv"][j]].any() for i in ranks for j in ranks if j > i)


def places(shards, side, inner):
    return oracle.positions_by_ulysses_rank(shards, side, inner, 1)[0]


UNEVEN = {
    1: {
        "ring": {"schedule": "ring", "rotate_forward": "q", "rotate_backward": "q"},
        "mesh": {"schedule": "mesh", "mesh": [2, 2, 1]},
        "distflash": {"schedule": "distflash"},
    },
    2: {name: SETTINGS[name] for name in ("ring", "mesh", "distflash")},
}


@pytest.mark.parametrize(
    ("ulysses_size", "table", "choose"),
    [
        pytest.param(1, FOUR, cover, id="4-cover"),
        pytest.param(2, TWO, cover, marks=pytest.mark.whole, id="2x2-cover"),
        pytest.param(1, FOUR, whole, marks=pytest.mark.whole, id="4-whole"),
        pytest.param(2, TWO, whole, marks=pytest.mark.whole, id="2x2-whole"),
    ],
)
@on_each_of(4)
def test_shards_of_any_length_are_exact(ulysses_size, table, choose):
    sps = {name: make(**its, ulysses=ulysses_size) for name, its in UNEVEN[ulysses_size].items()}
    for case in choose(settings=tuple(sps), shards=tuple(table), mask=tuple(OF_SHARDS)):
        sp, mask, (shards, lengths) = sps[case["settings"]], OF_SHARDS[case["mask"]], table[case["shards"]]
        if case["settings"] == "distflash" and not backwards_only(shards, lengths, mask):
            refused = refusal(attend_shards, sp, shards, tensors(*lengths), mask)
            assert lacking(refused, "ConfigError", "distflash", "causal", "block") == [], case
        else:
            assert shards_gap(sp, shards, tensors(*lengths), mask) < 1e-10, case


@on_each_of(4)
def test_lse_of_shards_of_any_length():
    """With and without Ulysses."""
    mask = Mask(window=6)
    for ulysses_size, table in ((2, TWO), (1, FOUR)):
        sp = make(ulysses=ulysses_size)
        for name, (shards, lengths) in table.items():
            whole = tensors(*lengths)
            (_, lse), _, (at, _) = attend_shards(sp, shards, whole, mask, return_lse=True)
            expected = oracle.lse(*whole[:2], mask).index_select(1, at)
            assert torch.equal(lse.isneginf(), expected.isneginf()), name
            assert (lse - expected).nan_to_num(neginf=0.0, posinf=float("inf")).abs().sum() < 1e-10, name


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
    "windows": (instead(WINDOW, {"mask": Mask(window=6)}), differ("mask", "window 5", "window 6")),
    "a mask on one rank": (instead({}, WINDOW), differ("no mask", "window 5")),
    "documents": (
        instead({"mask": Mask(documents=(0, 5))}, {"mask": Mask(documents=(0, 6))}),
        differ("mask", "2 documents"),
    ),
    "causal or not": (
        instead({"mask": FULL}, {"mask": Mask(causal=False, window=5)}),
        differ("no mask", "mask 'window 5"),
    ),
    "documents beyond the sequence": (
        asked(mask=Mask(documents=(0, 4, 16))),
        everywhere("documents", "16 tokens", "at 16"),
    ),
    "one rank's documents": (
        instead({}, {"mask": Mask(documents=(0, 99))}),
        only_one("documents", "16 tokens", "at 99"),
    ),
    "a tensor for a mask": (asked(mask=torch.ones(4, 4, dtype=torch.bool)), everywhere("Mask", "got a tensor")),
    "one rank's word for a mask": (instead({}, {"mask": "window"}), only_one("Mask", "got 'window'")),
    "an array for a mask": (asked(mask=numpy.ones((9, 9))), everywhere("Mask", "got array([")),
    "shards of other ranks": (
        asked(shards=UnevenShards(runs_of(4, 12))),
        everywhere("shards", "4 CP ranks", "2 ranks"),
    ),
    "a list for shards": (asked(shards=runs_of(4, 4, 4, 4)), everywhere("UnevenShards", "got list")),
    "one rank's tensor for shards": (
        instead({"shards": EVEN}, {"shards": torch.zeros(4)}),
        only_one("UnevenShards", "got Tensor"),
    ),
    "a named layout for shards": (
        asked(shards=EvenShards("zigzag", 16, 4)),
        everywhere("UnevenShards", "got EvenShards"),
    ),
    "shards": (instead({"shards": EVEN}, {"shards": UnevenShards(runs_of(3, 4, 5, 4))}), differ("shards 'of 4 ranks")),
    "shards on one rank": (instead({}, {"shards": EVEN}), differ("no shards", "shards 'of 4 ranks")),
    "one rank's head_dim": (
        instead({"shards": EVEN}, {"shards": EVEN, "dim": 16}),
        differ("q '(1, 4, 8)", "q '(1, 4, 16)"),
    ),
    "one rank's tokens": (
        instead({"shards": EVEN}, {"shards": EVEN, "tokens": 5}),
        only_one("shards", "4 of q", "5 and 5"),
    ),
    "one rank's keys": (
        instead({"shards": EVEN}, {"shards": EVEN, "keys": 5}),
        only_one("shards", "4 of k", "4 and 5"),
    ),
    "keys of another length without shards": (asked(keys=5), everywhere("but for head_dim", "k (1, 5, 2, 8)")),
}
EACH = [{"tokens": tokens} for tokens in (4, 3, 5, 4)]

# on distflash
CANNOT = {
    "full": (asked(mask=FULL), everywhere("distflash", "causal", "block", kind="ConfigError")),
    "a window to both sides": (
        asked(mask=Mask(causal=False, window=20)),
        everywhere("distflash", "causal", "block", kind="ConfigError"),
    ),
    "shards out of order": (
        asked(shards=UnevenShards(runs_of(4, 4, 4, 4)[::-1])),
        everywhere("distflash", "causal", "block", kind="ConfigError"),
    ),
    "one rank's mask": (instead({}, {"mask": FULL}), only_one("distflash", "causal", "block", kind="ConfigError")),
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
    sp, whole = make(), tensors(*TWO["other lengths"][1])
    shards, mask = UnevenShards(runs_of(31, 12)), Mask(window=4)
    expected = oracle.dense(*whole, mask=mask)[1]
    out, local, (at, _) = attend_shards(sp, shards, whole, mask)
    del shards, mask
    gc.collect()
    out.backward(whole[3].index_select(1, at))
    oracle.assert_exact([local[0].grad], [expected.index_select(1, at)])


# ---- compiled


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"ulysses": 2}, marks=pytest.mark.whole)], ids=["ring", "ulysses"]
)
@on_each_of(2, timeout=200, keep=None)
def test_masks_are_compiled(settings):
    """A function that is given another mask at each call, one that makes its mask itself, and wrong masks."""
    sp, whole = make(**settings), oracle.tensors(1, SEQ, (4, 2))
    q, k, v, do = whole
    doubled = q, k, v, do / 2  # the compiled functions give twice attention's result

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def given(q, k, v, mask):
        return sp.attention(q, k, v, mask=mask) * 2.0

    @functools.partial(torch.compile, backend="aot_eager")
    def made(q, k, v, mask):
        return sp.attention(q, k, v, mask=Mask(window=6)) * 2.0

    fields_of_given = ({"window": 5}, {"window": 5}, {"window": 9}, {"documents": (0, 7, 30)}, {})
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


@pytest.mark.parametrize(("ranks", "ulysses_size"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.whole)])
@on_each_of("ranks", timeout=200, keep=None)
def test_shards_are_compiled(ranks, ulysses_size):
    """Of any length; other shards at the second call."""
    sp = make(ulysses=ulysses_size)

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def function(q, k, v, shards):
        return sp.attention(q, k, v, shards=shards) * 1.0

    for name in ("other lengths", "more keys than queries"):
        shards, lengths = TWO[name]
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
