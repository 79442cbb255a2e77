"""Block kernels, the preferred first. `select` takes the first that can, or raises with every kernel's reasons."""

from __future__ import annotations

import functools

import torch

from ...compiler import cuts
from ...compiler.cuts import Takes
from ...errors import ConfigError, KernelError, choose
from .flash import CpuFlash, CudaFlash, FlashAttn
from .reference import BlockSpec, Chunked, Kernel, Reference, Scores, caps

KERNELS: dict[str, Kernel] = {k.name: k for k in (FlashAttn(), CudaFlash(), CpuFlash(), Chunked(), Reference())}


def register(kernel: Kernel) -> None:
    """From now on the kernel can be chosen by its name, on this rank: do it on every one, before any configuration is
    made. Raises ConfigError where the name is taken."""
    if kernel.name in cuts.KERNELS:
        raise ConfigError(f"a kernel needs a name of its own; got {kernel.name}, rename it")
    KERNELS[kernel.name] = kernel
    cuts.KERNELS.append(kernel.name)
    select.cache_clear()


def remove(name: str) -> None:
    """Takes a kernel off again. Raises ConfigError where there is none of this name."""
    choose("a kernel that is removed", name, KERNELS)
    del KERNELS[name]
    cuts.KERNELS.remove(name)
    select.cache_clear()


@functools.lru_cache(maxsize=64)
def select(name: str, spec: BlockSpec) -> Kernel:
    """The kernel of that name, or for "auto" the first without a reason against it; with the softcap of the spec.

    Raises KernelError with the reasons of every kernel that was asked.
    """
    reasons = {kernel: _reasons(KERNELS[kernel], spec) for kernel in ([name] if name != "auto" else _candidates(spec))}
    for candidate, against in reasons.items():
        if not against:
            kernel = KERNELS[candidate]
            return kernel.capped(spec.softcap) if spec.softcap and caps(kernel) else kernel
    words = "; ".join(f"{candidate} {' and '.join(against)}" for candidate, against in reasons.items())
    advice = ', train in bf16: "bf16": {"enabled": true} in the DeepSpeed JSON' if _is_wide(spec) else ""
    raise KernelError(f"no attention kernel takes {spec}: {words}{advice}")


def _is_wide(spec: BlockSpec) -> bool:
    return spec.device == "cuda" and spec.dtype in (torch.float32, torch.float64)


def _candidates(spec: BlockSpec) -> list[str]:
    """On a GPU "reference" is for who names it: its dense score matrix would end the memory that sequence parallelism
    is there to save. "chunked" is there for what nothing else does, and not in silence where a fast kernel is missing.
    """
    slow = {"reference", "chunked"} - ({"chunked"} if spec.softcap else set())
    return [name for name in KERNELS if spec.device == "cpu" or name not in slow]


def _reasons(kernel: Kernel, spec: BlockSpec) -> list[str]:
    return kernel.reasons(spec) + ["cannot cap scores"] * (spec.softcap > 0 and not caps(kernel))


__all__ = ["KERNELS", "BlockSpec", "Kernel", "Scores", "Takes", "register", "remove", "select"]
