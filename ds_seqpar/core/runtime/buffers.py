"""A program's slots as tensors, and the layout of DeepSpeed Ulysses messages.

Each slot is one byte buffer, viewed as the tensors of its current unit.

DeepSpeed Ulysses surrounds any inner attention with all-to-alls that exchange tokens for heads (Jacobs et al., 2023).
This module packs and unpacks Ulysses messages, and `transport` sends the messages. The first dimension of a message is
tokens. For each token, the heads of all tensors are adjacent. The messages of all Ulysses ranks, one after another,
therefore form the CP rank's tensor (tokens, batch, elements) without a copy. Each tensor is copied only once, either
into an inward message or out of an outward message. `compiler.sharding.heads` determines which heads each Ulysses rank
receives. One copy operation suffices for a group of consecutive Ulysses ranks with the same number of heads. If the
heads are divisible by ulysses_size, all ranks are in one group. If several Ulysses ranks share a kv head (ulysses_size
> Hkv), the head is sent to exactly those ranks, and its gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..compiler.compile import BoundProgram
from ..compiler.program.shape import FieldLocation
from ..compiler.schedules.actions import Unit
from ..compiler.sharding.heads import MessageLayout
from ..compiler.sharding.layout import Key

Tensors = tuple[Tensor, ...]
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


class Buffers:
    """The buffers for a program's slots. A buffer is allocated on first use and freed when the program frees the slot.

    Attributes:
        viewed: Locations and tensors of the last view of each slot.
    """

    def __init__(self, bound: BoundProgram, device: torch.device) -> None:
        self.bound, self.device = bound, device
        self.buffers: list[Tensor | None] = [None] * len(bound.program.slots)
        self.viewed: dict[int, tuple[tuple[FieldLocation, ...], Tensors]] = {}

    def raw(self, slot: int, size: int) -> Tensor:
        """Return the first `size` bytes of a slot."""
        buffer = self._buffer(slot)
        return buffer if buffer.numel() == size else buffer[:size]

    def tensors(self, slot: int, unit: Unit) -> Tensors:
        """Return the tensors of a unit in its slot, (batch, tokens, heads, head_dim) or (batch, tokens, heads)."""
        locations = self.bound.locations(slot, *unit)
        viewed = self.viewed.get(slot)
        if viewed is None or viewed[0] is not locations:  # most units in a slot have the same size
            viewed = self.viewed[slot] = locations, views(self._buffer(slot), locations)
        return viewed[1]

    def parts(self, slot: int, kind: str, keys: list[Key]) -> list[Tensors]:
        """Return the tensors of each of several consecutive units in a slot."""
        start, units = 0, []
        for key in keys:
            end = start + self.bound.unit_bytes(slot, kind, key)
            units.append(views(self._buffer(slot)[start:end], self.bound.locations(slot, kind, key)))
            start = end
        return units

    def elements(self, slot: int, dtype: str) -> Tensor:
        """Return the whole slot as a vector of elements."""
        return self._buffer(slot).view(DTYPES[dtype])

    def adopt(self, slot: int, tensor: Tensor) -> None:
        """Use the memory of a contiguous tensor as the slot's buffer."""
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
    """Return accum_dtype, the dtype in which results of dtype `dtype` are summed: fp64 if `dtype` is fp64, otherwise
    fp32.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def views(buffer: Tensor, locations: tuple[FieldLocation, ...]) -> Tensors:
    """Return the tensors of a unit as views of its bytes."""
    return tuple(buffer[start:end].view(DTYPES[dtype]).view(shape) for start, end, dtype, shape in locations)


# ---- messages of head exchanges


def _views_of_groups(buffer: Tensor, layout: MessageLayout) -> list[tuple[Tensor, ...]]:
    """Return, for each group of Ulysses ranks, views of all tensors in a message (elements,) of local tokens.

    Each view has the shape (Ulysses ranks, s, B, h * D).
    """
    tokens, views_of_groups, start = layout.tokens[layout.rank], [], 0
    for group in layout.shares.groups:
        rows = [heads * dim for heads, dim in zip(group.heads, layout.widths, strict=True)]
        end = start + group.ranks * tokens * layout.batch * sum(rows)
        views_of_groups.append(buffer[start:end].view(group.ranks, tokens, layout.batch, sum(rows)).split(rows, dim=3))
        start = end
    return views_of_groups


def pack_in(tensors: Sequence[Tensor], layout: MessageLayout, buffer: Tensor) -> None:
    """Fill the message for an inward exchange.

    Args:
        tensors: Local tensors (B, s, H, D).
        layout: The message's layout.
        buffer: The message (elements,) to fill. For each Ulysses rank, the message contains the heads that the Ulysses
            rank works on, as (s, B, h * D of all tensors).
    """
    batch, tokens = layout.batch, layout.tokens[layout.rank]
    for group, targets in zip(layout.shares.groups, _views_of_groups(buffer, layout), strict=True):
        for x, target, dim, heads, span, shared in zip(tensors, targets, layout.widths, *group[1:], strict=True):
            distinct = group.ranks // shared
            source = _by_share(x, span, (batch, tokens, distinct, heads, dim))
            target.view(distinct, shared, tokens, batch, heads, dim).copy_(source.unsqueeze(1))


def _by_share(x: Tensor, span: slice, shape: tuple[int, ...]) -> Tensor:
    """Return a view (shares, s, B, h, D) of the heads in `span` of x (B, s, H, D). `shape` is (B, s, shares, h, D)."""
    heads = x if x.shape[2] == span.stop - span.start else x[:, :, span]
    return heads.view(shape).permute(2, 1, 0, 3, 4)


def split_in(received: Tensor, layout: MessageLayout) -> list[Tensor]:
    """Return views of the tensors received in an inward head exchange.

    Args:
        received: A message of shape (elements,) or (T, B, h * D of all tensors), where T is the number of tokens of all
            Ulysses ranks.
        layout: The message's layout.

    Returns:
        A view (B, T, h, D) for each tensor.
    """
    shape, sizes = (sum(layout.tokens), layout.batch), [*zip(layout.heads, layout.widths, strict=True)]
    rows = [heads * dim for heads, dim in sizes]
    parts = received.view(*shape, sum(rows)).split(rows, dim=2)
    return [x.view(*shape, *size).transpose(0, 1) for x, size in zip(parts, sizes, strict=True)]


def join_out(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors (B, T, h, D) into (T, B, h * D of all tensors), the inverse of `split_in`.

    A single tensor is returned as a view (T, B, h, D).
    """
    token_first = [x.transpose(0, 1) for x in tensors]
    return token_first[0] if len(tensors) == 1 else torch.cat([x.flatten(2) for x in token_first], dim=2)


def unpack_out(received: Tensor, layout: MessageLayout) -> list[Tensor]:
    """Return the tensors received in an outward head exchange.

    If Ulysses ranks share a head, their results for the head are summed in `sum_dtype`.

    Args:
        received: The message (elements,): (s, B, h * D of all tensors) from each Ulysses rank.
        layout: The message's layout.

    Returns:
        The tensors (B, s, H, D), each with its own memory.
    """
    shares, batch, tokens = layout.shares, layout.batch, layout.tokens[layout.rank]
    views_of_groups, tensors, sums = _views_of_groups(received, layout), [], sum_dtype(received.dtype)
    for index, (total, dim, split) in enumerate(zip(shares.totals, layout.widths, shares.split, strict=True)):
        shape, filled = (batch, tokens, total, dim), 0  # filled: number of heads already written
        whole = received.new_empty(shape, dtype=sums) if split else received.new_empty(shape)
        for group, sources in zip(shares.groups, views_of_groups, strict=True):
            heads, span, shared = group.heads[index], group.spans[index], group.sharers[index]
            distinct = group.ranks // shared
            source = sources[index].view(distinct, shared, tokens, batch, heads, dim)
            source = source.sum(1, dtype=sums) if shared > 1 else source.squeeze(1)
            target = _by_share(whole, span, (batch, tokens, distinct, heads, dim))
            target.add_(source) if span.start < filled else target.copy_(source)
            filled = span.stop
        tensors.append(whole.to(received.dtype) if split else whole)
    return tensors
