"""The kernel protocol, and two kernels that are built from torch's own operations and run on any device.

`Reference` computes the dense score matrix, and defines the results against which other kernels are tested. `Chunked`
computes a few query rows at a time, for features that no fast kernel supports, such as a softcap.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeGuard

import torch
from einops import rearrange
from torch import Tensor

from ...compiler.tiles.launches import PLAIN_KERNEL, KernelSupport


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """Properties of the blocks that a kernel must support."""

    device: str  # device type, such as "cuda"
    dtype: torch.dtype  # dtype of q, k and v
    q_heads: int
    kv_heads: int
    head_dim: int
    softcap: float = 0.0  # bound on scores; 0 means no bound

    @classmethod
    def of(cls, q: Tensor, kv_heads: int, softcap: float = 0.0) -> BlockSpec:
        """Return the spec for q (batch, seq, q_heads, head_dim) and `kv_heads` key/value heads."""
        return cls(q.device.type, q.dtype, q.shape[2], kv_heads, q.shape[3], softcap)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        cap = f", softcap {self.softcap:g}" if self.softcap else ""
        return f"{self.dtype_name} on {self.device}, {self.q_heads}/{self.kv_heads} heads of {self.head_dim}{cap}"


class Scores(NamedTuple):
    """The score of a query and a key: x = scale * (q . k), or with a softcap, softcap * tanh(x / softcap) (Gemma 2).

    A `softcap` of 0 means no softcap.
    """

    scale: float
    softcap: float = 0.0  # 0 means no softcap


class Kernel(Protocol):
    """Full or causal attention over one block, and its gradient.

    To add a kernel, implement this protocol and pass an instance to `register`.

    Attributes:
        name: The name by which configurations select the kernel.
        support: The kernel's features beyond full and causal blocks:

            - bands (`band`): both methods have an extra parameter `width: int = 0`. If `width` is not 0, row i sees
              columns i to i + width - 1, if those columns exist;
            - windows (`windows`): both methods have an extra parameter `segments: Segments | None = None`.
        tolerance: For each dtype, the maximum error max|a-b|/max|b| relative to fp64 that the conformance tests allow.
        ran_on: The devices on which the conformance tests have passed.
    """

    name: str
    support: KernelSupport
    tolerance: dict[torch.dtype, float]
    ran_on: str

    def reasons(self, spec: BlockSpec) -> list[str]:
        """Return the reasons why the kernel does not support the spec, or an empty list if the spec is supported."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Compute attention over one block.

        Hq is a multiple of Hkv. Query head h uses key/value head `h * Hkv // Hq`.

        Args:
            q: (B, Sq, Hq, D).
            k: (B, Sk, Hkv, D), in q's dtype.
            v: (B, Sk, Hkv, D), in q's dtype.
            causal: If True, row i sees columns 0 to i. Otherwise, every row sees all columns.
            scale: Factor by which q . k is multiplied.

        Returns:
            (out, lse). out has q's shape and dtype. lse (B, Sq, Hq) is the log-sum-exp of each row's scores, in fp32
            (fp64 for fp64 inputs).
        """
        ...

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute one block's contribution to the gradients.

        Args:
            do: Gradient of out, (B, Sq, Hq, D) in q's dtype.
            q: As in `forward`.
            k: As in `forward`.
            v: As in `forward`.
            out: Output for *whole* rows, over the keys in all blocks, (B, Sq, Hq, D) in q's dtype.
            lse: The lse for whole rows, (B, Sq, Hq) in fp32 (fp64 for fp64 inputs).
            causal: As in `forward`.
            scale: As in `forward`.

        Returns:
            (dq, dk, dv), with the shapes of q, k and v.
        """
        ...


class Capping(Kernel, Protocol):
    """A kernel that can cap scores."""

    def capped(self, softcap: float) -> Kernel:
        """Return the same kernel with a softcap, as defined in `Scores`."""
        ...


def can_cap(kernel: Kernel) -> TypeGuard[Capping]:
    return hasattr(kernel, "capped")


# ---- two kernels in torch's own operations


class Reference:
    name = "reference"
    support = PLAIN_KERNEL
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # noqa: RUF012
    ran_on = "CPU"
    max_scores = sys.maxsize  # maximum number of scores in memory at once

    def __init__(self, softcap: float = 0.0) -> None:
        self.softcap = softcap

    def capped(self, softcap: float) -> Reference:
        return type(self)(softcap)

    def reasons(self, spec: BlockSpec) -> list[str]:
        reasons = [] if spec.dtype in self.tolerance else [f"takes floating point, not {spec.dtype}"]
        return reasons + ["takes tensors that hold numbers, not meta"] * (spec.device == "meta")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lses = torch.empty_like(q), []
        for rows, columns in _row_pieces(q, k, causal, self.max_scores):
            rows_out, rows_lse = attend(
                q[:, rows], k[:, columns], v[:, columns], causal, scale, self.softcap, rows.start
            )
            out[:, rows] = rows_out
            lses.append(rows_lse)
        return out, torch.cat(lses, dim=1)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        for rows, columns in _row_pieces(q, k, causal, self.max_scores):
            operands = do[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, rows]
            dq[:, rows], rows_dk, rows_dv = gradients(*operands, causal, scale, self.softcap, rows.start)
            dk[:, columns] += rows_dk
            dv[:, columns] += rows_dv
        return dq, dk.to(k.dtype), dv.to(v.dtype)


class Chunked(Reference):
    """The reference kernel without the dense score matrix. The temporaries do not grow with the product of the
    lengths.
    """

    name = "chunked"
    max_scores = 1 << 22  # 16 MiB in fp32; a single row may exceed the limit


def is_deterministic() -> bool:
    """Return whether torch rejects nondeterministic operations, in which case some kernels cannot be used."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, softcap: float, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute `Kernel.forward` with results in fp32 (fp64 for fp64 inputs).

    Args:
        first: Row number of q's first row. If `causal` is True, the row sees columns 0 to `first`.
    """
    scores = _scores(q, k, causal, scale, softcap, first)
    lse = torch.logsumexp(scores, dim=-1)
    # not exp(scores - lse), because rounding the lse would distort the sum of weights, and delta in backward
    out = torch.einsum("bkgqs,bskd->bqkgd", torch.softmax(scores, dim=-1), _wide(v))
    return rearrange(out, "b q k g d -> b q (k g) d"), rearrange(lse, "b k g q -> b q (k g)")


def gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, scale: float, softcap: float, first: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `Kernel.backward` with results in fp32 (fp64 for fp64 inputs). See `attend` for `first`."""
    heads = k.shape[2]
    scores = _scores(q, k, causal, scale, softcap, first)
    p = torch.exp(scores - rearrange(lse, "b q (k g) -> b k g q 1", k=heads))
    do_, out_, q_ = (_grouped(x, heads) for x in (do, out, q))
    delta = rearrange((do_ * out_).sum(-1), "b q k g -> b k g q 1")
    dv = torch.einsum("bkgqs,bqkgd->bskd", p, do_)
    ds = p * (torch.einsum("bqkgd,bskd->bkgqs", do_, _wide(v)) - delta) * scale
    if softcap:  # derivative of the softcap; 0 for masked scores
        ds = ds * torch.where(scores.isneginf(), 0.0, 1.0 - (scores / softcap).square())
    dq = torch.einsum("bkgqs,bskd->bqkgd", ds, _wide(k))
    return rearrange(dq, "b q k g d -> b q (k g) d"), torch.einsum("bkgqs,bqkgd->bskd", ds, q_), dv


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """Return x (B, q, Hq, D) with query heads grouped by key/value head, as (B, q, Hkv, Hq / Hkv, D) in fp32 (fp64 for
    fp64 inputs).
    """
    return rearrange(_wide(x), "b q (k g) d -> b q k g d", k=kv_heads)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, softcap: float, first: int) -> Tensor:
    """Return the scores (B, Hkv, Hq / Hkv, Sq, Sk), with -inf for columns that a row does not see."""
    scores = torch.einsum("bqkgd,bskd->bkgqs", _grouped(q, k.shape[2]), _wide(k)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(first)
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores


def _row_pieces(q: Tensor, k: Tensor, causal: bool, max_scores: int) -> Iterator[tuple[slice, slice]]:
    """Yield pairs (rows, columns that the rows see) with at most `max_scores` scores, but at least one row."""
    rows, columns = q.shape[1], k.shape[1]
    size = max(1, max_scores // (q.shape[0] * q.shape[2] * columns))
    for start in range(0, rows, size):
        end = min(start + size, rows)
        yield slice(start, end), slice(0, min(end, columns) if causal else columns)
