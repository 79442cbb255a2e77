"""Ulysses' all-to-all as custom ops with autograd: each is the derivative of the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..handles import held, of_handle
from . import ulysses

# what an exchange of heads is counted as -> its derivative
DERIVATIVE = {"qkv": "dqkv", "out_heads": "do_heads", "lse_heads": "dlse_heads"}
Context: TypeAlias = Any  # of a backward to come: torch's own type of it has none of the attributes that one gives it
Place: TypeAlias = Sequence[int]  # says who gets which heads: the heads of k, how many members there are, which this is


@torch.library.custom_op("ds_seqpar::scatter_heads", mutates_args=())
def scatter_heads(
    tensors: Sequence[Tensor], counts: Sequence[int], place: Place, handle: int, kind: str, after: Tensor | None
) -> Tensor:
    """All-to-all from all heads of some tokens, each (B, s, H, D), to some heads of all the inner rank's tokens,
    (T, B, h of all, D). counts: the tokens of every member."""
    (batch, _, _, dim), (kv_heads, members, member) = tensors[0].shape, place
    its, runtime = ulysses.deal(tuple(x.shape[2] for x in tensors), kv_heads, members), of_handle(handle)
    sizes = ulysses.sizes(its, counts, member, batch * dim)
    with runtime.recorded("heads", f"scatter {kind}"):
        received = runtime.exchange_heads(kind, ulysses.pack_in(tensors, its), sizes)
    return received.view(sum(counts), batch, its.widths[member], dim)


@scatter_heads.register_fake
def _(
    tensors: Sequence[Tensor], counts: Sequence[int], place: Place, handle: int, kind: str, after: Tensor | None
) -> Tensor:
    heads = sum(ulysses.own_heads(tensors, *place))
    return tensors[0].new_empty(sum(counts), tensors[0].shape[0], heads, tensors[0].shape[3])


def _save_scatter(ctx: Context, inputs: tuple, output: Tensor) -> None:
    tensors, ctx.counts, ctx.place, ctx.handle, ctx.kind, _ = inputs
    ctx.held, ctx.heads = held(ctx.handle), [x.shape[2] for x in tensors]


def _differentiate_scatter(ctx: Context, grad: Tensor) -> tuple:
    kind = DERIVATIVE.get(ctx.kind, ctx.kind)
    return gather_heads(grad, ctx.heads, ctx.counts, ctx.place, ctx.handle, kind), None, None, None, None, None


scatter_heads.register_autograd(_differentiate_scatter, setup_context=_save_scatter)


@torch.library.custom_op("ds_seqpar::gather_heads", mutates_args=())
def gather_heads(
    joined: Tensor, heads: Sequence[int], counts: Sequence[int], place: Place, handle: int, kind: str
) -> list[Tensor]:
    """The way back, and the derivative: (T, B, h of all, D) -> each (B, s, H, D), H in `heads`."""
    (_, batch, _, dim), (kv_heads, members, member) = joined.shape, place
    its, runtime = ulysses.deal(tuple(heads), kv_heads, members), of_handle(handle)
    incoming, outgoing = ulysses.sizes(its, counts, member, batch * dim)
    with runtime.recorded("heads", f"gather {kind}"):
        joined = joined.contiguous()
        received = runtime.exchange_heads(kind, joined, (outgoing, incoming))
        del joined  # where it is a copy it must not stand beside the results
        return ulysses.unpack_out(received, its, batch, counts[member], dim)


@gather_heads.register_fake
def _(
    joined: Tensor, heads: Sequence[int], counts: Sequence[int], place: Place, handle: int, kind: str
) -> list[Tensor]:
    return [joined.new_empty(joined.shape[1], counts[place[2]], total, joined.shape[3]) for total in heads]


def _save_gather(ctx: Context, inputs: tuple, output: list[Tensor]) -> None:
    _, _, ctx.counts, ctx.place, ctx.handle, ctx.kind = inputs
    ctx.held = held(ctx.handle)


def _differentiate_gather(ctx: Context, grads: list[Tensor]) -> tuple:
    kind = DERIVATIVE.get(ctx.kind, ctx.kind)
    return scatter_heads(grads, ctx.counts, ctx.place, ctx.handle, kind, None), None, None, None, None, None


gather_heads.register_autograd(_differentiate_gather, setup_context=_save_gather)
