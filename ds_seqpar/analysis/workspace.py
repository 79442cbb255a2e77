"""Temporary memory that a kernel allocates during one launch, according to formulas from the kernel's source code."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class LaunchSize(NamedTuple):
    """The size of a launch."""

    batch: int  # multiplied by the groups of the launch
    rows: int
    columns: int
    q_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int  # of q, k and v
    forward: bool

    def of_q(self, rows_of: int, width: int) -> int:
        """Return the number of elements in all q rows, with `width` elements per head.

        The number of rows is rounded up to a multiple of `rows_of`.
        """
        return self.batch * _up(self.rows, rows_of) * self.q_heads * width

    @property
    def expanded(self) -> int:
        """Size in bytes of k and v, or their gradients, repeated for all query heads; 0 without GQA."""
        repeated = self.q_heads != self.kv_heads
        return repeated * 2 * self.batch * self.columns * self.q_heads * self.head_dim * self.itemsize


def flash_2(size: LaunchSize) -> int:
    """Return the workspace of mha_bwd in flash-attention (csrc/flash_attn/flash_api.cpp).

    The function allocates dq and delta in fp32, and dk and dv for all query heads. Additional copies of dq, which
    deterministic algorithms allocate, are not counted.
    """
    if size.forward:
        return 0
    width = _up(size.head_dim, 32 if size.head_dim <= 128 else 64)
    return 4 * size.of_q(128, width + 1) + size.expanded


def flash_3(size: LaunchSize) -> int:
    """Return the workspace of mha_bwd in flash-attention 3 (hopper/flash_api.cpp)."""
    if size.forward:
        return 0
    width = next((width for width in (64, 96, 128, 192) if size.head_dim <= width), 256)
    columns = size.batch * _up(size.columns, 128) * size.kv_heads * (size.q_heads != size.kv_heads)
    return 4 * (size.of_q(128, width + 2) + 2 * columns * width)


def efficient(size: LaunchSize) -> int:
    """Return the workspace of torch's memory-efficient attention (attention_backward.cu, kernel_backward.h).

    The backward pass allocates dq and delta in fp32. Forward and backward expand k and v to all query heads, and
    backward also expands the gradients of k and v.
    """
    accumulated = 0 if size.forward else 4 * size.of_q(64, _up(size.head_dim, 64) + 1)
    return accumulated + size.expanded * (1 if size.forward else 2)


# workspace by kernel; other kernels have no workspace, or a workspace of unknown size
WORKSPACES: dict[str, Callable[[LaunchSize], int]] = {
    "flash_attn": flash_2,
    "flash_attn_3": flash_3,
    "cuda_flash": flash_2,
    "cuda_efficient": efficient,
}


def planned_kernel(name: str, dtype: str, head_dim: int, on_gpu: bool) -> str:
    """Return the kernel whose workspace is counted in plans. For "auto", this is the most likely choice."""
    if name != "auto" or not on_gpu:
        return name
    return "cuda_flash" if "float16" in dtype and head_dim <= 256 else "cuda_efficient"


def _up(number: int, block: int) -> int:
    return -(-number // block) * block
