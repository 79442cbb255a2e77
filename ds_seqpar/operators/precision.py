"""Matrix products in full precision, regardless of torch's settings for lower precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# settings that allow rounding fp32 to TF32 on GPUs, and to TF32 or bf16 in oneDNN
PRODUCTS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
INHERITED, EXACT = "none", "ieee"


@contextlib.contextmanager
def all_digits(device_type: str) -> Iterator[None]:
    """Context manager that keeps operands of matrix products in full precision, and disables autocast.

    `torch.get_float32_matmul_precision` raises an error if one of the newer settings has been changed, for example by
    `TrainingArguments(tf32=True)`. The newer settings can always be read and written.
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
    """Return the value to restore: the product's setting, or "none" if the setting equals the global default."""
    value = product.fp32_precision
    product.fp32_precision = INHERITED
    return INHERITED if product.fp32_precision == value else value
