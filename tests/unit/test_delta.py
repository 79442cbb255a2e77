"""Queries that travel bring delta = rowsum(do * out) and no out; a kernel is given a projection instead."""

import pytest
import torch

from ds_seqpar.core.runtime import dense as work
from ds_seqpar.core.runtime.dense import out_with_rowsum
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.testing import attention
from tests.oracle import dense, errors, tensors

SCALES = (1.0, 1e-25, 1e-30)  # of rows of do in fp32: the squares of the small ones are 0


def _rows(dtype, seed):
    """(do, out, delta): rows of every scale, and rows of zeros."""
    dice = torch.Generator().manual_seed(seed)
    do, out = (torch.randn(2, 12, 3, 16, generator=dice, dtype=torch.float64) for _ in range(2))
    do *= torch.tensor([*SCALES, 0.0] * 3, dtype=torch.float64)[:, None, None]
    do, out = do.to(dtype), out.to(dtype)
    return do, out, (do.to(work.sum_dtype(dtype)) * out).sum(-1)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # a rounding of each of the result's elements and of their sum
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)],
    ids=["fp64", "fp32", "bf16"],
)
def test_the_projection_has_the_delta_of_the_true_output_and_is_no_longer(dtype, tolerance):
    for seed in range(8):
        do, out, delta = _rows(dtype, seed)
        found = out_with_rowsum(do, delta)
        assert found.dtype == dtype
        assert found.isfinite().all()
        again = (do.double() * found.double()).sum(-1)
        assert (again - delta.double()).abs().le(tolerance * delta.double().abs()).all()
        assert found[:, 3::4].eq(0).all()  # where do is 0
        lengths = found.double().norm(dim=-1), out.double().norm(dim=-1)
        assert lengths[0].le(lengths[1] * (1 + tolerance)).all()


def test_on_devices_pieces_are_large_and_have_every_row_once(monkeypatch):
    x = torch.empty(2, 5, 3, 8, device="meta")
    assert work._pieces(x) is None
    monkeypatch.setattr(work, "AT_ONCE", 2 * 2 * 3 * 8)  # two tokens
    seen, pieces = torch.zeros(2, 5, 3), [*work._pieces(x)]
    for piece in pieces:
        seen[piece] += 1
    assert seen.eq(1).all()
    assert len(pieces) == 3


def _traveling_q(scale):
    """fp32 errors of dq, dk, dv of a ring where q travels, for a do of this scale with some rows of zeros."""
    q, k, v, do = tensors(1, 64, (4, 2), 16, torch.float32)
    do *= scale
    do[:, ::5] = 0
    found = attention(SequenceParallelConfig(size=8, ulysses=1, rotate_backward="q"), q, k, v, do)
    return errors((found.dq, found.dk, found.dv), dense(q, k, v, do)[1:])


@pytest.mark.parametrize("scale", SCALES)
def test_gradients_of_visiting_queries_are_exact_however_small(scale):
    assert max(_traveling_q(scale)) <= 1e-5


def test_a_projection_that_squares_small_numbers_would_be_noticed(monkeypatch):
    def naive(do, delta):
        square = do.square().sum(-1, keepdim=True)
        return do * torch.where(square > 0, delta[..., None] / square, 0.0)

    monkeypatch.setattr(work, "out_with_rowsum", naive)
    assert max(_traveling_q(1.0)) <= 1e-5
    assert max(_traveling_q(1e-25)) > 0.01


def test_visitors_outputs_are_projections_and_the_own_is_the_true_one(monkeypatch):
    made = []
    monkeypatch.setattr(work, "out_with_rowsum", lambda do, delta: made.append(do.shape) or out_with_rowsum(do, delta))
    inputs = tensors(1, 16, (2, 2), 8)
    for side, visitors in (("kv", 0), ("q", 4 * 3)):
        made.clear()
        attention(SequenceParallelConfig(size=4, ulysses=1, rotate_forward=side, rotate_backward=side), *inputs)
        assert len(made) == visitors
