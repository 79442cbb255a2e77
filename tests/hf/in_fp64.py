"""Models of transformers in fp64, and how far others in fp32 may be from them."""

import contextlib
import functools

import torch

from hf_integration.look.in_fp64 import InFP64, fp64
from tests.hf.every_type import tiny


def throughout(function):
    """Make a function of a model that computes in fp64 throughout where the model's weights are in fp64."""

    @functools.wraps(function)
    def wrapped(model, *args):
        with InFP64() if next(model.parameters()).dtype == torch.float64 else contextlib.nullcontext():
            return function(model, *args)

    return wrapped


def limit_beside(own, least=1e-5, times=6, most=3e-5):
    """Return how far from fp64 a model in fp32 may be where the plain one is `own` far.

    Args:
        own: max|a-b| / max|b| of the plain model's result in fp32 and in fp64.
        least: The limit where the plain model is near: some sums of small numbers are ill-conditioned, and there any
            order of the same sums gives other digits, as other processors do.
        times: One order is a poor sample of how far others are. Of glm4's first 3 seeds the farthest is 5.5 times as
            far as the plain model.
        most: The limit beyond which more than rounding might hide, unless half of it is the plain model's own: then it
            is twice as much as that.
    """
    return max(least, min(times * own, most), 2 * own)


def tiny_fp64(name):
    """Return `tiny(name)` in fp64, with buffers that were computed in it."""
    torch.set_default_dtype(torch.float64)
    try:
        with InFP64():
            return fp64(tiny(name))
    finally:
        torch.set_default_dtype(torch.float32)
