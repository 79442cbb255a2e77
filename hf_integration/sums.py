"""Gradients of parameters that several tiles have, added up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

ROWS = 4096  # of a weight's gradient that is added to a sum of another dtype, at a time


class Sums:
    """Gradients of parameters, added up in fp32 or wider."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        self.parameters = tuple(parameters)
        self.totals: list[Tensor | None] = [None] * len(self.parameters)

    def add(self, found: Sequence[Tensor | None]) -> None:
        for i, (total, gradient) in enumerate(zip(self.totals, found, strict=True)):
            if gradient is not None and total is None:
                self.totals[i] = gradient.to(_wide(gradient.dtype), copy=True)
            elif gradient is not None and total is not None:
                total.add_(gradient)

    def linear(self, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
        """x (B, t, d) W^T + b. The gradient of a weight that is one of the parameters goes into its sum some rows at a
        time: one of a vocabulary, for each tile, would be as large as the sum."""
        found = [i for i, parameter in enumerate(self.parameters) if parameter is weight]
        if not found or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return F.linear(x, weight, bias)
        return _Linear.apply(x, weight, bias, functools.partial(self._add_product, found[0]))

    def _add_product(self, i: int, grad: Tensor, x: Tensor) -> None:
        """grad (n, rows), x (n, d): adds grad^T x."""
        total, shape = self.totals[i], (grad.shape[1], x.shape[1])
        if total is None:
            total = self.totals[i] = x.new_zeros(shape, dtype=_wide(x.dtype))
        if total.dtype == x.dtype:
            total.addmm_(grad.T, x)
            return
        for rows, of_rows in zip(total.split(ROWS), grad.split(ROWS, 1), strict=True):
            rows += of_rows.T @ x

    def taken(self, factor: Tensor | None = None) -> Iterator[Tensor | None]:
        """Of each parameter in its dtype, times factor (); None for one that no tile used. The wide one is dropped with
        it."""
        for i, parameter in enumerate(self.parameters):
            total, self.totals[i] = self.totals[i], None
            if total is not None and factor is not None:
                total.mul_(factor)
            yield None if total is None else total.to(parameter.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Linear(Function):
    """x W^T + b, whose backward gives what W's gradient is the product of to `add` (grad (n, rows), x (n, d))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, add: Callable[..., None]) -> Tensor:
        ctx.add = add
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_token = grad.flatten(0, -2)
        ctx.add(by_token, x.flatten(0, -2))
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        return grad @ weight if wants_x else None, None, by_token.sum(0) if wants_bias else None, None
