"""Softcap and sinks at their ends, in other dtypes, and the kernels that cap; test_exact.py has them in all calls."""

import math
import re

import pytest
import torch

from ds_seqpar import Mask, SequenceParallelConfig, UnevenShards
from ds_seqpar.base.errors import InputError, KernelError
from ds_seqpar.core.runtime.kernels import KERNELS, BlockSpec, reference, select
from ds_seqpar.testing import attention
from tests import oracle
from tests.words import missing


def _dense(q, k, v, do, sinks, **asked):
    q, k, v, sinks = (x.detach().double().requires_grad_() for x in (q, k, v, sinks))
    out = oracle.attention(q, k, v, sinks=sinks, **asked)
    return out.detach(), *torch.autograd.grad(out, (q, k, v, sinks), do.double())


# SkyRL#558: sinks taken from the wrong heads after head sharding; a sink added to every partial result
def test_each_head_has_its_own_sink_once():
    q, k, v, do = oracle.tensors(heads=(4, 2))
    far = torch.tensor([-200.0, 0.0, 5.0, 200.0], dtype=torch.float64)  # nothing, some, most, all of the weight
    for ulysses in (1, 2, 4):
        found = attention(SequenceParallelConfig(size=4, ulysses=ulysses), q, k, v, do, sinks=far)
        plain = attention(SequenceParallelConfig(size=4, ulysses=ulysses), q, k, v, do)
        assert torch.equal(found.out[:, :, 0], plain.out[:, :, 0])
        assert found.out[:, :, 3].abs().max() < 1e-60
        assert oracle.error(found.out, oracle.attention(q, k, v, sinks=far)) < 1e-12


def test_queries_without_any_key_are_zero_beside_a_sink():
    q, k, v, do = (x[:, :n] for x, n in zip(oracle.tensors(seq=16, heads=(2, 1)), (16, 0, 0, 16), strict=True))
    empty, sinks = UnevenShards([[(0, 1, 16)], []], [[], []]), torch.zeros(2, dtype=torch.float64)
    found = attention(SequenceParallelConfig(size=2, ulysses=1), q, k, v, do, shards=empty, sinks=sinks)
    for x in (found.out, found.dq, found.dsinks):
        assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_sinks_without_weight_and_with_all_of_it(size, dtype):
    """-inf changes nothing, inf takes all; rows 5 to 7 of 8 see none of the 4 keys."""
    q, _, _, do = oracle.tensors(seq=8, heads=(4, 2), dtype=dtype)
    _, k, v, _ = oracle.tensors(seq=4, heads=(4, 2), dtype=dtype, seed=1)
    k = k + 30.0  # which fp32 takes off
    cut = 8 // size
    shards = UnevenShards([[(cut * r, 1, cut)] for r in range(size)], [[(0, 1, 4)], []][:size])
    asked = {"mask": Mask(window=2), "shards": shards}
    config = SequenceParallelConfig(size=size, ulysses=1)
    sinks = torch.tensor([-math.inf, -1e30, math.inf, 1e30], dtype=dtype)
    found, plain = attention(config, q, k, v, do, sinks=sinks, **asked), attention(config, q, k, v, do, **asked)
    for ours, without in ((found.out, plain.out), (found.dq, plain.dq)):
        assert torch.equal(ours[:, 5:], torch.zeros_like(ours[:, 5:]))
        oracle.assert_exact((ours[:, :, :2],), (without[:, :, :2],), limit=1e-6)
        assert torch.equal(ours[:, :, 2:], torch.zeros_like(ours[:, :, 2:]))
    assert torch.equal(found.dsinks, torch.zeros(4, dtype=dtype))
    oracle.assert_exact((found.dk[:, :, 0], found.dv[:, :, 0]), (plain.dk[:, :, 0], plain.dv[:, :, 0]), limit=1e-6)
    assert not found.dk[:, :, 1].any()
    assert not found.dv[:, :, 1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softcap_and_sinks_in_other_dtypes(dtype):
    """As near to fp64 as one kernel for the whole: fp32 to 1e-5, bf16 within twice its error."""
    q, k, v, do = oracle.tensors(heads=(4, 2), dim=16, seq=64, dtype=dtype)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1))
    wanted = _dense(q, k, v, do, sinks, softcap=2.0)
    found, alone = (
        attention(SequenceParallelConfig(size=size, ulysses=1), q, k, v, do, softcap=2.0, sinks=sinks)
        for size in (4, 1)
    )
    pairs = zip(*([r.out, r.dq, r.dk, r.dv, r.dsinks] for r in (found, alone)), wanted, strict=True)
    for ours, single, want in pairs:
        assert oracle.error(ours, want) <= (1e-5 if dtype == torch.float32 else 2 * oracle.error(single, want))


@pytest.mark.parametrize("name", ["reference", "chunked"])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "causal"), [(37, 37, True), (24, 56, True), (56, 24, True), (9, 40, False)]
)
def test_kernels_that_cap(name, q_len, kv_len, causal, monkeypatch):
    monkeypatch.setattr(reference.Chunked, "max_scores", 500)  # many pieces, the last one shorter
    kernel = KERNELS[name].capped(1.5)
    dice = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(2, n, h, 8, generator=dice, dtype=torch.float64)
        for n, h in ((q_len, 4), (kv_len, 2), (kv_len, 2), (q_len, 4))
    )
    out, lse = kernel.forward(q, k, v, causal, 0.5)
    found = out, *kernel.backward(do, q, k, v, out, lse, causal, 0.5)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    seen = torch.ones(q_len, kv_len, dtype=torch.bool).tril() if causal else False
    wanted = oracle.attention(q, k, v, seen, 0.5, softcap=1.5)
    assert max(oracle.errors(found, (wanted, *torch.autograd.grad(wanted, (q, k, v), do)))) < 1e-12


def test_a_capped_kernel_never_holds_a_dense_matrix(monkeypatch):
    monkeypatch.setattr(reference.Chunked, "max_scores", 4096)
    made = []
    for name in ("attend", "gradients"):
        inner = getattr(reference, name)
        at = {"attend": (0, 1), "gradients": (1, 2)}[name]  # q and k among the arguments
        monkeypatch.setattr(
            reference,
            name,
            lambda *x, inner=inner, at=at: (made.append(x[at[0]].shape[1] * x[at[1]].shape[1]), inner(*x))[1],
        )
    q = torch.randn(1, 512, 2, 8)
    kernel = KERNELS["chunked"].capped(1.0)
    out, lse = kernel.forward(q, q, q, True, 1.0)
    kernel.backward(q, q, q, q, out, lse, True, 1.0)
    assert made
    assert max(made) * 2 <= 4096


def test_which_kernel_caps():
    assert select("auto", BlockSpec("cpu", torch.float32, 8, 2, 64, 50.0)).name == "chunked"
    assert select("auto", BlockSpec("cuda", torch.float32, 8, 2, 64, 50.0)).name == "chunked"
    with pytest.raises(KernelError) as caught:
        select("cpu_flash", BlockSpec("cpu", torch.float32, 8, 2, 64, 50.0))
    assert missing(str(caught.value), "float32 on cpu", "softcap 50", "cpu_flash") == []
    with pytest.raises(KernelError, match="float64 on cuda"):  # nothing slow in silence
        select("auto", BlockSpec("cuda", torch.float64, 8, 2, 64))


@pytest.mark.parametrize("softcap", [0, -1.0, math.inf, math.nan, True, "50", torch.tensor(2.0)])
def test_a_softcap_that_is_none_is_refused(softcap):
    q, k, v, _ = oracle.tensors()
    with pytest.raises(InputError, match=f"softcap.*got {re.escape(repr(softcap))}"):
        attention(SequenceParallelConfig(size=2), q, k, v, softcap=softcap)


@pytest.mark.parametrize("sinks", [torch.zeros(3), torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64), 0.5])
def test_sinks_that_are_not_one_a_head_are_refused(sinks):
    q, k, v, _ = oracle.tensors(heads=(4, 2))
    with pytest.raises(InputError, match=r"sinks of shape \(4,\)"):
        attention(SequenceParallelConfig(size=2), q, k, v, sinks=sinks)
