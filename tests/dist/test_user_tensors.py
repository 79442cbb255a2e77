"""What users bring to `sp.attention` beside tidy tensors: right to 1e-10, or one sentence on every rank.

Strided tensors, one token a rank, lse and checkpoints are axes of tests/attention_cases.py.
"""

import itertools

import pytest
import torch

from ds_seqpar import testing as virtual
from tests import oracle
from tests.dist.ranks import (
    attend,
    gather_all,
    lacking,
    leaves,
    make,
    refusal,
)
from tests.launch import on_each_of


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
@on_each_of(2)
def test_autocast_chooses_the_dtype_and_nothing_inside(kernel):
    """Against the kernel alone outside autocast, on the bf16 inputs that autocast makes; in fp64, which it leaves."""
    for dtype, ulysses_size in itertools.product((torch.float32, torch.float64), (1, 2)):
        sp = make(ulysses=ulysses_size, kernel=kernel)
        whole = oracle.tensors(1, 96, (4, 2), dim=16, dtype=dtype)
        local = leaves(sp, *whole[:3])
        with torch.autocast("cpu", torch.bfloat16):
            out = sp.attention(*local)
            out.backward(sp.shard(whole[3], 1).to(out.dtype))
        same = torch.bfloat16 if dtype == torch.float32 else dtype
        assert out.dtype == same
        alone = virtual.attention(sp.config, *(x.to(same) for x in whole))
        mine = gather_all(sp, out, *(x.grad for x in local))
        oracle.assert_exact(mine, (alone.out, alone.dq, alone.dk, alone.dv), (dtype, ulysses_size))


@on_each_of(2)
def test_a_loss_of_the_lse_is_refused():
    sp = make(ulysses=2)
    out, lse = sp.attention(*leaves(sp, *oracle.tensors(2, 24, (8, 2))[:3]), return_lse=True)
    assert lacking(refusal((out.sum() + lse.sum()).backward), "InputError", "lse.detach()") == []


@on_each_of(2)
def test_a_gradient_penalty_is_refused_and_not_silently_zero():
    """A gradient that could be differentiated is right."""
    for kernel, ulysses_size in itertools.product(("cpu_flash", "reference"), (1, 2)):
        sp = make(ulysses=ulysses_size, kernel=kernel)
        q, k, v, do = whole = oracle.tensors(1, 24, (4, 2))
        local = leaves(sp, q, k, v)
        (dq,) = torch.autograd.grad(sp.attention(*local), local[0], sp.shard(do, 1), create_graph=True)
        oracle.assert_exact([sp.gather(dq.detach(), 1)], oracle.dense(*whole)[1:2])
        refused = refusal(torch.autograd.grad, dq.square().sum(), local[0])
        assert lacking(refused, "InputError", "no second derivative") == []


@pytest.mark.parametrize("tokens", [14, 24])
@on_each_of(4)
def test_gradients_of_a_mean_loss_survive_narrow_travel(tokens):
    """Gradients of a mean loss over `2 ** tokens` times as many tokens as are here: as small as those of a long one."""
    q, k, v, do = oracle.tensors(1, 32, (4, 4), dtype=torch.float32)
    whole = q, k, v, do / 2.0**tokens
    found = attend(make(comm_dtype="bf16", rotate_backward="q"), *whole)
    oracle.assert_exact(found[1:], oracle.dense(*whole)[1:], limit=2e-2)
