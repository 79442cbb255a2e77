"""Copy tensors to a device without making the host wait, and cache tensors that depend on a layout there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .compat import tree_leaves, tree_map

T = TypeVar("T")


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on a device. If that is an accelerator, the host does not wait for the copy."""
    device = torch.device(device)
    if device.type == "cpu":
        return x.to(device)  # with non_blocking the host could read it before the device has written it
    if x.device.type == "cpu" and device.type != "meta" and torch.accelerator.is_available():
        # a copy from other memory may wait for what the device has still to do
        x = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x)
    return x.to(device, non_blocking=True)


class DeviceCache:
    """Tensors that depend only on a batch's layout, made and copied to a device once for each layout. Do not write to
    them.
    """

    MOST, FEW, BYTES = 64, 8, 2**26  # so many are kept; beyond the few last ones, only while all have at most the bytes

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable, device: torch.device | str, make: Callable[[], T]) -> T:
        """Return the result of `make`, a tensor or a tuple with tensors, on a device.

        Args:
            key: identifies the result; equal keys return the same result.
            device: where the result is needed.
            make: called for a key that is not cached.
        """
        device = torch.device(device)
        # what one stream has made, another one might read too early, or give to others while it is still read
        stream = torch.cuda.current_stream(device) if device.type == "cuda" and torch.cuda.is_available() else None
        entry = self._kept.pop((key, device, stream), None)  # in one step: threads that load data may shard it too
        if entry is None:
            with torch.inference_mode(False):  # else autograd could not save it
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
