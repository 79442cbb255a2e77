"""Products that keep the full precision of their dtype, regardless of torch's switches for lower precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# fp32 may be rounded to TF32 on GPUs, and to TF32 or bf16 by oneDNN
PRODUCTS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
INHERITED, EXACT = "none", "ieee"


@contextlib.contextmanager
def all_digits(device_type: str) -> Iterator[None]:
    """Context manager in which products keep the full precision of their operands' dtype, and autocast is off.

    The older `torch.get_float32_matmul_precision` raises after one of the newer switches was set, for example by
    `TrainingArguments(tf32=True)`; the newer switches can be read and set in either case.
    """
    before = [_own_value(product) for product in PRODUCTS]
    for product in PRODUCTS:
        product.fp32_precision = EXACT
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        for product, value in zip(PRODUCTS, before, strict=True):
            product.fp32_precision = value


def _own_value(product: Any) -> str:
    """Return the value set for products themselves. If it equals `torch.backends.fp32_precision`, it continues to
    follow that.
    """
    value = product.fp32_precision
    product.fp32_precision = INHERITED
    return INHERITED if product.fp32_precision == value else value
