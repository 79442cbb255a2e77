"""Tensors whose values this package made, so that nobody needs to read them again: to read a tensor on a device, the
host must wait for the device.

A tensor is trusted together with its maker, as long as nobody has written to it.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..compat import tensor_version

_makers = WeakTensorKeyDictionary()  # tensor -> (a weak reference to its maker, its version then)


def trust(x: Tensor, maker: Any) -> Tensor:
    """Trusts the tensor from now on. Returns it."""
    if not x.is_inference():  # those have no version, by which a later write is noticed
        _makers[x] = weakref.ref(maker), tensor_version(x)
    return x


def is_trusted(x: object, maker: Any) -> bool:
    """Whether `maker` made the tensor, and nobody has written to it since."""
    if maker is None or not isinstance(x, Tensor) or x not in _makers:
        return False
    owner, version = _makers[x]
    return owner() is maker and version == tensor_version(x)


def is_trusted_of_any(x: object) -> bool:
    """Whether any maker made the tensor, and nobody has written to it since."""
    owner = _makers[x][0]() if isinstance(x, Tensor) and x in _makers else None
    return is_trusted(x, owner)


def trust_copy(x: object, copy: object) -> None:
    """Trusts a copy of a tensor, as on a device, if the tensor is trusted."""
    if is_trusted_of_any(x) and isinstance(copy, Tensor):
        trust(copy, _makers[x][0]())
