"""Latent attention (MLA): what is sent of a token is its latent, which becomes keys and values where a product is.

A latent has R numbers a token, for all heads; DeepSeek-V3's 576 stand for 40,960 of k and v. A matrix (H, R, D + Dv)
expands it. Forward and backward expand a block in each product with it, and the gradients of its keys and values
become that of the latent there, which is sent with it. The matrix's own gradient stays on the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..core.compiler.tiles.tiles import Rows, Tile
from ..core.runtime.buffers import Tensors, sum_dtype
from ..core.runtime.dense import Backward, Forward
from ..core.runtime.kernels import Kernel
from ..core.runtime.kernels.accumulate import Accumulator, Sum


def expanded(latent: Tensor, matrix: Tensor, k_dim: int) -> list[Tensor]:
    """Return k (B, n, H, D) and v (B, n, H, Dv) of a latent (B, n, R) by a matrix (H, R, D + Dv)."""
    kv = torch.einsum("bnr,hre->bnhe", latent, matrix)
    return [*kv.split([k_dim, kv.shape[-1] - k_dim], dim=-1)]


class Expansion(NamedTuple):
    """The matrix of some heads that makes keys and values of a latent."""

    matrix: Tensor  # (R, H * (D + Dv))
    heads: int
    v_dim: int

    @classmethod
    def of(cls, matrix: Tensor, v_dim: int) -> Expansion:
        """Return the expansion by a matrix (H, R, D + Dv)."""
        return cls(matrix.transpose(0, 1).flatten(1), matrix.shape[0], v_dim)

    def expand(self, latent: Tensor) -> Tensors:
        """Return k and v (B, n, H, D) of a latent (B, n, 1, R), the smaller of the two padded with zeros."""
        kv = (latent.flatten(2) @ self.matrix).unflatten(-1, (self.heads, -1))
        k, v = kv.split([kv.shape[-1] - self.v_dim, self.v_dim], dim=-1)
        return padded(k, v.shape[-1]), padded(v, k.shape[-1])

    def columns(self, dk: Tensor, dv: Tensor) -> Tensor:
        """Return gradients of `expand`'s k and v as one matrix (B * n, H * (D + Dv))."""
        k_dim = self.matrix.shape[1] // self.heads - self.v_dim
        return torch.cat([dk[..., :k_dim], dv[..., : self.v_dim]], dim=-1).flatten(2).flatten(0, 1)


def padded(x: Tensor, dim: int) -> Tensor:
    """Return x (..., D) with zeros up to `dim`, as it is where it has as many elements."""
    return x if x.shape[-1] >= dim else functional.pad(x, (0, dim - x.shape[-1]))


def _seen(latent: Tensor, launches: Sequence[Tile]) -> Tensor:
    """Return the rows of a latent up to the last one that a launch sees."""
    return latent[:, : max(launch.sides[1].end for launch in launches)]


class LatentForward(Forward):
    """Forward of q (B, n, H, D) and a latent (B, m, 1, R)."""

    def __init__(self, kernel: Kernel, scale: float, q: Tensor, latent: Tensor, expansion: Expansion) -> None:
        super().__init__(kernel, scale, q, latent)
        self.expansion = expansion

    def product(
        self, q: Tensors, kv: Tensors, q_slot: int, launches: Sequence[Tile], results: list[Accumulator]
    ) -> None:
        if launches:
            super().product(q, self.expansion.expand(_seen(kv[0], launches)), q_slot, launches, results)


class LatentBackward(Backward):
    """Backward of `LatentForward`. The results are dq and the latent's gradient.

    Attributes:
        dmatrix: The gradient of the expansion's matrix, in accum_dtype.
    """

    def __init__(
        self, kernel: Kernel, scale: float, do: Tensor, q: Tensor, latent: Tensor, out: Tensor, lse: Tensor,
        expansion: Expansion,
    ) -> None:  # fmt: skip
        super().__init__(kernel, scale, do, q, (latent,), out, lse)
        self.expansion = expansion
        self.dmatrix = torch.zeros_like(expansion.matrix, dtype=sum_dtype(q.dtype))

    def product(
        self, q: Tensors, kv: Tensors, q_slot: int, launches: Sequence[Tile], results: list[Accumulator]
    ) -> None:
        if not launches:
            return
        (dq, dlatent), latent = results, _seen(kv[0], launches)
        shape = *latent.shape[:2], self.expansion.heads, q[0].shape[3]
        dkv = Sum(lambda: (self.dmatrix.new_empty(shape), self.dmatrix.new_empty(shape)))
        super().product(q, self.expansion.expand(latent), q_slot, launches, [dq, dkv])
        columns = self.expansion.columns(*dkv.finish(self.dtype, self.dtype))
        self.dmatrix += latent.flatten(2).flatten(0, 1).mT @ columns
        gradient = (columns @ self.expansion.matrix.mT).view(latent.shape)
        dlatent.add((gradient,), Rows(0, latent.shape[1]), kv[0].shape[1])
