"""The online-softmax merge: exact, in any order, and quiet about rows that nothing has touched."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_seqpar.core.runtime.kernels.accumulate import merge_

INF = float("inf")


def _partial(scores, values):
    """(out, lse) of one block, by direct softmax; scores (B, S, H, K), values (B, K, H, D)."""
    lse = torch.logsumexp(scores, dim=-1)
    return torch.einsum("bshk,bkhd->bshd", torch.softmax(scores, dim=-1), values), lse


def _merged(*parts):
    out, lse = (x.clone() for x in parts[0])
    for part in parts[1:]:
        merge_(out, lse, *part)
    return out, lse


def _random(keys, scale=1.0, dtype=torch.float64):
    dice = torch.Generator().manual_seed(keys)
    scores = torch.randn(2, 5, 3, keys, generator=dice, dtype=dtype) * scale
    return scores, torch.randn(2, keys, 3, 4, generator=dice, dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("scale", [0.01, 1, 100])  # of the scores: nearly equal blocks, and blocks that one outweighs
def test_merged_blocks_equal_the_direct_softmax(dtype, tolerance, scale):
    scores, values = _random(24, scale, dtype)
    parts = [_partial(scores[..., cut], values[:, cut]) for cut in (slice(0, 3), slice(3, 20), slice(20, 24))]
    for got, want in zip(_merged(*parts), _partial(scores, values), strict=True):
        assert got.dtype == dtype
        assert ((got - want).abs().max() / want.abs().max()).item() <= tolerance


# Megatron#1764, TransformerEngine#2186: rows without a key give NaN
@pytest.mark.parametrize("untouched", ["left", "right", "both"])
def test_rows_that_nothing_has_touched_stay_zero(untouched):
    scores, values = _random(8)
    left, right = _partial(scores[..., :4], values[:, :4]), _partial(scores[..., 4:], values[:, 4:])
    expected = [x.clone() for x in _merged(left, right)]
    row = (slice(None), 2)
    for side, part in (("left", left), ("right", right)):
        if untouched in (side, "both"):
            part[0][row], part[1][row] = 0.0, -INF
    other = {"left": right, "right": left, "both": (torch.zeros_like(left[0]), torch.full_like(left[1], -INF))}
    expected[0][row], expected[1][row] = other[untouched][0][row], other[untouched][1][row]
    out, lse = _merged(left, right)
    torch.testing.assert_close(out, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected[1], rtol=0, atol=1e-12)
    assert not out.isnan().any()


def test_scores_beyond_the_range_of_exp_do_not_overflow():
    out, lse = (torch.full(shape, value, dtype=torch.float64) for shape, value in (((1, 1, 1, 2), 1), ((1, 1, 1), 5e4)))
    merge_(out, lse, torch.full_like(out, 3), lse.clone())
    torch.testing.assert_close(out, torch.full_like(out, 2), rtol=1e-10, atol=0)
    merge_(out, lse, torch.full_like(out, 7), torch.full_like(lse, 9e4))
    assert out.eq(7).all()
    assert lse.eq(9e4).all()


# ring-flash-attention#42, #67: the error grows with the ring where sums are kept in the blocks' dtype
def test_half_precision_blocks_are_merged_in_fp32():
    out, lse = torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), -INF)
    for _ in range(300):
        merge_(out, lse, torch.ones(1, 1, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 1))
    assert out.dtype == lse.dtype == torch.float32
    assert (out - 1).abs().item() <= 1e-5
    assert (lse - torch.log(torch.tensor(300.0))).abs().item() <= 1e-5


_number = st.floats(-50, 50)
_part = st.tuples(_number, st.one_of(st.just(-INF), st.floats(-1000, 1000)))


def _tensors(part):
    value, lse = part
    out = 0.0 if lse == -INF else value  # a row that no key has touched has no value
    return torch.full((1, 1, 1, 1), out, dtype=torch.float64), torch.full((1, 1, 1), lse, dtype=torch.float64)


@given(_part, _part, _part)
def test_merging_is_associative_and_commutative(a, b, c):
    a, b, c = map(_tensors, (a, b, c))
    want = _merged(_merged(a, b), c)
    for got in (_merged(a, _merged(b, c)), _merged(_merged(c, a), b), _merged(c, b, a)):
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-9)
