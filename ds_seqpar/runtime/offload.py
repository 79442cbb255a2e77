"""Checkpoints in host memory: what they save leaves the device while the next layers are computed, and is back before
backward asks for it.

On CUDA the two ways have a stream each. At most `RING` tensors wait on the device for their copies to end, and one is
fetched ahead of the one that is used. Host memory is pinned, and used again step after
step. It is taken in pieces, since torch rounds pinned memory up to a power of two. On CPUs the same path copies into
the same kind of pool, without streams: it saves nothing there, and shows that what comes back is what left.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..config import HOST_PIECE

RING = 2


class Packed:
    """A tensor that left, in pieces of host memory that go back to the pool with it. before: the one that left before
    it. gone, came: events of its copies; back: it, on the device again."""

    gone: Any = None
    came: Any = None
    back: Tensor | None = None

    def __init__(self, store: Store, x: Tensor) -> None:
        self.store, self.device, self.shape, self.dtype = store, x.device, x.shape, x.dtype
        whole, rest = divmod(x.numel() * x.element_size(), HOST_PIECE)
        self.before = store.last
        self.pieces: list[Tensor] = []  # those that were taken go back also where there is no room for the next
        for size in [HOST_PIECE] * whole + [rest] * (rest > 0):
            self.pieces.append(store.take(size))

    def parts(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece, and the bytes of `x` that it is for. x: contiguous, of the shape and dtype of what left."""
        yield from zip(self.pieces, x.view(-1).view(torch.uint8).split(HOST_PIECE), strict=True)

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def __del__(self) -> None:
        for piece in self.pieces:
            self.store.give(piece, self.came or self.gone)


class Store:
    """Host memory for one rank's checkpoints. made: bytes of all that it ever took; away: of what is there now."""

    pinned = False

    def __init__(self) -> None:
        self.free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(list)
        self.last: weakref.ref[Packed] | None = None
        self.made = self.away = 0

    def __deepcopy__(self, memo: dict) -> Store:
        return self

    def saving(self) -> contextlib.AbstractContextManager:
        """A context in which tensors that autograd saves leave."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, x: Tensor) -> Packed | Tensor:
        """Parameters, and what holds no numbers of floating point, stay."""
        if isinstance(x, nn.Parameter) or not x.is_floating_point() or x.numel() == 0:
            return x
        packed = Packed(self, x)
        self.leave(packed, x.detach())
        self.last = weakref.ref(packed)
        return packed

    def unpack(self, packed: Packed | Tensor) -> Tensor:
        return self.fetch(packed) if isinstance(packed, Packed) else packed

    def take(self, size: int) -> Tensor:
        if self.free[size]:
            host, used = self.free[size].pop()
            self.wait(used)
        else:
            host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.pinned)
            self.made += size
        self.away += size
        return host

    def give(self, host: Tensor, used: Any) -> None:
        """used: the event after which nobody reads it any more."""
        self.away -= host.numel()
        self.free[host.numel()].append((host, used))

    def leave(self, packed: Packed, x: Tensor) -> None:
        for piece, part in packed.parts(x.contiguous()):
            piece.copy_(part)

    def fetch(self, packed: Packed) -> Tensor:
        found = packed.empty()
        for piece, part in packed.parts(found):
            part.copy_(piece)
        return found

    def wait(self, used: Any) -> None:
        """Until host memory is nobody's."""


class StreamingStore(Store):
    """The same for a CUDA device, whose copies run beside what is computed."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.out, self.home = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.leaving: deque[Any] = deque()

    def wait(self, used: Any) -> None:
        if used is not None:
            self.out.wait_event(used)

    def leave(self, packed: Packed, x: Tensor) -> None:
        here = torch.cuda.current_stream(x.device)
        self.out.wait_stream(here)
        with torch.cuda.stream(self.out):
            for piece, part in packed.parts(x.contiguous()):
                piece.copy_(part, non_blocking=True)
        x.record_stream(self.out)  # its memory is not given to others before the copy has ended
        packed.gone = self.out.record_event()
        self.leaving.append(packed.gone)
        if len(self.leaving) > RING:
            here.wait_event(self.leaving.popleft())

    def fetch(self, packed: Packed) -> Tensor:
        self._start(packed)
        torch.cuda.current_stream(packed.device).wait_event(packed.came)
        found, packed.back = packed.back, None
        if packed.before is not None and (before := packed.before()) is not None:
            self._start(before)
        assert found is not None
        return found

    def _start(self, packed: Packed) -> None:
        if packed.back is not None:
            return
        here = torch.cuda.current_stream(packed.device)
        self.home.wait_event(packed.gone)
        self.home.wait_stream(here)  # what is made now may get memory that `here` still works on
        with torch.cuda.stream(self.home):
            packed.back = packed.empty()
            for piece, part in packed.parts(packed.back):
                part.copy_(piece, non_blocking=True)
        packed.back.record_stream(here)
        packed.came = self.home.record_event()


def store_of(device: torch.device) -> Store:
    return StreamingStore(device) if device.type == "cuda" else Store()
