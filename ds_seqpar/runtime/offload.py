"""Checkpoints in host memory. The tensors that they save are copied out while the next layers are computed, and copied
in again before backward asks for them.

On CUDA each of the two ways has a stream. At most `PENDING_COPIES` tensors wait on the device for their copies to end,
and one is copied in ahead of the one that is used. Host memory is pinned, and used again step after step. It is taken
in pieces, since torch rounds pinned memory up to a power of two. On CPUs the same code copies into the same kind of
pool, without streams. It saves nothing there, and shows that what comes back is what was saved.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..config.settings import HOST_PIECE

PENDING_COPIES = 2


class HostTensor:
    """A tensor in pieces of host memory, which go back to the store's pool with it.

    previous: the one that was copied out before it. copied_out, copied_in: events at the end of its copies. on_device:
    its tensor, from the start of the copy in until somebody takes it."""

    copied_out: Any = None
    copied_in: Any = None
    on_device: Tensor | None = None

    def __init__(self, store: Store, x: Tensor) -> None:
        self.store, self.device, self.shape, self.dtype = store, x.device, x.shape, x.dtype
        whole, rest = divmod(x.numel() * x.element_size(), HOST_PIECE)
        self.previous = store.last
        self.pieces: list[Tensor] = []  # those allocated go back to the pool even where the next allocation fails
        for size in [HOST_PIECE] * whole + [rest] * (rest > 0):
            self.pieces.append(store.allocate(size))

    def parts(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece, and the bytes of `x` that it is for. x: contiguous, of this tensor's shape and dtype."""
        yield from zip(self.pieces, x.view(-1).view(torch.uint8).split(HOST_PIECE), strict=True)

    def empty(self) -> Tensor:
        """Uninitialised memory for it on its device."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def __del__(self) -> None:
        for piece in self.pieces:
            self.store.release(piece, self.copied_in or self.copied_out)


class Store:
    """Host memory for one rank's checkpoints. bytes_allocated: all that it ever took from the host. bytes_in_use: those
    that hold a tensor now. free: the others' pieces by size, each with the event after which it may be written."""

    pinned = False

    def __init__(self) -> None:
        self.free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(list)
        self.last: weakref.ref[HostTensor] | None = None
        self.bytes_allocated = self.bytes_in_use = 0

    def __deepcopy__(self, memo: dict) -> Store:
        return self

    def saving(self) -> contextlib.AbstractContextManager:
        """A context in which tensors that autograd saves go to host memory."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, x: Tensor) -> HostTensor | Tensor:
        """A copy of x in host memory. Parameters, empty tensors and those of integers are returned as they are."""
        if isinstance(x, nn.Parameter) or not x.is_floating_point() or x.numel() == 0:
            return x
        packed = HostTensor(self, x)
        self.copy_out(packed, x.detach())
        self.last = weakref.ref(packed)
        return packed

    def unpack(self, packed: HostTensor | Tensor) -> Tensor:
        """The inverse of `pack`: a tensor on x's device."""
        return self.copy_in(packed) if isinstance(packed, HostTensor) else packed

    def allocate(self, size: int) -> Tensor:
        """So many bytes of host memory, from the pool if it has a piece of that size."""
        if self.free[size]:
            piece, unused = self.free[size].pop()
            self.wait(unused)
        else:
            piece = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.pinned)
            self.bytes_allocated += size
        self.bytes_in_use += size
        return piece

    def release(self, piece: Tensor, unused: Any) -> None:
        """Gives a piece back to the pool. unused: the event after which nobody reads or writes it any more."""
        self.bytes_in_use -= piece.numel()
        self.free[piece.numel()].append((piece, unused))

    def copy_out(self, packed: HostTensor, x: Tensor) -> None:
        for piece, part in packed.parts(x.contiguous()):
            piece.copy_(part)

    def copy_in(self, packed: HostTensor) -> Tensor:
        x = packed.empty()
        for piece, part in packed.parts(x):
            part.copy_(piece)
        return x

    def wait(self, event: Any) -> None:
        """Has the next copy out wait for an event."""


class StreamingStore(Store):
    """The same for a CUDA device: its copies run beside what is computed, each way on a stream of its own."""

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
            for piece, part in packed.parts(x.contiguous()):
                piece.copy_(part, non_blocking=True)
        x.record_stream(self.to_host)  # its memory is not given to others before the copy has ended
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
        x.record_stream(compute)  # its memory is not given to the next copy in before `compute` has used it
        return x

    def _start_copy_in(self, packed: HostTensor) -> None:
        """Starts the copy, unless it was started ahead. It does not wait for what the compute stream has yet to do.

        That needs no wait, since the copy writes to memory of the `to_device` stream. torch's caching allocator has a
        pool of memory for each stream. A tensor's memory goes back to the pool of the stream that was current when it
        was made. If `record_stream` has named another stream, it goes back only after an event of that stream, which is
        recorded when the tensor is freed. So whatever the allocator returns here, no other stream still uses."""
        if packed.on_device is not None:
            return
        self.to_device.wait_event(packed.copied_out)
        with torch.cuda.stream(self.to_device):
            packed.on_device = packed.empty()
            for piece, part in packed.parts(packed.on_device):
                part.copy_(piece, non_blocking=True)
        packed.copied_in = self.to_device.record_event()


def store_of(device: torch.device) -> Store:
    """A store for checkpoints of tensors on the device."""
    return StreamingStore(device) if device.type == "cuda" else Store()
