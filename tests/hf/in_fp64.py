"""Models of transformers in fp64 throughout, also where their code casts to fp32: what is then wrong is no rounding."""

import contextlib
import functools

import torch
from torch.overrides import TorchFunctionMode

from tests.hf.every_type import tiny


class InFP64(TorchFunctionMode):
    """Context manager in which what asks for fp32 gets fp64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        elif function is not torch.Tensor.view:  # which reads bytes
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in kwargs.items()}
        return function(*args, **kwargs)


def throughout(function):
    """Make a function of a model that computes in fp64 throughout where the model's weights are in fp64."""

    @functools.wraps(function)
    def wrapped(model, *args):
        with InFP64() if model.dtype == torch.float64 else contextlib.nullcontext():
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


def fp64(model):
    """Return a model in fp64, without the kernels of experts that know only fp32."""
    model.set_experts_implementation("eager")
    return model.double()


def tiny_fp64(name):
    """Return `tiny(name)` in fp64, with buffers that were computed in it."""
    torch.set_default_dtype(torch.float64)
    try:
        with InFP64():
            return fp64(tiny(name))
    finally:
        torch.set_default_dtype(torch.float32)
