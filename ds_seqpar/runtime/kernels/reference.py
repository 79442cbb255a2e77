"""The definition, written out: a dense score matrix, in fp32 (fp64 for fp64). Any device; for tests and odd cases."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from ...compiler.cuts import PLAIN
from .base import BlockSpec


class Reference:
    name = "reference"
    takes = PLAIN
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # noqa: RUF012
    ran_on = "CPU"

    def __init__(self, softcap: float = 0.0) -> None:
        self.softcap = softcap

    def capped(self, softcap: float) -> Reference:
        return type(self)(softcap)

    def reasons(self, spec: BlockSpec) -> list[str]:
        found = [] if spec.dtype in self.tolerance else [f"takes floating point, not {spec.dtype}"]
        return found + ["takes tensors that hold numbers, not meta"] * (spec.device == "meta")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v, causal, scale, self.softcap)
        return out.to(q.dtype), lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = gradients(do, q, k, v, out, lse, causal, scale, self.softcap)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, softcap: float, first: int = 0
) -> tuple[Tensor, Tensor]:
    """`Kernel.forward`, wide. first: the number of q's first row, which sees columns 0 .. first where causal."""
    scores = _scores(q, k, causal, scale, softcap, first)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.einsum("bkgqs,bskd->bqkgd", torch.exp(scores - lse[..., None]), _wide(v))
    return rearrange(out, "b q k g d -> b q (k g) d"), rearrange(lse, "b k g q -> b q (k g)")


def gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, scale: float, softcap: float, first: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`Kernel.backward`, wide."""
    heads = k.shape[2]
    scores = _scores(q, k, causal, scale, softcap, first)
    p = torch.exp(scores - rearrange(lse, "b q (k g) -> b k g q 1", k=heads))
    do_, out_, q_ = (_grouped(x, heads) for x in (do, out, q))
    delta = rearrange((do_ * out_).sum(-1), "b q k g -> b k g q 1")
    dv = torch.einsum("bkgqs,bqkgd->bskd", p, do_)
    ds = p * (torch.einsum("bqkgd,bskd->bkgqs", do_, _wide(v)) - delta) * scale
    if softcap:  # the derivative of the cap; what is masked has none
        ds = ds * torch.where(scores.isneginf(), 0.0, 1.0 - (scores / softcap).square())
    dq = torch.einsum("bkgqs,bskd->bqkgd", ds, _wide(k))
    return rearrange(dq, "b q k g d -> b q (k g) d"), torch.einsum("bkgqs,bqkgd->bskd", ds, q_), dv


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """Wide, each key/value head's query heads together."""
    return rearrange(_wide(x), "b q (k g) d -> b q k g d", k=kv_heads)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, softcap: float, first: int) -> Tensor:
    """(B, Hkv, Hq / Hkv, Sq, Sk)."""
    scores = torch.einsum("bqkgd,bskd->bkgqs", _grouped(q, k.shape[2]), _wide(k)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(first)
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores
