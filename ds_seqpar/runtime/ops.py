"""Attention over a sequence shared by many ranks, as custom ops with autograd.

All that communicates is a torch.library op, backward too: torch.compile takes them as they are, and checkpointing can
save the result of `ds_seqpar::attention` and recompute the rest (DistFlashAttn, section 3.3). What is no tensor or
number goes by its handle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..compiler.masks import Mask
from ..compiler.shards import Shards, UnevenShards, members_tokens
from ..errors import InputError
from ..handles import held, hold, of_handle
from . import sinks as sink
from . import ulysses
from .buffers import Tensors
from .exchange import Context, Place, gather_heads, scatter_heads
from .inputs import Asked, agree_on_inputs
from .kernels import Scores
from .runtime import Runtime, run
from .walk import Walk
from .work import rowsum, wide

CONFIGURED = -1  # in place of a handle: shards of the configured layout


def attention(
    runtime: Runtime, tensors: Tensors, mask: Mask, shards: UnevenShards | None, scores: Scores,
    sinks: Tensor | None = None, after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q (B, s, Hq, D), k and v (B, s, Hkv, D) of this rank's tokens, sinks (Hq,) -> out as q, differentiable, and the
    lse of the heads that this Ulysses member works on. after: what must have been computed before anything is sent."""
    handle, members = runtime.handle, runtime.config.ulysses
    handles = handle, mask.handle, handle_of_shards(shards)
    if members == 1:
        return attend(*tensors, sinks, *handles, *scores, after)
    (q, k, v), counts = tensors, counts_of(runtime, tensors, shards)
    heads, place = q.shape[2], place_of(runtime, k)
    if counts[0] == counts[1]:
        q, k, v = _inward([q, k, v], counts[0], place, handle, after)
    else:  # queries and keys are shared otherwise
        (q,) = _inward([q], counts[0], place, handle, after)
        k, v = _inward([k, v], counts[1], place, handle, after)
    if sinks is not None:
        sinks = sinks[ulysses.heads_of(heads, *place)[0]]
    out, lse = attend(q, k, v, sinks, *handles, *scores, None)
    return gather_heads(ulysses.join_out([out]), [heads], counts[0], place, handle, "out_heads")[0], lse


def _inward(tensors: list[Tensor], counts: list[int], place: Place, handle: int, after: Tensor | None) -> list[Tensor]:
    arrived = scatter_heads(tensors, counts, place, handle, "qkv", after)
    return ulysses.split_in(arrived, ulysses.own_heads(tensors, *place))


def place_of(runtime: Runtime, k: Tensor) -> Place:
    assert runtime.member is not None  # None is for virtual ranks
    return k.shape[2], runtime.config.ulysses, runtime.member


def handle_of_shards(shards: UnevenShards | None) -> int:
    """None: those of the configured layout."""
    return CONFIGURED if shards is None else shards.handle


def counts_of(runtime: Runtime, tensors: Tensors, shards: UnevenShards | None) -> list[list[int]]:
    """The tokens of every Ulysses member, of q and of k/v."""
    members = runtime.config.ulysses
    if shards is None:
        return [[tensors[0].shape[1]] * members] * 2
    return [members_tokens(shards, side, runtime.rank, members) for side in ("q", "kv")]


def gather_lse(runtime: Runtime, lse: Tensor, tensors: Tensors, shards: UnevenShards | None) -> Tensor:
    """The lse (B, s, Hq) of this rank's own tokens, from what `attention` returns for these q, k and v."""
    if runtime.config.ulysses == 1:
        return lse
    (q, k, _), joined = tensors, ulysses.join_out([lse.unsqueeze(-1)])
    counts, place = counts_of(runtime, tensors, shards)[0], place_of(runtime, k)
    return gather_heads(joined, [q.shape[2]], counts, place, runtime.handle, "lse_heads")[0].squeeze(-1)


@torch.library.custom_op("ds_seqpar::agree", mutates_args=())
def agree_on(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    mask: int,
    shards: int,
    scale: float | None,
    backward: bool,
    lse: bool,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`inputs.agree_on_inputs` as a part of a compiled graph; the empty result is for what must come after it."""
    given = None if shards == CONFIGURED else of_handle(shards)
    asked = Asked(of_handle(mask), given, scale, backward, lse, softcap, sinks)
    agree_on_inputs(of_handle(handle), q, k, v, asked)
    return q.new_empty(0, dtype=torch.int64)  # nothing that a gradient flows through


@agree_on.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    mask: int,
    shards: int,
    scale: float | None,
    backward: bool,
    lse: bool,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    return q.new_empty(0, dtype=torch.int64)  # nothing that a gradient flows through


def _shards(runtime: Runtime, shards: int, q: Tensor) -> Shards:
    return runtime.shards(q.shape[1]) if shards == CONFIGURED else of_handle(shards)


def _finish(walk: Walk, device: torch.device) -> Tensors:
    if not torch.is_autocast_enabled(device.type):
        return run(walk)
    with torch.autocast(device.type, enabled=False):  # dtypes are chosen already, and sums stay wide
        return run(walk)


@torch.library.custom_op("ds_seqpar::attention", mutates_args=())
def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: int, mask: int, shards: int,
    scale: float, softcap: float, after: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    runtime, scores = of_handle(handle), Scores(scale, softcap)
    hold(mask, *(() if shards == CONFIGURED else (shards,)))
    out, lse = _finish(runtime.forward(q, k, v, of_handle(mask), _shards(runtime, shards, q), scores), q.device)
    if sinks is not None:
        sink.merge_(out, lse, sinks)
    return out, lse


@attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: int, mask: int, shards: int,
    scale: float, softcap: float, after: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


def _save_attention(ctx: Context, inputs: tuple, output: tuple) -> None:
    q, k, v, sinks, *ctx.handles, scale, softcap, _ = inputs
    ctx.held, ctx.scores = held(*ctx.handles), (scale, softcap)
    ctx.save_for_backward(q, k, v, *output, sinks)


def _differentiate_attention(ctx: Context, do: Tensor, _: Tensor) -> tuple:
    q, k, v, out, lse, sinks = ctx.saved_tensors
    grads = attend_backward(do, q, k, v, out, lse, *ctx.handles, *ctx.scores)
    return *grads, None if sinks is None else sink.gradient(rowsum(do, out, lse.dtype), lse, sinks), *[None] * 6


attend.register_autograd(_differentiate_attention, setup_context=_save_attention)


@torch.library.custom_op("ds_seqpar::attention_backward", mutates_args=())
def attend_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    handle: int,
    mask: int,
    shards: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    runtime, scores = of_handle(handle), Scores(scale, softcap)
    walk = runtime.backward((do, q, k, v, out, lse), of_handle(mask), _shards(runtime, shards, q), scores)
    dq, dk, dv = _finish(walk, q.device)
    return dq, dk, dv


@attend_backward.register_fake
def _(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    handle: int,
    mask: int,
    shards: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _refuse_second_derivative(ctx: Context, *grads: Tensor) -> tuple:
    raise InputError(
        "sequence parallel attention has no second derivative; got a gradient of its gradient (create_graph=True), "
        "use torch's own attention where you need one"
    )


attend_backward.register_autograd(_refuse_second_derivative)


class Constant(torch.autograd.Function):
    """The identity; a gradient that reaches it is refused, where one that is lost would go unnoticed."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        raise InputError(
            "the lse of sequence parallel attention has no gradient; got a loss that depends on it, use lse.detach()"
        )
