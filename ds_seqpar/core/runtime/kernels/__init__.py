"""The attention kernels. `select` returns a kernel by name, or the first kernel that supports a block."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ....base.errors import ConfigError, KernelError, check_choice
from ....base.seams import load
from ...compiler.tiles import launches
from ...compiler.tiles.launches import KernelSupport
from .reference import BlockSpec, Chunked, Kernel, Reference, Scores, can_cap, is_deterministic

# in the order in which "auto" tries them
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (Chunked(), Reference())}
# functions (kernel, spec) that return why the kernel selected by "auto" is slow and what to install, or ""
SLOW: list[Callable[[Kernel, BlockSpec], str]] = []


def register(kernel: Kernel) -> None:
    """Register a kernel so that configurations can select it by name. "auto" tries the added kernel last.

    Call this function on every rank before creating any configuration.

    Args:
        kernel: An object that implements the `Kernel` protocol.

    Raises:
        ConfigError: The name is taken.
    """
    if kernel.name in launches.KERNELS:
        raise ConfigError(f"a kernel needs a name of its own; got {kernel.name}, rename it")
    KERNELS[kernel.name] = kernel
    launches.KERNELS.append(kernel.name)
    select.cache_clear()


def register_first(*kernels: Kernel) -> None:
    """Add kernels that "auto" tries first, in this order.

    The names of the added kernels must already be in `launches.KERNELS`.
    """
    others = dict(KERNELS)
    KERNELS.clear()
    KERNELS.update({kernel.name: kernel for kernel in kernels} | others)


def remove(name: str) -> None:
    """Remove a kernel. Raise ConfigError if no kernel has this name."""
    check_choice("a kernel that is removed", name, KERNELS)
    del KERNELS[name]
    launches.KERNELS.remove(name)
    select.cache_clear()


@functools.lru_cache(maxsize=64)
def select(name: str, spec: BlockSpec, deterministic: bool | None = None) -> Kernel:
    """Return the kernel with this name, with the spec's softcap applied. For "auto", return the first kernel that
    supports the spec.

    Args:
        name: A kernel's name, or "auto".
        spec: The blocks that the kernel must support.
        deterministic: The value of `is_deterministic()`. Kernels check `is_deterministic()` themselves; the argument
            only makes the value part of the cache key.

    Raises:
        KernelError: No kernel supports the spec. For every kernel that was tried, the message lists the reasons.
    """
    names = [name] if name != "auto" else candidates(spec)
    reasons = {kernel: _reasons(KERNELS[kernel], spec) for kernel in names}
    for candidate, objections in reasons.items():
        if not objections:
            kernel = KERNELS[candidate]
            return kernel.capped(spec.softcap) if spec.softcap and can_cap(kernel) else kernel
    sentence = "; ".join(f"{candidate} {' and '.join(objections)}" for candidate, objections in reasons.items())
    slow = "chunked" not in reasons and not _reasons(KERNELS["chunked"], spec)
    advice = ', or name "kernel": "chunked", which takes it slowly' if name == "auto" and slow else ""
    raise KernelError(f"no attention kernel takes {spec}: {sentence}{advice}")


def available(device: str) -> tuple[str, ...]:
    """Return the names of the kernels that this rank can run on this device type.

    The result may differ between ranks with different installed packages or GPUs.
    """
    specs = [BlockSpec(device, dtype, 1, 1, 64) for dtype in (torch.bfloat16, torch.float32)]
    return tuple(name for name, kernel in KERNELS.items() if not all(kernel.reasons(spec) for spec in specs))


def candidates(spec: BlockSpec) -> list[str]:
    """Return the names of the kernels that "auto" tries.

    On GPUs, slow kernels must be requested by name. The dense score matrix of "reference", for example, would use up
    the memory that sequence parallelism saves. On GPUs, "auto" tries "chunked" only for a softcap, which few kernels
    support.
    """
    slow = {"reference", "chunked"} - ({"chunked"} if spec.softcap else set())
    return [name for name in KERNELS if spec.device == "cpu" or name not in slow]


def slowness(kernel: Kernel, spec: BlockSpec) -> str:
    """Explain why the kernel selected by "auto" is slow for the spec and what to install, or return "" if it is not
    slow.
    """
    return next(filter(None, (slow(kernel, spec) for slow in SLOW)), "")


def _reasons(kernel: Kernel, spec: BlockSpec) -> list[str]:
    return kernel.reasons(spec) + ["cannot cap scores"] * (spec.softcap > 0 and not can_cap(kernel))


__all__ = [
    "KERNELS",
    "BlockSpec",
    "Kernel",
    "KernelSupport",
    "Scores",
    "available",
    "candidates",
    "is_deterministic",
    "register",
    "remove",
    "select",
    "slowness",
]

load("kernels")
