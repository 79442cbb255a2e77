"""Register the Triton kernels of `triton_ops`. Without Triton, GPUs compute the same results in several operations."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..base.log import log_once
from ..core.runtime.kernels import accumulate


def ops(x: Tensor) -> Any:
    """Return the namespace of the ops if the ops support x (CUDA, not fp64), otherwise None.

    The ops compute in fp32.
    """
    if not x.is_cuda or x.dtype == torch.float64:
        return None
    if why := missing():
        log_once(f"partial results are merged in several operations each, which takes longer than in one: {why}")
        return None
    return torch.ops.ds_seqpar


@functools.cache
def missing() -> str:
    """Return the reason why Triton kernels are unavailable in this process, or "" if they are available.

    Before the first launch, Triton compiles a Python extension with the machine's C compiler, which may be missing.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "they need a GPU of compute capability 8.0 (Ampere) or later"
    try:
        from triton.runtime import driver

        from . import triton_ops  # noqa: F401, which defines the ops

        if torch.cuda.is_available():
            driver.active.get_current_target()
    except Exception as error:
        return f"Triton cannot be used, {type(error).__name__}: {error}"
    return ""


accumulate.FUSED.append(ops)
