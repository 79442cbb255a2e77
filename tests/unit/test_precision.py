"""Products of states keep all digits, whichever of torch's switches was set, and leave each of them as it was."""

import multiprocessing

import pytest
import torch
from torch import backends

from ds_seqpar.operators.precision import PRODUCTS, all_digits


def _of_backends(value):
    return lambda: setattr(backends, "fp32_precision", value)  # as transformers' enable_tf32 does


def _of_product(product, value):
    return lambda: setattr(product, "fp32_precision", value)


# which switch was set -> how
SWITCHES = {
    "none": lambda: None,
    "all products": _of_backends("tf32"),
    "products on GPUs": _of_product(backends.cuda.matmul, "tf32"),
    "products on CPUs": _of_product(backends.mkldnn.matmul, "bf16"),
    "the older": lambda: torch.set_float32_matmul_precision("medium"),
    "the older of cuBLAS": lambda: setattr(backends.cuda.matmul, "allow_tf32", True),
}


def _older():
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "a mix"


def _switches():
    return [backends.fp32_precision, *(product.fp32_precision for product in PRODUCTS), _older()]


def _inside(switch, found):
    """In a process of its own, whose switches nobody has set."""
    SWITCHES[switch]()
    before = _switches()
    with all_digits("cpu"):
        inside = {product.fp32_precision for product in PRODUCTS}
    after = _switches()
    backends.fp32_precision = "ieee" if switch == "all products" else "none"
    found.send((before, inside, after, [product.fp32_precision for product in PRODUCTS]))


@pytest.mark.parametrize("switch", SWITCHES)
def test_products_keep_all_digits_and_switches_their_values(switch):
    found, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_inside, args=(switch, there))
    process.start()
    assert found.poll(60)
    before, inside, after, changed = found.recv()
    process.join()
    assert inside == {"ieee"}
    assert before == after
    # a product that follows the switch of all goes on to follow it
    assert changed == (["ieee", "ieee"] if switch == "all products" else before[1:3])
