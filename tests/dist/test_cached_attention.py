"""Attention to a cache of which each rank holds a part equals dense attention: decode steps, and new tokens."""

import dataclasses
import re
import runpy
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_seqpar.core.compiler.compile import Compiler
from ds_seqpar.core.compiler.sharding.layout import Run
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, Mask
from ds_seqpar.core.compiler.sharding.shards import UnevenShards
from ds_seqpar.operators import decode as cached
from tests import oracle
from tests.dist.ranks import SECONDS, WRONG, assert_all_refused, differ, everywhere, lacking, make, only_one, refusal
from tests.launch import on_each_of, on_ranks

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
MLA = (24, 16)  # head_dim of q and k, and of v


def whole(rows, new, kept, heads, dims=(8, 8), dtype=torch.float64, seed=0):
    """q of the new tokens, k and v of the kept ones."""
    made = torch.Generator().manual_seed(seed)
    shapes = (new, heads[0], dims[0]), (kept, heads[1], dims[0]), (kept, heads[1], dims[1])
    return [torch.randn(rows, *shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes]


def error(found, wanted):
    worst = (found.double() - wanted).abs().max().item() if wanted.numel() else 0.0
    return worst and worst / wanted.abs().max().item()


# ---- decode steps


def dealt(sp, x, lengths):
    """This rank's part of each row's first `lengths[row]` tokens, in turn, in a buffer with room; and its counts."""
    parts = [x[row, : lengths[row]][sp.rank :: sp.size] for row in range(len(x))]
    held = x.new_full((x.shape[0], x.shape[2], 3 + max(map(len, parts)), x.shape[3]), torch.nan).transpose(1, 2)
    for row, part in enumerate(parts):
        held[row, 1 : 1 + len(part)] = part
    return held, [(1, 1 + len(part)) for part in parts]


def decoded(sp, lengths, heads, dims=(8, 8), dtype=torch.float64, agreed=True, sinks=None, **options):
    """The step's output, and by dense attention in fp64 what it should be."""
    q, k, v = whole(len(lengths), 1, max(lengths), heads, dims, dtype)
    (keys, counts), (values, _) = dealt(sp, k, lengths), dealt(sp, v, lengths)
    counts = counts if len({*lengths}) > 1 else None
    if counts is None:
        end = 1 + len(range(sp.rank, lengths[0], sp.size))
        keys, values = keys[:, 1:end], values[:, 1:end]
    options["sinks"] = None if sinks is None else torch.linspace(-1, 1, heads[0], dtype=dtype)
    out = sp.decode_attention(q, keys, values, counts=counts, agreed=agreed, **options)
    rows = [
        oracle.attention(*(x[row : row + 1, :length].double() for x in (q, k, v)), causal=False, **options)
        for row, length in enumerate(lengths)
    ]
    return out, torch.cat(rows)


def check_decode(sp, *args, dtype=torch.float64, **options):
    out, wanted = decoded(sp, *args, dtype=dtype, **options)
    assert error(out, wanted) < TOLERANCE[dtype], (args, options)
    if sp.size > 1:
        bits = sp.runtime.comm.parts_of_all(out.flatten(), "the bits")
        assert (bits == bits[0]).all()


def check_decode_steps(sp):
    check_decode(sp, [9], (4, 2))
    check_decode(sp, [9, 9], (8, 8), agreed=False)
    check_decode(sp, [7, 1, 1, 12], (4, 1), softcap=2.0, agreed=False)
    check_decode(sp, [3, 20], (3, 3), MLA, sinks=True, scale=0.7)
    check_decode(sp, [2, 2], (2, 1), dtype=torch.float32, sinks=True)
    check_decode(sp, [1], (6, 2), MLA, dtype=torch.float32, softcap=1.0)


def check_bytes(sp):
    """They are those of one all-gather, and the same however much is kept."""
    heads, dim, rows = 3 * sp.size, 8, 2
    for kept in (1, 40):
        before = sp.comm.received_bytes
        check_decode(sp, [kept] * rows, (heads, sp.size), (dim, dim), dtype=torch.float32)
        of_bits = (sp.size - 1) * rows * heads * dim * 4  # their comparison's
        assert sp.comm.received_bytes - before - of_bits == (sp.size - 1) * rows * heads * (dim + 1) * 4


# ---- new tokens


def cut(first, total, size, seed):
    """Runs of each rank that together hold [first, first + total): of any lengths, some ranks' empty."""
    made = torch.Generator().manual_seed(seed)
    ends = sorted(torch.randint(0, total + 1, (2 * size - 1,), generator=made).tolist())
    pieces = [Run(first + a, 1, b - a) for a, b in zip([0, *ends], [*ends, total], strict=True)]
    return [tuple(run for run in (pieces[r], pieces[2 * size - 1 - r]) if run.length) for r in range(size)]


def positions(runs, first=0):
    return [p - first for run in runs for p in run.positions]


def attended(sp, new, kept, heads, dims=(8, 8), mask=CAUSAL, dtype=torch.float64, seed=0, side="auto", **options):
    """(out, lse) of this rank's new tokens, and by dense attention in fp64 what out should be."""
    q, k, v = whole(2, new, kept, heads, dims, dtype, seed)
    shards = UnevenShards(cut(kept, new, sp.size, seed), cut(0, kept, sp.size, seed + 1), q_start=kept)
    here, held = positions(shards.q[sp.rank], kept), positions(shards.kv[sp.rank])
    scores = {"scale": options.get("scale"), "softcap": options.get("softcap"), "agreed": options.pop("agreed", True)}
    ring = sp.runtime.one_ring
    ring.compiler = Compiler(dataclasses.replace(ring.compiler.recipe, forward=side), ring.rank)
    ring.last_bound.clear()
    found = sp.cache_attention(q[:, here], k[:, held], v[:, held], mask=mask, shards=shards, **scores)
    seen = oracle.seen(mask, range(kept, kept + new), range(kept))
    return *found, oracle.attention(q.double(), k.double(), v.double(), causal=seen, **options)[:, here]


def check_attend(sp, *args, dtype=torch.float64, **options):
    results = {}
    for side in ("q", "kv", "auto"):
        before = sp.comm.received.copy()
        out, lse, wanted = attended(sp, *args, dtype=dtype, side=side, **options)
        assert error(out, wanted) < TOLERANCE[dtype], (side, args, options)
        assert (lse.isneginf() == (wanted == 0).all(-1)).all()
        results[side] = lse
        moved = {kind for kind, count in sp.comm.received.items() if count > before[kind]}
        assert moved <= {"q": {"q", "out"}, "kv": {"kv"}, "auto": {"q", "out", "kv"}}[side]
    torch.testing.assert_close(results["q"], results["kv"], rtol=0, atol=TOLERANCE[dtype])


def check_new_tokens(sp):
    check_attend(sp, 11, 17, (4, 2))
    check_attend(sp, 2, 9, (3, 1), MLA, seed=3, agreed=False, softcap=2.0)
    check_attend(sp, 9, 14, (4, 4), mask=Mask(window=6), seed=5, scale=0.6)
    check_attend(sp, 9, 14, (4, 2), mask=Mask(documents=(0, 5, 10, 20)), dtype=torch.float32, seed=7)
    check_attend(sp, 3, 1, (2, 2), dtype=torch.float32)  # most ranks have kept nothing
    check_attend(sp, 1, 0, (2, 2), dtype=torch.float32)


def check_what_moves(sp):
    """Few queries come to many keys, and few keys to many queries: what takes fewer bytes, the same on all ranks."""
    for new, kept, kinds in ((6, 60, {"q", "out"}), (60, 6, {"kv"})):
        before = sp.comm.received.copy()
        q, k, v = whole(1, new, kept, (4, 2))
        spans = ([(Run(a * n // 2, 1, n // 2),) for a in range(2)] for n in (new, kept))
        q_runs, kv_runs = spans
        shards = UnevenShards([(run._replace(start=run.start + kept),) for (run,) in q_runs], kv_runs, q_start=kept)
        here, held = positions(q_runs[sp.rank]), positions(kv_runs[sp.rank])
        out, _ = sp.cache_attention(q[:, here], k[:, held], v[:, held], mask=CAUSAL, shards=shards)
        assert error(out, oracle.attention(q, k, v, causal=False)[:, here]) < 1e-10
        assert {kind for kind, count in sp.comm.received.items() if count > before[kind]} == kinds


def check_half(sp):
    """In bf16 at most twice the error of one device."""
    cases = (decoded, ([40, 40], (4, 2), (64, 64))), (attended, (20, 40, (4, 2), (64, 64)))
    with make(size=1, ulysses=1) as alone:
        for function, args in cases:
            found, *_, wanted = function(sp, *args, dtype=torch.bfloat16)
            single, *_, whole_wanted = function(alone, *args, dtype=torch.bfloat16)
            assert error(found, wanted) <= 2 * error(single, whole_wanted)


RANKS = (1, 1), (2, 1), (3, 3), (4, 2), pytest.param(8, 2, marks=pytest.mark.slow)


@pytest.mark.parametrize(("size", "ulysses"), RANKS)
@on_each_of("size")
def test_every_rank_gets_dense_attention(size, ulysses):
    order = "ring_intra" if ulysses < size else "auto"  # then SP ranks are not in the order of the job's
    with make(size=size, ulysses=ulysses, heads=(6, 3) if ulysses == 3 else (4, 2), rank_order=order) as sp:
        check_decode_steps(sp)
        with mock.patch.object(cached, "MOST", 0):  # as parts of many rows are merged
            check_decode_steps(sp)
        check_new_tokens(sp)
        check_bytes(sp)
        if size == 2:
            check_what_moves(sp)
            check_half(sp)


# ---- refusals


def step(sp, rank, change=None, **options):
    """A decode step in which the wrong rank, or every one, does something else."""
    q, k, v = whole(2, 1, 6, (4, 2))
    inputs = change(q, k, v) if change else (q, k, v)
    return sp.decode_attention(*inputs, **options)


def turn(sp, rank, change=None, **options):
    q, k, v = whole(2, 1, 3, (4, 2))
    shards = UnevenShards([(Run(6, 1, 1),), (Run(7, 1, 1),)], [(Run(0, 1, 3),), (Run(3, 1, 3),)], q_start=6)
    inputs = change(q, k, v) if change else (q, k, v)
    return sp.cache_attention(*inputs, **{"mask": CAUSAL, "shards": shards, **options})


def all_ask(call, **options):
    return lambda sp, rank: call(sp, rank, **options)


def one_asks(call, **options):
    return lambda sp, rank: call(sp, rank, **(options if rank == WRONG else {}))


def wants_gradients(q, k, v):
    return q, k.requires_grad_(), v


OTHER = UnevenShards([(Run(6, 1, 2),), ()], [(Run(0, 1, 3),), (Run(3, 1, 3),)], q_start=6)
REFUSED = {
    "gradients": (all_ask(step, change=wants_gradients), everywhere("no backward", "torch.no_grad()")),
    "one rank's gradients": (one_asks(turn, change=wants_gradients), only_one("no backward", "torch.no_grad()")),
    "new tokens": (
        all_ask(step, change=lambda q, k, v: (k.repeat(1, 1, 2, 1), k, v)),
        everywhere("one new", "6", "cache_attention"),
    ),
    "counts of other rows": (one_asks(step, counts=[(0, 3)]), only_one("counts", "2 rows", "6 kept", "[(0, 3)]")),
    "counts beyond the keys": (one_asks(step, counts=[(0, 3), (0, 7)]), only_one("counts", "6 kept")),
    "counts that are no ints": (
        one_asks(step, counts=[(0, 3), (0, 1.5)]), only_one("ints within 6 kept", "[(0, 3), (0, 1.5)]"),
    ),
    "another softcap": (one_asks(step, softcap=2.0), differ("softcap 2.0")),
    "other heads": (one_asks(step, change=lambda q, k, v: (q, k[:, :, :1], v[:, :, :1])), differ("(2, 1, 8)")),
    "heads that do not divide": (
        all_ask(step, change=lambda q, k, v: (q[:, :, :3], k, v)),
        everywhere("multiple", "3 and 2", kind="ConfigError"),
    ),
    "no shards": (all_ask(turn, shards=None), everywhere("UnevenShards", "NoneType")),
    "other shards": (one_asks(turn, shards=OTHER), only_one("tokens that the shards give", "0 of q")),
    "another window": (one_asks(turn, mask=Mask(window=3)), differ("attention inputs; got", "window 3")),
    "a decode step in place of a turn": (
        lambda sp, rank: (step if rank == WRONG else turn)(sp, rank),
        everywhere("the same calls", "decode inputs", "attention inputs", kind="DisagreementError"),
    ),
}  # fmt: skip


@on_each_of(2, timeout=SECONDS)
def test_wrong_inputs_are_told_to_all_ranks():
    with make(ulysses=1) as sp:
        assert_all_refused(REFUSED, sp)


@on_each_of(2, timeout=SECONDS)
def test_ranks_need_the_same_SequenceParallel_for_a_step():
    with make() as one, make(comm_dtype="bf16") as other:
        found = refusal(step, other if one.rank == WRONG else one, one.rank)
        assert lacking(found, "DisagreementError", f"rank {WRONG}: SequenceParallel") == []


# ---- the page


def as_script(path):
    dist.destroy_process_group()  # it makes its own
    return runpy.run_path(str(path), run_name="__main__")["out"]


def test_the_script_of_the_page_runs(tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs" / "generation.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(# decode.py: torchrun --nproc-per-node 4 .*?)```", page, re.S)
    (tmp_path / "decode.py").write_text(script, encoding="utf-8")
    outs = on_ranks(4, as_script, tmp_path / "decode.py", keep=None)
    torch.manual_seed(0)
    tokens = [[torch.randn(1, count, heads, 64) for heads in (8, 2, 2)] for count in (512, 1, 1, 1, 1, 1, 1)]
    _, k, v = (torch.cat(x, 1).double() for x in zip(*tokens, strict=True))
    assert error(outs[0], oracle.attention(tokens[-1][0].double(), k, v, causal=False)) < 1e-5
    assert all(torch.equal(out, outs[0]) for out in outs)
