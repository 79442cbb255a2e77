"""Kernels that are not part of the core. Each module registers its own at `runtime.kernels`."""

from . import flash, fused

__all__ = ["flash", "fused"]
