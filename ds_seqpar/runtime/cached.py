"""Attention to keys and values that were kept: a cache of which each rank of the sequence holds a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..compiler.sharding.masks import Mask
from ..compiler.sharding.shards import UnevenShards


def decode(
    sp, q: Tensor, k: Tensor, v: Tensor, counts: Sequence[tuple[int, int]] | None, scale: float | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """A slow stand-in with the right results."""
    counts = counts or [(0, k.shape[1])] * len(q)
    held = [(k[row, first:end], v[row, first:end]) for row, (first, end) in enumerate(counts)]
    outs = []
    for row, parts in enumerate(zip(*_all(sp, held), strict=True)):
        keys, values = (torch.cat([part[i] for part in parts])[None] for i in range(2))
        outs.append(_dense(q[row : row + 1], keys, values, None, scale, softcap, sinks)[0])
    return torch.cat(outs)


def attend(
    sp, q: Tensor, k: Tensor, v: Tensor, mask: Mask, shards: UnevenShards, scale: float | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """A slow stand-in with the right results."""
    keys, values = (torch.cat([part[i] for part in _all(sp, (k, v))], 1) for i in range(2))
    q_runs, kv_runs = (
        [p for run in runs for p in range(run.start, run.last + 1, run.step) if run.length]
        for runs in (shards.q[sp.rank], [run for block in shards.kv for run in block])
    )
    visible = torch.zeros(len(q_runs), len(kv_runs), dtype=torch.bool)
    kv = torch.tensor(kv_runs)
    for i, p in enumerate(q_runs):
        lo, hi = mask.bounds(p)
        visible[i] = (kv >= lo) & (kv < hi)
    return _dense(q, keys, values, visible, scale, softcap, None)


def _all(sp, x):
    parts = [None] * sp.size
    if sp.size == 1:
        return [x]
    dist.all_gather_object(parts, x, group=sp.groups.control)
    return [parts[i] for i in sorted(range(sp.size), key=lambda i: sp.groups.sp_order[i])]


def _dense(q, k, v, visible, scale, softcap, sinks):
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :1])], 1) if v.shape[1] else v.new_zeros(v.shape[0], 1, *v.shape[2:])
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1))
    return torch.einsum("bhnm,bmhd->bnhd", weights, v), lse.transpose(1, 2)
