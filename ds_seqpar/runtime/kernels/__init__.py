"""Block kernels, the preferred first. `select` takes the first that can, or raises with every kernel's reasons."""

from __future__ import annotations

import functools

import torch

from ...compiler import cuts
from ...compiler.cuts import Takes
from ...errors import ConfigError, KernelError, check_choice
from .flash import CpuFlash, CudaEfficient, CudaFlash, Cudnn, FlashAttn
from .reference import BlockSpec, Chunked, Kernel, Reference, Scores, caps, is_deterministic

# the rule of "auto": fast ones for GPUs, of which memory-efficient attention takes what flash does not; then the CPU's
ORDER: tuple[Kernel, ...] = (FlashAttn(), CudaFlash(), Cudnn(), CudaEfficient(), CpuFlash(), Chunked(), Reference())
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in ORDER}


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
    check_choice("a kernel that is removed", name, KERNELS)
    del KERNELS[name]
    cuts.KERNELS.remove(name)
    select.cache_clear()


@functools.lru_cache(maxsize=64)
def select(name: str, spec: BlockSpec, measured: tuple[str, ...] = (), deterministic: bool | None = None) -> Kernel:
    """The kernel of that name, or for "auto" the first without a reason against it; with the softcap of the spec.
    measured: names, the fastest first, that go before the others of "auto". deterministic: `is_deterministic()`, by
    which what was chosen is kept, since reasons ask it too.

    Raises KernelError with the reasons of every kernel that was asked.
    """
    possible = candidates(spec)
    names = [name] if name != "auto" else dict.fromkeys([*(x for x in measured if x in possible), *possible])
    reasons = {kernel: _reasons(KERNELS[kernel], spec) for kernel in names}
    for candidate, against in reasons.items():
        if not against:
            kernel = KERNELS[candidate]
            return kernel.capped(spec.softcap) if spec.softcap and caps(kernel) else kernel
    words = "; ".join(f"{candidate} {' and '.join(against)}" for candidate, against in reasons.items())
    slow = "chunked" not in reasons and not _reasons(KERNELS["chunked"], spec)
    advice = ', or name "kernel": "chunked", which takes it slowly' if name == "auto" and slow else ""
    raise KernelError(f"no attention kernel takes {spec}: {words}{advice}")


def here(device: str) -> tuple[str, ...]:
    """The kernels that this rank has for such a device. Ranks may differ in what is installed, and in their GPUs."""
    common = [BlockSpec(device, dtype, 1, 1, 64) for dtype in (torch.bfloat16, torch.float32)]
    return tuple(name for name, kernel in KERNELS.items() if not all(kernel.reasons(spec) for spec in common))


def candidates(spec: BlockSpec) -> list[str]:
    """Those of "auto": without a GPU's slow ones, which are for who names them. The dense score matrix of "reference"
    would end the memory that sequence parallelism is there to save. "chunked" is there for a softcap, which few kernels
    know."""
    slow = {"reference", "chunked"} - ({"chunked"} if spec.softcap else set())
    return [name for name in KERNELS if spec.device == "cpu" or name not in slow]


def _reasons(kernel: Kernel, spec: BlockSpec) -> list[str]:
    return kernel.reasons(spec) + ["cannot cap scores"] * (spec.softcap > 0 and not caps(kernel))


__all__ = [
    "KERNELS",
    "BlockSpec",
    "Kernel",
    "Scores",
    "Takes",
    "candidates",
    "here",
    "is_deterministic",
    "register",
    "remove",
    "select",
]
