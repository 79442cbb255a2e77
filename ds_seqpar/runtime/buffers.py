"""The slots of a program as tensors: one buffer of bytes each, seen as the tensors of the unit that it holds.

DeepSpeed Ulysses is an all-to-all that trades sequence for heads around any inner attention (Jacobs et al., 2023).
Pure functions around that all-to-all, which belongs to comm. In a message tokens come first, and the heads of q, k and
v of one token stand side by side. So the members' messages, one after another, are the inner rank's (tokens, batch,
heads, D) as they stand, and q, k and v are views. Each tensor is copied once on its way out and once by the transfer;
outward the same in reverse. Who gets which heads is `heads_of_member`. Neighbouring members with equally many heads are
copied for together; where U divides the heads these are all. A kv head that several members need (U > Hkv) goes to
exactly those; its gradients are summed. `counts`: the tokens of every member, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..compiler.actions import Key, Unit
from ..compiler.compile import BoundProgram
from ..compiler.heads import HeadShares
from ..compiler.shape import FieldLocation

Tensors = tuple[Tensor, ...]
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


class Buffers:
    """Made when they are first used, given up when the program says so."""

    def __init__(self, bound: BoundProgram, device: torch.device) -> None:
        self.bound, self.device = bound, device
        self.made: list[Tensor | None] = [None] * len(bound.program.slots)
        self.seen: dict[int, tuple[tuple[FieldLocation, ...], Tensors]] = {}  # by slot: as what it was seen last

    def raw(self, slot: int, size: int) -> Tensor:
        """The first `size` bytes of a slot."""
        made = self._buffer(slot)
        return made if made.numel() == size else made[:size]

    def tensors(self, slot: int, unit: Unit) -> Tensors:
        """The tensors of a unit in its slot, (batch, tokens, heads, head_dim) or (batch, tokens, heads)."""
        locations = self.bound.locations(slot, *unit)
        seen = self.seen.get(slot)
        if seen is None or seen[0] is not locations:  # most units in a slot are of one size
            seen = self.seen[slot] = locations, views(self._buffer(slot), locations)
        return seen[1]

    def parts(self, slot: int, kind: str, keys: list[Key]) -> list[Tensors]:
        """The tensors of several units that stand one after the other in a slot."""
        at, found = 0, []
        for key in keys:
            size = self.bound.unit_bytes(slot, kind, key)
            found.append(views(self._buffer(slot)[at : at + size], self.bound.locations(slot, kind, key)))
            at += size
        return found

    def elements(self, slot: int, dtype: str) -> Tensor:
        """The whole slot as one run of elements."""
        return self._buffer(slot).view(DTYPES[dtype])

    def adopt(self, slot: int, tensor: Tensor) -> None:
        """The bytes of a tensor without gaps become the slot's."""
        self.made[slot] = tensor.view(-1).view(torch.uint8)

    def free(self, slot: int) -> None:
        self.made[slot] = None
        self.seen.pop(slot, None)

    def _buffer(self, slot: int) -> Tensor:
        made = self.made[slot]
        if made is None:
            size = self.bound.slot_bytes(slot)
            made = self.made[slot] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return made


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that results are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def views(buffer: Tensor, locations: tuple[FieldLocation, ...]) -> Tensors:
    """The tensors of a unit in its bytes."""
    return tuple(buffer[start:end].view(DTYPES[dtype]).view(shape) for start, end, dtype, shape in locations)


# ---- heads, as an exchange sends them


def _blocks(buffer: Tensor, shares: HeadShares, batch: int, tokens: int, dim: int) -> list[tuple[Tensor, ...]]:
    """What goes or comes outside (elements,) -> of every group the part (members, s, B, h, D) of each tensor."""
    shapes = [(group.members, tokens, batch, sum(group.heads), dim) for group in shares.groups]
    parts = buffer.split([math.prod(shape) for shape in shapes]) if len(shapes) > 1 else (buffer,)
    cut = zip(parts, shapes, shares.groups, strict=True)
    return [part.view(shape).split(group.heads, dim=3) for part, shape, group in cut]


def pack_in(tensors: Sequence[Tensor], shares: HeadShares, buffer: Tensor) -> None:
    """Each (B, s, H, D), H as `shares.totals` -> buffer (elements,): for each member (s, B, h of all, D), the heads
    that it works on."""
    batch, tokens, _, dim = tensors[0].shape
    for group, block in zip(shares.groups, _blocks(buffer, shares, batch, tokens, dim), strict=True):
        for x, part, heads, span, sharers in zip(tensors, block, *group[1:], strict=True):
            distinct = group.members // sharers
            mine = _by_member(x, span, (batch, tokens, distinct, heads, dim))
            part.view(distinct, sharers, tokens, batch, heads, dim).copy_(mine.unsqueeze(1))


def _by_member(x: Tensor, span: slice, shape: tuple[int, ...]) -> Tensor:
    """(B, s, H, D) -> a view (n, s, B, h, D) of the heads in `span`. shape: (B, s, n, h, D), n shares of h heads."""
    some = x if x.shape[2] == span.stop - span.start else x[:, :, span]
    return some.view(shape).permute(2, 1, 0, 3, 4)


def split_in(received: Tensor, heads: Sequence[int]) -> list[Tensor]:
    """What the all-to-all gives, (T, B, h of all, D), T the tokens of all members -> views (B, T, h, D) of it."""
    return [x.transpose(0, 1) for x in received.split(list(heads), dim=2)]


def join_out(tensors: Sequence[Tensor]) -> Tensor:
    """The inverse of `split_in`: each (B, T, h, D) -> (T, B, h of all, D); a view where there is one tensor."""
    turned = [x.transpose(0, 1) for x in tensors]
    return turned[0] if len(turned) == 1 else torch.cat(turned, dim=2)


def unpack_out(received: Tensor, shares: HeadShares, batch: int, tokens: int, dim: int) -> list[Tensor]:
    """What the all-to-all gives, (elements,): from each member (s, B, h of all, D) -> each (B, s, H, D), in memory of
    its own. Where members share heads, what belongs to one is summed, in fp32 or wider."""
    blocks, found = _blocks(received, shares, batch, tokens, dim), []
    sums = wide(received.dtype)
    for index, (total, split) in enumerate(zip(shares.totals, shares.split, strict=True)):
        shape, done = (batch, tokens, total, dim), 0
        whole = received.new_empty(shape, dtype=sums) if split else received.new_empty(shape)
        for group, block in zip(shares.groups, blocks, strict=True):
            part, heads, span, sharers = block[index], group.heads[index], group.spans[index], group.sharers[index]
            distinct = group.members // sharers
            if sharers > 1:
                part = part.view(distinct, sharers, tokens, batch, heads, dim).sum(1, dtype=sums)
            place = _by_member(whole, span, (batch, tokens, distinct, heads, dim))
            place.add_(part) if span.start < done else place.copy_(part)
            done = span.stop
        found.append(whole.to(received.dtype) if split else whole)
    return found
