"""DeepSpeed Ulysses: an all-to-all that trades sequence for heads around any inner attention (Jacobs et al., 2023).

Pure functions around that all-to-all, which belongs to comm (or to the virtual runner). In what travels, tokens come
first and a token's heads, of q, k and v, stand side by side: what the members sent, one after another, then is the
inner rank's (tokens, batch, heads, D) as it stands, and q, k and v are views of it. So each tensor is copied once on
its way out and once by the transfer; outward the same in reverse. A kv head that several members need (U > Hkv) goes
to exactly those; its gradients are summed. `counts`: the tokens of every member, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def heads_of_member(heads: int, members: int) -> int:
    """How many of a tensor's heads a member works on; where it has fewer than members, they share them."""
    return max(1, heads // members)


def pack_in(tensors: Sequence[Tensor], members: int) -> Tensor:
    """Each (B, s, H, D), H of any size -> (U, s, B, h of all, D): row u holds the heads that member u works on."""
    batch, tokens, _, dim = tensors[0].shape
    heads = [heads_of_member(x.shape[2], members) for x in tensors]
    buffer = tensors[0].new_empty(members, tokens, batch, sum(heads), dim)
    for x, part in zip(tensors, buffer.split(heads, dim=3), strict=True):
        part.unflatten(0, (-1, sharing(x.shape[2], members))).copy_(_by_member(x, members))
    return buffer


def _by_member(x: Tensor, members: int) -> Tensor:
    """(B, s, H, D) -> a view (U / sharing, 1, s, B, h, D)."""
    shares = members // sharing(x.shape[2], members)
    return x.unflatten(2, (shares, -1)).permute(2, 1, 0, 3, 4).unsqueeze(1)


def sharing(heads: int, members: int) -> int:
    """How many members work on one and the same head."""
    return max(1, members // heads)


def split_in(received: Tensor, heads: Sequence[int]) -> list[Tensor]:
    """What the all-to-all gives, (T, B, h of all, D), T the tokens of all members -> views (B, T, h, D) of it."""
    return [x.transpose(0, 1) for x in received.split(list(heads), dim=2)]


def join_out(tensors: Sequence[Tensor]) -> Tensor:
    """The inverse of `split_in`: each (B, T, h, D) -> (T, B, h of all, D); a view where there is one tensor."""
    turned = [x.transpose(0, 1) for x in tensors]
    return turned[0] if len(turned) == 1 else torch.cat(turned, dim=2)


def unpack_out(received: Tensor, heads: Sequence[int]) -> list[Tensor]:
    """What the all-to-all gives, (U, s, B, h of all, D) -> each (B, s, H, D), in memory of its own. heads: H of each.
    Where members share heads, what belongs to one is summed, in fp32 or wider."""
    members = received.shape[0]
    parts = received.split([heads_of_member(total, members) for total in heads], dim=3)
    return [_from_members(part, total) for part, total in zip(parts, heads, strict=True)]


def _from_members(part: Tensor, heads: int) -> Tensor:
    members, tokens, batch, _, dim = part.shape
    found = part.new_empty(batch, tokens, heads, dim)
    if (shared := sharing(heads, members)) > 1:
        wide = torch.float64 if part.dtype == torch.float64 else torch.float32
        part = part.unflatten(0, (-1, shared)).sum(1, dtype=wide)
    found.unflatten(2, (part.shape[0], -1)).copy_(part.permute(2, 1, 0, 3, 4))
    return found


def sizes_in(buffer: Tensor, counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Elements that go to every member and that come from each, for a buffer that `pack_in` made."""
    _, tokens, *rest = buffer.shape
    token = math.prod(rest)
    return [tokens * token] * len(counts), [count * token for count in counts]


def sizes_out(joined: Tensor, counts: Sequence[int], tokens: int) -> tuple[list[int], list[int]]:
    """Elements that go to every member and that come from each, for what `join_out` made; `tokens` are one's own."""
    token = math.prod(joined.shape[1:])
    return [count * token for count in counts], [tokens * token] * len(counts)
