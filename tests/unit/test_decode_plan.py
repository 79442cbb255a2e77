"""Decode steps as plans: valid, complete under NCCL's rules, few bytes, and walked by virtual ranks."""

from collections import deque

import pytest

from ds_seqpar.analysis import nccl
from ds_seqpar.analysis.listing import listing
from ds_seqpar.compiler import decode, memory
from ds_seqpar.compiler.compile import block_mask_of
from ds_seqpar.compiler.overlap.simulate import programs_of
from ds_seqpar.compiler.program.shape import shape_of
from ds_seqpar.compiler.program.ulysses import SavedForBackward
from ds_seqpar.compiler.schedules.actions import Compute, Step
from ds_seqpar.compiler.schedules.plan import Plan
from ds_seqpar.compiler.schedules.validate import validate
from ds_seqpar.compiler.sharding.masks import FULL
from ds_seqpar.errors import PlanError
from ds_seqpar.runtime.cached import _Decode, _DecodeCall
from ds_seqpar.runtime.kernels import Scores
from ds_seqpar.runtime.kernels.reference import Reference
from ds_seqpar.runtime.walk import Walk
from ds_seqpar.testing import Mailbox, _advance, _VirtualComm
from tests import oracle
from tests.unit.commands import run

SIZES = (1, 2, 3, 4, 5, 8)
KERNEL, SCORES = Reference(), Scores(8**-0.5)


def plan_of(size, heads=8):
    shape = shape_of("fp32", "float32", 1, (1, 1, 8))
    block_mask = block_mask_of(FULL, decode.shards(size, heads))
    return decode.recipe(size).plan("forward", block_mask, shape), block_mask


@pytest.mark.parametrize("size", SIZES)
def test_plans_are_valid_and_end_under_nccls_rules(size):
    plan, block_mask = plan_of(size)
    validate(plan, block_mask.pairs())
    nccl.check([programs_of(plan), programs_of(plan)])
    schedule = decode.DECODE
    assert plan.received({"out": 3}) == schedule.received(schedule.axes(size, {}), "forward", "kv", {"out": 3})


def wrong(size, change):
    """A decode plan whose steps are changed on every rank."""
    plan, _ = plan_of(size)
    ranks = tuple(tuple(change(step, rank) for step in steps) for rank, steps in enumerate(plan.ranks))
    return Plan(name="wrong", direction="forward", ranks=ranks, shares_queries=True)


def without(field):
    return lambda step, rank: Step(
        **{name: getattr(step, name) for name in ("gathers", "computes", "reduces") if name != field}
    )


def own_keys_twice(step, rank):
    computes = tuple(Compute(rank=rank, q=compute.q, kv=(0,)) for compute in step.computes)
    return Step(gathers=step.gathers, computes=computes, reduces=step.reduces)


@pytest.mark.parametrize(
    ("change", "words"),
    [(without("gathers"), "is not home"), (without("reduces"), "not there"), (own_keys_twice, "not there")],
)
def test_plans_that_lack_something_are_refused(change, words):
    _, block_mask = plan_of(4)
    with pytest.raises(PlanError, match=words):
        validate(wrong(4, change), block_mask.pairs())


@pytest.mark.parametrize("comm_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("size", "heads"), [(2, 1), (3, 4), (4, 6), (5, 3), (8, 12)])
def test_virtual_ranks_get_the_same_bits(size, heads, comm_dtype):
    q, k, v = oracle.tensors(2, 11, (heads, 1))[:3]
    q, mailbox = q[:, :1], Mailbox(deque)
    comms = [_VirtualComm(rank, mailbox) for rank in range(size)]
    walks = []
    for rank, comm in enumerate(comms):
        bound = decode.bound_decode(size, rank, heads, shape_of(comm_dtype, "float64", 2, (1, 1, v.shape[3])))
        call = _DecodeCall(bound, KERNEL, SCORES, {"q": q}, None, None, SavedForBackward.NOTHING, False)
        call.work = _Decode(KERNEL, SCORES.scale, q, k[:, rank::size], v[:, rank::size])
        call.work.counts, call.work.softcap = [(0, len(range(rank, 11, size)))] * 2, 0.0
        walks.append(Walk(bound, call, comm))
    while any(walk.at < len(walk.program.code) for walk in walks):
        assert any([_advance(walk) for walk in walks])
    results = [walk.call.results() for walk in walks]
    out, lse = (x.transpose(1, 2) for x in results[0])
    tolerance = 1e-10 if comm_dtype == "fp32" else 1e-2
    assert (out - oracle.attention(q, k, v, causal=False)).abs().max() < tolerance
    assert (lse - oracle.lse(q, k, FULL)).abs().max() < 1e-10
    assert all((x == y).all() for found in results for x, y in zip(found, results[0], strict=True))
    elements = 2 * heads * (v.shape[3] + 1)  # out and lse
    assert sum(comm.received["out"] for comm in comms) == 2 * (size - 1) * elements
    shares = [heads * (rank + 1) // size - heads * rank // size for rank in range(size)]
    if size > 2 and len({*shares}) == 1:
        assert {comm.received["out"] for comm in comms} == {2 * (size - 1) * elements // size}


def test_memory_is_that_of_the_slots_and_does_not_grow_with_what_is_kept():
    bound = decode.bound_decode(4, 1, 8, shape_of("fp32", "float32", 2, (1, 1, 64)))
    out = 2 * 8 * (64 + 1) * 4
    assert 2 * out <= memory.peak(bound) <= 4 * out
    assert f"peak memory: {memory.peak(bound)} bytes" in listing(bound)


def test_show_prints_a_decode_step(capsys):
    out, err, code = run(capsys, "show", "--decode", "--size", 4, "--program", 1)
    assert (err, code) == ("", 0)
    assert plan_of(4)[0].table() in out
    bound = decode.bound_decode(4, 1, 8, shape_of("fp32", "float32", 1, (1, 1, 128)))
    assert listing(bound) in out
    for words in (["--overlap"], ["--schedule", "ring"], ["--seq", 8], ["--full"]):
        _, err, code = run(capsys, "show", "--decode", *words)
        assert code == 2
        assert words[0] in err
