"""Heads that Ulysses ranks do not divide, over real gloo processes: exact, and no more than must be is sent."""

import itertools

import pytest
import torch

from ds_seqpar import SequenceParallelConfig
from ds_seqpar import testing as virtual
from ds_seqpar.compiler.sharding.heads import heads_by_ulysses_rank
from ds_seqpar.compiler.sharding.layout import Run
from ds_seqpar.compiler.sharding.masks import Mask
from ds_seqpar.compiler.sharding.shards import UnevenShards
from tests import oracle
from tests.dist.ranks import attend, leaves, make
from tests.launch import on_each_of
from tests.launch import on_warm_ranks as on_ranks

HEADS = ((33, 33), (14, 2), (25, 5), (40, 10), (7, 1))
BATCH, SEQ, DIM = 2, 48, 8


def real_ranks(settings):
    """By heads: global (out, dq, dk, dv), from one rank of each sequence, what this rank received, its place."""
    found, sp = {}, make(**settings)
    for heads in HEADS:
        before, whole = sp.comm.received.copy(), oracle.tensors(BATCH, SEQ, heads)
        mine = attend(sp, *whole)
        found[heads] = [x.numpy() for x in mine] if sp.rank == 0 else None, sp.comm.received - before
    return found, sp.rank


# deepspeed#8291, verl#850, prime-rl#3042
@pytest.mark.parametrize("settings", [
    {"ulysses": 4},
    pytest.param({"ulysses": 2, "layout": "striped"}, marks=pytest.mark.whole),
    {"ulysses": 2, "schedule": "mesh", "mesh": [2, 1, 1], "overlap": True},
    {"size": 2, "ulysses": 2},
], ids=["four", "around a ring", "around a mesh", "two sequences"])  # fmt: skip
def test_heads_that_members_do_not_divide_are_exact(settings):
    """And virtual ranks have the same bits, and count as much."""
    results = on_ranks(4, real_ranks, settings)
    for heads in HEADS:
        whole = oracle.tensors(BATCH, SEQ, heads)
        imagined = virtual.attention(SequenceParallelConfig(**{"size": 4, **settings}), *whole)
        expected = oracle.dense(*whole)
        for found, rank in results:
            mine, counted = found[heads]
            assert counted == +imagined.received[rank], heads
            if mine is not None:
                mine = [torch.from_numpy(x) for x in mine]
                assert max(oracle.errors(mine, expected)) < 1e-10, heads
                same = zip(mine, (imagined.out, imagined.dq, imagined.dk, imagined.dv), strict=True)
                assert all(torch.equal(a, b) for a, b in same), heads


@pytest.mark.parametrize("heads", HEADS, ids=str)
@on_each_of(4)
def test_a_member_receives_its_own_heads_and_no_other(heads):
    sp, whole = make(ulysses=4), oracle.tensors(BATCH, SEQ, heads, dim=DIM)
    sp.attention(*leaves(sp, *whole[:3])).backward(sp.shard(whole[3], 1))
    row = BATCH * SEQ // 4 * DIM  # one head of one Ulysses rank's tokens
    own = [(q.stop - q.start, kv.stop - kv.start) for q, kv in heads_by_ulysses_rank(*heads, 4)]
    q, kv = own[sp.rank]
    inward, outward = 3 * row * (q + 2 * kv), row * (heads[0] - q)
    # a gradient of k and v comes from every other Ulysses rank that has one
    gradients = 2 * row * (sum(kv for _, kv in own) - kv)
    wanted = {"qkv": inward, "out_heads": outward, "do_heads": 3 * row * q, "dqkv": outward + gradients}
    assert dict(sp.comm.received) == wanted
    assert sp.comm.received_bytes == 8 * sum(wanted.values())


SHARDS = UnevenShards([[Run(0, 1, 5), Run(30, 1, 13)], [Run(5, 1, 25)]])
HELD = ((4, None), (2, None), (2, SHARDS), (4, UnevenShards([[Run(0, 1, 43)]])))


@pytest.mark.parametrize("each", [2, pytest.param(len(HEADS), marks=pytest.mark.whole)])
@on_each_of(4)
def test_lse_and_shards_of_any_length(each):
    """Of whole sequences and of shards of any length. each: of how many heads, in turn."""
    mask, turns = Mask(window=9), itertools.cycle(HEADS)
    for ulysses_size, held in HELD:
        sp = make(ulysses=ulysses_size)
        for heads in itertools.islice(turns, each):
            q, k, v, do = whole = oracle.tensors(BATCH, SEQ if held is None else 43, heads)
            at = places(sp, held, q.shape[1])
            local = [x[:, at].requires_grad_() for x in (q, k, v)]
            out, lse = sp.attention(*local, mask=mask, shards=held, return_lse=True)
            out.backward(do[:, at])
            found = [out.detach(), *(x.grad for x in local), lse.detach()]
            expected = [*oracle.dense(*whole, mask=mask), oracle.lse(q, k, mask)]
            oracle.assert_exact(found, [x[:, at] for x in expected], (ulysses_size, heads))


def places(sp, shards, seq):
    """The positions of this rank's tokens."""
    if shards is None:
        return sp.position_ids(seq)
    ulysses_size = sp.config.ulysses
    return torch.tensor(
        oracle.positions_by_ulysses_rank(shards, "q", sp.rank // ulysses_size, ulysses_size)[sp.rank % ulysses_size]
    )


@pytest.mark.parametrize("heads", [(14, 2), (7, 1)], ids=str)
@on_each_of(4)
def test_bf16_is_as_good_as_one_rank(heads):
    """In root mean square errors: a sum in bf16 of shared heads' gradients would show."""
    whole = oracle.tensors(1, 256, heads, dim=16, dtype=torch.bfloat16)
    alone = virtual.attention(make(size=1).config, *whole)
    expected = oracle.dense(*whole)
    single = oracle.spreads((alone.out, alone.dq, alone.dk, alone.dv), expected)
    found = oracle.spreads(attend(make(ulysses=4), *whole), expected)
    assert all(mine <= 1.5 * one for mine, one in zip(found, single, strict=True)), (found, single)
