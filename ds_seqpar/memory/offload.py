"""Checkpoints in host memory. Saved tensors are copied to the host while later layers run, and copied back in backward.

On CUDA, copies in each direction have their own stream. At most `PENDING_COPIES` tensors stay on the device until their
copies finish, and one tensor is prefetched ahead of the tensor in use. Host memory is pinned and reused in every step.
Host memory is allocated in pieces, since torch rounds pinned allocations up to powers of two. On CPUs, tensors are
copied into a similar pool without streams. These copies save no memory, but let tests check that restored tensors equal
the saved tensors.
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
    """A tensor stored in pieces of host memory. Deleting the HostTensor returns the pieces to the store's pool."""

    copied_out: Any = None  # event at the end of the copy to the host
    copied_in: Any = None  # event at the end of the copy to the device
    on_device: Tensor | None = None  # the tensor, from the start of the copy to the device until it is used

    def __init__(self, store: Store, x: Tensor) -> None:
        self.store, self.device, self.shape, self.dtype = store, x.device, x.shape, x.dtype
        full_pieces, remainder = divmod(x.numel() * x.element_size(), HOST_PIECE)
        self.previous = store.last  # the tensor copied to the host before this one
        self.pieces: list[Tensor] = []  # filled one by one, so that earlier pieces are freed if an allocation fails
        for size in [HOST_PIECE] * full_pieces + [remainder] * (remainder > 0):
            self.pieces.append(store.allocate(size))

    def parts(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (piece, the bytes of `x` for the piece).

        `x` is contiguous, with the shape and dtype of the HostTensor.
        """
        yield from zip(self.pieces, x.view(-1).view(torch.uint8).split(HOST_PIECE), strict=True)

    def empty(self) -> Tensor:
        """Return an uninitialized tensor with the same shape, dtype and device."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def __del__(self) -> None:
        for piece in self.pieces:
            self.store.release(piece, self.copied_in or self.copied_out)


class Store:
    """The host memory for one rank's checkpoints."""

    pinned = False

    def __init__(self) -> None:
        # by size in bytes: (unused piece, event after which the piece may be written)
        self.free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(list)
        self.last: weakref.ref[HostTensor] | None = None
        self.bytes_allocated = self.bytes_in_use = 0  # allocated in total, and currently used by tensors

    def __deepcopy__(self, memo: dict) -> Store:
        return self

    def saving(self) -> contextlib.AbstractContextManager:
        """Return a context in which tensors saved by autograd are copied to host memory."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, x: Tensor) -> HostTensor | Tensor:
        """Return a copy of x in host memory. Parameters, empty tensors and integer tensors are returned unchanged."""
        if isinstance(x, nn.Parameter) or not x.is_floating_point() or x.numel() == 0:
            return x
        packed = HostTensor(self, x)
        self.copy_out(packed, x.detach())
        self.last = weakref.ref(packed)
        return packed

    def unpack(self, packed: HostTensor | Tensor) -> Tensor:
        """Return the packed tensor on its device. The inverse of `pack`."""
        return self.copy_in(packed) if isinstance(packed, HostTensor) else packed

    def allocate(self, size: int) -> Tensor:
        """Return `size` bytes of host memory, from the pool if the pool contains a piece of that size."""
        if self.free[size]:
            piece, unused = self.free[size].pop()
            self.wait(unused)
        else:
            piece = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.pinned)
            self.bytes_allocated += size
        self.bytes_in_use += size
        return piece

    def release(self, piece: Tensor, unused: Any) -> None:
        """Return a piece to the pool. `unused` is the event after which the piece is no longer read or written."""
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
        """Make the next copy to the host wait for an event."""


class StreamingStore(Store):
    """A store for a CUDA device. Copies overlap with computation, on a separate stream for each direction."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.to_host, self.to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.pending: deque[Any] = deque()  # events at the ends of copies to the host

    def wait(self, event: Any) -> None:
        if event is not None:
            self.to_host.wait_event(event)

    def copy_out(self, packed: HostTensor, x: Tensor) -> None:
        compute = torch.cuda.current_stream(x.device)
        self.to_host.wait_stream(compute)
        with torch.cuda.stream(self.to_host):
            for piece, content in packed.parts(x.contiguous()):
                piece.copy_(content, non_blocking=True)
        x.record_stream(self.to_host)  # prevents reuse of the memory before the copy has finished
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
        x.record_stream(compute)  # prevents the next copy from reusing the memory before `compute` has finished
        return x

    def _start_copy_in(self, packed: HostTensor) -> None:
        """Start copying to the device unless already started, without waiting for pending work on the compute stream.

        No wait is needed, since the copy writes to memory of the `to_device` stream. torch's caching allocator has a
        memory pool per stream. A tensor's memory returns to the pool of the stream that was current when the tensor was
        created. If `record_stream` was called with another stream, the memory returns only after an event that is
        recorded on that stream when the tensor is freed. Memory that the allocator returns for the copy is therefore
        not in use by another stream.
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
    """Return a store for checkpointed tensors on the device."""
    return StreamingStore(device) if device.type == "cuda" else Store()
