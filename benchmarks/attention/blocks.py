"""How long the blocks of a plan are: a rank may own several, which travel apart."""

from __future__ import annotations

from ds_seqpar.compiler.compile import side_of
from ds_seqpar.compiler.shape import Shape
from ds_seqpar.compiler.shards import Shards, tokens_of


def block_bytes(shape: Shape, direction: str, shards: Shards) -> dict[str, int]:
    """Bytes of one block of each kind, of even shards: what `Plan.received` and `Costs` take."""
    sizes = shape.bytes_per_token(direction)
    return {kind: size * shards.tokens(side_of(kind), (0,)) for kind, size in sizes.items()}


def unit(shape: Shape, shards: Shards) -> int:
    """Bytes of the q of an inner rank's tokens."""
    return shape.bytes_per_token("forward")["q"] * tokens_of(shards, "q", 0)
