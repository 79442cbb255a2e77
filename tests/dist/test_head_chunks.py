"""Attention on some heads at a time: the same numbers, in every schedule, and buffers of one head chunk."""

import itertools

import pytest
import torch
import torch.distributed as dist

from ds_seqpar.core.compiler.sharding.heads import max_head_chunks
from ds_seqpar.core.compiler.sharding.masks import Mask
from tests import oracle
from tests.dist.ranks import attend, leaves, make, refusal
from tests.launch import on_warm_ranks as on_ranks
from tests.words import missing

SCHEDULES = ("ring", "double_ring", "distflash", "attention2d", "wallfacer", "mesh")
HEADS = {"equal": (8, 8), "grouped": (8, 4), "one kv head of two left": (6, 3)}
GRID = [
    (*case, kept)
    for case, kept in zip(
        itertools.product(SCHEDULES, (1, 2, 4), HEADS, (2, 3, 4, "auto"), (False, True)),
        itertools.cycle(("auto", True, False)),
        strict=False,
    )
]
COVER, WHOLE = GRID[::61], GRID[::17]


def legal(case):
    _, ulysses, heads, head_chunks, *_ = case
    return head_chunks == "auto" or head_chunks <= max_head_chunks(*HEADS[heads], ulysses)


def errors(cases):
    """Of every case: the greatest error of out and gradients against dense attention, and for two of five that of the
    lse and of attention with a window, sinks and a softcap against one head chunk of the same settings, 0 for the
    others."""
    return [_errors(*case, full=at % 5 < 2) for at, case in enumerate(cases)]


def _errors(schedule, ulysses, heads, head_chunks, overlap, kept, full):
    section = {
        "size": 4,
        "ulysses": ulysses,
        "schedule": schedule,
        "overlap": overlap,
        "save_qkv_after_all_to_all": kept,
    }
    chunked_by_heads, plain = make(**section, head_chunks=head_chunks), make(**section)
    whole = oracle.tensors(2, 48, HEADS[heads])
    error = max(oracle.errors(attend(chunked_by_heads, *whole), oracle.dense(*whole)))
    if not full:
        return error, 0.0
    sinks = torch.linspace(-1, 1, HEADS[heads][0], dtype=torch.float64)
    found = [_full(sp, whole, sinks.clone().requires_grad_()) for sp in (plain, chunked_by_heads)]
    return error, max(oracle.errors(found[1], found[0]))


def _full(sp, whole, sinks):
    """(out, lse, dq, dk, dv, dsinks) with all that attention can have."""
    local = leaves(sp, *whole[:3])
    out, lse = sp.attention(*local, mask=Mask(window=11), softcap=3.0, sinks=sinks, return_lse=True)
    out.backward(sp.shard(whole[3], 1))
    dist.all_reduce(sinks.grad)  # of a rank's own heads, which are others in head chunks
    return [out.detach(), lse.detach(), *(x.grad for x in local), sinks.grad]


@pytest.mark.parametrize("cases", [COVER, pytest.param(WHOLE, marks=pytest.mark.slow)], ids=["cover", "whole"])
def test_stages_are_exact(cases):
    cases = [case for case in cases if legal(case)]
    for found in on_ranks(4, errors, cases, timeout=500):
        for case, (dense, chunked_by_heads) in zip(cases, found, strict=True):
            assert dense < 1e-10, case
            assert chunked_by_heads < 1e-10, case


def traffic():
    """What arrives in a call, forward and backward, by kind: of one head chunk; of four that hide exchanges; of four
    that send q, k and v again."""
    whole, found = oracle.tensors(1, 64, (16, 16)), []
    for settings in ({}, {"head_chunks": 4}, {"head_chunks": 4, "save_qkv_after_all_to_all": False}):
        sp = make(size=4, ulysses=2, overlap=True, **settings)
        sp.attention(*leaves(sp, *whole[:3])).sum().backward()
        found.append(dict(sp.comm.received))
    return found


def test_stages_that_hide_exchanges_send_what_one_stage_sends():
    for plain, hidden, again in on_ranks(4, traffic):
        assert hidden == plain
        assert again["qkv"] == 2 * plain["qkv"]


def refused():
    return [refusal(make, size=2, head_chunks=head_chunks, heads=(8, 4)) for head_chunks in (0, "two", True, 8)] + [
        refusal(make, size=2, ulysses=2, head_chunks=2, heads=(2, 2))
    ]


def test_wrong_stages_are_refused():
    for found in on_ranks(2, refused):
        for (kind, message), got in zip(found, ("0", "'two'", "True", "8", "2"), strict=True):
            assert kind == "ConfigError"
            assert missing(message, "head_chunks", f"got {got}") == []
