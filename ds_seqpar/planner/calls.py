"""The programs of a call of attention of a configuration, and how much memory they take (`compiler.memory`). Bytes; no
tensor."""

from __future__ import annotations

from ..compiler import heads as dealing
from ..compiler.compile import Bound, Compiler
from ..compiler.cuts import PLAIN, Takes
from ..compiler.exchange import Kept, Members, kept_of
from ..compiler.masks import Mask
from ..compiler.memory import Figures, fewest_stages, figures
from ..compiler.shape import shape_of
from ..compiler.shards import EvenShards
from ..config import SequenceParallelConfig


def call_figures(
    config: SequenceParallelConfig,
    *,
    world: int,
    tokens: int,
    mask: Mask,
    heads: tuple[int, int, int],
    dtype: str = "bfloat16",
    batch: int = 1,
    rank: int = 0,
    member: int | None = None,
    takes: Takes = PLAIN,
    early: int = 0,
    kept: bool | None = None,
) -> Figures:
    """What a resolved configuration's attention over `tokens` of a rank takes.

    heads: (query heads, key/value heads, head_dim) of the model; rank: the inner one; member: of Ulysses, None for one
    with the most heads; takes: of the kernel; early: as `Comm.early`, which is 0
    but over gloo; kept: whether the checkpoint around it keeps what backward needs, None where there is no checkpoint.
    """
    recipe = config.recipe(config.topology(world))
    shards = EvenShards(config.layout, tokens * config.size, recipe.size)
    q_heads, kv_heads, _ = heads
    own = shape_of(config.travel_dtype, dtype, batch, heads)
    count = config.head_stages
    if count == "auto":
        count = fewest_stages(recipe, config.ulysses, config.travel_dtype, own, mask, shards)
    if member is None:
        member = dealing.busiest(q_heads, kv_heads, config.ulysses)
    leaves = kept_of(config.ulysses, count, kept is not None, bool(kept))
    compiler, members = Compiler(recipe, rank, early), Members(config.ulysses, member)

    def bound(direction: str) -> Bound:
        more = count, leaves if config.ulysses > 1 else Kept()
        return compiler.call(direction, mask, shards, own, members, takes, *more)

    return figures(bound("forward"), bound("backward"), leaves)
