"""Packed documents on virtual ranks: every schedule, over the shards of every layout, equals dense attention with the
true mask in both directions; rows that see no key are 0."""

import dataclasses
import itertools
import random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ds_seqpar.compiler.schedules import SCHEDULES
from ds_seqpar.compiler.sharding.balance import shards_of
from ds_seqpar.compiler.sharding.layout import Run, divisors
from ds_seqpar.compiler.sharding.masks import Mask
from ds_seqpar.compiler.sharding.shards import UnevenShards
from ds_seqpar.config.settings import SequenceParallelConfig
from ds_seqpar.errors import ConfigError
from ds_seqpar.testing import attention
from tests import oracle
from tests.grids import examples

NAMES = ("out", "dq", "dk", "dv", "dsinks")
LAYOUTS = ("balanced", "contiguous", "striped", "zigzag")
HEADS = ((2, 1), (3, 3), (4, 2), (5, 1), (6, 2), (14, 2))  # most of them such that Ulysses ranks do not divide


@dataclasses.dataclass(frozen=True)
class Pack:
    """Documents of these lengths as a layout deals them, which need not be the configured one."""

    config: SequenceParallelConfig
    layout: str
    lengths: tuple[int, ...]
    mask: Mask
    heads: tuple[int, int]
    batch: int = 1
    softcap: float | None = None
    sinks: bool = False

    @property
    def shards(self):
        return shards_of(self.layout, self.lengths, self.config.size // self.config.ulysses)


def expected(q, k, v, do, sinks=None, **asked):
    """(out, dq, dk, dv, dsinks) in fp64; without sinks the first four."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    out = oracle.attention(*leaves[:3], sinks=leaves[3] if len(leaves) > 3 else None, **asked)
    return out.detach(), *torch.autograd.grad(out, leaves, do.double())


def results(found):
    return [x for x in (found.out, found.dq, found.dk, found.dv, found.dsinks) if x is not None]


def gaps(found, wanted):
    """By name: the greatest error, to the greatest number or 1: a token that sees itself alone has gradients of 0."""
    assert not any(x.isnan().any() for x in found)
    return {
        name: ((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item() if b.numel() else 0.0
        for name, a, b in zip(NAMES, found, wanted, strict=False)
    }


def sees_a_later_block(shards, visible):
    """Whether any query sees a key of a later rank: what distflash cannot do."""
    held = [[p for run in runs for p in run.positions] for runs in shards.q]
    pairs = [(i, j) for i in range(shards.size) for j in range(i + 1, shards.size)]
    return any(visible[held[i]][:, held[j]].any() for i, j in pairs)


def check(pack):
    """Equals dense attention to 1e-10, or refuses where the schedule cannot."""
    seq = sum(pack.lengths)
    inputs = oracle.tensors(pack.batch, seq, pack.heads, 4, seed=seq)
    asked = {"mask": pack.mask, "softcap": pack.softcap}
    asked["sinks"] = torch.linspace(-3, 3, pack.heads[0], dtype=torch.float64) if pack.sinks else None
    if pack.config.schedule == "distflash":
        visible = oracle.seen(pack.mask, range(seq), range(seq))
        if sees_a_later_block(pack.shards, visible):
            with pytest.raises(ConfigError, match=r"distflash.*causal.*queries of block \d+"):
                attention(pack.config, *inputs, shards=pack.shards, **asked)
            return
    found = results(attention(pack.config, *inputs, shards=pack.shards, **asked))
    wrong = gaps(found, expected(*inputs, **asked))
    assert max(wrong.values()) <= 1e-10, (pack, wrong)


# ---- what is drawn


@st.composite
def documents(draw, most):
    """Lengths of documents, up to `most` tokens together; what is last may be padding."""
    seq = draw(st.integers(1, most))
    kind = draw(st.sampled_from(["one", "ones", "cuts", "cuts", "short", "long", "padding"]))
    dice = random.Random(draw(st.integers(0, 2**32)))
    count = {"one": 1, "ones": seq, "short": -(-seq // 3)}.get(kind, dice.randint(1, min(seq, 8)))
    if kind == "long":  # with a document of most of it, longer than any rank's share
        long = seq - seq // 4
        rest = [1] * (seq - long)
        rest.insert(dice.randint(0, len(rest)), long)
        return tuple(rest)
    starts = [0, *sorted(dice.sample(range(1, seq), count - 1)), seq] if seq > 1 else [0, 1]
    lengths = [b - a for a, b in itertools.pairwise(starts)]
    return tuple([*lengths, dice.randint(1, seq)] if kind == "padding" else lengths)


@st.composite
def packs(draw, schedule, world, most):
    its = SCHEDULES[schedule]
    heads = draw(st.sampled_from(HEADS))
    size = draw(st.sampled_from([n for n in range(1, world + 1) if list(its.shapes(n))]))
    ulysses = draw(st.sampled_from([1, *(u for u in divisors(size) if u <= heads[0] and list(its.shapes(size // u)))]))
    own = draw(st.sampled_from(list(its.shapes(size // ulysses))))
    its = its.at(size // ulysses, own)
    config = SequenceParallelConfig(
        size=size,
        ulysses=ulysses,
        schedule=schedule,
        overlap=draw(st.booleans()),
        rotate_forward=draw(st.sampled_from(its.moving_sides)),
        rotate_backward=draw(st.sampled_from(its.moving_sides)),
        **own,
    )
    lengths = draw(documents(most))
    seq = sum(lengths)
    usual = not its.can_compute(0, 1)  # takes other masks and shards by chance only
    layouts = (its.default_layout, *(("balanced",) if its.blocks_per_rank == 1 else ())) if usual else LAYOUTS
    mask = Mask(
        causal=draw(st.sampled_from([True, True, usual])),
        window=draw(st.none() | st.integers(1, seq)),
        documents=Mask.documents_of(lengths),
    )
    return Pack(
        config,
        draw(st.sampled_from(layouts)),
        lengths,
        mask,
        heads,
        batch=draw(st.sampled_from([1, 1, 2])),
        softcap=draw(st.sampled_from([None, None, 1.5])),
        sinks=draw(st.sampled_from([False, False, True])),
    )


# axolotl#3608: packed documents attended to one another, loss 1.83 times too large; TransformerEngine#1930: packing
# with context parallelism wrong; deepspeed#7384, #7842: lengths that ranks do not divide corrupt
@pytest.mark.parametrize("schedule", SCHEDULES)
@examples(20)
@given(data=st.data())
def test_packs_equal_dense_attention_under_every_schedule(schedule, data):
    check(data.draw(packs(schedule, 16, 64)))


@pytest.mark.whole
@pytest.mark.parametrize("schedule", SCHEDULES)
@examples(80)
@given(data=st.data())
def test_many_packs_equal_dense_attention_under_every_schedule(schedule, data):
    check(data.draw(packs(schedule, 16, 128)))


DICE = random.Random(5)
MANY = {
    "hundreds of documents": tuple(DICE.choice([1, 1, 1, 2, 3]) for _ in range(200)),
    "hundreds of one token": (1,) * 211,
    "one beside hundreds": (*(1,) * 100, 97, *(1,) * 100),
    "fewer tokens than ranks": (1, 1, 3),
    "one token": (1,),
    "prime lengths": (13, 31, 2, 53),
}


def dealt(cases):
    """pytest parameters (case, layout): each case under one layout after another, and marked `whole` under the rest."""
    turns = itertools.cycle(LAYOUTS)
    return [
        pytest.param(case, layout, id=f"{name}-{layout}", marks=[] if layout == mine else pytest.mark.whole)
        for (name, case), mine in zip(cases.items(), turns, strict=False)
        for layout in LAYOUTS
    ]


@pytest.mark.parametrize(("lengths", "layout"), dealt(MANY))
def test_many_documents_or_few_tokens(lengths, layout):
    mask = Mask(documents=Mask.documents_of(lengths))
    for size, ulysses, heads, own in (
        (16, 1, (2, 1), {"schedule": "ring", "overlap": True}),
        (12, 4, (14, 2), {"schedule": "ring", "rotate_forward": "q", "rotate_backward": "q"}),
        (8, 2, (3, 3), {"schedule": "mesh", "mesh": (2, 1, 2)}),
        (5, 5, (5, 1), {"schedule": "ring"}),
    ):
        config = SequenceParallelConfig(size=size, ulysses=ulysses, **own)
        check(Pack(config, layout, lengths, mask, heads))


@given(documents(64), st.integers(1, 6), st.sampled_from(LAYOUTS), st.data())
@examples(20)
def test_a_document_full_of_nan_reaches_no_other(lengths, inner, layout, data):
    """Neither in out nor in gradients: what is not visible is not computed, and so not added as a nothing."""
    spoilt = data.draw(st.integers(0, len(lengths) - 1))
    mask = Mask(causal=data.draw(st.booleans()), documents=Mask.documents_of(lengths))
    start = sum(lengths[:spoilt])
    bad = torch.zeros(sum(lengths), dtype=torch.bool)
    bad[start : start + lengths[spoilt]] = True
    clean = oracle.tensors(1, sum(lengths), (3, 1), 4)
    poisoned = [x.masked_fill(bad[None, :, None, None], float("nan")) for x in clean]
    config = SequenceParallelConfig(size=2 * inner, ulysses=2)
    found = attention(config, *poisoned, mask=mask, shards=shards_of(layout, lengths, inner))
    for mine, wanted in zip(results(found), oracle.dense(*clean, mask=mask), strict=True):
        torch.testing.assert_close(mine[:, ~bad], wanted[:, ~bad], rtol=1e-10, atol=1e-10)


# ---- rows that see no key


@st.composite
def deserts(draw):
    """(queries, keys, shards, mask): fewer keys than queries, so that late rows see none under a window or documents.
    Blocks of any lengths, none too."""
    queries = draw(st.integers(1, 48))
    keys = draw(st.integers(0, queries))
    inner = draw(st.integers(1, 6))
    dice = random.Random(draw(st.integers(0, 2**32)))
    shards = UnevenShards(*([*_blocks(dice, n, inner)] for n in (queries, keys)))
    starts = draw(st.sets(st.integers(1, max(1, queries - 1)), max_size=6)) if queries > 1 else set()
    mask = Mask(window=draw(st.none() | st.integers(1, 8)), documents=(0, *sorted(starts)))
    return queries, keys, shards, mask


def _blocks(dice, tokens, inner):
    cuts = [0, *sorted(dice.randint(0, tokens) for _ in range(2 * inner - 1)), tokens]
    runs = [Run(a, 1, b - a) for a, b in itertools.pairwise(cuts)]
    dice.shuffle(runs)
    return [tuple(sorted(run for run in runs[block::inner] if run.length)) for block in range(inner)]


# Megatron#1764, TransformerEngine#2186: NaN where a rank, or half of it, had nothing to see
@given(deserts(), st.sampled_from([1, 2, 3]), st.booleans())
@examples(60)
@example((8, 0, UnevenShards([[(0, 1, 5)], [(5, 1, 3)]], [[], []]), Mask()), 2, False)
@example((8, 0, UnevenShards([[(0, 1, 5)], [(5, 1, 3)]], [[], []]), Mask()), 2, True)
@example((8, 1, UnevenShards([[(0, 2, 4)], [(1, 2, 4)]], [[], [(0, 1, 1)]]), Mask(window=1)), 1, True)
def test_rows_without_a_key_are_zero_wherever_they_lie(desert, ulysses, sink):
    queries, keys, shards, mask = desert
    q, _, _, do = oracle.tensors(1, queries, (3, 3), 4)
    _, k, v, _ = oracle.tensors(1, keys, (3, 3), 4, seed=1)
    sinks = torch.tensor([-2.0, 0.0, 2.0], dtype=torch.float64) if sink else None
    config = SequenceParallelConfig(size=shards.size * ulysses, ulysses=ulysses)
    found = results(attention(config, q, k, v, do, mask=mask, shards=shards, sinks=sinks))
    wrong = gaps(found, expected(q, k, v, do, sinks, mask=mask))
    assert max(wrong.values()) <= 1e-10, (desert, wrong)
    visible = oracle.seen(mask, range(queries), range(keys))
    blind, unseen = ~visible.any(1), ~visible.any(0)
    for x, alone in zip(found[:4], (blind, blind, unseen, unseen), strict=True):
        assert not x[:, alone].any()


# ---- other dtypes

FEW = {
    "packed": ((70, 1, 200, 41), Mask(documents=(0, 70, 71, 271))),
    "short documents": ((24,) * 13, Mask(documents=tuple(range(0, 312, 24)))),
    "a window": ((150, 161), Mask(window=50, documents=(0, 150))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("case", "layout"), dealt(FEW))
def test_packs_in_other_dtypes(case, layout, dtype):
    """fp32 to 1e-5; bf16 within twice the error of one device."""
    lengths, mask = case
    inputs = oracle.tensors(1, sum(lengths), (6, 2), 32, dtype)
    wanted = oracle.dense(*inputs, mask=mask)
    whole = shards_of("contiguous", lengths, 1)
    alone = results(attention(SequenceParallelConfig(size=1), *inputs, mask=mask, shards=whole))
    for size, ulysses in ((4, 1), (8, 2), (4, 4)):
        config = SequenceParallelConfig(size=size, ulysses=ulysses)
        found = results(attention(config, *inputs, mask=mask, shards=shards_of(layout, lengths, size // ulysses)))
        assert {x.dtype for x in found} == {dtype}
        if dtype == torch.float32:
            assert max(oracle.errors(found, wanted)) <= 1e-5
        else:
            pairs = zip(oracle.spreads(found, wanted), oracle.spreads(alone, wanted), strict=True)
            assert all(mine <= 2 * single for mine, single in pairs)
