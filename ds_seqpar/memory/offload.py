"""Checkpoints in host memory: saved tensors are copied out while the next layers are computed, and copied back before
backward.

On CUDA each direction has a stream. At most `PENDING_COPIES` tensors are kept on the device until their copies end, and
one tensor is copied in ahead of the one in use. Host memory is pinned and reused in every step. It is allocated in
pieces, since torch rounds pinned memory up to a power of two. On CPUs the same code copies into the same kind of pool,
without streams. This does not save memory, but it tests that the tensors copied back equal the saved ones.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.settings import HOST_PIECE

PENDING_COPIES = 2


class HostTensor:
    """A tensor in pieces of host memory, which return to the store's pool when it is deleted."""

    copied_out: Any = None  # event at the end of its copy out
    copied_in: Any = None  # event at the end of its copy in
    on_device: Tensor | None = None  # its tensor, from the start of the copy in until it is used

    def __init__(self, store: Store, x: Tensor) -> None:
        self.store, self.device, self.shape, self.dtype = store, x.device, x.shape, x.dtype
        full_pieces, remainder = divmod(x.numel() * x.element_size(), HOST_PIECE)
        self.previous = store.last  # the one that was copied out before it
        self.pieces: list[Tensor] = []  # those allocated go back to the pool even where the next allocation fails
        for size in [HOST_PIECE] * full_pieces + [remainder] * (remainder > 0):
            self.pieces.append(store.allocate(size))

    def parts(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each piece with the bytes of `x` that it holds. x: contiguous, of this tensor's shape and dtype."""
        yield from zip(self.pieces, x.view(-1).view(torch.uint8).split(HOST_PIECE), strict=True)

    def empty(self) -> Tensor:
        """Return an uninitialized tensor of the same form on its device."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def __del__(self) -> None:
        for piece in self.pieces:
            self.store.release(piece, self.copied_in or self.copied_out)


class Store:
    """Host memory for one rank's checkpoints."""

    pinned = False

    def __init__(self) -> None:
        # pieces that hold no tensor, by size in bytes, each with the event after which it may be written
        self.free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(list)
        self.last: weakref.ref[HostTensor] | None = None
        self.bytes_allocated = self.bytes_in_use = 0  # ever taken from the host; those that hold a tensor now

    def __deepcopy__(self, memo: dict) -> Store:
        return self

    def saving(self) -> contextlib.AbstractContextManager:
        """Return a context in which tensors that autograd saves are copied to host memory."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, x: Tensor) -> HostTensor | Tensor:
        """Return a copy of x in host memory. Parameters, empty tensors and integer tensors are returned as they are."""
        if isinstance(x, nn.Parameter) or not x.is_floating_point() or x.numel() == 0:
            return x
        packed = HostTensor(self, x)
        self.copy_out(packed, x.detach())
        self.last = weakref.ref(packed)
        return packed

    def unpack(self, packed: HostTensor | Tensor) -> Tensor:
        """Return the packed tensor on its device: the inverse of `pack`."""
        return self.copy_in(packed) if isinstance(packed, HostTensor) else packed

    def allocate(self, size: int) -> Tensor:
        """Return `size` bytes of host memory, from the pool if it has a piece of that size."""
        if self.free[size]:
            piece, unused = self.free[size].pop()
            self.wait(unused)
        else:
            piece = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.pinned)
            self.bytes_allocated += size
        self.bytes_in_use += size
        return piece

    def release(self, piece: Tensor, unused: Any) -> None:
        """Return a piece to the pool. unused: the event after which nothing reads or writes it."""
        self.bytes_in_use -= piece.numel()
        self.free[piece.numel()].append((piece, unused))

    def copy_out(self, packed: HostTensor, x: Tensor) -> None:
        for piece, content in packed.parts(x.contiguous()):
            piece.copy_(content)

    def copy_in(self, packed: HostTensor) -> Tensor:
        x = packed.empty()
        for piece, content in packed.parts(x):
            content.copy_(piece)
        return x

    def wait(self, event: Any) -> None:
        """Make the next copy out wait for an event."""


class StreamingStore(Store):
    """A store for a CUDA device: its copies run in parallel with computation, each direction on its own stream."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.to_host, self.to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.pending: deque[Any] = deque()  # events at the ends of copies out

    def wait(self, event: Any) -> None:
        if event is not None:
            self.to_host.wait_event(event)

    def copy_out(self, packed: HostTensor, x: Tensor) -> None:
        compute = torch.cuda.current_stream(x.device)
        self.to_host.wait_stream(compute)
        with torch.cuda.stream(self.to_host):
            for piece, content in packed.parts(x.contiguous()):
                piece.copy_(content, non_blocking=True)
        x.record_stream(self.to_host)  # its memory is not reused before the copy has ended
        packed.copied_out = self.to_host.record_event()
        self.pending.append(packed.copied_out)
        if len(self.pending) > PENDING_COPIES:
            compute.wait_event(self.pending.popleft())

    def copy_in(self, packed: HostTensor) -> Tensor:
        self._start_copy_in(packed)
        compute = torch.cuda.current_stream(packed.device)
        compute.wait_event(packed.copied_in)
        x, packed.on_device = packed.on_device, None
        if packed.previous is not None and (previous := packed.previous()) is not None:
            self._start_copy_in(previous)
        assert x is not None
        x.record_stream(compute)  # its memory is not reused by the next copy in before `compute` has used it
        return x

    def _start_copy_in(self, packed: HostTensor) -> None:
        """Start the copy, unless it was started ahead. It does not wait for pending work on the compute stream.

        No wait is needed, since the copy writes to memory of the `to_device` stream. torch's caching allocator has a
        pool of memory for each stream. A tensor's memory returns to the pool of the stream that was current when the
        tensor was made. If `record_stream` has named another stream, the memory returns only after an event of that
        stream, which is recorded when the tensor is freed. So no other stream still uses the memory that the allocator
        returns here.
        """
        if packed.on_device is not None:
            return
        self.to_device.wait_event(packed.copied_out)
        with torch.cuda.stream(self.to_device):
            packed.on_device = packed.empty()
            for piece, content in packed.parts(packed.on_device):
                content.copy_(piece, non_blocking=True)
        packed.copied_in = self.to_device.record_event()


def store_of(device: torch.device) -> Store:
    """Return a store for checkpoints of tensors on the device."""
    return StreamingStore(device) if device.type == "cuda" else Store()
