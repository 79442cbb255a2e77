"""What a kernel is, and the definition in torch's own operations, for any device.

The definition comes with a dense score matrix, for tests and odd cases. It also comes a few query rows at a time, for
what no fast kernel does, such as a softcap.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeGuard

import torch
from einops import rearrange
from torch import Tensor

from ...compiler.cuts import PLAIN_KERNEL, KernelSupport
from ...compiler.masks import Mask


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """What a kernel must be able to take. softcap: the bound of scores, 0 for none."""

    device: str
    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    softcap: float = 0.0

    @classmethod
    def of(cls, q: Tensor, kv_heads: int, softcap: float = 0.0) -> BlockSpec:
        """For q of shape (batch, seq, q_heads, head_dim)."""
        return cls(q.device.type, q.dtype, q.shape[2], kv_heads, q.shape[3], softcap)

    def case(self, mask: Mask) -> str:
        """What calibration measures kernels by, as "bfloat16 128 causal"."""
        return f"{self.dtype_name} {self.head_dim} {mask.kind}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        cap = f", softcap {self.softcap:g}" if self.softcap else ""
        return f"{self.dtype_name} on {self.device}, {self.q_heads}/{self.kv_heads} heads of {self.head_dim}{cap}"


class Scores(NamedTuple):
    """What a query's score of a key is: x = scale * (q . k), and softcap * tanh(x / softcap) where a softcap is given
    (Gemma 2)."""

    scale: float
    softcap: float = 0.0


class Kernel(Protocol):
    """Attention of one block, full or causal, and its gradient.

    name: as in the configuration. tolerance: greatest max|a-b|/max|b| against fp64 that its conformance tests allow, a
    dtype. ran_on: where the conformance suite has passed. support: what else it can be called for:

    - bands: both methods have one more argument, `width: int = 0`. Where it is not 0, row i sees those of the columns i
      .. i + width - 1 that there are;
    - windows: one more argument, `segments: Segments | None = None`;
    - all tiles of a product: it is `Accumulating`.
    """

    name: str
    support: KernelSupport
    tolerance: dict[torch.dtype, float]
    ran_on: str

    def reasons(self, spec: BlockSpec) -> list[str]:
        """Why it cannot take such blocks; empty where it can."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """q (B, Sq, Hq, D), k and v (B, Sk, Hkv, D) -> out as q, lse (B, Sq, Hq) in fp32 (fp64 for fp64).

        Hq is a multiple of Hkv: query head h reads key/value head h * Hkv // Hq. causal: row i sees columns 0 .. i.
        """
        ...

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This block's part of dq, dk, dv, given the *whole* row's out and lse (not only this block's)."""
        ...


class Capping(Kernel, Protocol):
    """A kernel that can cap scores."""

    def capped(self, softcap: float) -> Kernel:
        """The same with that softcap: see `Scores`."""
        ...


def caps(kernel: Kernel) -> TypeGuard[Capping]:
    return hasattr(kernel, "capped")


# ---- the definition


class Reference:
    name = "reference"
    support = PLAIN_KERNEL
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # noqa: RUF012
    ran_on = "CPU"
    most = sys.maxsize  # scores that are there at once

    def __init__(self, softcap: float = 0.0) -> None:
        self.softcap = softcap

    def capped(self, softcap: float) -> Reference:
        return type(self)(softcap)

    def reasons(self, spec: BlockSpec) -> list[str]:
        found = [] if spec.dtype in self.tolerance else [f"takes floating point, not {spec.dtype}"]
        return found + ["takes tensors that hold numbers, not meta"] * (spec.device == "meta")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), []
        for rows, seen in _pieces(q, k, causal, self.most):
            part, part_lse = attend(q[:, rows], k[:, seen], v[:, seen], causal, scale, self.softcap, rows.start)
            out[:, rows] = part
            lse.append(part_lse)
        return out, torch.cat(lse, dim=1)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        for rows, seen in _pieces(q, k, causal, self.most):
            given = do[:, rows], q[:, rows], k[:, seen], v[:, seen], out[:, rows], lse[:, rows]
            dq[:, rows], part_dk, part_dv = gradients(*given, causal, scale, self.softcap, rows.start)
            dk[:, seen] += part_dk
            dv[:, seen] += part_dv
        return dq, dk.to(k.dtype), dv.to(v.dtype)


class Chunked(Reference):
    """The reference's arithmetic without its dense matrix: its temporaries do not grow with the product of lengths."""

    name = "chunked"
    most = 1 << 22  # where a single row has no more: 16 MiB in fp32


def is_deterministic() -> bool:
    """Whether torch refuses what is not deterministic, which is a reason against some kernels."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


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


def _pieces(q: Tensor, k: Tensor, causal: bool, most: int) -> Iterator[tuple[slice, slice]]:
    """(rows, the columns that they see), all rows; a piece has so many scores at most, and one row at least."""
    rows, columns = q.shape[1], k.shape[1]
    size = max(1, most // (q.shape[0] * q.shape[2] * columns))
    for start in range(0, rows, size):
        end = min(start + size, rows)
        yield slice(start, end), slice(0, min(end, columns) if causal else columns)
