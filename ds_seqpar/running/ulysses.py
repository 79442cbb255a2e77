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
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..planning.heads import heads_of


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
    """Neighbouring members with equal shares. Of each tensor: the heads of one member, and those of all together."""

    members: int
    heads: tuple[int, ...]
    spans: tuple[slice, ...]

    def sharing(self, index: int) -> int:
        """How many of them work on one and the same head of a tensor."""
        span = self.spans[index]
        return self.members * self.heads[index] // (span.stop - span.start)


class Deal(NamedTuple):
    """How tensors of `totals` heads go to members. widths: the heads of all tensors that each member has."""

    totals: tuple[int, ...]
    runs: tuple[Run, ...]
    widths: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def deal(totals: tuple[int, ...], kv_heads: int, members: int) -> Deal:
    """totals: heads of tensors that travel together."""
    shares = [tuple(_held(total, kv_heads, members, member) for total in totals) for member in range(members)]
    heads = [tuple(x.stop - x.start for x in share) for share in shares]

    def alike(member: int) -> tuple:
        sharers = [sum(other[i] == mine for other in shares) for i, mine in enumerate(shares[member])]
        return heads[member], sharers

    runs = []
    for _, found in itertools.groupby(range(members), alike):
        run = list(found)
        spans = (slice(a.start, b.stop) for a, b in zip(shares[run[0]], shares[run[-1]], strict=True))
        runs.append(Run(len(run), heads[run[0]], tuple(spans)))
    return Deal(totals, tuple(runs), tuple(map(sum, heads)))


def _blocks(buffer: Tensor, its: Deal, batch: int, tokens: int, dim: int) -> list[tuple[Tensor, ...]]:
    """What goes or comes outside (elements,) -> of every run the part (members, s, B, h, D) of each tensor."""
    shapes = [(run.members, tokens, batch, sum(run.heads), dim) for run in its.runs]
    parts = buffer.split([members * tokens * batch * heads * dim for members, *_, heads, _ in shapes])
    views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return [view.split(run.heads, dim=3) for view, run in zip(views, its.runs, strict=True)]


def pack_in(tensors: Sequence[Tensor], its: Deal) -> Tensor:
    """Each (B, s, H, D), H as `its.totals` -> (elements,): for each member (s, B, h of all, D), the heads it works
    on."""
    batch, tokens, _, dim = tensors[0].shape
    buffer = tensors[0].new_empty(sum(its.widths) * tokens * batch * dim)
    for run, block in zip(its.runs, _blocks(buffer, its, batch, tokens, dim), strict=True):
        for index, (x, part, span) in enumerate(zip(tensors, block, run.spans, strict=True)):
            mine, shared = x.narrow(2, span.start, span.stop - span.start), run.sharing(index)
            part.unflatten(0, (-1, shared)).copy_(_by_member(mine, run.members // shared))
    return buffer


def _by_member(x: Tensor, shares: int) -> Tensor:
    """(B, s, H, D) -> a view (shares, 1, s, B, h, D)."""
    return x.unflatten(2, (shares, -1)).permute(2, 1, 0, 3, 4).unsqueeze(1)


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
    blocks = _blocks(received, its, batch, tokens, dim)
    return [_from_members(parts, its, index) for index, parts in enumerate(zip(*blocks, strict=True))]


def _from_members(parts: Sequence[Tensor], its: Deal, index: int) -> Tensor:
    """parts: of every run, (members, s, B, h, D)."""
    _, tokens, batch, _, dim = parts[0].shape
    dtype = parts[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    spans = [run.spans[index] for run in its.runs]
    split = any(after.start < before.stop for before, after in itertools.pairwise(spans))  # one head's members
    found = parts[0].new_empty(batch, tokens, its.totals[index], dim, dtype=wide if split else dtype)
    for place, (part, run, span) in enumerate(zip(parts, its.runs, spans, strict=True)):
        if (shared := run.sharing(index)) > 1:
            part = part.unflatten(0, (-1, shared)).sum(1, dtype=wide)
        whole = found.narrow(2, span.start, span.stop - span.start).unflatten(2, (part.shape[0], -1))
        part = part.permute(2, 1, 0, 3, 4)
        begun = place > 0 and span.start < spans[place - 1].stop
        whole.add_(part) if begun else whole.copy_(part)
    return found.to(dtype)


def sizes(its: Deal, counts: Sequence[int], member: int, token: int) -> tuple[list[int], list[int]]:
    """Elements that go to every member inward and that come from each; outward the other way round. token: those of one
    head of a token, in the whole batch."""
    outside = counts[member] * token
    return [outside * width for width in its.widths], [count * its.widths[member] * token for count in counts]
