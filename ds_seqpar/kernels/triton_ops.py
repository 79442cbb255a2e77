"""Triton kernels for GPUs that merge online softmax results, compute delta, and compute the output that replaces delta.

Each kernel runs in one launch and computes the function of the same name (`accumulate.merge_`, `dense.rowsum`,
`dense.out_with_rowsum`) in fp32 without temporary memory. The kernels are registered as ops so that fake tensors can be
traced through them. Tensors may have any strides, with the shape (B, n, H, D), or (B, groups, n, H, D) for the groups
of a launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # number of tensor elements per Triton program
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}  # since Triton 3.10, fusion is off by default


@triton.jit
def _begins(row, sizes, strides):
    """Return the offsets of rows in a tensor with four row dimensions.

    Row indices have 32 bits, and offsets have 64 bits.
    """
    fourth, rest = row % sizes[3], row // sizes[3]
    third, rest = rest % sizes[2], rest // sizes[2]
    second, first = rest % sizes[1], rest // sizes[1]
    begin = first.to(tl.int64) * strides[0] + second.to(tl.int64) * strides[1]
    return begin + third.to(tl.int64) * strides[2] + fourth.to(tl.int64) * strides[3]


@triton.jit
def _block(rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the rows and columns of a Triton program, and masks of valid rows and elements."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    return row, column, row < rows, (row < rows)[:, None] & (column < width)


@triton.jit
def _elements(x, row, column, sizes, strides):
    """Return pointers to a block of x."""
    return x + _begins(row, sizes, strides)[:, None] + column * strides[4]


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    out, lse, new_out, new_lse, sizes, of_out, of_lse, of_new_out, of_new_lse, rows, width, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row, column, is_row, there = _block(rows, width, ROWS, WIDTH)
    lse += _begins(row, sizes, of_lse)
    a = tl.load(lse, is_row, 0.0)
    b = tl.load(new_lse + _begins(row, sizes, of_new_lse), is_row, 0.0).to(tl.float32)
    difference = a - b
    difference = tl.where(difference == difference, difference, 0.0)  # -inf - -inf is NaN
    out = _elements(out, row, column, sizes, of_out)
    x = tl.load(out, there, 0.0) * tl.sigmoid(difference)[:, None]
    new = tl.load(_elements(new_out, row, column, sizes, of_new_out), there, 0.0).to(tl.float32)
    tl.store(out, x + new * tl.sigmoid(-difference)[:, None], there)
    larger = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    tl.store(lse, larger + tl.log(1.0 + tl.exp(-tl.abs(difference))), is_row)


@triton.jit(do_not_specialize=["rows"])
def rowsum_kernel(do, out, delta, sizes, of_do, of_out, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, column, is_row, there = _block(rows, width, ROWS, WIDTH)
    x = tl.load(_elements(do, row, column, sizes, of_do), there, 0.0).to(tl.float32)
    y = tl.load(_elements(out, row, column, sizes, of_out), there, 0.0).to(tl.float32)
    tl.store(delta + row, tl.sum(x * y, 1), is_row)


@triton.jit(do_not_specialize=["rows"])
def out_with_rowsum_kernel(
    do, delta, out, sizes, of_do, of_delta, of_out, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    row, column, is_row, there = _block(rows, width, ROWS, WIDTH)
    x = tl.load(_elements(do, row, column, sizes, of_do), there, 0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    largest = tl.where(largest > 0, largest, 1.0)
    unit = x / largest[:, None]  # the maximum element is 1, or all elements are 0
    square = tl.maximum(tl.sum(unit * unit, 1), 1.0, propagate_nan=tl.PropagateNan.ALL)
    factor = tl.load(delta + _begins(row, sizes, of_delta), is_row, 0.0).to(tl.float32) / largest / square
    tl.store(_elements(out, row, column, sizes, of_out), unit * factor[:, None], there)


def launch(
    kernel: triton.JITFunction, shape: Sequence[int], tensors: Sequence[Tensor], strided: Sequence[Tensor]
) -> None:
    """Launch a kernel on the device of its tensors.

    Args:
        kernel: The kernel.
        shape: The shape of the rows, including their width.
        tensors: All tensor arguments of the kernel.
        strided: The tensors whose strides are passed. Each tensor has rows of the given width, or one number per row.
            All other tensors are contiguous.
    """
    *sizes, width = [1] * (5 - len(shape)) + list(shape)
    rows = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    if not rows or not width:
        return
    at_once = max(1, ELEMENTS // triton.next_power_of_2(width))
    strides = [_strides(x.stride(), len(shape) - 1, sizes) for x in strided]
    with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device
        kernel[triton.cdiv(rows, at_once),](
            *tensors, tuple(sizes), *strides, rows, width, ROWS=at_once, WIDTH=triton.next_power_of_2(width),
            **OPTIONS,
        )  # fmt: skip


def _strides(strides: Sequence[int], dims: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of the four row dimensions, with 0 for dimensions of size 1, and the stride within a row."""
    rows = [*[0] * (4 - dims), *strides[:dims]]
    return *(stride if size > 1 else 0 for stride, size in zip(rows, sizes, strict=True)), *strides[dims:]


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    tensors = out, lse, new_out, new_lse
    launch(merge_kernel, out.shape, tensors, tensors)


def rowsum(do: Tensor, out: Tensor) -> Tensor:
    delta = do.new_empty(do.shape[:-1], dtype=torch.float32)
    launch(rowsum_kernel, do.shape, (do, out, delta), (do, out))
    return delta


def out_with_rowsum(do: Tensor, delta: Tensor) -> Tensor:
    out = torch.empty_like(do)
    launch(out_with_rowsum_kernel, do.shape, (do, delta, out), (do, delta, out))
    return out


# by schema: (function that launches the kernel, fake implementation)
OPS = {
    "merge_(Tensor(a!) out, Tensor(b!) lse, Tensor new_out, Tensor new_lse) -> ()": (merge_, lambda *_: None),
    "rowsum(Tensor do, Tensor out) -> Tensor": (
        rowsum,
        lambda do, out: do.new_empty(do.shape[:-1], dtype=torch.float32),
    ),
    "out_with_rowsum(Tensor do, Tensor delta) -> Tensor": (out_with_rowsum, lambda do, delta: torch.empty_like(do)),
}
LIBRARY = torch.library.Library("ds_seqpar", "FRAGMENT")
for schema, (function, like) in OPS.items():
    LIBRARY.define(schema)
    LIBRARY.impl(function.__name__, function, "CUDA")
    torch.library.register_fake(f"ds_seqpar::{function.__name__}", like, lib=LIBRARY)
