"""Attention over a sequence shared by many ranks, as custom ops with autograd.

All that communicates is a torch.library op, backward too: torch.compile takes them as they are, and checkpointing can
save the result of `ds_seqpar::attention` and recompute the rest (DistFlashAttn, section 3.3). What is no tensor or
number goes by its handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import InputError
from ..handles import hold, of_handle
from ..planning.masks import Mask
from ..planning.shards import Shards, UnevenShards, members_tokens
from . import ulysses
from .buffers import Tensors
from .inputs import Asked, agree_on_inputs
from .runtime import Runtime, run
from .walk import Walk
from .work import wide

# what an exchange of heads is counted as -> its derivative
DERIVATIVE = {"qkv": "dqkv", "out_heads": "do_heads", "lse_heads": "dlse_heads"}
Context: TypeAlias = Any  # of a backward to come: torch's own type of it has none of the attributes that one gives it
Place: TypeAlias = Sequence[int]  # says who gets which heads: the heads of k, how many members there are, which this is
CONFIGURED = -1  # in place of a handle: shards of the configured layout


def attention(
    runtime: Runtime, tensors: Tensors, mask: Mask, shards: UnevenShards | None, scale: float,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q (B, s, Hq, D), k and v (B, s, Hkv, D) of this rank's tokens -> out as q, differentiable, and the lse of the
    heads that this Ulysses member works on. after: what must have been computed before anything is sent."""
    handle, members = runtime.handle, runtime.config.ulysses
    handles = handle, mask.handle, handle_of_shards(shards)
    if members == 1:
        return _attention(*tensors, *handles, scale, after)
    (q, k, v), counts = tensors, _counts(runtime, tensors, shards)
    heads, place = q.shape[2], _place(runtime, k)
    if counts[0] == counts[1]:
        q, k, v = _inward([q, k, v], counts[0], place, handle, after)
    else:  # queries and keys are shared otherwise
        (q,) = _inward([q], counts[0], place, handle, after)
        k, v = _inward([k, v], counts[1], place, handle, after)
    out, lse = _attention(q, k, v, *handles, scale, None)
    return _gather_heads(ulysses.join_out([out]), [heads], counts[0], place, handle, "out_heads")[0], lse


def _inward(tensors: list[Tensor], counts: list[int], place: Place, handle: int, after: Tensor | None) -> list[Tensor]:
    arrived = _scatter_heads(tensors, counts, place, handle, "qkv", after)
    return ulysses.split_in(arrived, ulysses.own_heads(tensors, *place))


def _place(runtime: Runtime, k: Tensor) -> Place:
    assert runtime.member is not None  # None is for virtual ranks
    return k.shape[2], runtime.config.ulysses, runtime.member


def handle_of_shards(shards: UnevenShards | None) -> int:
    """None: those of the configured layout."""
    return CONFIGURED if shards is None else shards.handle


def _counts(runtime: Runtime, tensors: Tensors, shards: UnevenShards | None) -> list[list[int]]:
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
    counts, place = _counts(runtime, tensors, shards)[0], _place(runtime, k)
    return _gather_heads(joined, [q.shape[2]], counts, place, runtime.handle, "lse_heads")[0].squeeze(-1)


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
) -> Tensor:
    """`inputs.agree_on_inputs` as a part of a compiled graph; the empty result is for what must come after it."""
    given = None if shards == CONFIGURED else of_handle(shards)
    agree_on_inputs(of_handle(handle), q, k, v, Asked(of_handle(mask), given, scale, backward, lse))
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
def _attention(
    q: Tensor, k: Tensor, v: Tensor, handle: int, mask: int, shards: int, scale: float, after: Tensor | None
) -> tuple[Tensor, Tensor]:
    runtime = of_handle(handle)
    hold(mask, *(() if shards == CONFIGURED else (shards,)))
    out, lse = _finish(runtime.forward(q, k, v, of_handle(mask), _shards(runtime, shards, q), scale), q.device)
    return out, lse


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, handle: int, mask: int, shards: int, scale: float, after: Tensor | None
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


def _held(*handles: int) -> list[object]:
    """What backward needs even where the caller has let go of it; a compiler has symbols for numbers that change."""
    return [of_handle(handle) for handle in handles if type(handle) is int and handle != CONFIGURED]


def _save_attention(ctx: Context, inputs: tuple, output: tuple) -> None:
    q, k, v, *ctx.handles, ctx.scale, _ = inputs
    ctx.held = _held(*ctx.handles)
    ctx.save_for_backward(q, k, v, *output)


def _differentiate_attention(ctx: Context, do: Tensor, _: Tensor) -> tuple:
    return *_attention_backward(do, *ctx.saved_tensors, *ctx.handles, ctx.scale), None, None, None, None, None


_attention.register_autograd(_differentiate_attention, setup_context=_save_attention)


@torch.library.custom_op("ds_seqpar::attention_backward", mutates_args=())
def _attention_backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    runtime = of_handle(handle)
    walk = runtime.backward((do, q, k, v, out, lse), of_handle(mask), _shards(runtime, shards, q), scale)
    dq, dk, dv = _finish(walk, q.device)
    return dq, dk, dv


@_attention_backward.register_fake
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
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _refuse_second_derivative(ctx: Context, *grads: Tensor) -> tuple:
    raise InputError(
        "sequence parallel attention has no second derivative; got a gradient of its gradient (create_graph=True), "
        "use torch's own attention where you need one"
    )


_attention_backward.register_autograd(_refuse_second_derivative)


@torch.library.custom_op("ds_seqpar::scatter_heads", mutates_args=())
def _scatter_heads(
    tensors: Sequence[Tensor], counts: Sequence[int], place: Place, handle: int, kind: str, after: Tensor | None
) -> Tensor:
    """All-to-all from all heads of some tokens, each (B, s, H, D), to some heads of all the inner rank's tokens,
    (T, B, h of all, D). counts: the tokens of every member."""
    (batch, _, _, dim), (kv_heads, members, member) = tensors[0].shape, place
    its = ulysses.deal(tuple(x.shape[2] for x in tensors), kv_heads, members)
    sizes = ulysses.sizes(its, counts, member, batch * dim)
    received = of_handle(handle).comm.exchange_heads(kind, ulysses.pack_in(tensors, its), sizes)
    return received.view(sum(counts), batch, its.widths[member], dim)


@_scatter_heads.register_fake
def _(
    tensors: Sequence[Tensor], counts: Sequence[int], place: Place, handle: int, kind: str, after: Tensor | None
) -> Tensor:
    heads = sum(ulysses.own_heads(tensors, *place))
    return tensors[0].new_empty(sum(counts), tensors[0].shape[0], heads, tensors[0].shape[3])


def _save_scatter(ctx: Context, inputs: tuple, output: Tensor) -> None:
    tensors, ctx.counts, ctx.place, ctx.handle, ctx.kind, _ = inputs
    ctx.held, ctx.heads = _held(ctx.handle), [x.shape[2] for x in tensors]


def _differentiate_scatter(ctx: Context, grad: Tensor) -> tuple:
    kind = DERIVATIVE.get(ctx.kind, ctx.kind)
    return _gather_heads(grad, ctx.heads, ctx.counts, ctx.place, ctx.handle, kind), None, None, None, None, None


_scatter_heads.register_autograd(_differentiate_scatter, setup_context=_save_scatter)


@torch.library.custom_op("ds_seqpar::gather_heads", mutates_args=())
def _gather_heads(
    joined: Tensor, heads: Sequence[int], counts: Sequence[int], place: Place, handle: int, kind: str
) -> list[Tensor]:
    """The way back, and the derivative: (T, B, h of all, D) -> each (B, s, H, D), H in `heads`."""
    (_, batch, _, dim), (kv_heads, members, member), joined = joined.shape, place, joined.contiguous()
    its = ulysses.deal(tuple(heads), kv_heads, members)
    incoming, outgoing = ulysses.sizes(its, counts, member, batch * dim)
    received = of_handle(handle).comm.exchange_heads(kind, joined, (outgoing, incoming))
    del joined  # where it is a copy it must not stand beside the results
    return ulysses.unpack_out(received, its, batch, counts[member], dim)


@_gather_heads.register_fake
def _(
    joined: Tensor, heads: Sequence[int], counts: Sequence[int], place: Place, handle: int, kind: str
) -> list[Tensor]:
    return [joined.new_empty(joined.shape[1], counts[place[2]], total, joined.shape[3]) for total in heads]


def _save_gather(ctx: Context, inputs: tuple, output: list[Tensor]) -> None:
    _, _, ctx.counts, ctx.place, ctx.handle, ctx.kind = inputs
    ctx.held = _held(ctx.handle)


def _differentiate_gather(ctx: Context, grads: list[Tensor]) -> tuple:
    kind = DERIVATIVE.get(ctx.kind, ctx.kind)
    return _scatter_heads(grads, ctx.counts, ctx.place, ctx.handle, kind, None), None, None, None, None, None


_gather_heads.register_autograd(_differentiate_gather, setup_context=_save_gather)


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
