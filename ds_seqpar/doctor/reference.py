"""Attention by its definition, in any dtype: in fp64 what the product must compute, in another dtype how far off that a
plain computation is."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compiler.sharding.masks import CAUSAL, FULL, Mask

NAMES = ("out", "dq", "dk", "dv")


def masks(tokens: int, window: int | None) -> dict[str, Mask]:
    """Return the masks that models have, by name. window: that of the model, if it has one."""
    documents = (0, tokens // 3, tokens // 3 + 1, tokens // 2 + 3)
    cut = Mask(window=min(window or tokens, tokens // 3))
    return {"full": FULL, "causal": CAUSAL, "window": cut, "documents": Mask(documents=documents)}


def seen(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """Return which keys each query sees, by their positions: bool (queries, keys)."""
    q, kv = queries[:, None], keys[None, :]
    visible = torch.ones(len(queries), len(keys), dtype=torch.bool, device=q.device)
    if mask.causal:
        visible &= kv <= q
    if mask.window:
        visible &= kv > q - mask.window
    if mask.documents:
        starts = torch.tensor(mask.documents, device=q.device)
        visible &= torch.searchsorted(starts, q, right=True) == torch.searchsorted(starts, kv, right=True)
    return visible


def attention(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, visible: Tensor, scale: float, softcap: float | None,
    dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """Return out, dq, dk and dv in fp64, computed in `dtype`. Tensors are (batch, tokens, heads, head_dim)."""
    found = []
    for kv_head in range(k.shape[2]):  # one after the other, for their scores' memory
        group = q.shape[2] // k.shape[2]
        heads, kv_heads = slice(kv_head * group, kv_head * group + group), slice(kv_head, kv_head + 1)
        with torch.enable_grad():
            one = [
                x[:, :, h].detach().to(dtype).requires_grad_() for x, h in ((q, heads), (k, kv_heads), (v, kv_heads))
            ]
            scores = torch.einsum("bqhd,bkod->bhqk", one[0], one[1]) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.masked_fill(~visible, torch.finfo(dtype).min).softmax(-1).masked_fill(~visible, 0.0)
            out = torch.einsum("bhqk,bkod->bqhd", weights, one[2])
            found.append([out.detach(), *torch.autograd.grad(out, one, do[:, :, heads].to(dtype))])
    return [torch.cat(parts, dim=2).double() for parts in zip(*found, strict=True)]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Return for each pair the greatest difference over the greatest expected number; infinite for a NaN."""
    gaps = [(a.double() - b).abs().max() / b.abs().max().clamp(min=1e-30) for a, b in zip(found, expected, strict=True)]
    return [float(gap.nan_to_num(nan=float("inf"))) for gap in gaps]


def allowed(dtype: torch.dtype, plain: float) -> float:
    """Return the greatest error that is allowed where a plain computation in this dtype has the error `plain`."""
    return max(2 * plain, torch.finfo(dtype).eps * (4 if dtype.itemsize == 2 else 32))
