"""The slots of a program as tensors, and the layout of Ulysses' messages.

Each slot is one buffer of bytes, seen as the tensors of the unit that it holds.

DeepSpeed Ulysses is an all-to-all that trades sequence for heads around any inner attention (Jacobs et al., 2023). The
functions here fill and read its messages; comm sends them. In a message tokens come first, and the heads of q, k and v
of one token stand side by side. So the Ulysses ranks' messages, one after another, are the CP rank's (tokens, batch,
heads, D) without a copy, and q, k and v are views. A tensor is copied once into a message; outward once out of one.

`compiler.heads` says which Ulysses rank gets which heads. One copy serves a group of neighbouring Ulysses ranks with
equally many heads; where U divides the heads, that is all of them. A kv head that several Ulysses ranks need (U > Hkv)
goes to exactly those, and its gradients are summed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..compiler.compile import BoundProgram
from ..compiler.program.shape import FieldLocation
from ..compiler.schedules.actions import Unit
from ..compiler.sharding.heads import HeadShares
from ..compiler.sharding.layout import Key

Tensors = tuple[Tensor, ...]
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


class Buffers:
    """The buffers of a program's slots: allocated when they are first used, freed when the program says so.

    viewed: by slot, the locations of the unit that it was seen as last, and its tensors."""

    def __init__(self, bound: BoundProgram, device: torch.device) -> None:
        self.bound, self.device = bound, device
        self.buffers: list[Tensor | None] = [None] * len(bound.program.slots)
        self.viewed: dict[int, tuple[tuple[FieldLocation, ...], Tensors]] = {}

    def raw(self, slot: int, size: int) -> Tensor:
        """The first `size` bytes of a slot."""
        buffer = self._buffer(slot)
        return buffer if buffer.numel() == size else buffer[:size]

    def tensors(self, slot: int, unit: Unit) -> Tensors:
        """The tensors of a unit in its slot, (batch, tokens, heads, head_dim) or (batch, tokens, heads)."""
        locations = self.bound.locations(slot, *unit)
        viewed = self.viewed.get(slot)
        if viewed is None or viewed[0] is not locations:  # most units in a slot are of one size
            viewed = self.viewed[slot] = locations, views(self._buffer(slot), locations)
        return viewed[1]

    def parts(self, slot: int, kind: str, keys: list[Key]) -> list[Tensors]:
        """The tensors of several units that stand one after the other in a slot."""
        start, units = 0, []
        for key in keys:
            end = start + self.bound.unit_bytes(slot, kind, key)
            units.append(views(self._buffer(slot)[start:end], self.bound.locations(slot, kind, key)))
            start = end
        return units

    def elements(self, slot: int, dtype: str) -> Tensor:
        """The whole slot as one run of elements."""
        return self._buffer(slot).view(DTYPES[dtype])

    def adopt(self, slot: int, tensor: Tensor) -> None:
        """Makes the memory of a contiguous tensor the slot's buffer."""
        self.buffers[slot] = tensor.view(-1).view(torch.uint8)

    def free(self, slot: int) -> None:
        self.buffers[slot] = None
        self.viewed.pop(slot, None)

    def _buffer(self, slot: int) -> Tensor:
        buffer = self.buffers[slot]
        if buffer is None:
            size = self.bound.slot_bytes(slot)
            buffer = self.buffers[slot] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return buffer


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results of `dtype` are summed: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def views(buffer: Tensor, locations: tuple[FieldLocation, ...]) -> Tensors:
    """The tensors of a unit, as views of its bytes."""
    return tuple(buffer[start:end].view(DTYPES[dtype]).view(shape) for start, end, dtype, shape in locations)


# ---- heads, as an exchange sends them


def _views_of_groups(buffer: Tensor, shares: HeadShares, batch: int, tokens: int, dim: int) -> list[tuple[Tensor, ...]]:
    """A message of local tokens (elements,) -> for every group of Ulysses ranks, views (Ulysses ranks, s, B, h, D) of
    each tensor."""
    shapes = [(group.ranks, tokens, batch, sum(group.heads), dim) for group in shares.groups]
    parts = buffer.split([math.prod(shape) for shape in shapes]) if len(shapes) > 1 else (buffer,)
    cut = zip(parts, shapes, shares.groups, strict=True)
    return [part.view(shape).split(group.heads, dim=3) for part, shape, group in cut]


def pack_in(tensors: Sequence[Tensor], shares: HeadShares, buffer: Tensor) -> None:
    """Fills a message. Each tensor (B, s, H, D), with H as `shares.totals` -> buffer (elements,): for each Ulysses rank
    (s, B, h of all tensors, D), the heads that it works on."""
    batch, tokens, _, dim = tensors[0].shape
    for group, parts in zip(shares.groups, _views_of_groups(buffer, shares, batch, tokens, dim), strict=True):
        for x, part, heads, span, shared in zip(tensors, parts, *group[1:], strict=True):
            distinct = group.ranks // shared
            dealt = _by_share(x, span, (batch, tokens, distinct, heads, dim))
            part.view(distinct, shared, tokens, batch, heads, dim).copy_(dealt.unsqueeze(1))


def _by_share(x: Tensor, span: slice, shape: tuple[int, ...]) -> Tensor:
    """(B, s, H, D) -> a view (shares, s, B, h, D) of the heads in `span`. shape: (B, s, shares, h, D)."""
    heads = x if x.shape[2] == span.stop - span.start else x[:, :, span]
    return heads.view(shape).permute(2, 1, 0, 3, 4)


def split_in(received: Tensor, heads: Sequence[int]) -> list[Tensor]:
    """What arrives inward, (T, B, h of all tensors, D), T the tokens of all Ulysses ranks -> a view (B, T, h, D) for
    each."""
    return [x.transpose(0, 1) for x in received.split(list(heads), dim=2)]


def join_out(tensors: Sequence[Tensor]) -> Tensor:
    """The inverse of `split_in`: each (B, T, h, D) -> (T, B, h of all tensors, D); a view where there is one tensor."""
    token_first = [x.transpose(0, 1) for x in tensors]
    return token_first[0] if len(token_first) == 1 else torch.cat(token_first, dim=2)


def unpack_out(received: Tensor, shares: HeadShares, batch: int, tokens: int, dim: int) -> list[Tensor]:
    """What arrives outward, (elements,): from each Ulysses rank (s, B, h of all tensors, D) -> each tensor (B, s, H,
    D), in memory of its own. Where Ulysses ranks share a head, their parts of it are summed, in `sum_dtype`."""
    parts_of_groups, tensors = _views_of_groups(received, shares, batch, tokens, dim), []
    sums = sum_dtype(received.dtype)
    for index, (total, split) in enumerate(zip(shares.totals, shares.split, strict=True)):
        shape, filled = (batch, tokens, total, dim), 0  # filled: heads that have a part already
        whole = received.new_empty(shape, dtype=sums) if split else received.new_empty(shape)
        for group, parts in zip(shares.groups, parts_of_groups, strict=True):
            part, heads, span, shared = parts[index], group.heads[index], group.spans[index], group.sharers[index]
            distinct = group.ranks // shared
            if shared > 1:
                part = part.view(distinct, shared, tokens, batch, heads, dim).sum(1, dtype=sums)
            target = _by_share(whole, span, (batch, tokens, distinct, heads, dim))
            target.add_(part) if span.start < filled else target.copy_(part)
            filled = span.stop
        tensors.append(whole.to(received.dtype) if split else whole)
    return tensors
