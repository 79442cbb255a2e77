"""Attention over a sequence shared by many ranks, with autograd: as one function, and as torch.library ops.

Where a compiler or a dispatch mode must see attention, it runs as one op, and so does its backward. torch.compile takes
these ops as they are. A selective checkpoint can save the result of `ds_seqpar::attention` and recompute the rest
(DistFlashAttn, section 3.3). Ops take only tensors and numbers, so other objects are passed to them by handle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..compiler.program.ulysses import Heads, SavedForBackward, UlyssesGroup
from ..compiler.sharding.handles import keep_alive, object_of, objects_of
from ..compiler.sharding.masks import Mask
from ..compiler.sharding.shards import Shards, UnevenShards, tokens_by_ulysses_rank
from ..errors import InputError
from . import checkpoints
from .buffers import Tensors, sum_dtype
from .call_io import Saved
from .input_checks import AttentionOptions, agree_on_inputs, can_be_op, of_one_head_dim
from .kernels import Scores
from .runtime import Runtime, run
from .walk import Walk
from .work import common_part, moments, offsets, takes_common_off

Context: TypeAlias = Any  # autograd's ctx, whose type in torch has none of the attributes that are set on it
ATTENTION = "attention"  # the name of a call in errors
CONFIGURED = -1  # in place of a handle: shards of the configured layout


class _Settings(NamedTuple):
    """All arguments of a call of attention but its tensors. head_chunks, saves and lse are those of
    `Runtime.forward`."""

    runtime: Runtime
    mask: Mask
    shards: UnevenShards | None  # None for the configured layout
    scores: Scores
    head_chunks: int
    saves: int
    lse: bool

    @classmethod
    def from_numbers(
        cls, handle: int, mask: int, shards: int, scale: float, softcap: float, head_chunks: int, saves: int, lse: bool
    ) -> _Settings:
        """Return the settings that `_as_numbers` gave as numbers, with lse."""
        scores = Scores(scale, softcap)
        return cls(object_of(handle), object_of(mask), _shards_of(shards), scores, head_chunks, saves, lse)

    def attended(self, tokens: int) -> tuple[Mask, Shards, Scores]:
        """Return (mask, shards, scores) for `tokens` local tokens of q."""
        if self.shards is not None:
            return self.mask, self.shards, self.scores
        return self.mask, self.runtime.shards(tokens * self.runtime.ulysses.size), self.scores

    def takes_common_off(self, dtype: torch.dtype) -> bool:
        """Return whether the keys' common part is subtracted."""
        return takes_common_off(dtype, self.scores.softcap, self.runtime.size, self.mask, self.shards)


def _as_numbers(
    runtime: Runtime, mask: Mask, shards: UnevenShards | None, scores: Scores, head_chunks: int, saves: int
) -> tuple:
    """Return the settings as the arguments of an op."""
    return runtime.handle, mask.handle, handle_of_shards(shards), *scores, head_chunks, saves


def handle_of_shards(shards: UnevenShards | None) -> int:
    """Return the handle of shards, where None is the configured layout."""
    return CONFIGURED if shards is None else shards.handle


def _shards_of(handle: int) -> UnevenShards | None:
    return None if handle == CONFIGURED else object_of(handle)


def agree(runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor | None:
    """Call `input_checks.agree_on_inputs`, unless a checkpoint replays the result.

    Returns:
        In a compiled graph, where the agreement is an op, the op's result: an op that takes it as an argument runs
        after the agreement. Otherwise None.
    """
    if torch.compiler.is_compiling() and can_be_op(runtime, q, k, v, options):
        mask, shards, *rest = options
        return agreement_op(q, k, v, runtime.handle, mask.handle, handle_of_shards(shards), *rest)
    if not checkpoints.is_replayed():
        agree_on_inputs(runtime, q, k, v, options)
    return None


@torch.library.custom_op("ds_seqpar::agree", mutates_args=())
def agreement_op(
    q: Tensor, k: Tensor, v: Tensor, handle: int, mask: int, shards: int, scale: float | None,
    backward: bool, lse: bool, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Call `input_checks.agree_on_inputs` in a compiled graph. Returns an empty tensor, an argument of ops that must
    run afterwards."""
    options = AttentionOptions(object_of(mask), _shards_of(shards), scale, backward, lse, softcap, sinks)
    agree_on_inputs(object_of(handle), q, k, v, options)
    return _empty(q)


@agreement_op.register_fake
def _empty(q: Tensor, *rest: object) -> Tensor:
    return q.new_empty(0, dtype=torch.int64)  # integers, through which no gradient flows


# ---- forward


def attention(
    runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, agreed: bool = False, parts: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Compute attention over the whole sequence for this rank's tokens of q. Differentiable, once.

    Args:
        runtime: The runtime of this rank.
        q: (B, s, Hq, D), this rank's tokens.
        k: (B, t, Hkv, D), this rank's tokens.
        v: (B, t, Hkv, Dv), this rank's tokens.
        options: Mask, shards, scale, softcap, sinks, and whether to return the lse.
        agreed: Whether the ranks have agreed on the inputs already.
        parts: If above 1, the tensors hold the heads of one of so many head chunks, and the caller calls this for each
            head chunk.

    Returns:
        (out, lse). out is (B, s, Hq, Dv); lse is (B, s, Hq), or None where the options do not ask for it.
    """
    dependency = None if agreed else agree(runtime, q, k, v, options)
    scale = q.shape[-1] ** -0.5 if options.scale is None else float(options.scale)
    scores = Scores(scale, float(options.softcap or 0.0))
    settings = options.mask, options.shards, scores, options.sinks, dependency, options.lse, parts
    if q.shape[-1] == v.shape[-1]:
        return _attention(runtime, (q, k, v), *settings)
    out, lse = _attention(runtime, tuple(of_one_head_dim(q, k, v)), *settings)
    return out[..., : v.shape[-1]], lse


def _attention(
    runtime: Runtime, tensors: Tensors, mask: Mask, shards: UnevenShards | None, scores: Scores,
    sinks: Tensor | None, dependency: Tensor | None, return_lse: bool, parts: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute `attention` of q, k and v of one head_dim.

    Whether forward saves the inner q, k and v for backward, or backward exchanges them again, is the setting
    `save_qkv_after_all_to_all`.

    Args:
        dependency: A tensor that must have been computed before anything is sent.
    """
    checkpointed = not torch.compiler.is_compiling() and checkpoints.is_checkpointed()
    q, k, _ = tensors
    head_chunks = head_chunks_of(runtime, q, k, mask, shards) if parts == 1 else 1
    saves = int(runtime.config.kept(max(head_chunks, parts), checkpointed, checkpointed and checkpoints.is_saved()))
    return_local_lse = return_lse and runtime.ulysses.size > 1
    settings = _Settings(runtime, mask, shards, scores, head_chunks, saves, return_local_lse)
    if _runs_as_op() and not checkpointed:
        numbers = _as_numbers(runtime, mask, shards, scores, head_chunks, saves)
        out, *rest = attention_op(
            *tensors, sinks, *numbers, return_local_lse, _sizes(runtime, tensors, shards), dependency
        )
    else:
        out, *rest = Attention.apply(*tensors, sinks, settings)
    common = rest.pop() if has_common(q) else None
    if not return_lse:
        return out, None
    lse = rest[-1] if return_local_lse else torch.cat(rest, dim=2) if head_chunks > 1 else rest[0]
    return out, lse if common is None else lse + offsets(q.detach(), common, scores.scale)


def _runs_as_op() -> bool:
    """Return whether attention must run as one op: for a compiler, or for a dispatch mode such as that of a selective
    checkpoint."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def head_chunks_of(runtime: Runtime, q: Tensor, k: Tensor, mask: Mask, shards: UnevenShards | None) -> int:
    """Return the number of head chunks. q and k have this rank's tokens; only their shape and dtype are read."""
    count = runtime.config.head_chunks
    if count != "auto":
        return count
    if torch.compiler.is_compiling():
        return 1  # an estimate of memory needs numbers, and the compiler may have symbols
    inner_shards = runtime.shards(q.shape[1] * runtime.ulysses.size) if shards is None else shards
    return runtime.fewest_head_chunks(q, k, mask, inner_shards)


def _sizes(runtime: Runtime, tensors: Tensors, shards: UnevenShards | None) -> list[int]:
    """Return the numbers from which the op's fake computes the shapes of its results: [ulysses_size, ulysses_rank, the
    CP rank's tokens of q, its tokens of k/v, 1 where q, k and v are sent in one message else 0]."""
    (q, k, _), ulysses_size = tensors, runtime.ulysses.size
    if shards is None:
        return [*runtime.ulysses, q.shape[1] * ulysses_size, k.shape[1] * ulysses_size, 1]
    counts = [tokens_by_ulysses_rank(shards, side, runtime.rank, ulysses_size) for side in ("q", "kv")]
    return [*runtime.ulysses, sum(counts[0]), sum(counts[1]), int(counts[0] == counts[1])]


def has_common(q: Tensor) -> bool:
    """Return whether the last of attention's results is the common part that was subtracted from all keys, 0 where
    nothing was subtracted. It depends on the dtype only, since a compiler must know it without the mask."""
    return q.dtype == torch.float32


def _forward(settings: _Settings, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> list[Tensor]:
    attended, runtime, common = settings.attended(q.shape[1]), settings.runtime, None
    runtime.calls.follow(ATTENTION, q.shape)
    if settings.takes_common_off(q.dtype):
        common = common_part(runtime.comm.parts_of_all(moments(k)), k.shape[2])
    walk = runtime.forward(q, k, v, sinks, *attended, settings.head_chunks, settings.saves, settings.lse, common)
    results = _run_without_autocast(walk, q.device)
    return [*results, k.new_zeros(k.shape[2:]) if common is None else common] if has_common(q) else results


def _run_without_autocast(walk: Walk, device: torch.device) -> list[Tensor]:
    if not torch.is_autocast_enabled(device.type):
        return run(walk)
    with torch.autocast(device.type, enabled=False):  # dtypes are chosen already, and sums stay in fp32
        return run(walk)


@torch.library.custom_op("ds_seqpar::attention", mutates_args=())
def attention_op(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: int, mask: int, shards: int, scale: float,
    softcap: float, head_chunks: int, saves: int, lse: bool, sizes: Sequence[int], dependency: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Compute attention's forward.

    Args:
        sizes: The result of `_sizes`. It is an argument because a compiler's cache is shared by several ranks.
        dependency: As in `_attention`.

    Returns:
        The results of `ForwardCall.results`: out, each head chunk's inner lse, the inner tensors that `saves` names,
        and with `lse` the lse of local rows. In fp32 also the keys' common part (see `runtime.work`), which is in no
        lse.
    """
    keep_alive(mask, *(() if shards == CONFIGURED else (shards,)))
    return _forward(
        _Settings.from_numbers(handle, mask, shards, scale, softcap, head_chunks, saves, lse), q, k, v, sinks
    )


@attention_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: int, mask: int, shards: int, scale: float,
    softcap: float, head_chunks: int, saves: int, lse: bool, sizes: Sequence[int], dependency: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    ulysses_size, ulysses_rank, *tokens, in_one_message = sizes
    heads = Heads.of(q.shape[2], k.shape[2], UlyssesGroup(ulysses_size, ulysses_rank), head_chunks)
    batch, dim, results = q.shape[0], q.shape[3], [q.new_empty(q.shape)]
    widths = [[span.stop - span.start for span in heads.inner(head_chunk)] for head_chunk in range(head_chunks)]
    results += [q.new_empty(batch, tokens[0], width, dtype=sum_dtype(q.dtype)) for width, _ in widths]
    for q_width, kv_width in widths if saves else ():
        if in_one_message:
            results.append(q.new_empty(tokens[0], batch, q_width + 2 * kv_width, dim))
        else:
            results += [q.new_empty(n, batch, h, dim) for n, h in zip(tokens, (q_width, 2 * kv_width), strict=True)]
    if saves == SavedForBackward.QKV_AND_OUT:
        results += [q.new_empty(batch, tokens[0], width, dim) for width, _ in widths]
    results += [q.new_empty(q.shape[:-1], dtype=sum_dtype(q.dtype))] * lse
    return results + [k.new_empty(k.shape[2:])] * has_common(q)


# ---- backward


def _backward(
    settings: _Settings, do: Tensor, sinks: Tensor | None, common: Tensor | None, saved: Sequence[Tensor], kv_heads: int
) -> list[Tensor]:
    """Return [dq, dk, dv], and with sinks their gradient. `saved` is in the order of `_save`, without sinks and
    common."""
    settings.runtime.calls.enter()
    local, inner, head_chunks = {"do": do}, list(saved), settings.head_chunks
    if settings.saves == SavedForBackward.NOTHING:
        local |= zip(("v", "k", "q"), (inner.pop(), inner.pop(), inner.pop()), strict=True)
    if settings.saves < SavedForBackward.QKV_AND_OUT:
        local["out"] = inner.pop()
    lses, inner = inner[:head_chunks], inner[head_chunks:]
    outs = inner[len(inner) - head_chunks :] if settings.saves == SavedForBackward.QKV_AND_OUT else []
    saved_by_forward = Saved(lses, inner[: len(inner) - len(outs)], outs)
    common = common if settings.takes_common_off(do.dtype) else None
    walk = settings.runtime.backward(local, kv_heads, sinks, saved_by_forward, *settings.attended(do.shape[1]), common)
    return _run_without_autocast(walk, do.device)


def _save(ctx: Context, local: Tensors, sinks: Tensor | None, results: Sequence[Tensor], saves: int, lse: bool) -> None:
    """Save for backward: sinks, the keys' common part, each head chunk's lse, the inner tensors that forward returned,
    and where backward needs them the local out and q, k and v.

    Args:
        local: q, k and v.
        results: The results of forward.
    """
    ctx.set_materialize_grads(False)
    common = results[-1] if has_common(local[0]) else None
    out, *inner = results[: len(results) - (common is not None) - lse]
    saved = (*inner, *(() if saves == SavedForBackward.QKV_AND_OUT else (out,)), *(() if saves else local))
    ctx.out = local[0].shape, local[0].dtype, local[0].device
    ctx.save_for_backward(sinks, common, *saved)


def _gradients(ctx: Context, do: Tensor | None, backward: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor | None]:
    """Return the gradients of q, k, v and sinks. `backward` is called with do and what `_save` saved."""
    if do is None:  # a function after attention has no gradient on this rank; on another it may have one
        do = torch.zeros(ctx.out[0], dtype=ctx.out[1], device=ctx.out[2])
    sinks, common, *saved = ctx.saved_tensors
    with torch.no_grad():
        grads = backward(do, sinks, common, saved)
    grads = _without_derivative(grads, saved)
    return grads if len(grads) == 4 else [*grads, None]


def _save_of_op(ctx: Context, inputs: tuple, output: Sequence[Tensor]) -> None:
    q, k, v, sinks, *ctx.numbers, lse, _, _ = inputs
    ctx.alive, ctx.k_shape = objects_of(*ctx.numbers[:3]), list(k.shape)
    _save(ctx, (q, k, v), sinks, output, ctx.numbers[-1], lse)


def _gradients_of_op(ctx: Context, grads: Sequence[Tensor | None]) -> tuple:
    gradients = _gradients(ctx, grads[0], lambda *args: attention_backward_op(*args, ctx.k_shape, *ctx.numbers))
    return *gradients, *[None] * 10


attention_op.register_autograd(_gradients_of_op, setup_context=_save_of_op)


class Attention(torch.autograd.Function):
    """Attention without an op. The machinery of an op takes as long as a kernel does for few tokens.

    In a checkpointed function the second run replays the results of the first one. The replayed results may have delta
    (B, s, Hq) in place of out, since backward needs no more of out; then zeros are returned as out.
    """

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, settings: _Settings) -> Tensors:
        results = checkpoints.replayed()
        if results is None:
            results = tuple(Attention.results(settings, q, k, v, sinks))
            checkpoints.save(results)
        else:
            settings.runtime.calls.follow(ATTENTION, q.shape)
        ctx.settings, ctx.k_shape = settings, k.shape
        _save(ctx, (q, k, v), sinks, results, settings.saves, settings.lse)
        # the lse stays differentiable: `_without_derivative` finds the inputs through it
        ctx.mark_non_differentiable(*results[2:])
        return results if results[0].dim() == q.dim() else (q.new_zeros(()).expand(q.shape), *results[1:])

    @staticmethod
    def results(settings: _Settings, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> list[Tensor]:
        """Return forward's results, from the op where attention must run as one."""
        if not _runs_as_op():
            return _forward(settings, q, k, v, sinks)
        numbers, sizes = _as_numbers(*settings[:-1]), _sizes(settings.runtime, (q, k, v), settings.shards)
        return attention_op(q, k, v, sinks, *numbers, settings.lse, sizes, None)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple:
        def backward(do: Tensor, sinks: Tensor | None, common: Tensor | None, saved: Sequence[Tensor]) -> list[Tensor]:
            return _backward(ctx.settings, do, sinks, common, saved, ctx.k_shape[2])

        return *_gradients(ctx, grads[0], backward), None


@torch.library.custom_op("ds_seqpar::attention_backward", mutates_args=())
def attention_backward_op(
    do: Tensor, sinks: Tensor | None, common: Tensor | None, saved: Sequence[Tensor], k_shape: Sequence[int],
    handle: int, mask: int, shards: int, scale: float, softcap: float, head_chunks: int, saves: int,
) -> list[Tensor]:  # fmt: skip
    """Compute attention's backward. Returns [dq, dk, dv], and with sinks their gradient. `saved` is in the order of
    `_save`."""
    settings = _Settings.from_numbers(handle, mask, shards, scale, softcap, head_chunks, saves, lse=False)
    return _backward(settings, do, sinks, common, saved, k_shape[2])


@attention_backward_op.register_fake
def _(
    do: Tensor, sinks: Tensor | None, common: Tensor | None, saved: Sequence[Tensor], k_shape: Sequence[int],
    *settings: object,
) -> list[Tensor]:  # fmt: skip
    grads = [do.new_empty(do.shape), do.new_empty(k_shape), do.new_empty(k_shape)]
    return grads if sinks is None else [*grads, sinks.new_empty(sinks.shape)]


class _WithoutDerivative(torch.autograd.Function):
    """The identity on gradients, which raises where they are differentiated. Of `tensors` the first `saved` are those
    that backward used, the others are the gradients."""

    @staticmethod
    def forward(ctx: Context, saved: int, *tensors: Tensor) -> Tensors:
        return tuple(grad.view_as(grad) for grad in tensors[saved:])

    @staticmethod
    def backward(ctx: Context, *grads: Any) -> tuple:
        raise InputError(
            "sequence parallel attention has no second derivative; got a gradient of its gradient (create_graph=True), "
            "use torch's own attention where you need one"
        )


def _without_derivative(grads: Sequence[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the gradients. With create_graph=True they become a part of the inputs' graph, through the saved tensors;
    otherwise a second derivative would silently be zero."""
    return _WithoutDerivative.apply(len(saved), *saved, *grads) if torch.is_grad_enabled() else grads


class LseWithoutGradient(torch.autograd.Function):
    """The identity on an lse, which raises InputError for a gradient that reaches it: it would be lost unnoticed.

    `forward` takes the lse and the attention output that belongs to it. A gradient is refused only if that output
    requires one.
    """

    @staticmethod
    def forward(ctx: Context, lse: Tensor, out: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return lse.view_as(lse)

    @staticmethod
    def backward(ctx: Context, grad: Tensor | None) -> tuple:
        if grad is None or not bool(grad.any()):  # a reentrant checkpoint gives zeros for what no loss depends on
            return None, None
        raise InputError(
            "the lse of sequence parallel attention has no gradient; got a loss that depends on it, use lse.detach()"
        )
