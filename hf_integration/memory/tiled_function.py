"""Compute a per-token function tile by tile, so that its intermediate tensors never exist for all tokens at once.

Source: TiledMLP and the tiled loss of ALST (arXiv 2506.13996, section 3.1). DeepSpeed (`sequence_tiled_compute`)
accumulates the gradients of tiles in `.grad`, in the parameters' dtype, and marks each parameter so that ZeRO
recognizes the last tile. In contrast, this module gives no parameter a gradient until all tiles are done.
`torch.autograd.grad` computes the gradients of a tile without running the hooks of parameters. The gradients are summed
in fp32 or wider, and returned once, as the gradients of the function. ZeRO and DDP thus get one gradient per parameter
and backward pass, for any number of tiles.

Backward recomputes each tile. A loss needs no recomputation. The incoming gradient is one factor for all tiles, so the
gradients of tiles are computed in forward, as in DeepSpeed. In fp16 the tiles of a loss are recomputed too, because
their gradients need the loss scale.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..compat import without_hooks
from ..context import ForwardContext, current, entered

Compute = Callable[[Tensor, slice], Tensor]  # called with a tile (B, t, d) and the slice of the tile's tokens


def tiled(compute: Compute, x: Tensor, parameters: Sequence[nn.Parameter], tiles: int) -> Tensor:
    """Compute `compute(x)` in `tiles` tiles along dim 1.

    Backward returns the gradient of x as one tensor, and parameter gradients in the parameters' dtype. All tensors for
    backward are saved before the computation starts. torch's non-reentrant checkpoint repeats a forward only up to the
    last saved tensor, so the repetition stops before the tiles.

    Args:
        compute: A function that processes tokens independently and preserves the shape.
        x: (B, s, d).
        parameters: The trained parameters that `compute` uses.
        tiles: The number of tiles.
    """
    run = _TiledForward(compute, x, tuple(parameters), tiles)
    return _TiledOutput.apply(_TiledBackward.apply(run, x, *run.parameters), run)


def tiled_sum(compute: Compute, x: Tensor, sums: GradientSums, tiles: int) -> Tensor:
    """Return the sum of `compute(tile)` over all tiles as a scalar. See `tiled` for the arguments.

    Gradients are computed in forward, and backward multiplies them by the incoming gradient. A second backward raises
    RuntimeError.

    Args:
        compute: A function of a tile that returns a scalar.
        x: See `tiled`.
        sums: The gradient sums for the trained parameters that `compute` uses. `compute` may add to the sums itself
            (see `GradientSums.linear`).
        tiles: See `tiled`.
    """
    run = _TiledForward(compute, x, sums.parameters, tiles)
    return _Summed.apply(run, sums, torch.is_grad_enabled() and not run.needs_loss_scale(x), x, *sums.parameters)


def tiled_by_token(compute: Compute, x: Tensor, sums: GradientSums, tiles: int) -> Tensor:
    """Return `compute(tile)` (B, t, n) for all tiles, like `tiled_sum` but without summing. n may differ from d.

    Backward recomputes each tile, and may run again.
    """
    return _ByToken.apply(_TiledForward(compute, x, sums.parameters, tiles), sums, x, *sums.parameters)


def tile_slices(tokens: int, tiles: int) -> list[slice]:
    """Return slices that divide `tokens` tokens into `tiles` tiles as evenly as possible.

    There is at least one tile, and at most one tile per token.
    """
    tiles = max(1, min(tiles, tokens))
    ends = [tokens * i // tiles for i in range(tiles + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


class _TiledForward:
    """One tiled forward, with the tiles, autocast settings and random state that its backward needs."""

    def __init__(self, compute: Compute, x: Tensor, parameters: tuple[nn.Parameter, ...], tiles: int) -> None:
        self.compute, self.parameters = compute, parameters
        self.slices = tile_slices(x.shape[1], tiles)
        self.conditions, self.dtype = ForwardConditions.of(x), x.dtype

    def needs_loss_scale(self, x: Tensor) -> bool:
        """Return whether any dtype is fp16, in which gradients underflow without the loss scale."""
        dtypes = [x.dtype, *(p.dtype for p in self.parameters)]
        return torch.float16 in [*dtypes, *([self.conditions.dtype] if self.conditions.enabled else [])]

    def forward(self, x: Tensor) -> Tensor:
        out = None
        for cut in self.slices:
            tile = self.compute(x[:, cut], cut)
            if out is None:  # autocast may have chosen a dtype different from x's
                out = tile.new_empty(*x.shape[:2], *tile.shape[2:])
            out[:, cut] = tile
        assert out is not None  # there is always a tile
        return out

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack([self.compute(x[:, cut], cut) for cut in self.slices]).sum()

    def recompute(self, x: Tensor, wants_x: bool, grad: Callable[[slice], Tensor], sums: GradientSums) -> Tensor | None:
        """Recompute the forward under its original conditions and return the gradient of x; see `gradients`."""
        with self.conditions.restored():
            return self.gradients(x, wants_x, grad, sums)[1]

    def gradients(
        self, x: Tensor, wants_x: bool, grad: Callable[[slice], Tensor] | None, sums: GradientSums
    ) -> tuple[list[Tensor], Tensor | None]:
        """Compute the gradients of all tiles. Parameter gradients are added to `sums`.

        Args:
            wants_x: Whether x needs a gradient.
            grad: A function that returns the gradient of a tile's result, or None if results are scalars with gradient
                1.

        Returns:
            (the tiles' results if they are scalars, the gradient of x or None).
        """
        dx, results = torch.empty_like(x, dtype=self.dtype) if wants_x else None, []
        with without_hooks(self.parameters):
            for cut in self.slices:
                with torch.enable_grad():
                    tile = x[:, cut].detach().requires_grad_(wants_x)
                    out = self.compute(tile, cut)
                inputs = [*([tile] if wants_x else []), *self.parameters]
                tile_grad = None if grad is None else grad(cut).to(out.dtype)
                gradients = list(torch.autograd.grad(out, inputs, tile_grad, allow_unused=True))
                if grad is None:
                    results.append(out.detach())
                if dx is not None:
                    tile_dx = gradients.pop(0)
                    dx[:, cut] = 0 if tile_dx is None else tile_dx
                sums.add(gradients)
                del gradients, out  # otherwise the tensors would coexist with the next tile's tensors
        return results, dx


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardConditions:
    """The autocast settings, random state and context of a forward."""

    device: torch.device
    dtype: torch.dtype
    enabled: bool
    random: tuple[Tensor, Tensor | None]  # random states of the CPU and of x's device
    context: ForwardContext | None

    @classmethod
    def of(cls, x: Tensor) -> ForwardConditions:
        device_type = x.device.type
        return cls(
            device=x.device,
            dtype=torch.get_autocast_dtype(device_type),
            enabled=torch.is_autocast_enabled(device_type),
            random=(torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None),
            context=current(),
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager that restores the autocast settings, random state and context of the original forward.

        The random state matters because LoRA inside an MLP may have dropout.
        """
        on_cpu, on_device = self.random
        with torch.random.fork_rng([] if on_device is None else [self.device]), entered(self.context):
            torch.set_rng_state(on_cpu)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, self.device)
            with torch.autocast(self.device.type, self.dtype, enabled=self.enabled):
                yield


class _TiledBackward(Function):
    """The identity of x, which saves x and runs the backward of all tiles."""

    @staticmethod
    def forward(ctx: Any, run: _TiledForward, x: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        sums = GradientSums(ctx.run.parameters)
        dx = ctx.run.recompute(x, ctx.needs_input_grad[1], lambda cut: grad[:, cut], sums)
        return None, dx, *sums.pop_all()


class _TiledOutput(Function):
    """The output of all tiles. Its gradient passes unchanged to `_TiledBackward`, since the shapes are equal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: _TiledForward) -> Tensor:
        return run.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Summed(Function):
    """The sum of the tiles' results. With `early`, gradients are computed in forward."""

    @staticmethod
    def forward(
        ctx: Any, run: _TiledForward, sums: GradientSums, early: bool, x: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        ctx.run, ctx.sums, ctx.early = run, sums, early and any(ctx.needs_input_grad)
        if not ctx.early:
            ctx.save_for_backward(x)
            return run.sum(x)
        results, ctx.dx = run.gradients(x, ctx.needs_input_grad[3], None, sums)
        return torch.stack(results).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sums is None:
            raise RuntimeError("a tiled loss needs its backward to run once; got a second one, run forward again")
        sums, ctx.sums = ctx.sums, None
        if ctx.early:
            dx, ctx.dx = None if ctx.dx is None else ctx.dx.mul_(grad), None
            return None, None, None, dx, *sums.pop_all(grad)
        (x,) = ctx.saved_tensors
        dx = ctx.run.recompute(x, ctx.needs_input_grad[3], lambda cut: grad, sums)
        return None, None, None, dx, *sums.pop_all()


class _ByToken(Function):
    """The per-token results of all tiles."""

    @staticmethod
    def forward(ctx: Any, run: _TiledForward, sums: GradientSums, x: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.run, ctx.sums = run, sums
        ctx.save_for_backward(x)
        return run.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = ctx.run.recompute(x, ctx.needs_input_grad[2], lambda cut: grad[:, cut], ctx.sums)
        return None, None, dx, *ctx.sums.pop_all()


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the module's parameters that need gradients."""
    return [p for p in module.parameters() if p.requires_grad]


def tile_count(total: int, tile_size: int) -> int:
    """Return the number of tiles of at most `tile_size` needed to cover `total`, which is at least 1."""
    return max(1, -(-total // tile_size))


ROWS = 4096  # number of rows of a weight's gradient to add at once to a sum of another dtype


class GradientSums:
    """Gradients of parameters, summed in fp32 or wider."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        self.parameters = tuple(parameters)
        self.totals: list[Tensor | None] = [None] * len(self.parameters)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        for i, (total, gradient) in enumerate(zip(self.totals, gradients, strict=True)):
            if gradient is not None and total is None:
                self.totals[i] = gradient.to(_at_least_fp32(gradient.dtype), copy=True)
            elif gradient is not None and total is not None:
                total.add_(gradient)

    def linear(self, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
        """Return `x W^T + b` for x (B, t, d).

        If the weight is one of the parameters, its gradient is added to the sum a few rows at a time. For a
        vocabulary-sized weight, a whole gradient per tile would take as much memory as the sum.
        """
        index = next((i for i, parameter in enumerate(self.parameters) if parameter is weight), None)
        if index is None or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return F.linear(x, weight, bias)
        return _Linear.apply(x, weight, bias, functools.partial(self._add_product, index))

    def _add_product(self, i: int, grad: Tensor, x: Tensor) -> None:
        """Add `grad^T x` to sum `i`, for grad (n, rows) and x (n, d)."""
        total, shape = self.totals[i], (grad.shape[1], x.shape[1])
        if total is None:
            total = self.totals[i] = x.new_zeros(shape, dtype=_at_least_fp32(x.dtype))
        if total.dtype == x.dtype:
            total.addmm_(grad.T, x)
            return
        for rows, grad_rows in zip(total.split(ROWS), grad.split(ROWS, 1), strict=True):
            rows += grad_rows.T @ x

    def pop_all(self, factor: Tensor | None = None) -> Iterator[Tensor | None]:
        """Yield each parameter's sum in the parameter's dtype, freeing the sum afterwards.

        Args:
            factor: A scalar tensor that multiplies the sums.

        Yields:
            The sum, or None for a parameter that no tile used.
        """
        for i, parameter in enumerate(self.parameters):
            total, self.totals[i] = self.totals[i], None
            if total is not None and factor is not None:
                total.mul_(factor)
            yield None if total is None else total.to(parameter.dtype)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Linear(Function):
    """A linear layer whose backward passes (gradient, x) to `add` instead of computing the weight's gradient."""

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
