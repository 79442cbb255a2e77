"""The memory that a kernel allocates in one launch and frees before it returns, by the formulas of its source."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class LaunchSize(NamedTuple):
    """The size of a launch."""

    batch: int  # with the groups of the launch
    rows: int
    columns: int
    q_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int  # of q, k and v
    forward: bool

    def of_q(self, rows_of: int, width: int) -> int:
        """Return the numbers of a row of all query heads, `width` a head, for rows that fill blocks of `rows_of`."""
        return self.batch * _up(self.rows, rows_of) * self.q_heads * width

    @property
    def expanded(self) -> int:
        """Bytes of k and v, or of their gradients, for all query heads; 0 if there are as many key/value heads."""
        repeated = self.q_heads != self.kv_heads
        return repeated * 2 * self.batch * self.columns * self.q_heads * self.head_dim * self.itemsize


def flash_2(size: LaunchSize) -> int:
    """csrc/flash_attn/flash_api.cpp of flash-attention, mha_bwd: dq and delta in fp32, dk and dv of all query heads.
    With deterministic algorithms there are several dq, which is not counted."""
    if size.forward:
        return 0
    width = _up(size.head_dim, 32 if size.head_dim <= 128 else 64)
    return 4 * size.of_q(128, width + 1) + size.expanded


def flash_3(size: LaunchSize) -> int:
    """hopper/flash_api.cpp, mha_bwd: dq, delta and lse in fp32, and with GQA dk and dv in fp32."""
    if size.forward:
        return 0
    width = next((width for width in (64, 96, 128, 192) if size.head_dim <= width), 256)
    columns = size.batch * _up(size.columns, 128) * size.kv_heads * (size.q_heads != size.kv_heads)
    return 4 * (size.of_q(128, width + 2) + 2 * columns * width)


def efficient(size: LaunchSize) -> int:
    """attention_backward.cu and kernel_backward.h of torch: dq and delta in fp32; k and v of all query heads, and in
    backward their gradients."""
    accumulated = 0 if size.forward else 4 * size.of_q(64, _up(size.head_dim, 64) + 1)
    return accumulated + size.expanded * (1 if size.forward else 2)


# kernel -> its workspace; of those that are not here nothing is known, or there is none
WORKSPACES: dict[str, Callable[[LaunchSize], int]] = {
    "flash_attn": flash_2,
    "flash_attn_3": flash_3,
    "cuda_flash": flash_2,
    "cuda_efficient": efficient,
}


def planned_kernel(name: str, dtype: str, head_dim: int, on_gpu: bool) -> str:
    """Return the kernel whose workspace a plan counts: the one that is named, else the one that "auto" most likely
    takes."""
    if name != "auto" or not on_gpu:
        return name
    return "cuda_flash" if "float16" in dtype and head_dim <= 256 else "cuda_efficient"


def _up(number: int, block: int) -> int:
    return -(-number // block) * block
