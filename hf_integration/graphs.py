"""What stays in Python where torch.compile makes graphs of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def between_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Between the graphs of a compiled model. (As a decorator torch's own would import the compiler.)"""

    @functools.wraps(function)
    def between(*args: Any, **kwargs: Any) -> Any:
        return (torch.compiler.disable(function) if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return between
