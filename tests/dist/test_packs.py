"""Packed documents, and lengths that ranks do not divide, over gloo: `sp.shard_batches` places them, attention over its
placement is exact, and what does not fit is one sentence on every rank."""

import dataclasses
import functools
import itertools

import torch
from transformers import DataCollatorWithFlattening

from ds_seqpar.core.compiler.sharding.masks import Mask
from tests import oracle
from tests.dist.ranks import (
    SECONDS,
    WRONG,
    assert_all_refused,
    attend,
    differ,
    everywhere,
    lacking,
    make,
    only_one,
    refusal,
)
from tests.grids import cover
from tests.hf.llama import small
from tests.launch import on_each_of

IGNORE = -100
HEADS = (6, 2)  # which 4 Ulysses ranks do not divide
LAYOUTS = ("balanced", "contiguous", "striped", "zigzag")
WAYS = {
    "ulysses 4": {"ulysses": 4},
    "ulysses 2": {"ulysses": 2},
    "ring, q travels": {"ulysses": 1, "layout": "striped", "rotate_forward": "q", "rotate_backward": "q"},
    "mesh": {"ulysses": 1, "layout": "zigzag", "schedule": "mesh", "mesh": [2, 1, 2]},
    "two groups": {"size": 2, "ulysses": 1},
}
# rows of documents: of one token, longer than a rank's share, as many as tokens, and what divides evenly
PACKS = {
    "rows differ": ((20, 1, 30), (7, 9, 35)),
    "one row": ((3, 1, 1, 40, 8),),
    "of one token": ((1,) * 13, (13,), (6, 7)),
    "even": ((16, 16), (8, 24)),
}
WINDOWS = (None, 1, 5, 99)
FORMS = range(5)  # of what is sharded and gathered
# each way with a pack, each pack with one way or two: virtual ranks have more of them
CASES = [(way, pack) for n, way in enumerate(WAYS) for m, pack in enumerate(PACKS) if (n + m) % 4 == 0]


def collated(pack, seed=0):
    """What a collator gives: rows of documents, each of which counts its own positions. Every token has a label."""
    rows, seq = len(pack), sum(pack[0])
    ids = torch.randint(3, 64, (rows, seq), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": restarts(pack)}


def restarts(pack):
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in pack])


def next_in_document(labels, pack):
    """Each label at the token before it, if that is of its document."""
    parts = [row.split(list(lengths)) for row, lengths in zip(labels, pack, strict=True)]
    end = torch.full((1,), IGNORE)
    return torch.stack([torch.cat([torch.cat([part[1:], end]) for part in row]) for row in parts])


def dense(pack, whole, window):
    """(out, dq, dk, dv) of rows that each have their own mask."""
    found = []
    for row, lengths in enumerate(pack):
        mask = Mask(window=window, documents=Mask.documents_of(lengths))
        found.append(oracle.dense(*(x[row : row + 1] for x in whole), mask=mask))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


# ---- right


def assert_whole(sp, shard, expected, placement):
    """The shards' tensors, put together again, are the expected ones."""
    local = torch.stack([shard[name].expand(shard["labels"].shape) for name in expected], dim=2)
    for name, x in zip(expected, sp.gather(local, 1, placement).unbind(2), strict=True):
        assert torch.equal(x, expected[name]), name


def assert_undone(sp, placement, rows, seq, form):
    """gather undoes shard, of a tensor of one of `FORMS` kinds of dims."""
    whole = torch.arange(3 * rows * seq * 2).view(3, rows, seq, 2)
    x, dim = [(whole[0], 1), (whole[0, :, :, 0], 1), (whole, 2), (whole, -2), (whole[..., 0], -1)][form]
    assert torch.equal(sp.gather(sp.shard(x, dim, placement), dim, placement), x), form


# axolotl#3608: packed documents attended to one another, loss 1.83 times too large; TransformerEngine#1930: packing
# with context parallelism wrong; verl#6475: labels leaked from one packed sample into the next; verl#6068: labels
# rolled after slicing; TRL PR 6812: positions began at 0 on every shard
@on_each_of(4, timeout=200)
def test_packed_rows_are_placed_and_attention_over_them_is_exact():
    """Each case with a window and a kind of tensor that is gathered, in turn."""
    turns, forms = itertools.cycle(WINDOWS), itertools.cycle(FORMS)
    for way, names in itertools.groupby(CASES, lambda case: case[0]):
        sp = make(**WAYS[way])
        for _, name in names:
            pack = PACKS[name]
            batch, rows, seq = collated(pack, seed=sp.data_rank), len(pack), sum(pack[0])
            shard = sp.shard_batch(batch)
            placement = shard["placement"]
            expected = {**batch, "shift_labels": next_in_document(batch["labels"], pack)}
            assert_whole(sp, shard, expected, placement)
            assert torch.equal(shard["position_ids"][0], sp.position_ids(0, placement))
            labels = sum(length - 1 for row in pack for length in row) * sp.data_size
            assert shard["num_items_in_batch"] == max(labels, 1) / 4
            whole = oracle.tensors(rows, seq, HEADS, 4, seed=sp.data_rank)
            window = next(turns)
            found = attend(sp, *whole, placement=placement, mask=placement.mask_with_window(window))
            oracle.assert_exact(found, dense(pack, whole, window), (way, name, window), least=1.0)
            assert_undone(sp, placement, rows, seq, next(forms))


# fewer than ranks, fewer than zigzag's chunks, more
LENGTHS = cover(layout=LAYOUTS, ulysses_size=(1, 2, 4), seq=(1, 7, 53))


# deepspeed#7384, #7842: a sequence length that the ranks do not divide silently corrupts the result
@on_each_of(4, timeout=200)
def test_any_length_is_exact_in_every_layout():
    """What is gathered without the placement is right too."""
    for (layout, ulysses_size), group in itertools.groupby(
        LENGTHS, lambda case: (case["layout"], case["ulysses_size"])
    ):
        sp = make(ulysses=ulysses_size, layout=layout)
        for seq in (case["seq"] for case in group):
            ids = torch.randint(3, 64, (2, seq), generator=torch.Generator().manual_seed(seq))
            shard = sp.shard_batch({"input_ids": ids, "labels": ids.clone()})
            at = torch.arange(seq).expand(2, -1)
            expected = {"input_ids": ids, "position_ids": at, "shift_labels": next_in_document(ids, [(seq,)] * 2)}
            for given in (shard["placement"], None):
                assert_whole(sp, shard, expected, given)
            assert torch.equal(shard["position_ids"][0], sp.position_ids(seq))
            tensors = oracle.tensors(2, seq, HEADS, 4)
            found = attend(sp, *tensors, placement=shard["placement"], mask=shard["placement"].mask)
            oracle.assert_exact(found, oracle.dense(*tensors), (layout, ulysses_size, seq), least=1.0)


# real tokens of two rows of 23, whose documents, if any, follow one another from the first real token on
PADDED = {
    "left": ((0, 23), (9, 23)),
    "right": ((0, 23), (0, 14)),
    "both": ((2, 21), (6, 22)),
    "a row of one token": ((0, 23), (22, 23)),
}


SIDES = {"layout": ("zigzag", "striped"), "side": tuple(PADDED), "cut": (None, 5), "causal": (True, False)}


# TransformerEngine#3331: tail padding dropped real keys; accelerate#4177: a padding mask was discarded
@on_each_of(4, timeout=200)
def test_padding_on_either_side_is_seen_by_nobody():
    """On real tokens: attention is that over each document alone, and their positions and labels are right."""
    for layout, group in itertools.groupby(cover(**SIDES), lambda case: case["layout"]):
        sp = make(layout=layout, ulysses=2 if layout == "zigzag" else 1)
        for case in group:
            assert_unseen(sp, PADDED[case["side"]], case["cut"], case["causal"], case)


def assert_unseen(sp, real, cut, causal, case):
    kept = torch.stack([(torch.arange(23) >= a) & (torch.arange(23) < b) for a, b in real])
    pieces = [
        (row, lo, hi)
        for row, (a, b) in enumerate(real)
        for lo, hi in itertools.pairwise([a, *([a + cut] if cut and a + cut < b else []), b])
    ]
    batch, labels = collated([(23,)] * 2), torch.full((2, 23), IGNORE)
    positions = torch.arange(23).repeat(2, 1) if cut is None else torch.ones(2, 23, dtype=torch.int64)
    for row, lo, hi in pieces:
        labels[row, lo : hi - 1] = batch["labels"][row, lo + 1 : hi]
        if cut is not None:  # padding after the tokens goes on, that before them has ones, as transformers has
            positions[row, lo:] = torch.arange(23 - lo)
    batch |= {"attention_mask": kept.long(), "labels": batch["labels"].masked_fill(~kept, IGNORE)}
    batch["position_ids"] = None if cut is None else positions
    shard = sp.shard_batch(batch, causal=causal)
    placement, (q, k, v, do) = shard["placement"], oracle.tensors(2, 23, HEADS, 4)
    whole = q, k, v, do * kept[..., None, None]
    mine = attend(sp, *whole, placement=placement, mask=placement.mask)
    for row, lo, hi in pieces:
        found, alone = ([x[row : row + 1, lo:hi] for x in of] for of in (mine, whole))
        oracle.assert_exact(found, oracle.dense(*alone, causal), case, least=1.0)
    named = [shard[name].expand(shard["labels"].shape) for name in ("position_ids", "shift_labels")]
    at, shifted = sp.gather(torch.stack(named, dim=2), 1, placement).unbind(2)
    assert torch.equal(at[kept], positions[kept]), case
    assert torch.equal(shifted, labels), case


# what compiling takes is tracing: of each number of rows, on each rank. A ring over shards is compiled in test_masks
@on_each_of(2, timeout=200, keep=None)
def test_attention_over_a_placement_is_compiled():
    """A function that is given one placement after another, of packs and windows."""
    sp = make(ulysses=2)

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def function(q, k, v, mask, shards):
        return sp.attention(q * 2.0, k, v, mask=mask, shards=shards) / 2.0

    for name, window in (("rows differ", 5), ("even", None)):
        pack = PACKS[name]
        placement = sp.shard_batch(collated(pack))["placement"]
        q, k, v, do = oracle.tensors(len(pack), sum(pack[0]), HEADS, 4)
        out, dq, dk, dv = attend(
            sp, q / 2, k, v, do, placement=placement, way=function, mask=placement.mask_with_window(window)
        )
        # q counts twice, and the function's result half
        oracle.assert_exact([out * 2, dq / 2, dk, dv], dense(pack, (q, k, v, do / 2), window), (name, window))


# ---- whatever says where documents are

FLAT = (20, 1, 9, 21)


def forms():
    """name -> a batch of one flat row whose documents are said so."""
    tokens = torch.randint(3, 64, (sum(FLAT),), generator=torch.Generator().manual_seed(0)).split(FLAT)
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    every = collator([{"input_ids": x} for x in tokens])
    bare = {name: every[name] for name in ("input_ids", "labels")}
    edges = torch.tensor([0, *itertools.accumulate(FLAT)])
    return {
        "position_ids": {**bare, "position_ids": every["position_ids"]},
        "positions of one dim": {**bare, "position_ids": every["position_ids"][0].int()},
        "cu_seq_lens": {**bare, "cu_seq_lens_q": every["cu_seq_lens_q"], "cu_seq_lens_k": every["cu_seq_lens_k"]},
        "with the longest": {name: x for name, x in every.items() if name not in ("position_ids", "seq_idx")},
        "cu_seqlens": {**bare, "cu_seqlens": edges},
        "without the last": {**bare, "cu_seqlens": edges[:-1]},  # what is left is one more
        "filled up": {**bare, "cu_seqlens": torch.cat([edges, edges[-1:].expand(3)])},  # to a fixed shape
        "an empty one": {**bare, "cu_seqlens": torch.cat([edges[:2], edges[1:]])},
        "seq_idx": {**bare, "seq_idx": every["seq_idx"]},
        "document_ids": {**bare, "document_ids": 7 - every["seq_idx"].long() % 2},  # neighbors differ
        "every": every,
    }


@on_each_of(4)
def test_documents_in_any_form_give_the_same_shards():
    sp = make(ulysses=2)
    first, *others = (sp.shard_batch(batch) for batch in forms().values())
    assert sorted(first) == ["input_ids", "labels", "num_items_in_batch", "placement", "position_ids", "shift_labels"]
    for name, shard in zip(list(forms())[1:], others, strict=True):
        assert shard.keys() == first.keys(), name
        assert all(map(same, shard.values(), first.values())), name


def same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# ---- refused

ROWS = PACKS["rows differ"]
OTHER = ((20, 2, 29), (7, 9, 35))


def packed(**other):
    """A packed batch, but for what a case asks for; a name with None is left out."""
    whole = {**collated(ROWS), **other}
    return {name: x for name, x in whole.items() if x is not None}


def given(**other):
    return lambda sp, rank: sp.shard_batch(packed(**other))


def given_to_wrong(**other):
    return lambda sp, rank: sp.shard_batch(packed(**(other if rank == WRONG else {})))


def numbers(*lengths):
    return torch.tensor(lengths, dtype=torch.int32)


def gathered(of, by, only=False):
    """gather of this rank's shard of a batch of `of`, with the placement of `by`; or on the wrong rank only."""

    def call(sp, rank):
        shard, other = (sp.shard_batch(collated(pack)) for pack in (of, by))
        right = only and rank != WRONG
        return sp.gather(shard["input_ids"], 1, (shard if right else other)["placement"])

    return call


def without(sp, rank):
    """gather with the placement on all but the wrong rank."""
    shard = sp.shard_batch(packed())
    return sp.gather(shard["input_ids"], 1, None if rank == WRONG else shard["placement"])


def without_one(sp, rank):
    """gather of a tensor that has no 1 before its tokens, where rows lie end to end."""
    shard = sp.shard_batch(packed())
    return sp.gather(shard["input_ids"][0], 0, shard["placement"])


def sharded(tokens):
    """shard of a tensor with as many tokens, with a placement of 102."""
    return lambda sp, rank: sp.shard(torch.zeros(1, tokens), 1, sp.shard_batch(packed())["placement"])


CU = {"position_ids": None}
REFUSED = {
    "positions from 1 on one rank": (given_to_wrong(position_ids=restarts(ROWS) + 1), only_one("got 1", "token 0")),
    "a gap in positions": (given(position_ids=restarts(ROWS) * 2), everywhere("got 2", "token 1")),
    "floating positions": (given(position_ids=restarts(ROWS).float()), everywhere("torch.float32")),
    "a list of positions": (given(position_ids=restarts(ROWS).tolist()), everywhere("got list")),
    "positions of three axes": (given(position_ids=restarts(ROWS).expand(3, 2, 51)), everywhere("(3, 2, 51)")),
    # transformers, accelerate: cumulative lengths of another micro-batch, used after an evaluation step
    "one rank's stale cumulative lengths": (
        given_to_wrong(cu_seq_lens_q=numbers(0, 20, 51, 102)), only_one("6 in position_ids", "3 others")
    ),
    "keys' and queries' lengths": (
        given(**CU, cu_seq_lens_q=numbers(0, 20, 51, 102), cu_seq_lens_k=numbers(0, 21, 51, 102)),
        everywhere("cu_seq_lens_k"),
    ),
    "lengths alone": (given(**CU, seq_lengths=[[20, 1, 30], [7, 9, 35]]), everywhere("got seq_lengths")),
    "a document across the end of a row": (given(**CU, cu_seqlens=numbers(0, 20, 60, 102)), everywhere("token 51")),
    "cumulative lengths beyond the tokens": (given(**CU, cu_seq_lens_q=numbers(0, 20, 103)), everywhere("103]")),
    "cumulative lengths that fall": (given(**CU, cu_seqlens=numbers(0, 30, 20, 102)), everywhere("[0, 30, 20, 102]")),
    "cumulative lengths from 1": (given(**CU, cu_seqlens=numbers(1, 20, 102)), everywhere("[1, 20, 102]")),
    "floating cumulative lengths": (given(**CU, cu_seqlens=numbers(0, 102).float()), everywhere("torch.float32")),
    "numbers of another shape": (given(**CU, seq_idx=torch.zeros(1, 102).int()), everywhere("(1, 102)")),
    "one rank's numbers of one dim": (given_to_wrong(document_ids=torch.zeros(51).long()), only_one("(51,)")),
    "numbers that are none": (given(**CU, seq_idx=torch.zeros(2, 51).bool()), everywhere("torch.bool")),
    "other documents on one rank": (given_to_wrong(position_ids=restarts(OTHER)), differ("position_ids")),
    "no documents on one rank": (given_to_wrong(**CU), differ("no [0] position_ids")),
    "the same documents in another form on one rank": (
        given_to_wrong(**CU, cu_seqlens=numbers(0, 20, 21, 51, 58, 67, 102)), differ("cu_seqlens")
    ),
    "gather with the placement of fewer tokens": (gathered(ROWS, PACKS["of one token"]), everywhere("got 2")),
    "gather with another placement on one rank": (gathered(ROWS, OTHER, only=True), differ("102 tokens")),
    "gather without the placement on one rank": (without, differ("no placement")),
    "gather of tokens without a row": (without_one, everywhere("dim 0")),
    "shard of too few tokens": (sharded(101), everywhere("(1, 101)")),
    "shard of too many tokens": (sharded(204), everywhere("(1, 204)")),
}  # fmt: skip


@on_each_of(4, timeout=SECONDS)
def test_what_says_no_documents_is_refused_on_every_rank():
    assert_all_refused(REFUSED, make(ulysses=2))


def instead(sp):
    """(what is given in place of parts of a shard, what ranks are told) of what is not its batch's, or too short."""
    of = {pack: sp.shard_batch(collated(pack))["placement"] for pack in (ROWS, OTHER, PACKS["one row"])}
    other_size, wrong = make(size=2, ulysses=1).shard_batch(collated(ROWS))["placement"], sp.rank == WRONG
    own, other = ({"placement": of[pack]} for pack in (ROWS, OTHER))
    return [
        ({"placement": other_size}, everywhere("4 CP ranks", "got 2")),
        ({"placement": of[PACKS["one row"]]}, everywhere("(1, 2")),
        ({"placement": {"rows": 2}}, everywhere("got dict")),
        (other, everywhere("other tokens")),
        (other if wrong else own, only_one("other tokens")),
        ({"placement": dataclasses.replace(of[ROWS], restarts=(0,))}, everywhere("other tokens")),
        ({"placement": None}, everywhere("its placement included")),
        ({"placement": None} if wrong else own, only_one("its placement included")),
        ({"position_ids": sp.shard_batch(collated(ROWS))["position_ids"] + 1}, everywhere("other tokens")),
        (sp.shard_batch({name: x[:, :3] for name, x in collated([(40,)] * 2).items()}), everywhere("got 3 tokens")),
    ]


@on_each_of(4, timeout=SECONDS, keep=None)
def test_a_patched_model_refuses_a_placement_that_is_not_its_batchs():
    """After which a right batch has the loss that it had before."""
    sp = make(ulysses=1)
    model, found = small().double().patch_attention(sp), set()
    for number, (changes, told) in enumerate(instead(sp)):
        shard = sp.shard_batch(collated(ROWS))
        sp.comm.received.clear()
        refused = refusal(model, **{**shard, **changes})
        assert lacking(refused, *told.get(sp.rank, told.get("others"))) == [], (number, refused)
        assert not sp.comm.received
        found.add(sp.mean_loss(model(**shard).loss))
    assert len(found) == 1
