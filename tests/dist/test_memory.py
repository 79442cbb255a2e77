"""What attention takes beyond its inputs, seen at every operation, is what the program says, and as little as wanted."""

import pytest
import torch

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.planning import memory
from ds_seqpar.planning.masks import Mask
from ds_seqpar.running.runtime import shape_of
from ds_seqpar.running.ulysses import heads_of, own_heads, split_in
from tests import live
from tests.dist.ranks import make
from tests.launch import on_ranks

HEADS, DIM, TOKENS = 8, 64, 512
UNIT = TOKENS * HEADS * DIM * torch.bfloat16.itemsize  # one rank's q
# settings -> the most units at once: forward; backward with its gradients and with what forward kept
WANTED = {
    "world 1": ({"size": 1}, 1.1, 4.2),
    "ulysses": ({"size": 4, "ulysses": 4}, 6.2, 10.3),
    "ring": ({"size": 4, "ulysses": 1, "schedule": "ring"}, 9.5, 20.5),
    "mesh": ({"size": 4, "ulysses": 1, "schedule": "mesh", "mesh": [2, 1, 2]}, 13, 29),
    "attention2d": ({"size": 4, "ulysses": 1, "schedule": "attention2d", "rows": 2}, 17, 34),
}
OTHERS = {
    "q travels": ({"size": 4, "schedule": "ring", "forward": "q", "backward": "q"}, Mask(), 8),
    "bf16 travels": ({"size": 4, "schedule": "ring", "travel_dtype": "bf16"}, Mask(), 8),
    "grouped heads": ({"size": 4, "schedule": "distflash"}, Mask(), 2),
    "window": ({"size": 4, "schedule": "double_ring", "layout": "contiguous"}, Mask(window=600), 8),
    "overlap": ({"size": 4, "schedule": "wallfacer", "overlap": True}, Mask(), 8),
    "ulysses around": ({"size": 4, "ulysses": 2, "schedule": "ring"}, Mask(), 4),
    "heads dealt unevenly": ({"size": 3, "ulysses": 3}, Mask(), 8),
    "grouped heads dealt unevenly": ({"size": 3, "ulysses": 3}, Mask(), 4),
    "members that share heads": ({"size": 4, "ulysses": 4}, Mask(), 2),
    "members that share heads unevenly": ({"size": 3, "ulysses": 3}, Mask(), 2),
}


def _measured(setting, mask, kv_heads):
    """(measured, the program's own) bytes, each (forward, backward); what is left."""
    torch.manual_seed(0)
    q, do = torch.randn(2, 1, TOKENS, HEADS, DIM).bfloat16()
    k, v = torch.randn(2, 1, TOKENS, kv_heads, DIM).bfloat16()
    with SequenceParallel(SequenceParallelConfig(**{"ulysses": 1, **setting})) as sp:
        figures = live.measure(lambda *x: sp.attention(*x, mask=mask), q, k, v, do)
        members = sp.config.ulysses
        own = shape_of(sp.config.travel_dtype, "bfloat16", 1, (HEADS, kv_heads, DIM))
        inner = [x[:, :, mine] for x, mine in zip((q, k), heads_of(HEADS, kv_heads, members, sp.rank % members), strict=True)]
        shards = sp.runtime.shards(TOKENS * members)
        bound = [sp.runtime.bound(direction, *inner, mask, shards)[0] for direction in ("forward", "backward")]
        said = memory.whole_forward(bound[0], members, own), memory.whole_backward(bound[1], members, own)
    return (figures.forward, figures.backward), said, figures.left


@pytest.mark.parametrize("name", WANTED)
def test_attention_takes_what_its_program_says_and_no_more_than_its_buffers(name):
    setting, forward, backward = WANTED[name]
    for measured, said, left in on_ranks(setting["size"], _measured, setting, Mask(), HEADS):
        assert measured[0] <= forward * UNIT
        assert measured[1] <= backward * UNIT
        assert said == pytest.approx(measured, rel=0.05)
        assert left == 0


@pytest.mark.parametrize("name", OTHERS)
def test_the_program_knows_its_memory_for_other_settings(name):
    setting, mask, kv_heads = OTHERS[name]
    for measured, said, left in on_ranks(setting["size"], _measured, setting, mask, kv_heads):
        assert said == pytest.approx(measured, rel=0.05)
        assert left == 0


def exchanged(batch):
    """Bytes, as multiples of what q, k and v take: the most at once inward, what stays; the same outward; what stays
    when results are dropped."""
    sp = make(size=2, ulysses=2, layout="contiguous")
    tensors = [torch.randn(batch, 64, heads, 16).requires_grad_() for heads in (4, 2, 2)]
    place = tensors[1].shape[2], 2, sp.rank
    mine = own_heads(tensors, *place)
    grads = [torch.randn(batch, 128, heads, 16) for heads in mine]
    unit = 4 * sum(x.numel() for x in grads)  # of q, k and v
    with live.Live(*tensors, *grads) as seen:
        arrived = torch.ops.ds_seqpar.scatter_heads(tensors, [64, 64], place, sp.runtime.handle, "qkv", None)
        inner = split_in(arrived, mine)
        del arrived
        found = [seen.peak, seen.settled()]
        seen.restart()
        torch.autograd.backward(inner, grads)
        del inner
        found += [seen.peak, seen.settled()]
        for x in tensors:
            x.grad = None
        return [x / unit for x in [*found, seen.settled()]]


def test_heads_are_exchanged_with_one_copy_each_way():
    """Inward what is sent and what arrives, at most; outward what is sent, what arrives and the gradients, beside what
    had arrived before."""
    for batch in (1, 2):
        assert on_ranks(2, exchanged, batch) == [[2.0, 1.0, 4.0, 1.0, 0.0]] * 2
