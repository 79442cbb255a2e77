"""What a kernel is: attention of a (q, k, v) block, with the log-sum-exp that merging needs, and what else it takes."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from ...compiler.cuts import Takes


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

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        cap = f", softcap {self.softcap:g}" if self.softcap else ""
        return f"{dtype} on {self.device}, {self.q_heads}/{self.kv_heads} heads of {self.head_dim}{cap}"


class Scores(NamedTuple):
    """What a query's score of a key is: x = scale * (q . k), and softcap * tanh(x / softcap) where a softcap is given
    (Gemma 2)."""

    scale: float
    softcap: float = 0.0


class Kernel(Protocol):
    """Attention of one block, full or causal, and its gradient.

    name: as in the configuration. takes: what else it can be called for; one that takes bands is `Banding`, one that
    takes all tiles of a product `Accumulating`. tolerance: greatest max|a-b|/max|b| against fp64 that its conformance
    tests allow, a dtype. ran_on: where the conformance suite has passed.
    """

    name: str
    takes: Takes
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


class Banding(Kernel, Protocol):
    """A kernel that takes bands. width: where it is not 0, row i sees columns i .. i + width - 1 that there are."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, width: int = 0
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
        width: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


class Capping(Kernel, Protocol):
    """A kernel that can cap scores."""

    def capped(self, softcap: float) -> Kernel:
        """The same with that softcap: see `Scores`."""
        ...


def caps(kernel: Kernel) -> TypeGuard[Capping]:
    return hasattr(kernel, "capped")
