"""Attention over real gloo processes equals dense attention."""

import torch

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from tests.launch import on_ranks


def attend(config, causal):
    torch.manual_seed(0)
    sp = SequenceParallel(SequenceParallelConfig(**config))
    q, k, v = (torch.randn(2, 48, h, 32, dtype=torch.float64) for h in (8, 2, 2))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in whole), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    do = torch.randn_like(out)
    grads = torch.autograd.grad(out, whole, do)
    local = [sp.shard(x, 1).requires_grad_() for x in (q, k, v)]
    mine = sp.attention(*local, causal=causal)
    mine.backward(sp.shard(do, 1))
    found = [sp.gather(x.detach(), 1) for x in (mine, *(x.grad for x in local))]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, (out, *grads), strict=True))


def test_first():
    assert max(on_ranks(4, attend, {"size": 4, "ulysses": 2}, True)) < 1e-10
