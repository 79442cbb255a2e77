"""The all-to-all that trades sequence for heads: who gets which heads, the way back, and its adjoint."""

import pytest
import torch

from ds_seqpar.running.ulysses import pack_in, pack_out, unpack_in, unpack_out

BATCH, TOKENS, DIM = 2, 3, 4  # tokens: of one member, before
# members, query heads, kv heads: more kv heads than members, as many, fewer, one
CASES = [(1, 4, 2), (2, 4, 4), (2, 8, 2), (4, 8, 2), (4, 4, 1), (3, 6, 3), (6, 12, 2), (8, 24, 2)]
_cases = pytest.mark.parametrize(("members", "q_heads", "kv_heads"), CASES)


def _exchange(buffers):
    """The all-to-all: member u gets row u of everybody's buffer."""
    return [torch.stack([buffer[u] for buffer in buffers]) for u in range(len(buffers))]


def _inward(tensors, members):
    """tensors[u] = [q, k, v] of member u, all heads of its tokens -> its heads of all tokens."""
    heads = [max(1, x.shape[2] // members) for x in tensors[0]]
    buffers = _exchange([pack_in(mine, members) for mine in tensors])
    return [unpack_in(buffer, BATCH, heads, DIM) for buffer in buffers]


def _outward(tensors, heads, members):
    per_member = [x.shape[2] for x in tensors[0]]
    buffers = _exchange([pack_out(mine, members) for mine in tensors])
    return [unpack_out(buffer, BATCH, heads, per_member, DIM) for buffer in buffers]


def _random(members, *heads, seed=0, tokens=TOKENS, dtype=torch.float64):
    dice = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(BATCH, tokens, h, DIM, generator=dice, dtype=torch.float64).to(dtype) for h in heads]
        for _ in range(members)
    ]


def _dot(a, b):
    return sum((x * y).sum() for mine, yours in zip(a, b, strict=True) for x, y in zip(mine, yours, strict=True))


@_cases
def test_a_member_gets_its_heads_of_all_tokens_in_member_order(members, q_heads, kv_heads):
    tensors = _random(members, q_heads, kv_heads, kv_heads)
    whole = [torch.cat(parts, dim=1) for parts in zip(*tensors, strict=True)]
    share = q_heads // members
    for u, (q, k, v) in enumerate(_inward(tensors, members)):
        queries = range(u * share, (u + 1) * share)
        assert torch.equal(q, whole[0][:, :, list(queries)])
        # verl#850: the ratio of query to key heads must hold on each member
        needed = sorted({head * kv_heads // q_heads for head in queries})
        assert torch.equal(k, whole[1][:, :, needed])
        assert torch.equal(v, whole[2][:, :, needed])
        assert share % len(needed) == 0


@_cases
def test_outward_is_the_inverse_of_inward(members, q_heads, kv_heads):
    tensors = _random(members, q_heads, kv_heads, kv_heads)
    back = _outward(_inward(tensors, members), [q_heads, kv_heads, kv_heads], members)
    times = max(1, members // kv_heads)  # what several members hold of one head comes back as their sum
    for mine, found in zip(tensors, back, strict=True):
        assert torch.equal(found[0], mine[0])
        for x, y in zip(found[1:], mine[1:], strict=True):
            torch.testing.assert_close(x, times * y, rtol=1e-12, atol=0)


@_cases
def test_packing_alone_is_inverted_by_unpacking_what_another_member_sent(members, q_heads, kv_heads):
    (mine,) = _random(1, q_heads)
    buffer = pack_in(mine, members)
    assert buffer.shape == (members, BATCH * TOKENS * q_heads // members * DIM)
    assert torch.equal(unpack_out(buffer, BATCH, [q_heads], [q_heads // members], DIM)[0], mine[0])
    (local,) = _random(1, q_heads // members, tokens=members * TOKENS)
    assert torch.equal(unpack_in(pack_out(local, members), BATCH, [q_heads // members], DIM)[0], local[0])


# deepspeed#8291, prime-rl#3042: gradients of shared heads
@_cases
def test_outward_is_the_adjoint_of_inward(members, q_heads, kv_heads):
    """<A x, y> = <x, A' y>: so gradients that go outward are those of what went inward."""
    x = _random(members, q_heads, kv_heads, kv_heads, seed=1)
    moved = _inward(x, members)
    y = _random(members, *(part.shape[2] for part in moved[0]), seed=2, tokens=members * TOKENS)
    back = _outward(y, [q_heads, kv_heads, kv_heads], members)
    torch.testing.assert_close(_dot(moved, y), _dot(x, back), rtol=1e-12, atol=1e-12)


def test_gradients_of_shared_heads_are_summed_wide():
    """deepspeed#6841: sums of sequence parallel gradients in bf16."""
    parts = [[torch.full((BATCH, 4, 1, DIM), 256.0 if u == 0 else 1.0, dtype=torch.bfloat16)] for u in range(4)]
    (found,), *_ = _outward(parts, [1], 4)
    assert found.dtype == torch.bfloat16
    assert found.eq(torch.tensor(259.0).to(torch.bfloat16)).all()  # adding in bf16 would stay at 256
