"""Functions that run in Python between the graphs of a compiled model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def between_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function to run between the graphs of a compiled model.

    Using `torch.compiler.disable` as the decorator would import the compiler.
    """

    @functools.wraps(function)
    def between(*args: Any, **kwargs: Any) -> Any:
        return (torch.compiler.disable(function) if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return between
