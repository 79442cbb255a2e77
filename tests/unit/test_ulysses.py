"""The all-to-all that trades sequence for heads: who gets which heads, the way back, and its adjoint."""

import pytest
import torch

from ds_seqpar.running import ulysses

DIM = 4
# members, query heads, kv heads: more kv heads than members, as many, fewer, one
CASES = [(1, 4, 2), (2, 4, 4), (2, 8, 2), (4, 8, 2), (4, 4, 1), (3, 6, 3), (6, 12, 2), (8, 24, 2)]
_cases = pytest.mark.parametrize(("members", "q_heads", "kv_heads"), CASES)
# sequences; whether members hold different numbers of tokens, one of them none; whether the tensors have gaps
_forms = pytest.mark.parametrize(
    ("batch", "uneven", "strided"), [(1, False, False), (2, False, True), (1, True, True), (2, True, False)]
)


def _exchange(buffers, sizes):
    """The all-to-all: member u gets the u-th part of everybody's buffer."""
    parts = [buffer.flatten().split(outgoing) for buffer, (outgoing, _) in zip(buffers, sizes, strict=True)]
    received = [[mine[u] for mine in parts] for u in range(len(buffers))]
    assert [[x.numel() for x in found] for found in received] == [incoming for _, incoming in sizes]
    return [torch.cat(found) for found in received]


def _counts(tensors):
    return [mine[0].shape[1] for mine in tensors]


def _inward(tensors):
    """tensors[u] = [q, k, v] of member u, all heads of its tokens -> its heads of all tokens."""
    members, counts = len(tensors), _counts(tensors)
    buffers = [ulysses.pack_in(mine, members) for mine in tensors]
    received = _exchange(buffers, [ulysses.sizes_in(buffer, counts) for buffer in buffers])
    heads = [ulysses.heads_of_member(x.shape[2], members) for x in tensors[0]]
    return [ulysses.split_in(x.view(sum(counts), *buffers[0].shape[2:]), heads) for x in received]


def _outward(tensors, heads, counts):
    members = len(tensors)
    joined = [ulysses.join_out(mine).contiguous() for mine in tensors]
    sizes = [ulysses.sizes_out(x, counts, own) for x, own in zip(joined, counts, strict=True)]
    received = _exchange(joined, sizes)
    return [
        ulysses.unpack_out(x.view(members, own, *joined[0].shape[1:]), heads)
        for x, own in zip(received, counts, strict=True)
    ]


def _random(batch, counts, *heads, seed=0, strided=False):
    dice = torch.Generator().manual_seed(seed)

    def one(tokens, h):
        if strided:  # heads before tokens, and more memory than elements
            wide = torch.randn(batch, h, 2 * tokens, DIM, generator=dice, dtype=torch.float64)
            return wide[:, :, ::2].transpose(1, 2)
        return torch.randn(batch, tokens, h, DIM, generator=dice, dtype=torch.float64)

    return [[one(tokens, h) for h in heads] for tokens in counts]


def _tokens(members, uneven):
    return [(3 * u) % 4 for u in range(members)] if uneven else [3] * members


def _memory(x):
    return x.untyped_storage().data_ptr()


def _dot(a, b):
    return sum((x * y).sum() for mine, yours in zip(a, b, strict=True) for x, y in zip(mine, yours, strict=True))


@_forms
@_cases
def test_a_member_gets_its_heads_of_all_tokens_in_member_order(members, q_heads, kv_heads, batch, uneven, strided):
    tensors = _random(batch, _tokens(members, uneven), q_heads, kv_heads, kv_heads, strided=strided)
    whole = [torch.cat(parts, dim=1) for parts in zip(*tensors, strict=True)]
    share = q_heads // members
    for u, (q, k, v) in enumerate(_inward(tensors)):
        queries = range(u * share, (u + 1) * share)
        assert torch.equal(q, whole[0][:, :, list(queries)])
        # verl#850: the ratio of query to key heads must hold on each member
        needed = sorted({head * kv_heads // q_heads for head in queries})
        assert torch.equal(k, whole[1][:, :, needed])
        assert torch.equal(v, whole[2][:, :, needed])
        assert share % len(needed) == 0


@_forms
@_cases
def test_outward_is_the_inverse_of_inward(members, q_heads, kv_heads, batch, uneven, strided):
    tensors = _random(batch, _tokens(members, uneven), q_heads, kv_heads, kv_heads, strided=strided)
    back = _outward(_inward(tensors), [q_heads, kv_heads, kv_heads], _counts(tensors))
    times = max(1, members // kv_heads)  # what several members hold of one head comes back as their sum
    for mine, found in zip(tensors, back, strict=True):
        assert torch.equal(found[0], mine[0])
        for x, y in zip(found[1:], mine[1:], strict=True):
            torch.testing.assert_close(x, times * y, rtol=1e-12, atol=0)


# deepspeed#8291, prime-rl#3042: gradients of shared heads
@_forms
@_cases
def test_outward_is_the_adjoint_of_inward(members, q_heads, kv_heads, batch, uneven, strided):
    """<A x, y> = <x, A' y>: so gradients that go outward are those of what went inward."""
    counts = _tokens(members, uneven)
    x = _random(batch, counts, q_heads, kv_heads, kv_heads, seed=1)
    moved = _inward(x)
    y = _random(batch, [sum(counts)] * members, *(part.shape[2] for part in moved[0]), seed=2, strided=strided)
    back = _outward(y, [q_heads, kv_heads, kv_heads], counts)
    torch.testing.assert_close(_dot(moved, y), _dot(x, back), rtol=1e-12, atol=1e-12)


def test_gradients_of_shared_heads_are_summed_wide():
    """deepspeed#6841: sums of sequence parallel gradients in bf16."""
    parts = [[torch.full((2, 4, 1, DIM), 256.0 if u == 0 else 1.0, dtype=torch.bfloat16)] for u in range(4)]
    (found,), *_ = _outward(parts, [1], [1] * 4)
    assert found.dtype == torch.bfloat16
    assert found.eq(torch.tensor(259.0).to(torch.bfloat16)).all()  # adding in bf16 would stay at 256


@pytest.mark.parametrize("batch", [1, 2])
def test_what_arrives_is_copied_no_more_than_once(batch):
    """Inward what arrived is used as it stands; outward what a kernel gives for one sequence is sent as it stands; and
    an op's results share no memory with each other."""
    received = torch.randn(6, batch, 4, DIM)
    assert {_memory(x) for x in ulysses.split_in(received, [2, 1, 1])} == {_memory(received)}
    out = torch.randn(batch, 6, 2, DIM)
    joined = ulysses.join_out([out])
    assert _memory(joined) == _memory(out)
    assert joined.is_contiguous() == (batch == 1)
    came = torch.randn(2, 3, batch, 4, DIM)
    found = ulysses.unpack_out(came, [4, 2, 2])
    assert len({_memory(x) for x in (came, *found)}) == 4
    assert all(x.is_contiguous() for x in found)
