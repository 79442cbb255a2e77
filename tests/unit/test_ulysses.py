"""The all-to-all that trades sequence for heads: who gets which heads, the way back, and its adjoint."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ds_seqpar.core.compiler.sharding.heads import heads_by_ulysses_rank, message_layout
from ds_seqpar.core.runtime import buffers

DIM = 4
DIMS = (4, 4, 3)  # of q, k and v
# Ulysses ranks, query heads, kv heads: more kv heads than Ulysses ranks, as many, fewer, one
EVEN = [(1, 4, 2), (2, 4, 4), (2, 8, 2), (4, 8, 2), (4, 4, 1), (3, 6, 3), (6, 12, 2), (8, 24, 2)]
# the same where Ulysses ranks do not divide them; in the last row kv heads with different numbers of Ulysses ranks
UNEVEN = [
    *[(4, 33, 33), (4, 25, 5), (4, 40, 10), (2, 3, 3), (4, 14, 2), (2, 7, 1), (4, 7, 1), (8, 14, 2)],
    *[(8, 21, 3), (8, 25, 5), (8, 12, 3)],
]
_cases = pytest.mark.parametrize(("ulysses_size", "q_heads", "kv_heads"), EVEN + UNEVEN)
# sequences; whether Ulysses ranks hold different numbers of tokens, one of them none; whether the tensors have gaps
_forms = pytest.mark.parametrize(
    ("batch", "uneven", "strided"), [(1, False, False), (2, False, True), (1, True, True), (2, True, False)]
)


class CountCopies(TorchDispatchMode):
    """Writes to tensors, views and empty ones aside."""

    copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.copies += func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.add_, torch.ops.aten._to_copy)
        return func(*args, **(kwargs or {}))


def _exchange(buffers, sizes):
    """The all-to-all: Ulysses rank u gets the u-th part of everybody's buffer."""
    parts = [buffer.flatten().split(outgoing) for buffer, (outgoing, _) in zip(buffers, sizes, strict=True)]
    received = [[mine[u] for mine in parts] for u in range(len(buffers))]
    assert [tuple(x.numel() for x in found) for found in received] == [incoming for _, incoming in sizes]
    return [torch.cat(found) for found in received]


def _layouts(totals, dims, kv_heads, batch, counts):
    """Of each Ulysses rank."""
    given = tuple(totals), tuple(dims), kv_heads, batch, tuple(counts)
    return [message_layout(*given, ulysses_rank) for ulysses_rank in range(len(counts))]


def _packed(tensors, layout):
    buffer = tensors[0].new_empty(sum(layout.of_local))
    buffers.pack_in(tensors, layout, buffer)
    return buffer


def _counts(tensors):
    return [mine[0].shape[1] for mine in tensors]


def _inward(tensors, kv_heads):
    """tensors[u] = [q, k, v] of Ulysses rank u, all heads of its tokens -> its heads of all tokens."""
    totals, dims = zip(*(x.shape[2:] for x in tensors[0]), strict=True)
    layouts = _layouts(totals, dims, kv_heads, len(tensors[0][0]), _counts(tensors))
    packed = [_packed(mine, layout) for mine, layout in zip(tensors, layouts, strict=True)]
    received = _exchange(packed, [layout.sizes(True) for layout in layouts])
    return [buffers.split_in(x, layout) for x, layout in zip(received, layouts, strict=True)]


def _outward(tensors, heads, kv_heads, counts):
    layouts = _layouts(heads, [x.shape[3] for x in tensors[0]], kv_heads, len(tensors[0][0]), counts)
    joined = [buffers.join_out(mine).contiguous() for mine in tensors]
    received = _exchange(joined, [layout.sizes(False) for layout in layouts])
    return [buffers.unpack_out(x, layout) for x, layout in zip(received, layouts, strict=True)]


def _random(batch, counts, *heads, seed=0, strided=False, dims=DIMS):
    dice = torch.Generator().manual_seed(seed)

    def one(tokens, h, dim):
        if strided:  # heads before tokens, and more memory than elements
            wide = torch.randn(batch, h, 2 * tokens, dim, generator=dice, dtype=torch.float64)
            return wide[:, :, ::2].transpose(1, 2)
        return torch.randn(batch, tokens, h, dim, generator=dice, dtype=torch.float64)

    return [[one(tokens, h, dim) for h, dim in zip(heads, dims, strict=True)] for tokens in counts]


def _tokens(ulysses_size, uneven):
    return [(3 * u) % 4 for u in range(ulysses_size)] if uneven else [3] * ulysses_size


def _memory(x):
    return x.untyped_storage().data_ptr()


def _dot(a, b):
    return sum((x * y).sum() for mine, yours in zip(a, b, strict=True) for x, y in zip(mine, yours, strict=True))


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 12))
def test_a_member_gets_its_heads_whatever_the_numbers(kv_heads, group, ulysses_size):
    q_heads = kv_heads * group
    assume(ulysses_size <= q_heads)
    tensors = _random(1, [1] * ulysses_size, q_heads, kv_heads, kv_heads)
    whole = [torch.cat(parts, dim=1) for parts in zip(*tensors, strict=True)]
    moved = _inward(tensors, kv_heads)
    for (q, kv), mine in zip(heads_by_ulysses_rank(q_heads, kv_heads, ulysses_size), moved, strict=True):
        wanted = [x[:, :, span] for x, span in zip(whole, (q, kv, kv), strict=True)]
        assert all(torch.equal(x, y) for x, y in zip(mine, wanted, strict=True))
    ones = [[torch.ones_like(x) for x in mine] for mine in moved]
    holders = sum(kv.stop - kv.start for _, kv in heads_by_ulysses_rank(q_heads, kv_heads, ulysses_size))
    for q, k, v in _outward(ones, [q_heads, kv_heads, kv_heads], kv_heads, [1] * ulysses_size):
        assert q.eq(1).all()
        assert k.sum() / DIMS[1] == v.sum() / DIMS[2] == holders


# deepspeed#8291, prime-rl#3042: gradients of shared heads
@_forms
@_cases
def test_outward_is_the_adjoint_of_inward(ulysses_size, q_heads, kv_heads, batch, uneven, strided):
    """<A x, y> = <x, A' y>: so gradients that go outward are those of what went inward."""
    counts = _tokens(ulysses_size, uneven)
    x = _random(batch, counts, q_heads, kv_heads, kv_heads, seed=1)
    moved = _inward(x, kv_heads)
    y = [
        _random(batch, [sum(counts)], *(part.shape[2] for part in mine), seed=2 + u, strided=strided)[0]
        for u, mine in enumerate(moved)
    ]
    back = _outward(y, [q_heads, kv_heads, kv_heads], kv_heads, counts)
    torch.testing.assert_close(_dot(moved, y), _dot(x, back), rtol=1e-12, atol=1e-12)


# of equal shares, and of Ulysses ranks that are copied for one by one
@pytest.mark.parametrize("q_heads", [4, 7])
def test_gradients_of_shared_heads_are_summed_wide(q_heads):
    """deepspeed#6841: sums of sequence parallel gradients in bf16."""
    own = [q.stop - q.start for q, _ in heads_by_ulysses_rank(q_heads, 1, 4)]
    parts = [
        [torch.full((2, 4, heads, DIM), 256.0 if u == 0 else 1.0, dtype=torch.bfloat16) for heads in (own[u], 1)]
        for u in range(4)
    ]
    for _, found in _outward(parts, [q_heads, 1], 1, [1] * 4):
        assert found.dtype == torch.bfloat16
        assert found.eq(torch.tensor(259.0).to(torch.bfloat16)).all()  # adding in bf16 would stay at 256


@pytest.mark.parametrize("batch", [1, 2])
def test_what_arrives_is_copied_no_more_than_once(batch):
    """Inward what arrived is used as it stands; outward what a kernel gives for one sequence is sent as it stands; and
    an op's results share no memory with each other."""
    layout = message_layout((4, 2, 2), (DIM,) * 3, 2, batch, (3, 3), 0)
    received = torch.randn(6, batch, 4, DIM)
    assert {_memory(x) for x in buffers.split_in(received.flatten(), layout)} == {_memory(received)}
    out = torch.randn(batch, 6, 2, DIM)
    joined = buffers.join_out([out])
    assert _memory(joined) == _memory(out)
    assert joined.is_contiguous() == (batch == 1)
    came = torch.randn(2 * 3 * batch * 4 * DIM)
    found = buffers.unpack_out(came, layout)
    assert len({_memory(x) for x in (came, *found)}) == 4
    assert all(x.is_contiguous() for x in found)


@pytest.mark.parametrize(("ulysses_size", "q_heads", "kv_heads"), EVEN)
def test_equal_shares_are_copied_at_once(ulysses_size, q_heads, kv_heads):
    """One copy a tensor, however many Ulysses ranks there are."""
    layout = message_layout((q_heads, kv_heads, kv_heads), DIMS, kv_heads, 1, (3,) * ulysses_size, 0)
    assert [group.ranks for group in layout.shares.groups] == [ulysses_size]
    tensors = _random(1, [3], q_heads, kv_heads, kv_heads)[0]
    with CountCopies() as seen:
        buffers.unpack_out(_packed(tensors, layout), layout)
    assert seen.copies == 6
