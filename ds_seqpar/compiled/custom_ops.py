"""torch.library ops for attention and its backward.

Compilers and dispatch modes must see attention as a single op, and torch.compile does not trace into such an op.

A selective checkpoint can save the result of `ds_seqpar::attention` and recompute everything else (DistFlashAttn,
section 3.3). Ops accept only tensors and numbers, so other objects are passed as integer handles.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..base import compat
from ..core.compiler.program.ulysses import Heads, SavedForBackward, UlyssesGroup
from ..core.compiler.sharding.masks import FULL
from ..core.compiler.sharding.op_handles import object_of, objects_of
from ..core.compiler.sharding.shards import Shards, tokens_of
from ..core.runtime import attention as eager
from ..core.runtime.admit import AdmittedCall, handle_of_shards, shards_of
from ..core.runtime.attention import Attention, Context
from ..core.runtime.buffers import Tensors, sum_dtype
from ..core.runtime.call import CallSettings
from ..core.runtime.kernels import Scores
from ..core.runtime.operator import OPERATORS
from ..core.runtime.runtime import Runtime


def attention(call: AdmittedCall) -> tuple[Tensor, Tensor | None]:
    """Compute `core.runtime.attention.attention` as a single op.

    In a checkpointed function, the op runs inside the autograd function, so that the recomputation can replay the op's
    results.
    """
    if call.checkpointed:
        forward = functools.partial(_forward, call.runtime)
        results = Attention.apply(call.runtime, call.settings, forward, call.sinks, *call.tensors)
    else:
        results = _forward(call.runtime, call.tensors, call.sinks, call.settings, call.agreement)
    return eager.returned(call, results)


def runs_as_op() -> bool:
    """Return whether a compiler, or a dispatch mode such as a selective checkpoint, needs attention as a single op."""
    return torch.compiler.is_compiling() or compat.dispatch_modes() > 0


def _forward(
    runtime: Runtime, tensors: Tensors, sinks: Tensor | None, settings: CallSettings, agreement: Tensor | None = None
) -> list[Tensor]:
    """Compute `Runtime.forward` as an op, with the settings encoded as numbers."""
    mask, shards, scores, head_chunks, saves, lse, operator, v_dim, layer = settings
    numbers = runtime.handle, mask.handle, handle_of_shards(shards), *scores, head_chunks, int(saves)
    sizes = _sizes(runtime, tensors[0], tensors[1], shards)
    return attention_op(tensors, sinks, *numbers, operator.name, v_dim, lse, layer, sizes, agreement)


def _settings(
    mask: int, shards: int, scale: float, softcap: float, head_chunks: int, saves: int, operator: str, v_dim: int,
    lse: bool, layer: int | None = None,
) -> CallSettings:  # fmt: skip
    """Decode the settings from the numbers passed by `_forward`."""
    what = Scores(scale, softcap), head_chunks, SavedForBackward(saves), lse, OPERATORS[operator], v_dim, layer
    return CallSettings(object_of(mask), shards_of(shards), *what)


def _sizes(runtime: Runtime, q: Tensor, k: Tensor, shards: Shards | None) -> list[int]:
    """Return the sizes from which the op's fake implementation derives the shapes of results.

    Returns:
        [1 if all operands are sent in one message else 0, ulysses_size, ulysses_rank, the CP rank's number of q tokens,
        the CP rank's number of k/v tokens].
    """
    if shards is None:
        return [1, *runtime.ulysses, q.shape[1] * runtime.ulysses.size, k.shape[1] * runtime.ulysses.size]
    tokens = [tokens_of(shards, side, runtime.rank) for side in ("q", "kv")]
    return [int(tokens[0] == tokens[1]), *runtime.ulysses, *tokens]


@torch.library.custom_op("ds_seqpar::attention", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def attention_op(
    tensors: Sequence[Tensor], sinks: Tensor | None, handle: int, mask: int, shards: int, scale: float,
    softcap: float, head_chunks: int, saves: int, operator: str, v_dim: int, lse: bool, layer: int | None,
    sizes: Sequence[int],
    agreement: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Compute attention's forward pass.

    Args:
        sizes: The result of `_sizes`. The sizes are an argument because several ranks may share a compiler cache.
        agreement: A tensor that must be computed before any data is sent.

    Returns:
        The results of `Runtime.forward`.
    """
    settings = _settings(mask, shards, scale, softcap, head_chunks, saves, operator, v_dim, lse, layer)
    results = object_of(handle).forward(tuple(tensors), sinks, settings)
    # keeps the objects alive until backward, since a compiled graph only stores handles; attached to the lse tensor
    results[1].untyped_storage().settings = settings
    return results


@attention_op.register_fake
def _(
    tensors: Sequence[Tensor], sinks: Tensor | None, handle: int, mask: int, shards: int, scale: float,
    softcap: float, head_chunks: int, saves: int, operator: str, v_dim: int, lse: bool, layer: int | None,
    sizes: Sequence[int],
    agreement: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    in_one_message, ulysses_size, ulysses_rank, *tokens = sizes
    (q, keys, *_), names = tensors, OPERATORS[operator].operands
    heads = Heads.of(q.shape[2], keys.shape[2], UlyssesGroup(ulysses_size, ulysses_rank), head_chunks)
    batch, dim, results = q.shape[0], q.shape[3], [q.new_empty(q.shape)]
    kv_dims = sum(x.shape[3] for x in tensors[1 : len(names)])
    widths = [[span.stop - span.start for span in heads.inner(head_chunk)] for head_chunk in range(head_chunks)]
    results += [q.new_empty(batch, tokens[0], width, dtype=sum_dtype(q.dtype)) for width, _ in widths]
    for q_width, kv_width in widths if saves else ():
        messages = [tokens[0] * q_width * dim, tokens[1] * kv_width * kv_dims]
        results += [q.new_empty(batch * n) for n in ([sum(messages)] if in_one_message else messages)]
    if saves == SavedForBackward.QKV_AND_OUT:
        results += [q.new_empty(batch, tokens[0], width, dim) for width, _ in widths]
    results += [q.new_empty(q.shape[:-1], dtype=sum_dtype(q.dtype))] * lse
    return results + [keys.new_empty(keys.shape[2:])] * OPERATORS[operator].has_common(q.dtype)


def _save(ctx: Context, inputs: tuple, output: Sequence[Tensor]) -> None:
    tensors, sinks, *ctx.numbers, lse, _, _, _ = inputs
    *_, head_chunks, saves, operator, v_dim = ctx.numbers
    what = Scores(1.0), head_chunks, SavedForBackward(saves), lse, OPERATORS[operator], v_dim
    ctx.alive, ctx.shapes = objects_of(*ctx.numbers[:3]), [size for x in tensors for size in x.shape]
    eager.save(ctx, tensors, sinks, output, CallSettings(FULL, None, *what))  # FULL, since the mask is not read


def _gradients(ctx: Context, grads: Sequence[Tensor | None]) -> tuple:
    gradients = eager.gradients(ctx, grads[0], lambda *args: attention_backward_op(*args, ctx.shapes, *ctx.numbers))
    return *gradients, *[None] * 13


attention_op.register_autograd(_gradients, setup_context=_save)


@torch.library.custom_op("ds_seqpar::attention_backward", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def attention_backward_op(
    do: Tensor, sinks: Tensor | None, common: Tensor | None, saved: Sequence[Tensor], shapes: Sequence[int],
    handle: int, mask: int, shards: int, scale: float, softcap: float, head_chunks: int, saves: int, operator: str,
    v_dim: int,
) -> list[Tensor]:  # fmt: skip
    """Compute `attention.backward`. `shapes` is a flat list of the sizes of all tensors."""
    settings = _settings(mask, shards, scale, softcap, head_chunks, saves, operator, v_dim, lse=False)
    shapes_of_all = settings.operator.shapes_of(shapes)
    return eager.backward(do, sinks, common, saved, shapes_of_all, object_of(handle), settings)


@attention_backward_op.register_fake
def _(
    do: Tensor, sinks: Tensor | None, common: Tensor | None, saved: Sequence[Tensor], shapes: Sequence[int],
    handle: int, mask: int, shards: int, scale: float, softcap: float, head_chunks: int, saves: int, operator: str,
    v_dim: int,
) -> list[Tensor]:  # fmt: skip
    grads = [do.new_empty(shape) for shape in OPERATORS[operator].shapes_of(shapes)]
    return grads if sinks is None else [*grads, sinks.new_empty(sinks.shape)]
