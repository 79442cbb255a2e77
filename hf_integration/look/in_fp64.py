"""Run models in fp64 throughout, even if their code casts to fp32.

The difference between fp32 and fp64 results is the rounding error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel


class InFP64(TorchFunctionMode):
    """Context manager in which code that requests fp32 gets fp64."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        elif function is not torch.Tensor.view:  # view(dtype) reinterprets bytes
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in kwargs.items()}
        return function(*args, **kwargs)


def fp64(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model in fp64, without expert kernels that support only fp32."""
    model.set_experts_implementation("eager")
    return model.double()
