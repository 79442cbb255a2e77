"""What attention of a layer takes of a rank's memory: of all heads, or in stages with their projections. Torch-free."""

from __future__ import annotations

import dataclasses
import functools
import math

from ..compiler.layout import multiple
from ..compiler.masks import Mask
from ..compiler.memory import Figures, fewest_stages
from ..compiler.schedules import schedule
from ..compiler.shape import ITEMSIZE, shape_of
from ..compiler.shards import EvenShards
from ..config import SequenceParallelConfig
from .calls import call_figures
from .request import Step

TURNS = 16  # of a way round, from which on more of them (two at a time) do not change what attention takes of memory


def stages_inside(step: Step) -> int:
    """In how many stages a patched model projects, attends and feeds its output projection; 1: all heads at once."""
    config, m = step.config, step.model
    if config.overlap or m.norms_heads:
        return 1
    if config.head_stages != "auto":
        return config.head_stages
    recipe = config.recipe(config.topology(step.world))
    shards = EvenShards(config.layout, tokens_of(step) * config.size, recipe.size)
    own = shape_of(config.travel_dtype, step.dtype, step.batch, (m.heads, m.kv_heads, m.head_dim))
    return fewest_stages(recipe, config.ulysses, config.travel_dtype, own, step.mask, shards)


def tokens_of(step: Step) -> int:
    """Of a sequence that a rank holds."""
    share = multiple(step.config.layout, step.config.size, step.config.ulysses)
    return math.ceil(step.seq / share) * share // step.config.size


def away(step: Step) -> bool:
    """Whether what attention gave a stage waits for its backward in host memory."""
    return step.config.offload_checkpoints and step.checkpointing


def attention_figures(step: Step) -> Figures:
    """What attention takes of the rank with the most. In stages: with their own q, k, v and gradient of out, which
    nobody else has then."""
    m, stages, tokens = step.model, stages_inside(step), tokens_of(step)
    config = shortened(step.config) if step.mask.scale_free else step.config
    bare = dataclasses.replace(config, placement="auto", mlp_tiles=1, loss_tiles=1, offload_checkpoints=False)
    if stages == 1:
        heads = m.heads, m.kv_heads, m.head_dim
        return _attention(bare, tokens, step.mask, step.dtype, heads, step.batch, step.checkpointing)
    kept = config.kept(stages, step.checkpointing, config.keep_attention)
    bare = dataclasses.replace(bare, head_stages=1, keep_exchanged=kept.operands, keep_attention=True)
    kv_heads = math.ceil(m.kv_heads / stages)
    heads = m.heads // m.kv_heads * kv_heads, kv_heads, m.head_dim
    one = _attention(bare, tokens, step.mask, step.dtype, heads, step.batch, True)
    width = tokens * step.batch * m.head_dim * ITEMSIZE[step.dtype]
    q, own = heads[0] * width, (heads[0] + 2 * kv_heads) * width
    others = one.saved if away(step) else (stages - 1) * one.saved  # one that is fetched ahead, or all
    later = others
    if step.checkpointing and not away(step) and not kept.operands:
        # while the first stage is computed the gradient of the input is not there; then delta and lse replace out
        rows = 8 * heads[0] * tokens * step.batch
        later = max((stages - 1) * rows, others - tokens * step.batch * m.hidden * ITEMSIZE[step.dtype])
    return Figures(
        forward=own + one.forward + others,
        saved=stages * one.saved,
        backward=own + q + one.backward + later,
        inputs=False,
    )


def shortened(config: SequenceParallelConfig) -> SequenceParallelConfig:
    """A configuration on fewer ranks whose attention takes as much memory of a rank, with as many tokens each; else the
    same. The longest way round is shortened: on more than a few turns a rank never holds more at once. What is gathered
    stays as it is, and whether turns are even."""
    chosen, inner = schedule(config.schedule), config.size // config.ulysses
    axes = dict(config.inner_axes)
    rings = [name for name in axes if name not in chosen.collective_axes]
    if config.overlap or not rings:
        return config
    longest = max(rings, key=lambda name: axes[name])
    turns = min(axes[longest], TURNS + axes[longest] % 2)
    inner, axes = inner // axes[longest] * turns, {**axes, longest: turns}
    fitting = (own for own in chosen.shapes(inner) if dict(chosen.axes(inner, own)) == axes)
    own = next(fitting, None)
    if own is None:
        return config
    return dataclasses.replace(config, size=inner * config.ulysses, own=tuple(sorted(own.items())))


@functools.lru_cache(maxsize=1024)
def _attention(
    config: SequenceParallelConfig, tokens: int, mask: Mask, dtype: str, heads: tuple[int, int, int], batch: int,
    checkpointing: bool,
) -> Figures:  # fmt: skip
    """Of the rank with the most of the first, the last and one between. tokens: of a rank. Kept, since the planner asks
    for the same on other links and in other placements."""
    inner = config.size // config.ulysses
    found = [
        call_figures(
            config, world=config.size, tokens=tokens, mask=mask, dtype=dtype, heads=heads, batch=batch, rank=rank,
            kept=config.keep_attention if checkpointing else None,
        )
        for rank in sorted({0, inner // 2, inner - 1})
    ]  # fmt: skip
    return max(found, key=lambda one: (one.backward, one.forward))
