"""The tensors that make up each kind of operand and result, and their sizes in bytes. This module does not import
torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple

from ..schedules.actions import ACCUMULATORS

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a call, of shape (batch, tokens, heads, width), or (batch, tokens, heads) if width is 0."""

    name: str
    side: str  # side whose tokens and heads the tensor has: "q" or "kv"
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
    """The batch size, heads and dtypes of one rank's tensors. Operators with other tensors extend this class."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str  # torch's name for the dtype of q, k and v
    comm_dtype: str  # dtype in which partial outputs and gradients are sent

    @property
    def accum_dtype(self) -> str:
        """The dtype of accumulators."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def of_heads(self, q: slice, kv: slice) -> Shape:
        """Return the shape restricted to the given slices of heads."""
        return dataclasses.replace(self, q_heads=q.stop - q.start, kv_heads=kv.stop - kv.start)

    @property
    def kv(self) -> dict[str, int]:
        """The width of each key/value tensor, by name."""
        return {"k": self.head_dim, "v": self.head_dim}

    @property
    def kernel_kv_heads(self) -> int:
        """The number of key/value heads that the kernel receives."""
        return self.kv_heads

    def product_bytes(self, direction: str, keys: int) -> int:
        """Return the size in bytes of a product's temporaries, excluding the kernel's workspace."""
        return 0

    def field(self, name: str, dtype: str | None = None) -> Field:
        """Return the call's tensor with this name.

        The name is q, out, lse, delta, a key of `kv`, or "d" followed by the name of a tensor with a gradient. The
        dtype defaults to the dtype of q. For lse and delta, `dtype` is ignored.
        """
        if name in ("lse", "delta"):
            return Field(name, "q", self.q_heads, 0, self.accum_dtype)
        width = self.kv.get(name, self.kv.get(name.removeprefix("d")))
        size = ("q", self.q_heads, self.head_dim) if width is None else ("kv", self.kv_heads, width)
        return Field(name, *size, dtype or self.dtype)

    def fields(self, direction: str, kind: str, dtype: str | None = None) -> tuple[Field, ...]:
        """Return the tensors of a unit of this kind. Results have the dtype `dtype`, which defaults to `comm_dtype`."""
        if kind in ("q", "kv"):
            names, dtype = tuple(self.kv) if kind == "kv" else ("q",), self.dtype
            names += ("do", "lse", "delta") if (direction, kind) == ("backward", "q") else ()
        else:
            names = {"out": ("out", "lse"), "dq": ("dq",), "dkv": tuple(f"d{name}" for name in self.kv)}[kind]
        return tuple(self.field(name, dtype or self.comm_dtype) for name in names)

    def bytes_per_token(self, direction: str) -> dict[str, int]:
        """Return the number of bytes sent per token for each kind of unit, for the whole batch."""
        return _bytes_per_token(self, direction)

    def elements_per_token(self, direction: str) -> dict[str, int]:
        """Return the number of elements per token for each kind of unit, for the whole batch."""
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

    Fields with larger elements come first, so every field is aligned without padding.
    """
    locations, at = {}, 0
    for field in sorted(fields, key=lambda f: -f.itemsize):
        end = at + batch * tokens * field.elements * field.itemsize
        width = (field.width,) if field.width else ()
        locations[field.name] = FieldLocation(at, end, field.dtype, (batch, tokens, field.heads, *width))
        at = end
    return tuple(locations[field.name] for field in fields)


def token_bytes(fields: Iterable[Field]) -> int:
    """Return the number of bytes that all fields together need per token of one sequence."""
    return sum(f.elements * f.itemsize for f in fields)


def buffer_bytes(fields: tuple[Field, ...], rows: int) -> int:
    """Return the size in bytes of a unit with `rows` tokens, rounded up to a multiple of 8 so that the next unit is
    aligned.
    """
    return -(-rows * token_bytes(fields) // 8) * 8


def shape_of(
    comm_dtype: str, dtype: str, batch: int, heads: tuple[int, int, int], kind: type[Shape] = Shape, **more: int
) -> Shape:
    """Return the shape of one rank's tensors.

    Args:
        comm_dtype: Value of the `comm_dtype` setting. "fp32" means fp32 or wider.
        dtype: torch's name for the dtype of q, k and v.
        heads: Tuple (number of query heads, number of key/value heads, head_dim) for one rank.
        kind: `Shape`, or an operator's subclass of `Shape`.
        more: Attributes that `kind` has in addition to the attributes of `Shape`.
    """
    accum_dtype = "float64" if dtype == "float64" else "float32"
    comm_dtype, (q, kv, dim) = {"fp32": accum_dtype, "bf16": "bfloat16"}[comm_dtype], heads
    return kind(batch=batch, q_heads=q, kv_heads=kv, head_dim=dim, dtype=dtype, comm_dtype=comm_dtype, **more)
