"""Block kernels, the preferred first. `select` takes the first that can, or raises with every kernel's reasons."""

from __future__ import annotations

import functools

from ...errors import KernelError
from .base import BlockSpec, Kernel
from .cpu_flash import CpuFlash
from .cuda_flash import CudaFlash, FlashAttn
from .reference import Reference

KERNELS: dict[str, Kernel] = {k.name: k for k in (FlashAttn(), CudaFlash(), CpuFlash(), Reference())}


@functools.lru_cache(maxsize=64)
def select(name: str, spec: BlockSpec) -> Kernel:
    """The kernel of that name, or for "auto" the first without a reason against it; "reference" only by name on a GPU,
    where its dense score matrix would end the memory that sequence parallelism is there to save.

    Raises KernelError with the reasons of every kernel that was asked.
    """
    asked = [name] if name != "auto" else [k for k in KERNELS if k != "reference" or spec.device == "cpu"]
    reasons = {kernel: KERNELS[kernel].reasons(spec) for kernel in asked}
    for kernel, against in reasons.items():
        if not against:
            return KERNELS[kernel]
    words = "; ".join(f"{kernel} {' and '.join(against)}" for kernel, against in reasons.items())
    raise KernelError(f"no attention kernel takes {spec}: {words}")


__all__ = ["KERNELS", "BlockSpec", "Kernel", "select"]
