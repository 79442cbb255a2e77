"""Latent attention (MLA). Ranks send each token's latent, and expand latents to keys and values for each product.

A latent has R elements per token, shared by all heads. In DeepSeek-V3, 576 elements represent 40,960 elements of k and
v. A matrix (H, R, D + Dv) expands the latent. Forward and backward expand a block again for each product. In backward,
the gradients of keys and values are converted to the gradient of the latent, which travels with the latent. The
gradient of the matrix stays on the rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.errors import InputError, SeqParError
from ..core.compiler.program.shape import ITEMSIZE, Shape
from ..core.compiler.sharding.shards import UnevenShards, tokens_of
from ..core.compiler.tiles.tiles import Rows, Tile
from ..core.runtime.buffers import Tensors, sum_dtype
from ..core.runtime.dense import Backward, Forward, Operands
from ..core.runtime.kernels.accumulate import Accumulator, Sum
from ..core.runtime.operator import Operator, padded, register, shape_of
from ..core.settings import SequenceParallelConfig


def expanded(latent: Tensor, matrix: Tensor, k_dim: int) -> list[Tensor]:
    """Return k (B, n, H, D) and v (B, n, H, Dv), expanded from a latent (B, n, R) with a matrix (H, R, D + Dv)."""
    kv = torch.einsum("bnr,hre->bnhe", latent, matrix)
    return [*kv.split([k_dim, kv.shape[-1] - k_dim], dim=-1)]


class Expansion(NamedTuple):
    """The matrix that expands a latent to the keys and values of some heads."""

    matrix: Tensor  # (R, H * (D + Dv))
    heads: int
    v_dim: int

    @classmethod
    def of(cls, matrix: Tensor, v_dim: int) -> Expansion:
        """Return the Expansion for a matrix (H, R, D + Dv)."""
        return cls(matrix.transpose(0, 1).flatten(1), matrix.shape[0], v_dim)

    def expand(self, latent: Tensor) -> Tensors:
        """Expand a latent (B, n, 1, R) to k and v (B, n, H, D). The narrower of k and v is padded with zeros."""
        kv = (latent.flatten(2) @ self.matrix).unflatten(-1, (self.heads, -1))
        k, v = kv.split([kv.shape[-1] - self.v_dim, self.v_dim], dim=-1)
        return padded(k, v.shape[-1]), padded(v, k.shape[-1])

    def columns(self, dk: Tensor, dv: Tensor) -> Tensor:
        """Return the gradients of k and v from `expand` as one matrix (B * n, H * (D + Dv))."""
        k_dim = self.matrix.shape[1] // self.heads - self.v_dim
        return torch.cat([dk[..., :k_dim], dv[..., : self.v_dim]], dim=-1).flatten(2).flatten(0, 1)


def _seen(latent: Tensor, launches: Sequence[Tile]) -> Tensor:
    """Return a latent's rows up to the last row that any launch sees."""
    return latent[:, : max(launch.sides[1].end for launch in launches)]


class LatentForward(Forward):
    """Forward pass for q (B, n, H, D) and a latent (B, m, 1, R)."""

    def __init__(self, operands: Operands) -> None:
        super().__init__(operands)
        self.expansion = Expansion.of(operands.parameters[0], operands.v_dim)

    def product(
        self, q: Tensors, kv: Tensors, q_slot: int, launches: Sequence[Tile], results: list[Accumulator]
    ) -> None:
        if launches:
            super().product(q, self.expansion.expand(_seen(kv[0], launches)), q_slot, launches, results)


class LatentBackward(Backward):
    """Backward pass of `LatentForward`, which returns dq and the latent's gradient.

    Attributes:
        dmatrix: The gradient of the expansion matrix, in accum_dtype.
    """

    def __init__(self, operands: Operands, do: Tensor, out: Tensor, lse: Tensor) -> None:
        super().__init__(operands, do, out, lse)
        self.expansion = Expansion.of(operands.parameters[0], operands.v_dim)
        self.dmatrix = torch.zeros_like(self.expansion.matrix, dtype=sum_dtype(self.dtype))

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

    def parameter_gradients(self) -> Tensors:
        return (self.dmatrix.unflatten(1, (self.expansion.heads, -1)).transpose(0, 1),)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape(Shape):
    """The shape of latent attention, in which one head with `latent` elements represents k and v."""

    latent: int

    @property
    def kv(self) -> dict[str, int]:
        return {"latent": self.latent}

    @property
    def kernel_kv_heads(self) -> int:
        return self.q_heads

    def product_bytes(self, direction: str, keys: int) -> int:
        """Return the total size in bytes of `keys` expanded keys and values and the expansion matrix.

        For backward, the gradients of keys, values and the matrix are included.
        """
        expanded, matrix = 2 * self.batch * keys * self.head_dim, 2 * self.latent * self.head_dim
        width = expanded * (1 if direction == "forward" else 2) + matrix
        gradient = 0 if direction == "forward" else 2 * matrix * ITEMSIZE[self.accum_dtype]
        return self.q_heads * (width * self.itemsize + gradient)


class Latent(Operator):
    """Attention of q (B, s, H, D) to a latent (B, s, R) that a matrix (H, R, D + Dv) expands."""

    name, operands, parameters, dims = "latent attention", ("q", "latent"), ("expand",), (4, 3, 3)
    is_linear = False  # keys only exist during a product
    kind, forward, backward = LatentShape, LatentForward, LatentBackward

    def check_shapes(self, tensors: Sequence[Any], lengths_differ: bool) -> None:
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else () for x in tensors]
        fits = [len(shape) for shape in shapes] == [*self.dims] and all(n for s in shapes for n in (s[0], *s[2:]))
        if fits:
            (rows, tokens, heads, dim), (latent_rows, latent_tokens, width), matrix = shapes
            fits = rows == latent_rows and (lengths_differ or tokens == latent_tokens)
            fits = fits and matrix[:2] == (heads, width) and matrix[2] > dim
        if not fits:
            raise InputError(
                "latent attention needs q (batch, local_seq, heads, head_dim), latent (batch, local_seq, width) and "
                f"expand (heads, width, head_dim + v_dim); got {', '.join(map(shape_of, tensors))}"
            )

    def prepare(self, tensors: Sequence[Tensor]) -> tuple[Tensors, int]:
        q, latent, expand = tensors
        v_dim = expand.shape[2] - q.shape[3]
        return (padded(q, v_dim), latent.unsqueeze(2), expand), v_dim

    def widths(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        return {"latent": shapes[1][3]}


LATENT = register(Latent())


def is_sent(config: SequenceParallelConfig, tokens: int, heads: int, width: int, dims: int) -> bool:
    """Return whether latent attention sends latents, rather than keys and values, for a resolved config.

    Expanding one key costs as much as attention from `width` query rows to the key. CP ranks expand a key in every hop,
    while each Ulysses rank expands a key only once, for its own heads.

    Args:
        config: The settings.
        tokens: Number of tokens in the whole sequence.
        heads: Number of query heads.
        width: Width of a token's latent.
        dims: head_dim + v_dim.
    """
    if config.size == 1 or config.latent_attention != "auto":
        return config.size > 1 and config.latent_attention == "latent"
    cp_size, one_chunk = config.size // config.ulysses, config.head_chunks in (1, "auto")
    return one_chunk and width * config.ulysses < heads * dims and (cp_size == 1 or tokens >= width * cp_size)


def sends_latent(config: SequenceParallelConfig, tensors: Sequence[Tensor], shards: UnevenShards | None) -> bool:
    """Return whether a call of latent attention sends its latent.

    The result is also True for a call with invalid tensors.
    """
    try:
        LATENT.check(tensors, shards is not None)
    except SeqParError:
        return True
    q, _, expand = tensors
    tokens = q.shape[1] * config.size
    if isinstance(shards, UnevenShards):
        tokens = sum(tokens_of(shards, "q", rank) for rank in range(shards.size))
    return is_sent(config, tokens, *expand.shape)
