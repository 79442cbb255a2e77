"""Copy tensors to a device without blocking the host, and cache layout-dependent tensors on devices."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .compat import tree_leaves, tree_map

T = TypeVar("T")


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on a device. A copy to an accelerator does not block the host."""
    device = torch.device(device)
    if device.type == "cpu":
        return x.to(device)  # with non_blocking, the host could read the tensor before the copy has finished
    if x.device.type == "cpu" and device.type != "meta" and torch.accelerator.is_available():
        # a copy from unpinned memory may wait for pending work on the device
        x = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x)
    return x.to(device, non_blocking=True)


class DeviceCache:
    """A cache of read-only tensors that depend only on a batch's layout, created once per layout and device."""

    # the cache keeps at most MOST entries; beyond the last FEW, BYTES also limits their total size
    MOST, FEW, BYTES = 64, 8, 2**26

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable, device: torch.device | str, make: Callable[[], T]) -> T:
        """Return the result of `make`, which is a tensor or a tuple that contains tensors, on a device.

        Args:
            key: The key of the result. Equal keys return the same result.
            device: The device of the result.
            make: A function that creates the result if the key is not cached.
        """
        device = torch.device(device)
        # one entry per stream: another stream could read a tensor too early, or free it while it is in use
        stream = torch.cuda.current_stream(device) if device.type == "cuda" and torch.cuda.is_available() else None
        # one atomic step, since data-loading threads also use the cache
        entry = self._kept.pop((key, device, stream), None)
        if entry is None:
            with torch.inference_mode(False):  # autograd cannot save inference tensors
                made = tree_map(lambda x: _kept_on(x, device) if isinstance(x, Tensor) else x, make())
            entry = made, sum(x.nbytes for x in tree_leaves(made) if isinstance(x, Tensor))
        self._kept[key, device, stream] = entry
        while len(self._kept) > self.MOST or (len(self._kept) > self.FEW and self._bytes() > self.BYTES):
            self._kept.popitem(last=False)
        return entry[0]

    def _bytes(self) -> int:
        return sum(size for _, size in list(self._kept.values()))


def _kept_on(x: Tensor, device: torch.device) -> Tensor:
    return to_device(x.clone() if x.is_inference() else x, device)
