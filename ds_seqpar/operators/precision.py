"""Products that keep all digits of their dtype, whichever of torch's switches has asked for fewer."""

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
    """Context manager in which products keep all digits of their operands' dtype, and autocast changes none.

    The older `torch.get_float32_matmul_precision` raises once anybody has set one of the newer switches, as
    `TrainingArguments(tf32=True)` does; the newer ones can be read and set whichever has been used.
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
    """Return what is set for a product itself. Where it has the value of `torch.backends.fp32_precision`, it follows
    that one later too."""
    value = product.fp32_precision
    product.fp32_precision = INHERITED
    return INHERITED if product.fp32_precision == value else value
