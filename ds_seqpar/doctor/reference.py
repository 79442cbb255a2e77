"""Attention by its definition, in any dtype: in fp64 what the product must compute, in another dtype how far off that a
plain computation is."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compiler.sharding.masks import CAUSAL, FULL, Mask
from .findings import Job

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


def random(job: Job, seed: int, size: tuple[int, int], count: int) -> list[Tensor]:
    """Return random tensors (1, tokens, heads, head_dim), the same on all ranks. size: tokens and heads."""
    dice = torch.Generator().manual_seed(seed)
    shape = count, 1, *size, job.head_dim
    return list(torch.randn(shape, generator=dice).to(job.sp.device, job.dtype))


def exact_and_plain(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, visible: Tensor, softcap: float | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return out, dq, dk and dv, all in fp64: as computed in fp64, and as computed in the tensors' dtype."""
    found = []
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    for dtype in (torch.float64, q.dtype):
        parts = []
        for at in range(k.shape[2]):  # of one key/value head after the other, for the memory of their scores
            of_heads = [(q, slice(at * group, at * group + group)), (k, slice(at, at + 1)), (v, slice(at, at + 1))]
            with torch.enable_grad():
                local = [x[:, :, heads].detach().to(dtype).requires_grad_() for x, heads in of_heads]
                scores = torch.einsum("bqhd,bkod->bhqk", local[0], local[1]) * scale
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                weights = scores.masked_fill(~visible, torch.finfo(dtype).min).softmax(-1).masked_fill(~visible, 0.0)
                out = torch.einsum("bhqk,bkod->bqhd", weights, local[2])
                gradients = torch.autograd.grad(out, local, do[:, :, of_heads[0][1]].to(dtype))
            parts.append([out.detach(), *gradients])
        found.append([torch.cat(of_kind, dim=2).double() for of_kind in zip(*parts, strict=True)])
    return found[0], found[1]


def share_of_allowed(
    name: str, found: Tensor, exact: Tensor, plain: Tensor, dtype: torch.dtype, group: int, part: Tensor | None = None
) -> tuple[float, str]:
    """Return the error as a share of the one that is allowed, and in words.

    Allowed is twice the error of a plain computation, and some roundings. The greatest error counts, and the root mean
    square, which sees errors that are small and everywhere.

    Args:
        dtype: In which tensors are rounded.
        group: Query heads of a key/value head, whose gradients some kernels add up in that dtype.
        part: That of `exact` with which `found` is compared; default: all of it.
    """
    expected, found, worst = exact if part is None else part, found.double(), (0.0, "")
    rounding = torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 8) * max(1.0, group**0.5 / 2)
    factor = float((found * expected).sum() / expected.square().sum())
    for norm, what, roundings in ((torch.inf, "at most", 4), (2, "on average", 1)):

        def size(x: Tensor, norm: float = norm) -> float:
            return float(torch.linalg.vector_norm(x, norm) / (1 if norm == torch.inf else x.numel() ** 0.5))

        gap, usual = size(found - expected) / max(map(size, (exact, expected))), size(plain - exact) / size(exact)
        text = f"{name} differs by {gap:.1e} {what}, and by {usual:.1e} in a plain computation"
        if size(found - factor * expected) <= 0.1 * size(found - expected):
            text = f"{name} is {factor:.4g} times what it must be"
        share = gap / max(2 * usual, roundings * rounding)
        worst = max(worst, (share if share == share else float("inf"), text))
    return worst
