"""Attention on virtual ranks equals dense attention, in out and gradients: one matrix of all that a call can have.

The program, the walker, kernels and packing are those of real ranks; only the transport is a mailbox. A case is drawn
axis by axis. `make test` takes few of many draws that still hold every pair of values, `make test-all` more draws.
"""

import functools
import itertools
import random

import pytest
import torch

from ds_seqpar import testing as virtual
from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.heads import max_head_chunks
from ds_seqpar.core.compiler.sharding.layout import Run, multiple
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.compiler.sharding.shards import EvenShards, UnevenShards
from ds_seqpar.core.runtime.kernels import KERNELS, accumulate
from ds_seqpar.core.runtime.operator import DENSE
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.data.balance import shards_of
from ds_seqpar.operators.latent import LATENT
from ds_seqpar.testing import attention
from tests import oracle
from tests.grids import pairwise
from tests.unit.packs import parents_of

NAMES = ("out", "dq", "dk", "dv", "dsinks")
LAYOUTS = ("balanced", "contiguous", "striped", "zigzag")
HEADS = ((4, 4), (4, 1), (6, 3), (14, 2), (7, 1))  # most of which Ulysses ranks do not divide
DIMS = ((8, 8), (8, 4), (5, 12))  # of q and k, and of v
WIDTH = 7  # of a latent
CAUSAL_MASKS = ("causal", "window", "documents", "windowed documents", "tree", "blocks")
MASKS = (*CAUSAL_MASKS, "full", "both sides", "full documents", "full tree", "prefix")
# tokens: in the configured layout as few as ranks can share, and more; any number of them, dealt by any layout; in
# runs that are cut anywhere, none too; and k and v of another length, so that some queries see no key
TOKENS = ("fewest", "more", "dealt", "cut", "other keys")
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.05}  # of the greatest number, or of 1


def drawn(schedule, most, dice):
    """A legal case on up to `most` ranks."""
    its, ulysses = SCHEDULES[schedule], dice.randint(1, 4)
    cp_size = dice.choice([n for n in range(1, most // ulysses + 1) if list(its.shapes(n))])
    own = dice.choice(list(its.shapes(cp_size)))
    its = its.at(cp_size, own)
    one_way, owns_two = not its.can_compute(0, 1), its.blocks_per_rank > 1
    tokens = dice.choice(TOKENS[:3] if owns_two else TOKENS)
    layouts = its.layouts if tokens in TOKENS[:2] or owns_two else ("contiguous", "balanced") if one_way else LAYOUTS
    heads = dice.choice([heads for heads in HEADS if heads[0] >= ulysses])
    dtype, latent = dice.choice([torch.float64, torch.float64, *LIMITS]), dice.choice((False, False, True))
    return {
        "schedule": schedule,
        "cp_size": cp_size,
        "own": tuple(own.items()),
        "ulysses": ulysses,
        "tokens": tokens,
        "layout": dice.choice(layouts),
        "mask": dice.choice(CAUSAL_MASKS if one_way else MASKS),
        "heads": (heads[0], 1) if latent else heads,
        "latent": latent,  # whether k and v are expanded from one that is sent
        "head_chunks": 1 if latent else dice.randint(1, min(3, max_head_chunks(*heads, ulysses))),
        "batch": dice.choice((1, 2)),
        "dims": dice.choice(DIMS),
        "dtype": dtype,
        "comm_dtype": dice.choice(("fp32", "bf16") if dtype == torch.bfloat16 else ("fp32",)),
        "rotate_forward": dice.choice(its.moving_sides),
        "rotate_backward": dice.choice(its.moving_sides),
        "overlap": dice.choice((False, True)),
        "early": dice.randint(0, 2),  # by how many steps a receive is posted before its message is sent
        "scale": dice.choice((None, 0.7)),
        "softcap": dice.choice((None, 1.5)),
        "sinks": dice.choice((False, True)),
    }


def draws(schedule, most, count, seed):
    dice = random.Random(f"{schedule} {seed}")
    return [drawn(schedule, most, dice) for _ in range(count)]


def config_of(case):
    named = case["tokens"] in TOKENS[:2]
    return SequenceParallelConfig(
        size=case["cp_size"] * case["ulysses"],
        **{name: case[name] for name in ("schedule", "ulysses", "head_chunks", "comm_dtype", "overlap")},
        **{name: case[name] for name in ("rotate_forward", "rotate_backward")},
        **dict(case["own"]),
        **({"layout": case["layout"]} if named else {}),
    )


def tokens_of(case, dice):
    """(queries, keys, lengths of documents, shards in place of the layout's or None)."""
    size, kind = case["cp_size"], case["tokens"]
    if kind in TOKENS[:2]:
        step = multiple(case["layout"], size * case["ulysses"], case["ulysses"])
        seq = step if kind == "fewest" else step * max(2, 30 // step)
        return seq, seq, cuts(dice, seq), None
    seq = dice.choice((1, 2, 3, dice.randint(4, 40), dice.randint(4, 40), 41))
    lengths = cuts(dice, seq)
    if kind == "dealt":
        return seq, seq, lengths, shards_of(case["layout"], lengths, size)
    ordered = not SCHEDULES[case["schedule"]].can_compute(0, 1)
    keys = dice.randint(0, 48) if kind == "other keys" else seq
    sides = [runs(dice, n, size, ordered) for n in ((seq,) if kind == "cut" else (seq, keys))]
    return seq, keys, lengths, UnevenShards(*sides)


def cuts(dice, seq):
    """Lengths of documents that fill so many tokens: from one to as many as tokens."""
    count = min(seq, dice.choice((1, 2, 4, 8, seq)))
    edges = [0, *sorted(dice.sample(range(1, seq), count - 1)), seq]
    return tuple(b - a for a, b in itertools.pairwise(edges))


def runs(dice, tokens, size, ordered):
    """Up to three runs of any lengths a rank; or one, in order."""
    edges = [0, *sorted(dice.randint(0, tokens) for _ in range((1 if ordered else 3) * size - 1)), tokens]
    pieces = [Run(a, 1, b - a) for a, b in itertools.pairwise(edges)]
    if not ordered:
        dice.shuffle(pieces)
    return [tuple(sorted(run for run in pieces[rank::size] if run.length)) for rank in range(size)]


def mask_of(kind, seq, lengths, dice):
    if "tree" in kind:
        parents = parents_of(len(lengths), lambda path: dice.randint(0, min(path, 4)))
        return Mask(causal=kind == "tree", documents=Mask.documents_of(lengths), parents=parents)
    if kind == "blocks":
        kind += dice.choice(("", " in documents", " and a window", " in windowed documents"))
    documents = Mask.documents_of(lengths) if "documents" in kind else (0,)
    window = dice.randint(1, seq) if "window" in kind or kind == "both sides" else None
    if kind == "prefix":
        return Mask(prefix=dice.randint(1, seq))
    right = dice.randint(0, seq) if kind == "both sides" else None
    causal = kind in CAUSAL_MASKS or "blocks" in kind
    spans = itertools.pairwise(sorted({*documents, *(dice.randint(0, seq) for _ in range(2 * seq // 3)), seq}))
    blocks = tuple(span for span in spans if "blocks" in kind and dice.random() < 0.6)
    fields = {"window_right": right, "blocks": blocks, "whole_blocks": dice.random() < 0.5}
    return Mask(causal=causal, window=window, documents=documents, **fields)


def expected(q, k, v, do, sinks=None, latent=False, **asked):
    """(out, dq, dk, dv, dsinks) in fp64; without sinks the first four."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    q, k, v, *others = leaves
    if latent:
        kv = torch.einsum("bnr,hre->bnhe", k, v)
        k, v = kv[..., : q.shape[3]], kv[..., q.shape[3] :]
    out = oracle.attention(q, k, v, sinks=others[0] if others else None, **asked)
    return out.detach(), *torch.autograd.grad(out, leaves, do.double())


def results(found):
    return [x for x in (found.out, found.dq, found.dk, found.dv, found.dsinks) if x is not None]


def inputs_of(case, queries, keys):
    """(q, k, v, do); k and v may be a latent and its matrix."""
    dice, (dim, v_dim), (q_heads, kv_heads) = torch.Generator().manual_seed(queries), case["dims"], case["heads"]
    shapes = (queries, q_heads, dim), (keys, kv_heads, dim), (keys, kv_heads, v_dim), (queries, q_heads, v_dim)
    shapes = [(case["batch"], *shape) for shape in shapes]
    if case["latent"]:
        shapes[1:3] = (case["batch"], keys, WIDTH), (q_heads, WIDTH, dim + v_dim)
    made = [torch.randn(shape, generator=dice, dtype=torch.float64) for shape in shapes]
    if case["latent"]:
        made[2] /= WIDTH**0.5
    return [x.to(case["dtype"]) for x in made]


def cannot_be_computed(schedule, shards, seen):
    """Whether any query sees a key of a block that the schedule never takes to its own: a later one in distflash."""
    blocks = range(shards.size * shards.blocks_per_rank)
    q, kv = ([[p for run in shards.runs(side, (b,)) for p in run.positions] for b in blocks] for side in ("q", "kv"))
    pairs = itertools.product(blocks, blocks)
    return any(seen[q[i]][:, kv[j]].any() for i, j in pairs if not schedule.can_compute(i, j))


def check(case, monkeypatch):
    """Equals dense attention, or is refused where the schedule cannot compute a product that is needed."""
    dice = random.Random(repr(case))
    queries, keys, lengths, shards = tokens_of(case, dice)
    mask = mask_of(case["mask"], queries, lengths, dice)
    inputs = inputs_of(case, queries, keys)
    asked = {"mask": mask, "scale": case["scale"], "softcap": case["softcap"]}
    asked["sinks"] = torch.linspace(-3, 3, case["heads"][0], dtype=torch.float64) if case["sinks"] else None
    given = {**asked, "operator": LATENT if case["latent"] else DENSE}
    seen = oracle.seen(mask, range(queries), range(keys))
    early = property(lambda comm: case["early"], lambda *_: None)
    monkeypatch.setattr(virtual._VirtualComm, "early", early, raising=False)
    its, config = SCHEDULES[case["schedule"]].at(case["cp_size"], dict(case["own"])), config_of(case)
    held = shards or EvenShards(config.resolve(config.size).layout, queries, case["cp_size"])
    if (shards is not None or mask.blocks) and cannot_be_computed(its, held, seen):
        with pytest.raises(ConfigError, match=rf"{case['schedule']}.*causal"):
            attention(config, *inputs, shards=shards, **given)
        return
    found = results(attention(config_of(case), *inputs, shards=shards, **given))
    assert {x.dtype for x in found[:4]} == {case["dtype"]}
    wanted = expected(*inputs, latent=case["latent"], **asked)
    for name, a, b in zip(NAMES, found, wanted, strict=False):
        # a token that sees itself alone has gradients of 0, and no relative error
        gap = ((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item() if b.numel() else 0.0
        assert gap <= LIMITS[case["dtype"]], (name, gap, case)  # which a NaN is not
    assert not found[0][:, ~seen.any(1)].any(), case  # a row that sees no key


@functools.cache
def few():
    """A cover of all schedules' draws, and some more draws of each."""
    pool, more = ([x for schedule in SCHEDULES for x in draws(schedule, 9, n, n)] for n in (400, 12))
    return pairwise(pool, without=("own",)) + more


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_attention_is_dense_attention(schedule, more, monkeypatch):
    """Of the faults that others had: wrong without a causal mask where work is balanced (pytorch#141429), fewer heads
    of k and v than ranks (verl#850), packed documents that see one another (axolotl#3608), lengths that ranks do not
    divide (deepspeed#7384), NaN where a rank sees nothing (Megatron#1764)."""
    cases = draws(schedule, 24, 300, 0) if more else [case for case in few() if case["schedule"] == schedule]
    for case in cases:
        check(case, monkeypatch)


def test_a_document_full_of_nan_reaches_no_other():
    """Neither in out nor in gradients: what is not visible is not computed, and so not added as a nothing."""
    dice = random.Random(0)
    for number in range(12):
        lengths, layout, cp_size = cuts(dice, dice.randint(2, 40)), dice.choice(LAYOUTS), dice.randint(1, 4)
        mask, spoilt = Mask(causal=number % 2 == 0, documents=Mask.documents_of(lengths)), dice.randrange(len(lengths))
        bad = torch.zeros(sum(lengths), dtype=torch.bool)
        bad[sum(lengths[:spoilt]) : sum(lengths[: spoilt + 1])] = True
        clean = oracle.tensors(1, sum(lengths), (3, 1), 4)
        poisoned = [x.masked_fill(bad[None, :, None, None], float("nan")) for x in clean]
        config = SequenceParallelConfig(size=2 * cp_size, ulysses=2)
        found = attention(config, *poisoned, mask=mask, shards=shards_of(layout, lengths, cp_size))
        for mine, wanted in zip(results(found), oracle.dense(*clean, mask=mask), strict=True):
            torch.testing.assert_close(mine[:, ~bad], wanted[:, ~bad], rtol=1e-10, atol=1e-10)


def test_long_sequences_are_exact():
    """Tiles of the triangle grow with its chunks, and documents may be hundreds."""
    for size, seq in ((3, 30), (6, 132)):
        inputs = oracle.tensors(1, seq, (4, 2), 8)
        found = attention(SequenceParallelConfig(size=size, ulysses=1, schedule="triangle", strips=1), *inputs)
        oracle.assert_exact(results(found), oracle.dense(*inputs))
    lengths = (*(1,) * 100, 97, *(1, 2, 3) * 30)
    mask, inputs = Mask(documents=Mask.documents_of(lengths)), oracle.tensors(1, sum(lengths), (14, 2), 4)
    for layout, settings in zip(LAYOUTS, ({"ulysses": 4}, {"overlap": True}, {"rotate_forward": "q"}, {}), strict=True):
        config = SequenceParallelConfig(**{"size": 12, "ulysses": 1, **settings})
        found = attention(config, *inputs, mask=mask, shards=shards_of(layout, lengths, 12 // config.ulysses))
        oracle.assert_exact(results(found), oracle.dense(*inputs, mask=mask), least=1.0)


# ---- bf16 on many ranks, to its rounding

# name -> (settings, how often one partial result is rounded on its way where it is sent in bf16): once where it goes
# straight to its owner or is reduce-scattered, and at every hop of a ring
PRECISE = {
    "ring": ({"schedule": "ring"}, 15),
    "ring, q travels": ({"schedule": "ring", "rotate_forward": "q", "rotate_backward": "q"}, 15),
    "mesh": ({"schedule": "mesh", "mesh": (2, 2, 4)}, 4),
    "mesh, q travels": ({"schedule": "mesh", "mesh": (2, 2, 4), "rotate_forward": "q", "rotate_backward": "q"}, 4),
    "attention2d, overlapped": ({"schedule": "attention2d", "rows": 4, "overlap": True}, 1),
    "distflash": ({"schedule": "distflash"}, 1),
    "triangle": ({"schedule": "triangle", "size": 6, "strips": 1}, 3),
    "ulysses": ({"ulysses": 8}, 1),
}


def precise(name, causal, inputs, comm_dtype="fp32"):
    settings = {"size": 16, "ulysses": 1, "comm_dtype": comm_dtype, **PRECISE[name][0]}
    return results(attention(SequenceParallelConfig(**settings), *inputs, causal=causal))


@functools.cache
def alone(heads, causal):
    """bf16 inputs, dense fp64, and how far from it one kernel call on the whole sequence is."""
    inputs = q, k, v, do = oracle.tensors(1, 192, heads, 64, torch.bfloat16)
    kernel, scale = KERNELS["cpu_flash"], 64**-0.5
    out, lse = kernel.forward(q, k, v, causal, scale)
    wanted = oracle.dense(*inputs, causal=causal)
    return inputs, wanted, oracle.spreads((out, *kernel.backward(do, q, k, v, out, lse, causal, scale)), wanted)


# ring-flash-attention#42, #67, OpenRLHF#564: in bf16 the error grew with the number of ranks
@pytest.mark.parametrize("name", PRECISE)
def test_bf16_is_as_exact_as_one_kernel_call_over_the_whole_sequence(name):
    """And partial results that are sent in bf16 cost their rounding only. In root mean squares: the greatest single
    error is chance."""
    causal = name not in ("mesh", "ring")
    inputs, wanted, single = alone((8, 1) if name == "ulysses" else (4, 2), causal)
    wide, narrow = (oracle.spreads(precise(name, causal, inputs, dtype), wanted) for dtype in ("fp32", "bf16"))
    assert all(mine <= 1.5 * one for mine, one in zip(wide, single, strict=True)), (wide, single)
    # one call's result was rounded once, so its error is one rounding at least; further ones add up in squares
    limit = (1.5**2 + PRECISE[name][1]) ** 0.5
    assert all(mine <= limit * one for mine, one in zip(narrow, single, strict=True)), (narrow, single)
    assert (narrow != wide) == (name not in ("ulysses", "distflash"))


def test_accumulating_in_bf16_would_be_noticed(monkeypatch):
    merge = accumulate.merge_

    def narrow(out, lse, new_out, new_lse):
        merge(out, lse, new_out, new_lse)
        out.copy_(out.bfloat16())

    monkeypatch.setattr(accumulate, "merge_", narrow)
    inputs, wanted, single = alone((4, 2), False)
    assert oracle.spreads(precise("ring", False, inputs), wanted)[0] > 1.5 * single[0]
