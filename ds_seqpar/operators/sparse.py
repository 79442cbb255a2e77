"""Sparse attention, in which queries attend to latents that an index selects.

Latents are gathered, and queries stay on their rank.

The index score of a key is the sum of `w relu(q k)` over index heads. The top scores are computed in blocks of rows and
keys, so that the scores of single heads are never stored. Attention reads the selected latents in blocks of rows, with
queries projected into the latent space. Backward recomputes each block.

In a decode step, every rank has the queries of the new token and a part of the keys and latents. Each rank selects its
own top keys, all ranks agree on the overall top keys, and each rank attends to its own keys among the overall top keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..core.runtime.buffers import sum_dtype
from ..core.runtime.kernels.accumulate import merge_sinks_
from ..core.runtime.runtime import Runtime
from .decode import STEP, merged_by_all
from .gathered import Context, Piece
from .segments import COLUMNS

ELEMENTS = 2**24  # maximum number of elements of a tensor in a block


@torch.no_grad()
def top_keys(
    q: Tensor, weights: Tensor, keys: Tensor, pieces: Sequence[Piece], count: int, scale: float = 1.0
) -> Tensor:
    """Return the keys that an index selects for each query, from the start of the document to the query itself.

    Args:
        q: Index queries of this rank (B, s, heads, D), in the dtype of the scores.
        weights: Weights of the heads (B, s, heads).
        keys: Index keys of all tokens (B, T, D).
        pieces: This rank's tokens.
        count: Maximum number of keys to select per query.
        scale: Factor applied to a head's scores.

    Returns:
        Indices of keys relative to the first token of the query's document, int64 (B, s, n), with n at most `count`.
        For a query that sees fewer than n keys, later keys are included, which must be ignored.
    """
    width = min(count, max(piece.end - piece.document for piece in pieces))
    picks = torch.full((*q.shape[:2], width), keys.shape[1], device=q.device)
    for piece in pieces:
        own = slice(piece.place, piece.place + piece.length)
        _, best = _best(q[:, own], weights[:, own, None], keys[:, piece.document : piece.end], count, scale)
        picks[:, own, : best.shape[2]] = best
    return picks


@torch.no_grad()
def top_kept(
    runtime: Runtime, q: Tensor, weights: Tensor, keys: Tensor, counts: Sequence[int], count: int, scale: float
) -> Tensor:
    """Return this rank's keys among the keys that an index selects for each row's new token.

    The keys are selected from all ranks' keys, and the call is collective.

    Args:
        runtime: The runtime of all ranks that share the sequence (`Runtime.one_ring`).
        q: Index queries (B, 1, heads, D), the same on all ranks.
        weights: Weights of the heads (B, 1, heads).
        keys: Index keys of this rank (B, n, D).
        counts: Number of valid keys in each row, or a single number for all rows.
        count: Maximum number of keys to select per row, across all ranks.
        scale: Factor applied to a head's scores.

    Returns:
        Indices into this rank's keys, int64 (B, 1, count). If another rank has the key, the index is n, the number of
        this rank's keys.
    """
    values, places = q.new_full((len(q), count), -torch.inf), q.new_zeros(len(q), count, dtype=torch.long)
    for row, own in enumerate(counts):
        if own:
            rows = slice(row, row + 1) if len(counts) > 1 else slice(None)
            best, at = _best(q[rows], weights[rows, :, None], keys[rows, :own], count, scale)
            values[rows, : best.shape[2]], places[rows, : best.shape[2]] = best[:, 0], at[:, 0]
    sent = functional.pad(values.flatten(), (0, 1), value=runtime.rank)
    parts = runtime.comm.parts_of_all(sent, STEP)
    ranks, of_all = parts[:, -1], parts[:, :-1].view(-1, len(q), count).transpose(0, 1).flatten(1)
    greatest, at = of_all.topk(count)
    mine = (ranks[at // count] == runtime.rank) & (greatest > -torch.inf)
    return places.gather(1, at % count).masked_fill(~mine, keys.shape[1])[:, None]


def _best(q: Tensor, weights: Tensor, keys: Tensor, count: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return (scores, picks) for queries (B, r, heads, D), the last of which sees all keys (B, n, D)."""
    (batch, rows, heads, _), tokens = q.shape, keys.shape[1]
    positions = torch.arange(tokens - rows, tokens, device=q.device)[:, None]
    flat, step = q.flatten(1, 2), max(1, ELEMENTS // (batch * rows * heads))
    values, picks = q.new_empty(batch, rows, 0), positions.new_empty(batch, rows, 0)
    for first in range(0, tokens, COLUMNS):
        columns = torch.arange(first, min(first + COLUMNS, tokens), device=q.device)
        scores = q.new_empty(batch, rows, len(columns))
        for start in range(0, len(columns), step):
            block = keys[:, columns[start : start + step]].to(q.dtype)
            of_heads = (flat @ block.mT).mul_(scale).relu_().unflatten(1, (rows, heads))
            scores[..., start : start + step] = (weights @ of_heads).squeeze(2)
        scores.masked_fill_(columns > positions, -torch.inf)
        greatest, at = scores.topk(min(count, len(columns)))
        values, picks = torch.cat([values, greatest], 2), torch.cat([picks, columns[at]], 2)
        if first:
            values, at = values.topk(min(count, values.shape[2]))
            picks = picks.gather(2, at)
    return values, picks


def sparse_attention(
    q: Tensor,
    latent: Tensor,
    matrix: Tensor,
    picks: Tensor,
    pieces: Sequence[Piece],
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention from a rank's queries to selected latents.

    Args:
        q: Queries of this rank (B, s, H, D).
        latent: Latents of all tokens (B, T, R).
        matrix: The matrix (H, R, D + Dv) that expands latents to keys and values.
        picks: The result of `top_keys` (B, s, n), or other indices without duplicates and with at least one visible key
            per query.
        pieces: This rank's tokens.
        scale: Factor applied to the scores.
        sinks: Additional score per head (H,) without a value, or None for no sinks.

    Returns:
        The output (B, s, H, Dv), differentiable with respect to q, latent, matrix and sinks.
    """
    return _Sparse.apply(q, latent, matrix, sinks, picks, pieces, scale)


def attention_to_kept(
    runtime: Runtime,
    q: Tensor,
    latent: Tensor,
    matrix: Tensor,
    picks: Tensor,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention from each row's new token to the selected latents of all ranks. The call is collective.

    Args:
        runtime: See `top_kept`.
        q: Queries (B, 1, H, D), the same on all ranks.
        latent: Latents of this rank (B, n, R).
        matrix: See `sparse_attention`.
        picks: The result of `top_kept` (B, 1, count).
        scale: Factor applied to the scores.
        sinks: See `sparse_attention`.

    Returns:
        The output (B, 1, H, Dv), the same on all ranks.
    """
    tokens, width = latent.shape[1], matrix.shape[2] - q.shape[3]
    part = q.new_zeros(*q.shape[:3], width + 1, dtype=sum_dtype(q.dtype))
    part[..., -1] = -torch.inf
    if tokens:
        of_keys, of_values = matrix.split([q.shape[3], width], dim=2)
        hidden = picks == tokens
        at = picks.masked_fill(hidden, 0).long().transpose(1, 2)
        rows = latent.gather(1, at.expand(-1, -1, latent.shape[2]))[:, None]
        with torch.autocast(q.device.type, enabled=False):
            scores = _scores(hidden, scale, q, rows, of_keys)
            weights = scores.softmax(3).nan_to_num().to(rows.dtype)  # NaN if other ranks have all selected keys
            part[..., :-1], part[..., -1] = _values(weights, rows, of_values), scores.logsumexp(3)
    if sinks is not None and runtime.rank == 0:
        merge_sinks_(part[..., :-1], part[..., -1], sinks)
    return merged_by_all(runtime, part).to(q.dtype)


class _Sparse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        q: Tensor,
        latent: Tensor,
        matrix: Tensor,
        sinks: Tensor | None,
        picks: Tensor,
        pieces: Sequence[Piece],
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q, latent, matrix, sinks, picks)
        ctx.pieces, ctx.scale = pieces, scale
        out = q.new_empty(*q.shape[:3], matrix.shape[2] - q.shape[3])
        for own, at, hidden in _blocks(q, latent, picks, pieces):
            with torch.autocast(q.device.type, enabled=False):  # as in the recomputation in backward
                out[:, own] = _attention(hidden, scale, q[:, own], latent.flatten(0, 1)[at], matrix, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple:
        q, latent, matrix, sinks, picks = ctx.saved_tensors
        inputs = [q, latent.flatten(0, 1), matrix, *([] if sinks is None else [sinks])]
        sums = [torch.zeros_like(x, dtype=sum_dtype(x.dtype)) for x in inputs]
        for own, at, hidden in _blocks(q, latent, picks, ctx.pieces):
            block = [x.detach().requires_grad_() for x in (q[:, own], inputs[1][at], *inputs[2:])]
            with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
                out = _attention(hidden, ctx.scale, *block)
            dq, drows, *others = torch.autograd.grad(out, block, grad[:, own])
            sums[0][:, own] = dq
            sums[1].index_add_(0, at.flatten(), drows.flatten(0, 2).to(sums[1].dtype))
            for total, x in zip(sums[2:], others, strict=True):
                total += x
        dq, dlatent, dmatrix, *dsinks = (total.to(x.dtype) for total, x in zip(sums, inputs, strict=True))
        return dq, dlatent.view(latent.shape), dmatrix, dsinks[0] if dsinks else None, None, None, None


def _blocks(
    q: Tensor, latent: Tensor, picks: Tensor, pieces: Sequence[Piece]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (a block's rows, flat indices of the selected latents, mask of hidden picks (B, r, n))."""
    (batch, tokens, width), heads, count = latent.shape, q.shape[2], picks.shape[2]
    rows = max(1, ELEMENTS // (batch * max(count * width, heads * width, heads * count)))
    begins = torch.arange(0, batch * tokens, tokens, device=picks.device)[:, None, None]
    for piece in pieces:
        for place in range(piece.place, piece.place + piece.length, rows):
            own = slice(place, min(place + rows, piece.place + piece.length))
            first = piece.start - piece.document - piece.place
            hidden = picks[:, own] > torch.arange(first + own.start, first + own.stop, device=picks.device)[:, None]
            yield own, begins + piece.document + picks[:, own].masked_fill(hidden, 0).long(), hidden


def _attention(
    hidden: Tensor, scale: float, q: Tensor, rows: Tensor, matrix: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention from queries (B, r, H, D) to latents (B, r, n, R), of which some are hidden."""
    of_keys, of_values = matrix.split([q.shape[3], matrix.shape[2] - q.shape[3]], dim=2)
    scores = _scores(hidden, scale, q, rows, of_keys)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None].expand(*scores.shape[:3], 1)], dim=3)
    weights = scores.softmax(3)[..., : rows.shape[2]].to(rows.dtype)
    return _values(weights, rows, of_values)


def _scores(hidden: Tensor, scale: float, q: Tensor, rows: Tensor, of_keys: Tensor) -> Tensor:
    scores = (torch.einsum("brhd,hcd->brhc", q, of_keys) @ rows.mT).to(sum_dtype(q.dtype)) * scale
    return scores.masked_fill(hidden[:, :, None], -torch.inf)


def _values(weights: Tensor, rows: Tensor, of_values: Tensor) -> Tensor:
    return torch.einsum("brhc,hcd->brhd", weights @ rows, of_values)
