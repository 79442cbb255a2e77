"""Tensors that were checked, or made, here and need no second look: one at a tensor on a device makes the host wait.

A tensor is trusted as the object that it is, for as long as nobody has written to it.
"""

from __future__ import annotations

from torch import Tensor

MARK = "_ds_seqpar_trusted"


def remember(x: Tensor) -> Tensor:
    """Trusts the tensor from now on. Returns it."""
    if not x.is_inference():  # those do not know whether somebody wrote to them
        setattr(x, MARK, x._version)
    return x


def is_trusted(x: object) -> bool:
    """Whether the tensor was remembered, and is what it was then."""
    return isinstance(x, Tensor) and not x.is_inference() and getattr(x, MARK, None) == x._version


def keep(x: object, moved: object) -> None:
    """What was made of a tensor on its way to a device is as trusted as that."""
    if isinstance(moved, Tensor) and is_trusted(x):
        remember(moved)
