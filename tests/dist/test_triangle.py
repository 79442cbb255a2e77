"""Ranks that own two blocks each, over real gloo processes: masks, any length, a checkpoint, and what is refused."""

import functools

import pytest
from torch.utils.checkpoint import checkpoint

from ds_seqpar.compiler.sharding.masks import Mask
from tests import oracle
from tests.dist.ranks import assert_all_refused, assert_exact, everywhere, leaves, make
from tests.launch import on_each_of
from tests.launch import on_warm_ranks as on_ranks

HEADS = (4, 2)
MASKS = (Mask(window=7), Mask(documents=(0, 5, 24, 31)), Mask(window=9, documents=(0, 20, 21, 40)))


@pytest.mark.parametrize("settings", [
    {"size": 6, "ulysses": 1, "strips": 2},
    {"size": 3, "ulysses": 1, "overlap": True},
    pytest.param({"size": 6, "ulysses": 1, "strips": 1}, marks=pytest.mark.whole),
    pytest.param({"size": 6, "ulysses": 2, "overlap": True}, marks=pytest.mark.whole),
    pytest.param({"size": 10, "ulysses": 1, "overlap": True}, marks=pytest.mark.whole),
], ids=str)  # fmt: skip
def test_masks_that_only_remove_are_exact_and_bring_less(settings):
    arrived = on_ranks(settings["size"], arrived_under_masks, settings, timeout=300)
    first, *others = map(sum, zip(*arrived, strict=True))
    assert all(total < first for total in others)


def arrived_under_masks(settings):
    """The elements that arrived without a mask, and under each; attention is exact."""
    found = []
    with make(schedule="triangle", **settings) as sp:
        for mask in (Mask(), *MASKS):
            before = sum(sp.comm.received.values())
            assert_exact(sp, oracle.tensors(2, 60, HEADS), mask=mask)
            found.append(sum(sp.comm.received.values()) - before)
    return found


@on_each_of(6)
def test_sequences_of_any_length_are_placed():
    """Sequences that ranks cannot share equally, one of them of packed documents."""
    with make(size=6, ulysses=1, schedule="triangle") as sp:
        for seq, documents in ((29, None), (50, (7, 1, 20, 22))):
            placement = sp.place(seq, documents)
            assert_exact(sp, oracle.tensors(1, seq, HEADS), placement, mask=placement.mask)


@on_each_of(3)
def test_stages_and_checkpoints_are_exact():
    with make(size=3, ulysses=1, schedule="triangle", head_chunks=2) as sp:
        way = functools.partial(checkpoint, sp.attention, use_reentrant=False)
        assert_exact(sp, oracle.tensors(1, 24, HEADS), way=way)


@on_each_of(3)
def test_full_attention_is_refused_before_anything_is_sent():
    with make(size=3, ulysses=1, schedule="triangle") as sp:
        words = "triangle", "causal", "queries of chunk", "ring or mesh"
        q, k, v = leaves(sp, *oracle.tensors(1, 24, HEADS)[:3])
        full = {"full": (lambda sp, rank: sp.attention(q, k, v, causal=False), everywhere(*words, kind="ConfigError"))}
        assert_all_refused(full, sp)
