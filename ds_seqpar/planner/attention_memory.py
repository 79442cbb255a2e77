"""Memory that one layer's attention needs on a rank, with all heads at once or in head chunks.

The memory of head chunks includes their projections. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from ..analysis.memory import Figures, fewest_head_chunks, figures
from ..analysis.workspace import planned_kernel
from ..core.compiler.compile import BoundProgram, Compiler
from ..core.compiler.program.shape import ITEMSIZE, shape_of
from ..core.compiler.program.ulysses import SavedForBackward, UlyssesGroup
from ..core.compiler.schedules import schedule
from ..core.compiler.sharding.heads import busiest_ulysses_rank
from ..core.compiler.sharding.layout import Topology, multiple
from ..core.compiler.sharding.masks import Mask
from ..core.compiler.sharding.shards import EvenShards
from ..core.compiler.tiles.launches import PLAIN_KERNEL, KernelSupport
from ..core.settings import SequenceParallelConfig
from ..operators.segments import COLUMNS
from .request import Index, TrainingStep

# cached, since memory settings (including head chunks) do not change the CP ranks' programs
compiler_of = functools.lru_cache(maxsize=256)(Compiler)
TURNS = 16  # ring length above which two more ranks do not change attention's memory per rank


def projecting_head_chunks(step: TrainingStep) -> int:
    """Return the number of head chunks that run their own projections, or 1 if all heads are computed at once."""
    config, m = step.config, step.model
    if config.overlap or m.norms_heads:
        return 1
    if config.head_chunks != "auto":
        return config.head_chunks
    recipe = config.recipe(config.topology(step.world))
    shards = EvenShards(config.layout, tokens_on_rank(step) * config.size, recipe.size)
    local = shape_of(config.comm_dtype, step.dtype, step.batch, (m.heads, m.kv_heads, m.head_dim))
    return fewest_head_chunks(recipe, config.ulysses, local, step.mask, shards, workspace_of(step))


def workspace_of(step: TrainingStep) -> str:
    """Return the kernel whose workspace is counted, as in `KernelSupport`."""
    return planned_kernel(step.config.kernel, step.dtype, step.model.head_dim, step.on_gpu)


def tokens_on_rank(step: TrainingStep) -> int:
    """Return the number of tokens of a sequence on each rank, including padding."""
    share = multiple(step.config.layout, step.config.size, step.config.ulysses)
    return math.ceil(step.seq / share) * share // step.config.size


def is_offloaded(step: TrainingStep) -> bool:
    """Return whether checkpoints, including kept attention results, stay in host memory until the backward pass."""
    return step.config.offload_checkpoints and step.checkpointing


def attention_figures(step: TrainingStep) -> Figures:
    """Return attention's memory on the rank that needs the most memory.

    With head chunks, the figures include q, k, v and the gradient of out for one head chunk. No other item for the
    layer includes these tensors.
    """
    if step.model.index is not None:
        return _index_figures(step, step.model.index)
    m, head_chunks, tokens = step.model, projecting_head_chunks(step), tokens_on_rank(step)
    workspace = workspace_of(step)
    config = on_fewer_ranks(step.config) if step.mask.scale_free else step.config
    bare = dataclasses.replace(config, rank_order="auto", mlp_tiles=1, loss_tiles=1, offload_checkpoints=False)
    if head_chunks == 1:
        heads = m.heads, m.kv_heads, m.head_dim
        return _attention(bare, tokens, step.mask, step.dtype, heads, step.batch, step.checkpointing, workspace)
    kept = config.kept(head_chunks, step.checkpointing, not config.recompute_attention)
    bare = dataclasses.replace(bare, head_chunks=1, save_qkv_after_all_to_all=kept.qkv, recompute_attention=False)
    kv_heads = math.ceil(m.kv_heads / head_chunks)
    heads = m.heads // m.kv_heads * kv_heads, kv_heads, m.head_dim
    chunk_figures = _attention(bare, tokens, step.mask, step.dtype, heads, step.batch, True, workspace)
    width = tokens * step.batch * m.head_dim * ITEMSIZE[step.dtype]
    q, local = heads[0] * width, (heads[0] + 2 * kv_heads) * width
    # offloaded: prefetched results for one head chunk; otherwise: results for all other head chunks
    other_head_chunks = chunk_figures.saved if is_offloaded(step) else (head_chunks - 1) * chunk_figures.saved
    in_backward = other_head_chunks
    if step.checkpointing and not is_offloaded(step) and not kept.qkv:
        # the input has no gradient until the first head chunk is done; from then on, delta and lse replace out
        delta_and_lse = 8 * heads[0] * tokens * step.batch
        in_backward = max(
            (head_chunks - 1) * delta_and_lse, other_head_chunks - tokens * step.batch * m.hidden * ITEMSIZE[step.dtype]
        )
    return Figures(
        forward=local + chunk_figures.forward + other_head_chunks,
        saved=head_chunks * chunk_figures.saved,
        backward=local + q + chunk_figures.backward + in_backward,
        inputs=False,
    )


def _index_figures(step: TrainingStep, index: Index) -> Figures:
    """Return the memory for a layer with an index: gathered tensors, scores for the rank's rows, and picked tokens.

    A checkpoint keeps none of the index's tensors.
    """
    rows, size = tokens_on_rank(step) * step.batch, ITEMSIZE[step.dtype]
    gathered = step.seq * step.batch * (index.latent + index.keys) * size
    scores, picks = 4 * rows * min(step.seq, COLUMNS), 8 * rows * min(step.seq, index.picks)
    saved = 0 if step.checkpointing else gathered + picks
    return Figures(forward=2 * (gathered + scores) + picks, saved=saved, backward=3 * gathered + picks, inputs=True)


def on_fewer_ranks(config: SequenceParallelConfig) -> SequenceParallelConfig:
    """Return a configuration with fewer ranks for which attention takes the same memory per rank, if there is one.

    The number of tokens per rank stays the same. The longest ring is shortened, because ranks on a longer ring hold no
    more tensors at once. Gathered axes and the parity of the ring length do not change. If there is no smaller
    configuration, `config` itself is returned.
    """
    inner_schedule, cp_size = schedule(config.schedule), config.size // config.ulysses
    axes = dict(config.cp_axes)
    rings = [name for name in axes if name not in inner_schedule.collective_axes]
    if config.overlap or not rings:
        return config
    longest = max(rings, key=lambda name: axes[name])
    ring_ranks = min(axes[longest], TURNS + axes[longest] % 2)
    cp_size, axes = cp_size // axes[longest] * ring_ranks, {**axes, longest: ring_ranks}
    fitting = (
        options for options in inner_schedule.shapes(cp_size) if dict(inner_schedule.axes(cp_size, options)) == axes
    )
    options = next(fitting, None)
    if options is None:
        return config
    return dataclasses.replace(config, size=cp_size * config.ulysses, schedule_options=tuple(sorted(options.items())))


@functools.lru_cache(maxsize=1024)
def _attention(
    config: SequenceParallelConfig, tokens: int, mask: Mask, dtype: str, heads: tuple[int, int, int], batch: int,
    checkpointing: bool, workspace: str,
) -> Figures:  # fmt: skip
    """Return attention's memory on the first, middle or last CP rank, whichever needs the most.

    Results are cached, because candidates that differ only in their links or rank order need the same memory.
    """
    cp_size = config.size // config.ulysses
    of_ranks = [
        call_figures(
            config, tokens=tokens, mask=mask, dtype=dtype, heads=heads, batch=batch, rank=rank,
            kept=not config.recompute_attention if checkpointing else None,
            support=PLAIN_KERNEL._replace(workspace=workspace),
        )
        for rank in sorted({0, cp_size // 2, cp_size - 1})
    ]  # fmt: skip
    return max(of_ranks, key=lambda figures_of_rank: (figures_of_rank.backward, figures_of_rank.forward))


def call_figures(
    config: SequenceParallelConfig,
    *,
    tokens: int,
    mask: Mask,
    heads: tuple[int, int, int],
    dtype: str = "bfloat16",
    batch: int = 1,
    rank: int = 0,
    ulysses_rank: int | None = None,
    support: KernelSupport = PLAIN_KERNEL,
    early: int = 0,
    kept: bool | None = None,
) -> Figures:
    """Return the memory that a layer's attention needs on one rank.

    Args:
        config: Configuration without "auto" values.
        tokens: Number of tokens per rank.
        mask: Mask of the whole sequence.
        heads: Tuple (number of query heads, number of key/value heads, head_dim) of the model.
        dtype: dtype of q, k and v.
        batch: Number of sequences that a group of ranks processes at once.
        rank: CP rank.
        ulysses_rank: Ulysses rank. None means a rank with the largest number of heads.
        support: Features that the kernel supports.
        early: Value of `Comm.early`, which is 0 except with gloo.
        kept: Whether the checkpoint around attention keeps attention's results; None without a checkpoint.
    """
    recipe = config.recipe(Topology(axes=config.cp_axes))  # rank placement does not affect programs
    shards = EvenShards(config.layout, tokens * config.size, recipe.size)
    q_heads, kv_heads, _ = heads
    local = shape_of(config.comm_dtype, dtype, batch, heads)
    count = config.head_chunks
    if count == "auto":
        count = fewest_head_chunks(recipe, config.ulysses, local, mask, shards, support.workspace)
    if ulysses_rank is None:
        ulysses_rank = busiest_ulysses_rank(q_heads, kv_heads, config.ulysses)
    saved_for_backward = config.kept(count, kept is not None, bool(kept))
    compiler, ulysses_group = compiler_of(recipe, rank, early), UlyssesGroup(config.ulysses, ulysses_rank)

    def bound(direction: str) -> BoundProgram:
        kept_for_backward = saved_for_backward if config.ulysses > 1 else SavedForBackward.QKV_AND_OUT
        return compiler.bound_call(direction, mask, shards, local, ulysses_group, support, count, kept_for_backward)

    return figures(bound("forward"), bound("backward"), saved_for_backward)
