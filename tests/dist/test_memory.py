"""How much memory is taken at once: tests/live.py says how it is counted."""

import torch

from ds_seqpar.running.ulysses import heads_of_member, split_in
from tests.dist.ranks import make
from tests.launch import on_ranks
from tests.live import Live


def exchanged(batch):
    """Bytes, as multiples of what q, k and v take: the most at once inward, what stays; the same outward; what stays
    when results are dropped."""
    sp = make(size=2, ulysses=2, layout="contiguous")
    tensors = [torch.randn(batch, 64, heads, 16).requires_grad_() for heads in (4, 2, 2)]
    mine = [heads_of_member(x.shape[2], 2) for x in tensors]
    grads = [torch.randn(batch, 128, heads, 16) for heads in mine]
    unit = 4 * sum(x.numel() for x in grads)  # of q, k and v
    with Live(*tensors, *grads) as live:
        arrived = torch.ops.ds_seqpar.scatter_heads(tensors, [64, 64], sp.runtime.handle, "qkv", None)
        inner = split_in(arrived, mine)
        del arrived
        found = [live.peak, live.settled()]
        live.restart()
        torch.autograd.backward(inner, grads)
        del inner
        found += [live.peak, live.settled()]
        for x in tensors:
            x.grad = None
        return [x / unit for x in [*found, live.settled()]]


def test_heads_are_exchanged_with_one_copy_each_way():
    """Inward what is sent and what arrives, at most; outward what is sent, what arrives and the gradients, beside what
    had arrived before."""
    for batch in (1, 2):
        assert on_ranks(2, exchanged, batch) == [[2.0, 1.0, 4.0, 1.0, 0.0]] * 2
