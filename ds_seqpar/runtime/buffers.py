"""The slots of a program as tensors: one buffer of bytes each, seen as the tensors of the unit that it holds."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compiler.actions import Key, Unit
from ..compiler.compile import Bound
from ..compiler.shape import Place

Tensors = tuple[Tensor, ...]
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


class Buffers:
    """Made when they are first used, given up when the program says so."""

    def __init__(self, bound: Bound, device: torch.device) -> None:
        self.bound, self.device = bound, device
        self.made: list[Tensor | None] = [None] * len(bound.program.slots)
        self.seen: dict[int, tuple[tuple[Place, ...], Tensors]] = {}  # by slot: as what it was seen last

    def raw(self, slot: int, size: int) -> Tensor:
        """The first bytes of a slot."""
        made = self._buffer(slot)
        return made if made.numel() == size else made[:size]

    def tensors(self, slot: int, unit: Unit) -> Tensors:
        """The tensors of a unit in its slot, (batch, tokens, heads, head_dim) or (batch, tokens, heads)."""
        places = self.bound.places(slot, *unit)
        seen = self.seen.get(slot)
        if seen is None or seen[0] is not places:  # most units in a slot are of one size
            seen = self.seen[slot] = places, views(self._buffer(slot), places)
        return seen[1]

    def parts(self, slot: int, kind: str, keys: list[Key]) -> list[Tensors]:
        """The tensors of several units that stand one after the other in a slot."""
        at, found = 0, []
        for key in keys:
            size = self.bound.unit_bytes(slot, kind, key)
            found.append(views(self._buffer(slot)[at : at + size], self.bound.places(slot, kind, key)))
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


def views(buffer: Tensor, places: tuple[Place, ...]) -> Tensors:
    """The tensors of a unit in its bytes."""
    return tuple(buffer[start:end].view(DTYPES[dtype]).view(shape) for start, end, dtype, shape in places)
