"""Kernels outside the core. Each module registers its kernels in `runtime.kernels`."""

from . import flash, fused

__all__ = ["flash", "fused"]
