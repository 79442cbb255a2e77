"""Attention over a sequence shared by many ranks, with autograd.

`custom_ops` provides the same attention as a single op for compilers and dispatch modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...base.errors import InputError
from . import replay
from .admit import AdmittedCall
from .buffers import Tensors
from .call import AttentionResults, CallSettings, Saved
from .dense import is_delta, offsets
from .runtime import Runtime
from .seams import ATTENTION, GuardedCall

Context: TypeAlias = Any  # autograd's ctx; torch's type for ctx lacks the attributes set here


def attention(call: AdmittedCall) -> tuple[Tensor, Tensor | None]:
    """Compute attention over the whole sequence for this rank's tokens of q. Differentiable once.

    Returns:
        (out, lse). out is (B, s, Hq, Dv). lse is (B, s, Hq), or None if the call does not request the lse.
    """
    forward = call.runtime.forward
    return returned(call, Attention.apply(call.runtime, call.settings, forward, call.sinks, *call.tensors))


def returned(call: AdmittedCall, results: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the (out, lse) that `attention` returns, given the results of `Runtime.forward`."""
    settings, q = call.settings, call.tensors[0]
    found = AttentionResults.of(results, q.dtype, settings)
    out = found.out if settings.v_dim == found.out.shape[-1] else found.out[..., : settings.v_dim]
    if not call.return_lse:
        return out, None
    lse, lses = found.lse, found.saved.lses
    if lse is None:
        lse = lses[0] if len(lses) == 1 else torch.cat(lses, dim=2)
    return out, lse if found.common is None else lse + offsets(q.detach(), found.common, settings.scores.scale)


def backward(
    do: Tensor, sinks: Tensor | None, common: Tensor | None, saved: Sequence[Tensor],
    shapes: Sequence[Sequence[int]], runtime: Runtime, settings: CallSettings,
) -> list[Tensor]:  # fmt: skip
    """Compute the backward pass from the tensors that `save` saved.

    Returns the gradients of the operator's tensors, and of the sinks if there are any. `shapes` contains the shapes of
    the operator's tensors.
    """
    operator, saves, inner = settings.operator, settings.saves, list(saved)
    local = {"do": do}
    for name in reversed(operator.parameters if saves.qkv else operator.inputs):
        local[name] = inner.pop()
    if not saves.out:
        local["out"] = inner.pop()
    return runtime.backward(local, shapes, sinks, Saved.of(inner, settings), settings, common)


def save(
    ctx: Context, tensors: Tensors, sinks: Tensor | None, results: Sequence[Tensor], settings: CallSettings
) -> None:
    """Save tensors for the backward pass.

    The saved tensors are the sinks, the keys' common part, each head chunk's lse, and the inner tensors that the
    forward pass returned. The local `out` and the operator's tensors are also saved if the backward pass needs them.

    Args:
        tensors: Tensors of the operator.
        results: Results of the forward pass.
    """
    ctx.set_materialize_grads(False)
    q, saves, found = tensors[0], settings.saves, AttentionResults.of(results, tensors[0].dtype, settings)
    inner = (x for of_head_chunks in found.saved for x in of_head_chunks)
    given = tensors[len(settings.operator.operands) :] if saves.qkv else tensors  # parameters are never exchanged
    ctx.out = q.shape, q.dtype, q.device
    ctx.save_for_backward(sinks, found.common, *inner, *(() if saves.out else (found.out,)), *given)


def gradients(
    ctx: Context, do: Tensor | None, compute: Callable[..., Sequence[Tensor]]
) -> tuple[Sequence[Tensor], Tensor | None]:
    """Return the gradients of the operator's tensors and of the sinks.

    `compute` receives `do` and the tensors that `save` saved.
    """
    if do is None:  # out has no gradient on this rank, but may have one on another rank
        do = torch.zeros(ctx.out[0], dtype=ctx.out[1], device=ctx.out[2])
    sinks, common, *saved = ctx.saved_tensors
    with torch.no_grad():
        grads = compute(do, sinks, common, saved)
    if torch.is_grad_enabled():
        # with create_graph=True, connect the gradients to the inputs' graph through the saved tensors; otherwise a
        # second derivative would silently be zero
        grads = _WithoutDerivative.apply(len(saved), *saved, *grads)
    return (grads, None) if sinks is None else (grads[:-1], grads[-1])


class Attention(torch.autograd.Function):
    """The autograd function for attention, without a custom op. `compute` is `Runtime.forward` or the op that replaces
    `Runtime.forward`.

    For short sequences, the overhead of a custom op can take as long as a kernel.

    When a checkpointed function is recomputed, the results of its first run are replayed. The replayed results may
    contain delta (B, s, Hq) instead of `out`, since the backward pass needs only delta. If delta replaces `out`,
    `forward` returns zeros as `out`.
    """

    @staticmethod
    def forward(
        ctx: Context, runtime: Runtime, settings: CallSettings, compute: Callable[..., list[Tensor]],
        sinks: Tensor | None, *tensors: Tensor,
    ) -> Tensors:  # fmt: skip
        replayed = GuardedCall("forward", ATTENTION, settings.layer, sends=False)
        results = replay.current().once(
            lambda: compute(tensors, sinks, settings), lambda: runtime.guarded(replayed).close()
        )
        ctx.runtime, ctx.settings, ctx.shapes, q = runtime, settings, [x.shape for x in tensors], tensors[0]
        save(ctx, tensors, sinks, results, settings)
        # the lse stays differentiable, because `gradients` reaches the inputs through the lse
        ctx.mark_non_differentiable(*results[2:])
        return (q.new_zeros(()).expand(q.shape), *results[1:]) if is_delta(results[0]) else results

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple:
        def compute(do: Tensor, sinks: Tensor | None, common: Tensor | None, saved: Sequence[Tensor]) -> list[Tensor]:
            return backward(do, sinks, common, saved, ctx.shapes, ctx.runtime, ctx.settings)

        of_tensors, of_sinks = gradients(ctx, grads[0], compute)
        return None, None, None, of_sinks, *of_tensors


class _WithoutDerivative(torch.autograd.Function):
    """An identity function on gradients that raises an error if the gradients are differentiated.

    The first `saved` items of `tensors` are the tensors that the backward pass used, and the rest are the gradients.
    """

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
    """An identity function on an lse that raises InputError if a gradient reaches the lse. Without the error, the
    gradient would be lost silently.

    `forward` receives the lse and the corresponding attention output. A gradient is rejected only if the attention
    output requires a gradient.
    """

    @staticmethod
    def forward(ctx: Context, lse: Tensor, out: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return lse.view_as(lse)

    @staticmethod
    def backward(ctx: Context, grad: Tensor | None) -> tuple:
        if grad is None or not bool(grad.any()):  # a reentrant checkpoint passes zeros for unused outputs
            return None, None
        raise InputError(
            "the lse of sequence parallel attention has no gradient; got a loss that depends on it, use lse.detach()"
        )
