"""DeepSpeed Ulysses: an all-to-all that trades sequence for heads around any inner attention (Jacobs et al., 2023).

`pack_*` and `unpack_*` are pure; the all-to-all between them belongs to comm (or to the virtual runner). Inward, q, k
and v go in one buffer. A kv head that several members need (U > Hkv) goes to exactly those; its gradients are summed.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor


def heads_of_member(heads: int, members: int) -> int:
    """How many of a tensor's heads a member works on; where it has fewer than members, they share them."""
    return max(1, heads // members)


def pack_in(tensors: list[Tensor], members: int) -> Tensor:
    """Each (B, s, H, D), H of any size -> one buffer (U, n): row u holds the heads that member u works on."""
    spread = [x.repeat_interleave(max(1, members // x.shape[2]), dim=2) for x in tensors]
    return torch.cat([rearrange(x, "b s (u h) d -> u (b s h d)", u=members) for x in spread], dim=1)


def unpack_in(buffer: Tensor, batch: int, heads: list[int], head_dim: int) -> list[Tensor]:
    """Buffer after the all-to-all -> each (B, U s, h, D) for the given heads per member. The inverse order of tokens
    in `layout.positions`: member after member gives the inner rank's runs."""
    tokens = buffer.shape[1] // (batch * sum(heads) * head_dim)
    parts = buffer.split([batch * tokens * h * head_dim for h in heads], dim=1)
    return [
        rearrange(part, "u (b s h d) -> b (u s) h d", b=batch, h=h, d=head_dim).contiguous()
        for part, h in zip(parts, heads, strict=True)
    ]


def pack_out(tensors: list[Tensor], members: int) -> Tensor:
    """Each (B, U s, h, D) -> one buffer (U, n): row u holds the tokens of member u."""
    return torch.cat([rearrange(x, "b (u s) h d -> u (b s h d)", u=members) for x in tensors], dim=1)


def unpack_out(buffer: Tensor, batch: int, heads: list[int], per_member: list[int], head_dim: int) -> list[Tensor]:
    """Buffer after the all-to-all -> each (B, s, H, D). heads: H of each tensor; per_member: h of each. Where U members
    hold fewer different heads than they are (U h > H), what belongs to one head is summed, in fp32 or wider."""
    tokens = buffer.shape[1] // (batch * sum(per_member) * head_dim)
    parts = buffer.split([batch * tokens * h * head_dim for h in per_member], dim=1)
    found = []
    for part, total, h in zip(parts, heads, per_member, strict=True):
        x = rearrange(part, "u (b s h d) -> b s (u h) d", b=batch, h=h, d=head_dim)
        if x.shape[2] > total:
            wide = x if x.dtype == torch.float64 else x.float()
            x = rearrange(wide, "b s (h shared) d -> b s h shared d", h=total).sum(3).to(x.dtype)
        found.append(x.contiguous())
    return found
