"""Tensors that were made here and need no second look: one at a tensor on a device makes the host wait for the device.

A tensor is trusted as the object that it is, by who made it, for as long as nobody has written to it.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_known = WeakTensorKeyDictionary()  # tensor -> (who made it, by weak reference; its version then)


def remember(x: Tensor, maker: Any) -> Tensor:
    """Trusts the tensor from now on. Returns it."""
    if not x.is_inference():  # those do not know whether somebody wrote to them
        _known[x] = weakref.ref(maker), x._version
    return x


def is_trusted(x: object, maker: Any) -> bool:
    """Whether `maker` made the tensor, and it is what it was then."""
    if maker is None or not isinstance(x, Tensor) or x not in _known:
        return False
    owner, version = _known[x]
    return owner() is maker and version == x._version


def is_known(x: object) -> bool:
    """Whether anybody made the tensor, and it is what it was then."""
    owner = _known[x][0]() if isinstance(x, Tensor) and x in _known else None
    return is_trusted(x, owner)


def keep(x: object, moved: object) -> None:
    """What was made of a tensor on its way to a device is as trusted as that."""
    if is_known(x) and isinstance(moved, Tensor):
        remember(moved, _known[x][0]())
