"""Attention to a cache of which each rank holds a part equals dense attention: decode steps, and new tokens."""

import pytest
import torch

from ds_seqpar.compiler.sharding.layout import Run
from ds_seqpar.compiler.sharding.masks import CAUSAL, Mask
from ds_seqpar.compiler.sharding.shards import UnevenShards
from ds_seqpar.runtime import cached
from tests import oracle
from tests.dist.ranks import make
from tests.launch import on_each_of

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def whole(rows, new, kept, heads, dims=(8, 8), dtype=torch.float64, seed=0):
    """q of the new tokens, k and v of the kept ones."""
    made = torch.Generator().manual_seed(seed)
    shapes = (new, heads[0], dims[0]), (kept, heads[1], dims[0]), (kept, heads[1], dims[1])
    return [torch.randn(rows, *shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes]


def error(found, wanted):
    return ((found.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()


# ---- decode


def dealt(sp, x, lengths):
    """This rank's part of each row's first `lengths[row]` tokens, in turn, in a buffer with room; and its counts."""
    parts = [x[row, : lengths[row]][sp.rank :: sp.size] for row in range(len(x))]
    held = x.new_full((x.shape[0], x.shape[2], 3 + max(map(len, parts)), x.shape[3]), torch.nan).transpose(1, 2)
    for row, part in enumerate(parts):
        held[row, 1 : 1 + len(part)] = part
    return held, [(1, 1 + len(part)) for part in parts]


def check_decode(sp, lengths, heads, dims=(8, 8), dtype=torch.float64, agreed=True, sinks=None, **options):
    q, k, v = whole(len(lengths), 1, max(lengths), heads, dims, dtype)
    (keys, counts), (values, _) = dealt(sp, k, lengths), dealt(sp, v, lengths)
    sinks = None if sinks is None else torch.linspace(-1, 1, heads[0], dtype=dtype)
    out = sp.decode_attention(q, keys, values, counts=counts, sinks=sinks, agreed=agreed, **options)
    for row, length in enumerate(lengths):
        x = [t[row : row + 1, : (1 if t is q else length)].double() for t in (q, k, v)]
        wanted = oracle.attention(*x, causal=False, sinks=None if sinks is None else sinks.double(), **options)
        assert error(out[row : row + 1], wanted) < TOLERANCE[dtype], (sp.size, lengths, heads, dims, dtype, options)
    same = sp.runtime.comm.parts_of_all(out.flatten()) if sp.size > 1 else out.flatten()[None]
    assert (same == same[0]).all()


def cases_of_decode(sp):
    check_decode(sp, [9], (4, 2))
    check_decode(sp, [9, 9], (8, 8), agreed=False)
    check_decode(sp, [7, 1, 7, 12], (4, 1), softcap=2.0)
    check_decode(sp, [3, 20], (3, 3), (24, 16), sinks=True, scale=0.7)
    check_decode(sp, [2, 2], (2, 1), (8, 8), torch.float32, sinks=True)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@on_each_of("size")
def test_decode(size):
    with make(size=size, ulysses=1) as sp:
        cases_of_decode(sp)


# ---- new tokens


def cut(first, total, size, seed):
    """Runs of each rank that hold [first, first + total) in pieces of all lengths, some empty."""
    made = torch.Generator().manual_seed(seed)
    at = sorted(torch.randint(0, total + 1, (2 * size - 1,), generator=made).tolist())
    pieces = [Run(first + a, 1, b - a) for a, b in zip([0, *at], [*at, total], strict=True)]
    return [tuple(run for run in (pieces[r], pieces[2 * size - 1 - r]) if run.length) for r in range(size)]


def held(runs, first=0):
    return [p - first for run in runs for p in run.positions]


def check_attend(
    sp,
    new,
    kept,
    heads,
    dims=(8, 8),
    mask=CAUSAL,
    dtype=torch.float64,
    seed=0,
    moving_side="auto",
    agreed=True,
    **options,
):
    q, k, v = whole(2, new, kept, heads, dims, dtype, seed)
    shards = UnevenShards(cut(kept, new, sp.size, seed), cut(0, kept, sp.size, seed + 1), q_start=kept)
    mine, kept_here = held(shards.q[sp.rank], kept), held(shards.kv[sp.rank])
    local = q[:, mine], k[:, kept_here], v[:, kept_here]
    out, lse = cached.attend(
        sp.runtime, *local, mask, shards, options.get("scale"), options.get("softcap"), agreed, moving_side
    )
    seen = oracle.seen(mask, range(kept, kept + new), range(kept))
    wanted = oracle.attention(q.double(), k.double(), v.double(), causal=seen, **options)[:, mine]
    assert out.shape == wanted.shape
    assert not mine or error(out, wanted) < TOLERANCE[dtype], (sp.size, new, kept, moving_side, mask)
    return out, lse


def cases_of_attend(sp):
    for side in ("q", "kv", "auto"):
        check_attend(sp, 11, 17, (4, 2), moving_side=side)
        check_attend(sp, 2, 9, (3, 1), (24, 16), moving_side=side, seed=3, agreed=False, softcap=2.0)
        check_attend(sp, 9, 14, (4, 2), mask=Mask(window=6), moving_side=side, seed=5, scale=0.6)
        check_attend(sp, 9, 14, (4, 2), (8, 8), Mask(documents=(0, 5, 10, 20)), torch.float32, 7, side)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@on_each_of("size")
def test_attend(size):
    with make(size=size, ulysses=2 if size == 4 else 1) as sp:
        cases_of_attend(sp)
