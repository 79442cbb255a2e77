"""From a resolved configuration to what programs are made from. Torch-free."""

from __future__ import annotations

from ..config import SequenceParallelConfig
from . import heads as dealing
from .compile import Compiler, Recipe
from .masks import Mask
from .memory import peak
from .schedules import schedule
from .shape import Shape
from .shards import Shards, tokens_of
from .topology import Topology


def recipe_of(config: SequenceParallelConfig, topology: Topology) -> Recipe:
    """What programs are made from, of a resolved configuration."""
    return Recipe(
        schedule=schedule(config.schedule),
        topology=topology,
        forward=config.forward,
        backward=config.backward,
        overlap=config.overlap,
    )


def shape_of(travel: str, dtype: str, batch: int, heads: tuple[int, int, int]) -> Shape:
    """heads: (query heads, key/value heads, head_dim) of one rank. travel: the setting, where "fp32" means fp32 or
    wider."""
    wide = "float64" if dtype == "float64" else "float32"
    q_heads, kv_heads, dim = heads
    travels = {"fp32": wide, "bf16": "bfloat16"}[travel]
    return Shape(batch=batch, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim, dtype=dtype, travel=travels)


def fewest_stages(config: SequenceParallelConfig, recipe: Recipe, own: Shape, mask: Mask, shards: Shards) -> int:
    """Of heads, given a rank's own q, k and v: as few that attention takes no more than its q, k, v and out, in the
    program of the first inner rank, which all know."""
    compiler, members = Compiler(recipe, 0), config.ulysses
    free = dealing.free_stages(own.q_heads, own.kv_heads, members)
    for count in free:
        heads = (*dealing.most(own.q_heads // count, own.kv_heads // count, members), own.head_dim)
        shape = shape_of(config.travel_dtype, own.dtype, own.batch, heads)
        taken = max(peak(compiler.bound(way, mask, shards, shape, False)) for way in ("forward", "backward"))
        whole = 2 * sum(heads[:2]) * count * own.head_dim * own.batch * own.itemsize
        if taken <= whole * tokens_of(shards, "q", 0):
            return count
    return free[-1]
