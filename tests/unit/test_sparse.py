"""The keys that an index picks, and attention to them, against the same in one product with a mask, in fp64."""

import itertools
import random

import pytest
import torch

from ds_seqpar.operators import sparse
from ds_seqpar.operators.gathered import Piece

BATCH, HEADS, DIM, V_DIM, WIDTH, INDEX_HEADS = 2, 3, 5, 4, 6, 16


def drawn(seed):
    """Return (pieces of a rank in two runs of a sequence, its tokens' positions, their documents, all tokens)."""
    draws = random.Random(seed)
    tokens = draws.randint(20, 60)
    starts = [0, *sorted(draws.sample(range(1, tokens), draws.randint(0, 3)))]
    cuts = sorted(draws.sample(range(tokens + 1), 4))
    pieces, place = [], 0
    for first, last in (cuts[:2], cuts[2:]):
        borders = [first, *(x for x in starts if first < x < last), last]
        for begin, end in itertools.pairwise(borders):
            for start in range(begin, end, 7):
                document = max(x for x in starts if x <= start)
                pieces.append(Piece(place, min(7, end - start), start, document))
                place += pieces[-1].length
    positions = torch.cat([torch.arange(x.start, x.end) for x in pieces])
    documents = torch.cat([torch.full((x.length,), x.document) for x in pieces])
    return pieces, positions, documents, tokens


def tensors(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def dense(q, latent, matrix, sinks, visible, scale):
    kv = torch.einsum("btc,hcd->bthd", latent, matrix)
    k, v = kv.split([DIM, V_DIM], -1)
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1)[..., : v.shape[1]], v)


@pytest.mark.parametrize("count", [4, 100])  # fewer keys than documents have, and more
@pytest.mark.parametrize("seed", range(6))
def test_picks_and_attention_are_those_of_one_product_with_a_mask(seed, count, monkeypatch):
    monkeypatch.setattr(sparse, "COLUMNS", 9)  # so that choices are merged
    monkeypatch.setattr(sparse, "ELEMENTS", 600)
    pieces, positions, documents, tokens = drawn(seed)
    own = len(positions)
    index = tensors(seed, (BATCH, own, INDEX_HEADS, DIM), (BATCH, own, INDEX_HEADS), (BATCH, tokens, DIM))
    picks = sparse.top_keys(*index, pieces, count, 0.3)

    at = torch.arange(tokens)
    seen = (at >= documents[:, None]) & (at <= positions[:, None])
    scores = torch.einsum("bsht,bsh->bst", (torch.einsum("bshd,btd->bsht", index[0], index[2]) * 0.3).relu(), index[1])
    best = scores.masked_fill(~seen, -torch.inf).topk(min(count, tokens)).indices
    visible = torch.zeros_like(scores, dtype=torch.bool).scatter(2, best, True) & seen
    found = torch.zeros(*scores.shape[:2], tokens + 1, dtype=torch.bool)
    absolute = (picks + documents[:, None]).where(picks <= (positions - documents)[:, None], tokens)
    assert torch.equal(found.scatter(2, absolute, True)[..., :tokens], visible)

    shapes = (BATCH, own, HEADS, DIM), (BATCH, tokens, WIDTH), (HEADS, WIDTH, DIM + V_DIM), (HEADS,)
    *inputs, do = tensors(seed + 100, *shapes, (BATCH, own, HEADS, V_DIM))
    for sinks, frozen in itertools.product((True, False), ((), (0, 2), (1,))):
        leaves = [x.clone().requires_grad_(number not in frozen) for number, x in enumerate(inputs)]
        given = leaves if sinks else [*leaves[:3], None]
        wanted = [x for x in given if x is not None and x.requires_grad]
        expected = dense(*given, visible, 0.4)
        out = sparse.sparse_attention(*given[:3], picks, pieces, 0.4, given[3])
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        for x, y in zip(torch.autograd.grad(out, wanted, do), torch.autograd.grad(expected, wanted, do), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_equal_scores_are_chosen_as_topk_chooses_among_the_same_columns():
    q, weights, keys = torch.zeros(1, 40, 2, 4), torch.ones(1, 40, 2), torch.randn(1, 40, 4)
    expected = torch.zeros(1, 40, 40).masked_fill(torch.ones(40, 40).tril() == 0, -torch.inf).topk(8).indices
    assert torch.equal(sparse.top_keys(q, weights, keys, [Piece(0, 40, 0, 0)], 8), expected)


def test_gradients_of_bf16_are_summed_in_fp32():
    pieces, tokens = [Piece(0, 40, 0, 0)], 40
    inputs = tensors(0, (1, tokens, HEADS, DIM), (1, tokens, WIDTH), (HEADS, WIDTH, DIM + V_DIM), (HEADS,))
    picks = torch.arange(tokens).expand(1, tokens, -1)  # all
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in inputs]
        out = sparse.sparse_attention(*leaves[:3], picks, pieces, 0.4, leaves[3])
        out.sum().backward()
        found.append([out, *(x.grad for x in leaves)])
        assert {x.dtype for x in found[-1]} == {dtype}
    for x, y in zip(*found, strict=True):
        assert float((x - y).norm() / y.norm()) < 2e-2
