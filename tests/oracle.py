"""Dense attention in fp64, written out and differentiated by autograd: the reference for all other implementations."""

import itertools

import torch
from torch import Tensor

from ds_seqpar.core.compiler.sharding.layout import owned
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.compiler.sharding.shards import EvenShards


def positions(layout, seq, size, ulysses, index):
    """The positions of the tokens of SP rank `index` = u + U * inner, under a named layout."""
    inner, member = divmod(index, ulysses)
    return positions_by_ulysses_rank(EvenShards(layout, seq, size // ulysses), "q", inner, ulysses)[member]


def positions_by_ulysses_rank(shards, side, cp_rank, ulysses_size):
    """The positions of the tokens of each Ulysses rank of a CP rank: its tokens in order, in shares that differ by at
    most one."""
    positions = [p for run in shards.runs(side, owned(cp_rank, shards.blocks_per_rank)) for p in run.positions]
    cuts = [len(positions) * ulysses_rank // ulysses_size for ulysses_rank in range(ulysses_size + 1)]
    return [positions[a:b] for a, b in itertools.pairwise(cuts)]


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool | Tensor = True, scale: float | None = None, mask: Mask | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The definition, differentiable. q (B, S, Hq, D); k and v (B, T, Hkv, D): query head h reads h * Hkv // Hq.
    causal: or which keys each query sees, (S, T) bool, as returned by `seen`. mask: in place of causal. A row that sees
    no key is 0. softcap: the bound of the scores. sinks (Hq,): one more score for every row, with value 0."""
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        causal = seen(mask, range(q.shape[1]), range(k.shape[1]))
    if causal is True:
        causal = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
    if causal is False:
        causal = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    scores = scores.masked_fill(~causal, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], dim=3)
    weights = scores.softmax(-1)[..., : k.shape[1]].masked_fill(~causal, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, values)


def lse(
    q: Tensor, k: Tensor, mask: Mask, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """For each row the log-sum-exp of the scores that it sees, (B, S, Hq); -inf if it sees none."""
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k.repeat_interleave(q.shape[2] // k.shape[2], dim=2))
    scores = scores * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = ~seen(mask, range(q.shape[1]), range(k.shape[1]))[:, None]
    found = scores.masked_fill(hidden, float("-inf")).logsumexp(-1)
    return found if sinks is None else torch.logaddexp(found, sinks)


def seen(mask: Mask, queries, keys) -> Tensor:
    """Which keys each query sees at these positions, by definition, pair by pair."""
    q, kv = torch.as_tensor(queries)[:, None], torch.as_tensor(keys)[None, :]
    found = torch.ones(q.shape[0], kv.shape[1], dtype=torch.bool)
    if mask.causal:
        found &= (kv <= q) | (kv < mask.prefix)
    together = torch.zeros_like(found)
    for first, end in mask.blocks:
        together |= (q >= first) & (q < end) & (kv >= first) & (kv < end)
    found |= together
    if mask.window_right is not None:
        found &= kv <= q + mask.window_right
    if mask.window:
        found &= (kv > q - mask.window) | (together & mask.whole_blocks)
    if mask.documents:  # for each document the ones it sees: itself, its parent and what its parent sees
        sees = torch.eye(len(mask.documents), dtype=torch.bool)
        for document, parent in enumerate(mask.parents):
            sees[document] |= sees[parent] & (parent >= 0)
        starts = torch.tensor(mask.documents)
        found &= sees[tuple(torch.searchsorted(starts, x, right=True) - 1 for x in (q, kv))]
    return found


def dense(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool | Tensor = True, scale: float | None = None,
    mask: Mask | None = None,
):  # fmt: skip
    """(out, dq, dk, dv) in fp64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, causal, scale, mask)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), do.double())


def error(found: Tensor, expected: Tensor) -> float:
    """max|a-b| / max|b|; infinite if a computed value is not a number."""
    assert found.shape == expected.shape
    gap = ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()
    return gap if gap == gap else float("inf")


def errors(found, expected) -> list[float]:
    """`error` of each pair."""
    return [error(a, b) for a, b in zip(found, expected, strict=True)]


def assert_exact(found, expected, case=None, limit=1e-10, least=0.0):
    """Checks that each pair differs by less than `limit` times the greatest expected number. least: a lower bound for
    that number, since a token that sees only itself has gradients of 0."""
    for at, (a, b) in enumerate(zip(found, expected, strict=True)):
        name = ("out", "dq", "dk", "dv")[at] if at < 4 else at
        assert a.shape == b.shape, (name, case)
        gap = (a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=least)
        assert gap < limit, (name, float(gap), case)  # false for NaN


def spreads(found, expected) -> list[float]:
    """For each pair the root mean square of a - b over that of b. It reveals many small errors, whereas `error` shows
    only the largest."""
    pairs = zip(found, expected, strict=True)
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs]


def tensors(batch=1, seq=48, heads=(4, 2), dim=8, dtype=torch.float64, seed=0):
    """(q, k, v, do), equal on every rank that calls it with the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, seq, h, dim) for h in (heads[0], heads[1], heads[1], heads[0])]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
