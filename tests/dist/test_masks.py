"""Masks and shards of any length over real gloo processes: equal to dense attention, or one sentence on every rank."""

import gc

import numpy
import pytest
import torch
from torch._dynamo.utils import counters

from ds_seqpar.compiler.layout import Run
from ds_seqpar.compiler.masks import CAUSAL, FULL, Mask
from ds_seqpar.compiler.shards import EvenShards, UnevenShards, members_positions
from ds_seqpar.errors import ConfigError
from tests import oracle
from tests.dist.ranks import (
    WRONG,
    assert_all_refused,
    differ,
    everywhere,
    gather_all,
    is_one_sentence,
    leaves,
    make,
    only_one,
    refusal,
    try_all,
)
from tests.grids import cover, whole
from tests.launch import on_warm_ranks as on_ranks
from tests.words import missing

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
    "ring, q travels": {"schedule": "ring", "layout": "striped", "forward": "q", "backward": "q"},
    "mesh": {"schedule": "mesh", "mesh": [1, 2, 1]},
    "distflash": {"schedule": "distflash"},
}
RANKS = {4: {**{name: {**SETTINGS[name], "ulysses": 2} for name in SETTINGS},
             "four in a mesh": {"schedule": "mesh", "mesh": [2, 2, 1], "ulysses": 1},
             "four in a ring": {"schedule": "ring", "overlap": True, "ulysses": 1},
             "four in distflash": {"schedule": "distflash", "ulysses": 1}}}  # fmt: skip


def fits(case, mask):
    return mask.causal or case["schedule"] != "distflash"


def gaps(found, whole, **options):
    """The greatest error of (out, dq, dk, dv)."""
    return max(oracle.errors(found, oracle.dense(*whole, **options)))


def attend(sp, whole, mask):
    local = leaves(sp, *whole[:3])
    out = sp.attention(*local, mask=mask)
    out.backward(sp.shard(whole[3], 1))
    return gather_all(sp, out, *(x.grad for x in local))


def masked(cases):
    """By case, which names settings and a mask: the greatest error."""
    found, inputs, sps = {}, oracle.tensors(2, SEQ, HEADS), {}
    for name, word in cases:
        if name not in sps:
            sps[name] = make(**RANKS[4][name])
        found[name, word] = gaps(attend(sps[name], inputs, MASKS[word]), inputs, mask=MASKS[word])
    return found


PAIRS = [(name, word) for name in RANKS[4] for word in MASKS if fits(RANKS[4][name], MASKS[word])]


# every third pair has all settings and all masks
@pytest.mark.parametrize(
    "cases", [PAIRS[::3], pytest.param(PAIRS[1::3] + PAIRS[2::3], marks=pytest.mark.whole)], ids=["few", "rest"]
)
def test_masks_are_exact_on_every_kind_of_schedule(cases):
    for found in on_ranks(4, masked, cases):
        assert len(found) == len(cases)
        assert {case: error for case, error in found.items() if not error < 1e-10} == {}


def test_causal_and_full_are_masks_too():
    for error in on_ranks(2, short_forms):
        assert error == 0


def short_forms():
    sp, (q, k, v, _) = make(), oracle.tensors(1, 8, (4, 2))
    pairs = [(sp.attention(q, k, v, mask=mask), sp.attention(q, k, v, mask.causal)) for mask in (CAUSAL, FULL)]
    return max(oracle.error(*pair) for pair in pairs)


# ---- shards of any length


def runs_of(*lengths):
    """One run a rank, of so many tokens each."""
    starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
    return [[Run(start, 1, length)] if length else [] for start, length in zip(starts, lengths, strict=True)]


# name -> shards of 2 inner ranks, (queries, keys)
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
    inner, member = sp.runtime.rank, sp.topology.index(sp.rank, "ulysses")
    return torch.tensor(members_positions(shards, side, inner, sp.config.ulysses)[member], dtype=torch.int64)


def attend_shards(sp, shards, whole, mask, **options):
    """What `sp.attention` gives, the leaves, and the positions of q and of k/v."""
    places = [held(sp, shards, side) for side in ("q", "kv")]
    local = [
        x.index_select(1, at).requires_grad_() for x, at in zip(whole[:3], (places[0], *places[1:] * 2), strict=True)
    ]
    return sp.attention(*local, mask=mask, shards=shards, **options), local, places


def shards_gap(sp, shards, lengths, mask):
    """The greatest error of this rank's part of (out, dq, dk, dv)."""
    whole = tensors(*lengths)
    out, local, (q, kv) = attend_shards(sp, shards, whole, mask)
    out.backward(whole[3].index_select(1, q))
    gaps = []
    parts = zip((out.detach(), *(x.grad for x in local)), oracle.dense(*whole, mask=mask), (q, q, kv, kv), strict=True)
    for mine, all_of_it, at in parts:
        assert mine.shape == (2, len(at), *all_of_it.shape[2:])
        # a rank may hold none, and what it holds may have no gradient
        gaps.append(float((mine - all_of_it.index_select(1, at)).abs().sum() / all_of_it.abs().max().clamp(min=1e-3)))
    return max(gaps)


def uneven(settings, shards_of_ranks, cases):
    """By case, which names settings, shards and mask: the error, or what was said."""
    found, sps = {}, {name: make(**setting) for name, setting in settings.items()}
    for case in cases:
        shards, lengths = shards_of_ranks[case["shards"]]
        try:
            said = shards_gap(sps[case["settings"]], shards, lengths, OF_SHARDS[case["mask"]])
        except ConfigError as error:
            said = str(error)
        found[case["settings"], case["shards"], case["mask"]] = said
    return found


def backwards_only(shards, lengths, mask):
    """Whether no rank's queries see keys of a later rank: what distflash can do."""
    seen, ranks = oracle.seen(mask, *map(range, lengths)), range(shards.size)
    at = {side: [torch.tensor([p for p in places(shards, side, r)]).long() for r in ranks] for side in ("q", "kv")}
    return not any(seen[at["q"][i]][:, at["kv"][j]].any() for i in ranks for j in ranks if j > i)


def places(shards, side, inner):
    return members_positions(shards, side, inner, 1)[0]


@pytest.mark.parametrize(
    ("members", "table", "choose"),
    [
        pytest.param(1, FOUR, cover, id="4-cover"),
        pytest.param(2, TWO, cover, marks=pytest.mark.whole, id="2x2-cover"),
        pytest.param(1, FOUR, whole, marks=pytest.mark.whole, id="4-whole"),
        pytest.param(2, TWO, whole, marks=pytest.mark.whole, id="2x2-whole"),
    ],
)
def test_shards_of_any_length_are_exact(members, table, choose):
    settings = {
        name: {**its, "ulysses": members} for name, its in (UNEVEN_TWO if members == 2 else UNEVEN_FOUR).items()
    }
    cases = choose(settings=tuple(settings), shards=tuple(table), mask=tuple(OF_SHARDS))
    for found in on_ranks(4, uneven, settings, table, cases):
        assert len(found) == len(cases)
        for (name, word, kind), result in found.items():
            if settings[name]["schedule"] == "distflash" and not backwards_only(*table[word], OF_SHARDS[kind]):
                assert missing(result, "distflash", "causal", "block") == []
                assert is_one_sentence(result)
            else:
                assert result < 1e-10, (name, word, kind)


UNEVEN_TWO = {name: SETTINGS[name] for name in ("ring", "mesh", "distflash")}
UNEVEN_FOUR = {
    "ring": {"schedule": "ring", "forward": "q", "backward": "q"},
    "mesh": {"schedule": "mesh", "mesh": [2, 2, 1]},
    "distflash": {"schedule": "distflash"},
}


def lse_of_shards():
    """The error of every rank's lse, with and without Ulysses."""
    errors, mask = [], Mask(window=6)
    for members, table in ((2, TWO), (1, FOUR)):
        sp = make(ulysses=members)
        for shards, lengths in table.values():
            q, k, v, do = tensors(*lengths)
            (_, lse), _, (at, _) = attend_shards(sp, shards, (q, k, v, do), mask, return_lse=True)
            keys = k.repeat_interleave(HEADS[0] // HEADS[1], dim=2)
            scores = torch.einsum("bqhd,bkhd->bqhk", q, keys) * q.shape[3] ** -0.5
            scores = scores.masked_fill(~oracle.seen(mask, *map(range, lengths))[:, None], float("-inf"))
            expected = scores.logsumexp(-1).index_select(1, at)
            assert lse.shape == expected.shape
            assert torch.equal(lse.isneginf(), expected.isneginf())
            errors.append((lse - expected).nan_to_num(neginf=0.0, posinf=float("inf")).abs().sum().item())
    return max(errors)


def test_lse_of_shards_of_any_length():
    assert max(on_ranks(4, lse_of_shards)) < 1e-10


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
        everywhere("InputError", "documents", "16 tokens", "at 16"),
    ),
    "one rank's documents": (
        instead({}, {"mask": Mask(documents=(0, 99))}),
        only_one("InputError", "documents", "16 tokens", "at 99"),
    ),
    "a tensor for a mask": (
        asked(mask=torch.ones(4, 4, dtype=torch.bool)),
        everywhere("InputError", "Mask", "got a tensor"),
    ),
    "one rank's word for a mask": (
        instead({}, {"mask": "window"}),
        only_one("InputError", "Mask", "got 'window'"),
    ),
    "an array for a mask": (
        asked(mask=numpy.ones((9, 9))),
        everywhere("InputError", "Mask", "got array(["),
    ),
    "shards of other ranks": (
        asked(shards=UnevenShards(runs_of(4, 12))),
        everywhere("InputError", "shards", "4 inner ranks", "2 ranks"),
    ),
    "a list for shards": (
        asked(shards=runs_of(4, 4, 4, 4)),
        everywhere("InputError", "UnevenShards", "got list"),
    ),
    "one rank's tensor for shards": (
        instead({"shards": EVEN}, {"shards": torch.zeros(4)}),
        only_one("InputError", "UnevenShards", "got Tensor"),
    ),
    "a named layout for shards": (
        asked(shards=EvenShards("zigzag", 16, 4)),
        everywhere("InputError", "UnevenShards", "got EvenShards"),
    ),
    "shards": (
        instead({"shards": EVEN}, {"shards": UnevenShards(runs_of(3, 4, 5, 4))}),
        differ("shards 'of 4 ranks"),
    ),
    "shards on one rank": (instead({}, {"shards": EVEN}), differ("no shards", "shards 'of 4 ranks")),
    "one rank's head_dim": (
        instead({"shards": EVEN}, {"shards": EVEN, "dim": 16}),
        differ("q '(1, 4, 8)", "q '(1, 4, 16)"),
    ),
    "one rank's tokens": (
        instead({"shards": EVEN}, {"shards": EVEN, "tokens": 5}),
        only_one("InputError", "shards", "4 of q", "5 and 5"),
    ),
    "one rank's keys": (
        instead({"shards": EVEN}, {"shards": EVEN, "keys": 5}),
        only_one("InputError", "shards", "4 of k", "4 and 5"),
    ),
    "keys of another length without shards": (
        asked(keys=5),
        everywhere("InputError", "but for head_dim", "k (1, 5, 2, 8)"),
    ),
}
EACH = [{"tokens": tokens} for tokens in (4, 3, 5, 4)]

# on distflash
CANNOT = {
    "full": (asked(mask=FULL), everywhere("ConfigError", "distflash", "causal", "block")),
    "a window to both sides": (
        asked(mask=Mask(causal=False, window=20)),
        everywhere("ConfigError", "distflash", "causal", "block"),
    ),
    "shards out of order": (
        asked(shards=UnevenShards(runs_of(4, 4, 4, 4)[::-1])),
        everywhere("ConfigError", "distflash", "causal", "block"),
    ),
    "one rank's mask": (instead({}, {"mask": FULL}), only_one("ConfigError", "distflash", "causal", "block")),
}


def refuse():
    ring = make(ulysses=1)
    found = try_all(REFUSED, ring)
    good = attention(ring, **EACH[ring.rank], shards=SHARDS, mask=Mask(documents=(0, 4, 15)))
    return found, try_all(CANNOT, make(ulysses=1, schedule="distflash")), tuple(good.shape)


def test_what_does_not_fit_is_refused_on_every_rank():
    found, cannot, shapes = zip(*on_ranks(4, refuse), strict=True)
    assert_all_refused(REFUSED, found)
    assert_all_refused(CANNOT, cannot)
    assert list(shapes) == [(1, each["tokens"], 4, 8) for each in EACH]


def members_tokens_refused():
    """Where two Ulysses members share an inner rank's tokens, each has its own number of them."""
    sp = make(ulysses=2)
    shards = UnevenShards(runs_of(5, 6))
    right = [(2, 3), (3, 3)][sp.runtime.rank][sp.topology.index(sp.rank, "ulysses")]
    good = attention(sp, right, shards=shards).shape[1]
    return good == right, refusal(attention, sp, right + (sp.rank == WRONG), shards=shards)


def test_members_tokens_must_be_their_own():
    for rank, (good, (kind, message)) in enumerate(on_ranks(4, members_tokens_refused)):
        assert good
        assert kind == ("InputError" if rank == WRONG else "DisagreementError")
        assert missing(message, "shards", "3 of q", "4 and 4") == [], message


def dropped():
    """The error of gradients whose mask and shards nobody holds any more."""
    sp, whole = make(), tensors(*TWO["other lengths"][1])
    shards, mask = UnevenShards(runs_of(31, 12)), Mask(window=4)
    expected = oracle.dense(*whole, mask=mask)[1]
    out, local, (at, _) = attend_shards(sp, shards, whole, mask)
    del shards, mask
    gc.collect()
    out.backward(whole[3].index_select(1, at))
    return oracle.error(local[0].grad, expected.index_select(1, at))


def test_backward_does_not_need_the_caller_to_keep_mask_and_shards():
    assert max(on_ranks(2, dropped)) < 1e-10


# ---- compiled


def compiled(settings):
    """(greatest error of a compiled function that is given another mask at each call, graph breaks, that of one which
    makes its mask itself, and what is said of a mask that is none)."""
    sp, errors = make(**settings), []
    function = torch.compile(
        lambda q, k, v, mask: sp.attention(q, k, v, mask=mask) * 2.0, backend="aot_eager", fullgraph=True
    )
    whole = oracle.tensors(1, SEQ, (4, 2))
    for fields in ({"window": 5}, {"window": 5}, {"window": 9}, {"documents": (0, 7, 30)}, {}):
        local = leaves(sp, *whole[:3])
        out = function(*local, Mask(**fields)) / 2.0
        gc.collect()  # the mask is the caller's, who has dropped it
        out.backward(sp.shard(whole[3], 1))
        found = gather_all(sp, out, *(x.grad for x in local))
        errors.append(gaps(found, whole, mask=Mask(**fields)))
    breaks = sum(counters["graph_break"].values())
    inside = torch.compile(lambda q, k, v: sp.attention(q, k, v, mask=Mask(window=6)) * 2.0, backend="aot_eager")
    local = leaves(sp, *whole[:3])
    out = inside(*local) / 2.0
    out.backward(sp.shard(whole[3], 1))
    made = gaps(gather_all(sp, out, *(x.grad for x in local)), whole, mask=Mask(window=6))
    loose = torch.compile(lambda *given, **options: sp.attention(*given, **options) * 1.0, backend="aot_eager")
    told = [
        refusal(loose, *leaves(sp, *whole[:3]), **options)
        for options in ({"mask": "window"}, {"mask": Mask(window=3 + sp.rank)}, {"shards": [[(0, 1, 4)]] * 2})
    ]
    return max(errors), breaks, made, told


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"ulysses": 2}, marks=pytest.mark.whole)], ids=["ring", "ulysses"]
)
def test_masks_are_compiled(settings):
    expected = [("InputError", "got 'window'"), ("DisagreementError", "window 4"), ("InputError", "UnevenShards")]
    for error, breaks, made, told in on_ranks(2, compiled, settings, timeout=200, keep=None):
        assert max(error, made) < 1e-10
        assert breaks == 0
        for (kind, message), (wanted, word) in zip(told, expected, strict=True):
            assert kind == wanted, message
            assert word in message
            assert is_one_sentence(message)


def compiled_shards(members):
    """The greatest error of attention over shards of any length, compiled; another shards at the second call."""
    sp, found = make(ulysses=members), []
    function = torch.compile(
        lambda q, k, v, shards: sp.attention(q, k, v, shards=shards) * 1.0, backend="aot_eager", fullgraph=True
    )
    for name in ("other lengths", "more keys than queries"):
        shards, lengths = TWO[name]
        whole = tensors(*lengths)
        at = [held(sp, shards, side) for side in ("q", "kv", "kv")]
        out = function(*(x.index_select(1, p) for x, p in zip(whole[:3], at, strict=True)), shards)
        found.append((out - oracle.attention(*whole[:3]).index_select(1, at[0])).abs().max().item())
    return max(found)


@pytest.mark.parametrize("members", [1, pytest.param(2, marks=pytest.mark.whole)])
def test_shards_are_compiled(members):
    assert max(on_ranks(2 * members, compiled_shards, members, timeout=200, keep=None)) < 1e-10
