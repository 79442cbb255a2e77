"""Ranks that own two blocks each, over real gloo processes: masks, any length, a checkpoint, and what is refused."""

import pytest
from torch.utils.checkpoint import checkpoint

from ds_seqpar.compiler.masks import Mask
from tests import oracle
from tests.dist.ranks import attend, gather_all, is_one_sentence, leaves, make, refusal
from tests.launch import on_warm_ranks as on_ranks
from tests.words import missing

HEADS = (4, 2)
MASKS = (Mask(window=7), Mask(documents=(0, 5, 24, 31)), Mask(window=9, documents=(0, 20, 21, 40)))


def masked(settings):
    """The error under each mask, and the elements that arrived; where none was given first."""
    found = []
    with make(schedule="triangle", **settings) as sp:
        whole = oracle.tensors(2, 60, HEADS)
        for mask in (Mask(), *MASKS):
            before = sum(sp.comm.received.values())
            local = leaves(sp, *whole[:3])
            out = sp.attention(*local, mask=mask)
            out.backward(sp.shard(whole[3], 1))
            got = gather_all(sp, out, *(x.grad for x in local))
            wanted = oracle.dense(*whole, mask=mask)
            found.append((max(oracle.errors(got, wanted)), sum(sp.comm.received.values()) - before))
    return found


@pytest.mark.parametrize("settings", [
    {"size": 6, "ulysses": 1, "strips": 2},
    {"size": 3, "ulysses": 1, "overlap": True},
    pytest.param({"size": 6, "ulysses": 1, "strips": 1}, marks=pytest.mark.whole),
    pytest.param({"size": 6, "ulysses": 2, "overlap": True}, marks=pytest.mark.whole),
    pytest.param({"size": 10, "ulysses": 1, "overlap": True}, marks=pytest.mark.whole),
], ids=str)  # fmt: skip
def test_masks_that_only_remove_are_exact_and_bring_less(settings):
    results = on_ranks(settings["size"], masked, settings, timeout=300)
    for found in results:
        assert max(error for error, _ in found) < 1e-10
    totals = [sum(arrived) for arrived in zip(*([n for _, n in found] for found in results), strict=True)]
    assert all(total < totals[0] for total in totals[1:])


def any_length():
    """Errors of sequences that ranks cannot share equally, one of them of packed documents."""
    found = []
    with make(size=6, ulysses=1, schedule="triangle") as sp:
        for seq, documents in ((29, None), (50, (7, 1, 20, 22))):
            placement = sp.place(seq, documents)
            whole = oracle.tensors(1, seq, HEADS)
            local = [sp.shard(x, 1, placement).requires_grad_() for x in whole[:3]]
            out = sp.attention(*local, mask=placement.mask, shards=placement.shards)
            out.backward(sp.shard(whole[3], 1, placement))
            got = gather_all(sp, out, *(x.grad for x in local), placement=placement)
            found += oracle.errors(got, oracle.dense(*whole, mask=placement.mask))
    return max(found)


def test_sequences_of_any_length_are_placed():
    assert max(on_ranks(6, any_length)) < 1e-10


def again():
    """The error of a checkpointed attention in two stages of heads."""
    with make(size=3, ulysses=1, schedule="triangle", head_stages=2) as sp:
        whole = oracle.tensors(1, 24, HEADS)
        local = leaves(sp, *whole[:3])
        out = checkpoint(sp.attention, *local, use_reentrant=False)
        out.backward(sp.shard(whole[3], 1))
        got = gather_all(sp, out, *(x.grad for x in local))
        return max(oracle.errors(got, oracle.dense(*whole)))


def test_stages_and_checkpoints_are_exact():
    assert max(on_ranks(3, again)) < 1e-10


def refused():
    """What full attention is told, what arrived because of it, and the error of a good one after it."""
    with make(size=3, ulysses=1, schedule="triangle") as sp:
        whole = oracle.tensors(1, 24, HEADS)
        kind, message = refusal(sp.attention, *leaves(sp, *whole[:3]), causal=False)
        arrived = sum(sp.comm.received.values())
        return kind, message, arrived, max(oracle.errors(attend(sp, *whole), oracle.dense(*whole)))


def test_full_attention_is_refused_before_anything_is_sent():
    for kind, message, arrived, error in on_ranks(3, refused):
        assert kind == "ConfigError"
        assert is_one_sentence(message)
        assert missing(message, "triangle", "causal", "queries of chunk", "ring or mesh") == []
        assert arrived == 0
        assert error < 1e-10
