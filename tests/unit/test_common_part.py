"""A part that all keys have in common offsets all scores: fp32 gradients stay as near to fp64 as dense fp32's."""

import functools

import pytest
import torch

from ds_seqpar import Mask, SequenceParallelConfig, testing
from ds_seqpar.core.runtime.dense import common_part, moments
from ds_seqpar.testing import attention
from tests import oracle
from tests.cuda_models import models

SEQ, DIM, HEADS = 144, 64, (4, 2)  # of 64, whose scale is exact: of others dense fp32 is worse in backward
OFFSETS = (100, 10_000)
TIMES = 4  # the error of torch's dense fp32, at most
WINDOW, PACK = Mask(window=50), Mask(documents=(0, 31, 100), window=40)
CASES = {
    "ring of 2": ({"size": 2}, Mask()),
    "striped": ({"size": 4, "layout": "striped"}, Mask()),
    "contiguous, q travels": (
        {"size": 4, "layout": "contiguous", "rotate_forward": "q", "rotate_backward": "q"},
        Mask(),
    ),
    "mesh": ({"size": 4, "schedule": "mesh", "mesh": (2, 1, 2), "overlap": True}, Mask()),
    "triangle": ({"size": 3, "schedule": "triangle"}, Mask()),
    "ulysses around a ring": ({"size": 4, "ulysses": 2, "head_chunks": 1}, Mask()),
    "window on one rank": ({"size": 1, "kernel": "reference"}, WINDOW),
    "pack on one rank": ({"size": 1, "kernel": "reference"}, PACK),
    "pack under ulysses": ({"size": 2, "ulysses": 2, "kernel": "reference"}, PACK),
    "one call for whole rows": ({"size": 1, "kernel": "chunked"}, Mask()),
    "prefix on one rank": ({"size": 1}, Mask(prefix=40)),
    "efficient attention": ({"size": 4, "kernel": "cuda_efficient_model"}, PACK),
}


@functools.cache
def given(offset, turned=False):
    """(q, k, v, do) in fp32 whose scores are all near `offset`: keys have a bias, and queries a part along it. turned:
    by RoPE, bias and all."""
    dice = torch.Generator().manual_seed(0)
    q, k, v, do = oracle.tensors(1, SEQ, HEADS, DIM)
    bias = torch.randn(DIM, generator=dice, dtype=torch.float64)
    bias /= bias.norm()
    q, k = q + bias * DIM**0.5, k + bias * offset
    if turned:
        q, k = _turned(q), _turned(k)
    return tuple(x.float() for x in (q, k, v, do))


def _turned(x):
    angles = torch.arange(SEQ)[:, None, None] * 1e6 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


@functools.cache
def dense(offset, mask, turned=False):
    """(dense results in fp64, the errors of torch's in fp32)."""
    *tensors, do = given(offset, turned)
    wanted = oracle.dense(*tensors, do, mask=mask)
    leaves = [x.clone().requires_grad_() for x in tensors]
    seen = oracle.seen(mask, range(SEQ), range(SEQ))
    q, k, v = (x.transpose(1, 2) for x in leaves)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    found = out.detach(), *torch.autograd.grad(out, leaves, do)
    return wanted, oracle.errors(found, wanted)


def times(settings, mask, offset, turned=False):
    """The errors of out, dq, dk and dv, each over that of torch's dense fp32."""
    wanted, usual = dense(offset, mask, turned)
    found = attention(SequenceParallelConfig(**{"ulysses": 1, **settings}), *given(offset, turned), mask=mask)
    errors = oracle.errors((found.out, found.dq, found.dk, found.dv), wanted)
    return [error / usual for error, usual in zip(errors, usual, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_errors_are_near_those_of_dense_attention_at_any_offset(name):
    with models():
        for offset in (0, *OFFSETS):
            assert max(times(*CASES[name], offset)) <= TIMES, offset


@pytest.mark.parametrize("name", ["ring of 2", "mesh", "pack on one rank"])
def test_so_they_are_where_rope_turns_the_bias(name):
    for offset in OFFSETS:
        assert max(times(*CASES[name], offset, turned=True)) <= TIMES, offset


@pytest.mark.parametrize("name", ["ring of 2", "mesh", "window on one rank", "pack under ulysses"])
def test_without_it_dq_has_another_error(name, monkeypatch):
    monkeypatch.setattr(testing.Runtime, "takes_common_off", lambda *_: False)
    out, dq, _, _ = times(*CASES[name], 1_000)
    assert dq > 2 * TIMES
    assert out < TIMES


def test_a_sink_keeps_its_weight():
    """Beside a sink, rows of ds do not sum to 0. Scores lie around the sinks: above, near and below them."""
    sinks = torch.tensor([80.0, 101.0, 130.0, -float("inf")])
    *tensors, do = given(100)
    leaves = [x.double().requires_grad_() for x in (*tensors, sinks)]
    out = oracle.attention(*leaves[:3], sinks=leaves[3])
    wanted = out.detach(), *torch.autograd.grad(out, leaves, do.double())
    for settings in ({"size": 2}, {"size": 4, "ulysses": 2}, {"size": 4, "ulysses": 2, "head_chunks": 2}):
        config = SequenceParallelConfig(**{"ulysses": 1, **settings})
        found = attention(config, *tensors, do, sinks=sinks)
        results = found.out, found.dq, found.dk, found.dv, found.dsinks
        oracle.assert_exact(results, wanted, settings, limit=2e-5)
    off = attention(SequenceParallelConfig(size=1), *tensors, do, sinks=sinks)  # one call for whole rows
    oracle.assert_exact((off.out, off.dk), (wanted[0], wanted[2]), limit=1e-3)


def test_half_precision_and_fp64_stay_as_they_are(monkeypatch):
    for dtype in (torch.bfloat16, torch.float64):
        tensors = [x.to(dtype) for x in given(1_000)]
        config = SequenceParallelConfig(size=2, ulysses=1)
        with monkeypatch.context() as patch:
            patch.setattr(testing.Runtime, "takes_common_off", lambda *_: False)
            plain = attention(config, *tensors)
        found = attention(config, *tensors)
        assert all(torch.equal(getattr(found, name), getattr(plain, name)) for name in ("out", "dq", "dk", "dv"))
    wanted, _ = dense(1_000, Mask())
    oracle.assert_exact((found.out, found.dq, found.dk, found.dv), wanted)


# ---- the common part itself


def part_of(*keys):
    return common_part(torch.stack([moments(k) for k in keys]), keys[0].shape[2])


def test_keys_without_a_bias_stay_as_they_are():
    k = torch.randn(2, 64, 3, 8, generator=torch.Generator().manual_seed(0))
    assert not part_of(k[:, :20], k[:, 20:]).any()
    far = torch.cat([k, torch.full((2, 1, 3, 8), 1e6)], 1)  # a key that lies apart is no bias
    assert not part_of(far).any()
    assert not part_of(k[:, :0]).any()  # no keys at all


def test_a_bias_is_the_mean_of_all_ranks_keys():
    k = torch.randn(2, 64, 3, 8, generator=torch.Generator().manual_seed(0))
    k[:, :, 1, 2:5] += 40
    found = part_of(k[:, :9], k[:, 9:9], k[:, 9:])
    torch.testing.assert_close(found[1, 2:5], k[:, :, 1, 2:5].mean((0, 1)))
    assert found.count_nonzero() == 3
    k[0, 0, 1, 2], k[0, 0, 1, 3] = torch.inf, torch.nan  # these elements' mean is no number
    assert part_of(k).nonzero().tolist() == [[1, 4]]
