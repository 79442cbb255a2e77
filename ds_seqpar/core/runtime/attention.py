"""Attention over a sequence shared by many ranks, with autograd.

`custom_ops` has the same attention as one op, for compilers and dispatch modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...base.errors import InputError
from ...memory import checkpoints
from ..compiler.program.ulysses import SavedForBackward
from .admit import AdmittedCall
from .buffers import Tensors
from .call import Saved
from .dense import has_common, offsets
from .runtime import CallSettings, Runtime

Context: TypeAlias = Any  # autograd's ctx, whose type in torch has none of the attributes that are set on it


def attention(call: AdmittedCall) -> tuple[Tensor, Tensor | None]:
    """Compute attention over the whole sequence for this rank's tokens of q. Differentiable, once.

    Returns:
        (out, lse). out is (B, s, Hq, Dv); lse is (B, s, Hq), or None where the call does not ask for it.
    """
    forward = call.runtime.forward
    return returned(call, Attention.apply(*call.tensors, call.sinks, call.runtime, call.settings, forward))


def returned(call: AdmittedCall, results: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the (out, lse) of `attention` from the results of `Runtime.forward`."""
    out, *rest = results
    q, out = call.tensors[0], out if call.v_dim == out.shape[-1] else out[..., : call.v_dim]
    common = rest.pop() if has_common(q.dtype) else None
    if not call.return_lse:
        return out, None
    lse = rest[-1] if call.settings.lse or len(rest) == 1 else torch.cat(rest, dim=2)
    return out, lse if common is None else lse + offsets(q.detach(), common, call.settings.scores.scale)


def backward(
    do: Tensor, sinks: Tensor | None, common: Tensor | None, saved: Sequence[Tensor], kv_heads: int, runtime: Runtime,
    settings: CallSettings,
) -> list[Tensor]:  # fmt: skip
    """Compute backward from what `save` saved. Returns [dq, dk, dv], and with sinks their gradient."""
    local, inner, head_chunks = {"do": do}, list(saved), settings.head_chunks
    for field in ("v", "k", "q") if not settings.saves.qkv else ("v",) if settings.latent else ():
        local[field] = inner.pop()
    if not settings.saves.out:
        local["out"] = inner.pop()
    lses, inner = inner[:head_chunks], inner[head_chunks:]
    outs = inner[len(inner) - head_chunks :] if settings.saves.out else []
    saved_by_forward = Saved(lses, inner[: len(inner) - len(outs)], outs)
    return runtime.backward(local, kv_heads, sinks, saved_by_forward, settings, common)


def save(
    ctx: Context, local: Tensors, sinks: Tensor | None, results: Sequence[Tensor], saves: SavedForBackward, lse: bool,
    latent: int,
) -> None:  # fmt: skip
    """Save for backward: sinks, the keys' common part, each head chunk's lse, the inner tensors that forward returned,
    and where backward needs them the local out and q, k and v.

    Args:
        local: q, k and v.
        results: The results of forward.
    """
    ctx.set_materialize_grads(False)
    common = results[-1] if has_common(local[0].dtype) else None
    out, *inner = results[: len(results) - (common is not None) - lse]
    matrix = local[2:] if latent else ()  # which is in no exchange
    saved = (*inner, *(() if saves.out else (out,)), *(matrix if saves.qkv else local))
    ctx.out = local[0].shape, local[0].dtype, local[0].device
    ctx.save_for_backward(sinks, common, *saved)


def gradients(ctx: Context, do: Tensor | None, compute: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor | None]:
    """Return the gradients of q, k, v and sinks. `compute` is called with do and what `save` saved."""
    if do is None:  # a function after attention has no gradient on this rank; on another it may have one
        do = torch.zeros(ctx.out[0], dtype=ctx.out[1], device=ctx.out[2])
    sinks, common, *saved = ctx.saved_tensors
    with torch.no_grad():
        grads = compute(do, sinks, common, saved)
    if torch.is_grad_enabled():
        # with create_graph=True the gradients become a part of the inputs' graph, through the saved tensors: otherwise
        # a second derivative would silently be zero
        grads = _WithoutDerivative.apply(len(saved), *saved, *grads)
    return grads if len(grads) == 4 else [*grads, None]


class Attention(torch.autograd.Function):
    """Attention without an op. The machinery of an op takes as long as a kernel does for few tokens. `compute` is
    `Runtime.forward`, or the op in its place.

    In a checkpointed function the second run replays the results of the first one. The replayed results may have delta
    (B, s, Hq) in place of out, since backward needs no more of out; then zeros are returned as out.
    """

    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, runtime: Runtime, settings: CallSettings,
        compute: Callable[..., list[Tensor]],
    ) -> Tensors:  # fmt: skip
        results = checkpoints.replayed()
        if results is None:
            results = tuple(compute(q, k, v, sinks, settings))
            checkpoints.save(results)
        else:
            runtime.calls.follow(runtime.call_name, sends=False)
        ctx.runtime, ctx.settings, ctx.kv_heads = runtime, settings, k.shape[2]
        save(ctx, (q, k, v), sinks, results, settings.saves, settings.lse, settings.latent)
        # the lse stays differentiable: `gradients` finds the inputs through it
        ctx.mark_non_differentiable(*results[2:])
        return results if results[0].dim() == q.dim() else (q.new_zeros(()).expand(q.shape), *results[1:])

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple:
        def compute(do: Tensor, sinks: Tensor | None, common: Tensor | None, saved: Sequence[Tensor]) -> list[Tensor]:
            return backward(do, sinks, common, saved, ctx.kv_heads, ctx.runtime, ctx.settings)

        return *gradients(ctx, grads[0], compute), None, None, None


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
