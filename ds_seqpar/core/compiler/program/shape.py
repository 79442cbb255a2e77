"""The tensors of each kind of operand and result, and their size in bytes. Does not import torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple

from ..schedules.actions import ACCUMULATORS

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a unit, of shape (batch, tokens, heads, width), or (batch, tokens, heads) if width is 0."""

    name: str
    heads: int
    width: int
    dtype: str

    @property
    def elements(self) -> int:
        """The number of elements per token."""
        return self.heads * max(1, self.width)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The batch and the heads that one rank computes."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str  # of q, k and v, as torch names it
    comm_dtype: str  # of partial outputs and gradients that are sent
    latent: int = 0  # width of the latent in place of k and v, which then has one head; 0: there is none

    @property
    def accum_dtype(self) -> str:
        """The dtype of accumulators."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def of_heads(self, q: slice, kv: slice) -> Shape:
        """Return the shape of some of the heads."""
        return dataclasses.replace(self, q_heads=q.stop - q.start, kv_heads=kv.stop - kv.start)

    def fields(self, direction: str, kind: str, dtype: str | None = None) -> tuple[Field, ...]:
        """Return the tensors of a unit of this kind. `dtype` is that of a result, `comm_dtype` by default."""
        q, row_shape = (self.q_heads, self.head_dim), (self.q_heads, 0)
        kv, names = (self.kv_heads, self.latent or self.head_dim), ("latent",) if self.latent else ("k", "v")
        dtype = dtype or self.comm_dtype
        return {
            ("forward", "q"): (Field("q", *q, self.dtype),),
            ("backward", "q"): (
                Field("q", *q, self.dtype),
                Field("do", *q, self.dtype),
                Field("lse", *row_shape, self.accum_dtype),
                Field("delta", *row_shape, self.accum_dtype),
            ),
            (direction, "kv"): tuple(Field(name, *kv, self.dtype) for name in names),
            ("forward", "out"): (Field("out", *q, dtype), Field("lse", *row_shape, self.accum_dtype)),
            ("backward", "dq"): (Field("dq", *q, dtype),),
            ("backward", "dkv"): tuple(Field(f"d{name}", *kv, dtype) for name in names),
        }[direction, kind]

    def bytes_per_token(self, direction: str) -> dict[str, int]:
        """Return, for each kind of unit, the bytes of one token as it is sent, for the whole batch."""
        return _bytes_per_token(self, direction)

    def elements_per_token(self, direction: str) -> dict[str, int]:
        """Return, for each kind of unit, the elements of one token, for the whole batch."""
        kinds = ("q", "kv", *ACCUMULATORS[direction])
        return {kind: self.batch * sum(f.elements for f in self.fields(direction, kind)) for kind in kinds}


@functools.lru_cache(maxsize=256)
def _bytes_per_token(shape: Shape, direction: str) -> dict[str, int]:
    kinds = ("q", "kv", *ACCUMULATORS[direction])
    return {kind: shape.batch * token_bytes(shape.fields(direction, kind)) for kind in kinds}


class FieldLocation(NamedTuple):
    """The location of a tensor in a buffer."""

    start: int  # in bytes
    end: int  # in bytes, exclusive
    dtype: str
    shape: tuple[int, ...]


def locations_of(fields: tuple[Field, ...], batch: int, tokens: int) -> tuple[FieldLocation, ...]:
    """Return the location of each field in the buffer of a unit.

    Fields of wider elements come first, so that every field is aligned without a gap.
    """
    locations, at = {}, 0
    for field in sorted(fields, key=lambda f: -f.itemsize):
        end = at + batch * tokens * field.elements * field.itemsize
        width = (field.width,) if field.width else ()
        locations[field.name] = FieldLocation(at, end, field.dtype, (batch, tokens, field.heads, *width))
        at = end
    return tuple(locations[field.name] for field in fields)


def token_bytes(fields: Iterable[Field]) -> int:
    """Return the bytes of these tensors for one token of one sequence."""
    return sum(f.elements * f.itemsize for f in fields)


def buffer_bytes(fields: tuple[Field, ...], rows: int) -> int:
    """Return the bytes of a unit of `rows` tokens, rounded up to a multiple of 8 to align the unit after it."""
    return -(-rows * token_bytes(fields) // 8) * 8


def shape_of(comm_dtype: str, dtype: str, batch: int, heads: tuple[int, int, int], latent: int = 0) -> Shape:
    """Return the shape of one rank's tensors.

    Args:
        comm_dtype: the setting, where "fp32" means fp32 or wider.
        dtype: of q, k and v, as torch names it.
        heads: (query heads, key/value heads, head_dim) of one rank.
        latent: as in `Shape`.
    """
    accum_dtype = "float64" if dtype == "float64" else "float32"
    q_heads, kv_heads, dim = heads
    comm_dtype = {"fp32": accum_dtype, "bf16": "bfloat16"}[comm_dtype]
    return Shape(
        batch=batch, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim, dtype=dtype, comm_dtype=comm_dtype, latent=latent
    )  # fmt: skip
