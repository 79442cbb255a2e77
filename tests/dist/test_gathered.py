"""Tokens gathered from the ranks of a sequence, in order of position, and the gradients of that."""

import pytest
import torch

from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.data.batch_layout import positions_held
from ds_seqpar.operators.gathered import gather, pieces_of, segments
from tests.dist.ranks import make
from tests.launch import on_each_of


def whole_tensors(seq):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, seq, 3, 2), (2, seq, 5), (2, seq))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def compared(sp, seq, shards=None, documents=()):
    """Gather leaves; each rank weighs them in another way, and the gradient is the sum of all."""
    held = positions_held(shards or EvenShards(sp.config.layout, seq, sp.size // sp.config.ulysses),
                          sp.config.ulysses, sp.rank)  # fmt: skip
    whole = whole_tensors(seq)
    local = [x[:, held].requires_grad_(number < 2) for number, x in enumerate(whole)]
    cut = segments(sp.runtime, len(held), shards, documents)
    found = gather(sp.runtime.one_ring, local, cut)
    assert all(torch.equal(x, y) for x, y in zip(found, whole, strict=True))
    assert [x.requires_grad for x in found] == [True, True, False]
    sum((x * x * (sp.rank + 1)).sum() for x in found[:2]).backward()
    for x, y in zip(local[:2], whole, strict=False):
        torch.testing.assert_close(x.grad, 2 * y[:, held] * sum(range(1, sp.size + 1)), rtol=1e-12, atol=1e-12)
    pieces = pieces_of(cut, 3)[sp.rank]
    positions = [torch.arange(piece.start, piece.end) for piece in pieces]
    assert torch.equal(torch.cat([held[:0], *positions]), held)
    assert all(piece.length <= 3 for piece in pieces)
    starts = [*(documents or (0,)), seq]
    for piece in pieces:
        assert piece.document in starts
        assert not any(piece.document < x < piece.end for x in starts)
        assert torch.equal(held[piece.place : piece.place + piece.length], torch.arange(piece.start, piece.end))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@on_each_of("ranks")
def test_all_tokens_reach_all_ranks_in_order_and_gradients_return(ranks):
    for ulysses in {1, 2, ranks} & {*range(1, ranks + 1)}:
        for layout in ("balanced", "contiguous"):
            sp = make(ulysses=ulysses, layout=layout)
            compared(sp, 16)
            compared(sp, 24, documents=(0, 1, 2, 9, 20))
            sp.close()
