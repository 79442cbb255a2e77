"""Dense attention in fp64, written out and differentiated by autograd: what every other way must equal."""

import torch
from torch import Tensor

from ds_seqpar.planning.masks import Mask


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None, mask: Mask | None = None
) -> Tensor:
    """The definition, differentiable. q (B, S, Hq, D); k and v (B, T, Hkv, D): query head h reads h * Hkv // Hq. mask:
    in place of causal; a row that sees no key is 0."""
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * (q.shape[3] ** -0.5 if scale is None else scale)
    if mask is not None:
        hidden = ~visible(mask, q.shape[1], k.shape[1])
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0.0)
        return torch.einsum("bhqk,bkhd->bqhd", weights, values)
    if causal:
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)


def visible(mask: Mask, queries: int, keys: int) -> Tensor:
    """(queries, keys) of positions from 0 on: which key a query sees."""
    q, k = torch.arange(queries)[:, None], torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if mask.causal:
        seen &= k <= q
    if mask.window:
        seen &= k > q - mask.window
    for start in mask.documents:
        seen &= (q >= start) == (k >= start)
    return seen


def dense(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool = True, scale: float | None = None,
    mask: Mask | None = None,
):  # fmt: skip
    """(out, dq, dk, dv) in fp64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, causal, scale, mask)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), do.double())


def error(found: Tensor, expected: Tensor) -> float:
    """max|a-b| / max|b|; infinite where something found is not a number."""
    assert found.shape == expected.shape
    gap = ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()
    return gap if gap == gap else float("inf")


def errors(found, expected) -> list[float]:
    """`error` of each pair."""
    return [error(a, b) for a, b in zip(found, expected, strict=True)]


def spreads(found, expected) -> list[float]:
    """Of each pair the root mean square of a - b over that of b: it sees many small errors, where `error` sees one."""
    pairs = zip(found, expected, strict=True)
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs]


def tensors(batch=1, seq=48, heads=(4, 2), dim=8, dtype=torch.float64, seed=0):
    """(q, k, v, do), the same on every rank that asks for the same."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, seq, h, dim) for h in (heads[0], heads[1], heads[1], heads[0])]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
