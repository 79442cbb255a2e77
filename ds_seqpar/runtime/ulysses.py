"""DeepSpeed Ulysses: an all-to-all that trades sequence for heads around any inner attention (Jacobs et al., 2023).

Pure functions around that all-to-all, which belongs to comm (or to the virtual runner). In what travels, tokens come
first and a token's heads, of q, k and v, stand side by side: what the members sent, one after another, then is the
inner rank's (tokens, batch, heads, D) as it stands, and q, k and v are views of it. So each tensor is copied once on
its way out and once by the transfer; outward the same in reverse. Who gets which heads is `heads_of`; neighbouring
members that get as many as one another are copied for together, and where U divides the heads these are all. A kv head
that several members need (U > Hkv) goes to exactly those; its gradients are summed. `counts`: the tokens of every
member, in their order.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..compiler.heads import heads_of


def _held(heads: int, kv_heads: int, members: int, member: int) -> slice:
    """The heads that a member works on, of one tensor of `heads` in all: of k or v where these are kv_heads, or else of
    q. (Where q has as many as k it is dealt as k is.)"""
    q, kv = heads_of(heads, kv_heads, members, member)
    return kv if heads == kv_heads else q


def own_heads(tensors: Sequence[Tensor], kv_heads: int, members: int, member: int) -> list[int]:
    """Each (B, s, H, D) of q's kind or k's -> how many of its heads this member works on. kv_heads: of k."""
    held = [_held(x.shape[2], kv_heads, members, member) for x in tensors]
    return [mine.stop - mine.start for mine in held]


class Run(NamedTuple):
    """Neighbouring members with equal shares. Of each tensor: the heads of one member, those of all together, and how
    many members work on one and the same head."""

    members: int
    heads: tuple[int, ...]
    spans: tuple[slice, ...]
    sharing: tuple[int, ...]


class Deal(NamedTuple):
    """How tensors of `totals` heads go to members. widths: the heads of all tensors that each member has; split: of
    each tensor, whether the members of one of its heads are in several runs."""

    totals: tuple[int, ...]
    runs: tuple[Run, ...]
    widths: tuple[int, ...]
    split: tuple[bool, ...]


@functools.lru_cache(maxsize=256)
def deal(totals: tuple[int, ...], kv_heads: int, members: int) -> Deal:
    """totals: heads of tensors that travel together."""
    shares = [tuple(_held(total, kv_heads, members, member) for total in totals) for member in range(members)]
    heads = [tuple(x.stop - x.start for x in share) for share in shares]

    def alike(member: int) -> tuple:
        sharers = [sum(other[i] == mine for other in shares) for i, mine in enumerate(shares[member])]
        return heads[member], sharers

    runs = [_run([shares[member] for member in mine]) for _, mine in itertools.groupby(range(members), alike)]
    split = (
        any(after.start < before.stop for before, after in itertools.pairwise(spans))
        for spans in zip(*(run.spans for run in runs), strict=True)
    )
    return Deal(totals, tuple(runs), tuple(map(sum, heads)), tuple(split))


def _run(shares: list[tuple[slice, ...]]) -> Run:
    """shares: of each member, which heads of each tensor."""
    heads = tuple(mine.stop - mine.start for mine in shares[0])
    spans = tuple(slice(first.start, last.stop) for first, last in zip(shares[0], shares[-1], strict=True))
    sharing = (len(shares) * h // (span.stop - span.start) for h, span in zip(heads, spans, strict=True))
    return Run(len(shares), heads, spans, tuple(sharing))


def _blocks(buffer: Tensor, its: Deal, batch: int, tokens: int, dim: int) -> list[tuple[Tensor, ...]]:
    """What goes or comes outside (elements,) -> of every run the part (members, s, B, h, D) of each tensor."""
    shapes = [(run.members, tokens, batch, sum(run.heads), dim) for run in its.runs]
    parts = buffer.split([math.prod(shape) for shape in shapes]) if len(shapes) > 1 else (buffer,)
    return [part.view(shape).split(run.heads, dim=3) for part, shape, run in zip(parts, shapes, its.runs, strict=True)]


def pack_in(tensors: Sequence[Tensor], its: Deal) -> Tensor:
    """Each (B, s, H, D), H as `its.totals` -> (elements,): for each member (s, B, h of all, D), the heads it works
    on."""
    batch, tokens, _, dim = tensors[0].shape
    buffer = tensors[0].new_empty(sum(its.widths) * tokens * batch * dim)
    for run, block in zip(its.runs, _blocks(buffer, its, batch, tokens, dim), strict=True):
        for x, part, heads, span, shared in zip(tensors, block, *run[1:], strict=True):
            shares = run.members // shared
            mine = _by_member(x, span, (batch, tokens, shares, heads, dim))
            part.view(shares, shared, tokens, batch, heads, dim).copy_(mine.unsqueeze(1))
    return buffer


def _by_member(x: Tensor, span: slice, shape: tuple[int, ...]) -> Tensor:
    """(B, s, H, D) -> a view (shares, s, B, h, D) of these heads. shape: (B, s, shares, h, D)."""
    some = x if x.shape[2] == span.stop - span.start else x[:, :, span]
    return some.view(shape).permute(2, 1, 0, 3, 4)


def split_in(received: Tensor, heads: Sequence[int]) -> list[Tensor]:
    """What the all-to-all gives, (T, B, h of all, D), T the tokens of all members -> views (B, T, h, D) of it."""
    return [x.transpose(0, 1) for x in received.split(list(heads), dim=2)]


def join_out(tensors: Sequence[Tensor]) -> Tensor:
    """The inverse of `split_in`: each (B, T, h, D) -> (T, B, h of all, D); a view where there is one tensor."""
    turned = [x.transpose(0, 1) for x in tensors]
    return turned[0] if len(turned) == 1 else torch.cat(turned, dim=2)


def unpack_out(received: Tensor, its: Deal, batch: int, tokens: int, dim: int) -> list[Tensor]:
    """What the all-to-all gives, (elements,): from each member (s, B, h of all, D) -> each (B, s, H, D), in memory of
    its own. Where members share heads, what belongs to one is summed, in fp32 or wider."""
    blocks, found = _blocks(received, its, batch, tokens, dim), []
    wide = torch.float64 if received.dtype == torch.float64 else torch.float32
    for index, (total, split) in enumerate(zip(its.totals, its.split, strict=True)):
        shape, done = (batch, tokens, total, dim), 0
        whole = received.new_empty(shape, dtype=wide) if split else received.new_empty(shape)
        for run, block in zip(its.runs, blocks, strict=True):
            part, heads, span, shared = block[index], run.heads[index], run.spans[index], run.sharing[index]
            shares = run.members // shared
            if shared > 1:
                part = part.view(shares, shared, tokens, batch, heads, dim).sum(1, dtype=wide)
            place = _by_member(whole, span, (batch, tokens, shares, heads, dim))
            place.add_(part) if span.start < done else place.copy_(part)
            done = span.stop
        found.append(whole.to(received.dtype) if split else whole)
    return found


def sizes(its: Deal, counts: Sequence[int], member: int, token: int) -> tuple[list[int], list[int]]:
    """Elements that go to every member inward and that come from each; outward the other way round. token: those of one
    head of a token, in the whole batch."""
    outside = counts[member] * token
    return [outside * width for width in its.widths], [count * its.widths[member] * token for count in counts]
