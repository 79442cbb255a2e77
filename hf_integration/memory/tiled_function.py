"""Computes a function of each token tile by tile, so that its intermediate tensors never exist for all tokens at once.

Source: TiledMLP and the tiled loss of ALST (arXiv 2506.13996, section 3.1). DeepSpeed (`sequence_tiled_compute`) adds
up the gradients of tiles in `.grad`, in the parameters' dtype, and marks each parameter so that ZeRO knows the last
tile. Here no parameter gets a gradient until all tiles are through. `torch.autograd.grad` gives the gradients of a tile
and runs no hook of a parameter. They are summed in fp32 or wider, and returned once, as the gradients of the function.
So ZeRO and DDP see one gradient a parameter and backward pass, whatever the number of tiles.

Backward computes each tile again. A loss needs no second run: the gradient that arrives is one factor for all tiles, so
their gradients are computed in forward, as DeepSpeed does. In fp16 tiles of a loss are computed again too, because
their gradients need the loss scale.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .. import dropout

Compute = Callable[[Tensor, slice], Tensor]  # of a tile (B, t, d) and of the tokens that it holds


class Source(NamedTuple):
    """The computation that a `Deferred` tensor stands for: forward(norm, x[:, cut]) for each tile, of x (B, s, d)."""

    x: Tensor
    norm: nn.Module
    forward: Callable[[Any, Tensor], Tensor]


class Deferred(Function):
    """A tensor of x's shape without memory, in place of a norm's output. The modules that read it compute the norm of x
    themselves, tile by tile, and give it the gradient of x. Any other reader finds NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_full((), float("nan")).expand(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def tiled(
    compute: Compute, x: Tensor, parameters: Sequence[nn.Parameter], tiles: int, source: Source | None = None,
    overwrites_source: bool = False,
) -> Tensor:  # fmt: skip
    """compute(x), computed over `tiles` tiles of dim 1.

    x (B, s, d). compute: treats each token by itself, and keeps the shape. parameters: those that compute uses and that
    want gradients. Backward gives the gradient of x as one tensor, and those of the parameters in their own dtype. All
    that backward needs is saved before anything is computed. So torch's non-reentrant checkpoint, which repeats a
    forward only up to the last tensor that it needs, stops before the tiles. source: what x stands for, if it is
    `Deferred`; then the norm's parameters get gradients too. overwrites_source: nobody reads source.x after backward,
    so backward may write its gradient into it.
    """
    if source is None:
        run = _TiledForward(compute, x, tuple(parameters), tiles)
    else:
        _, norm, forward = source  # the run must not hold x
        run = _TiledForward(
            lambda tile, cut: compute(forward(norm, tile), cut), x, (*parameters, *trained_parameters(norm)), tiles
        )
        run.overwrites_source = overwrites_source
    real = None if source is None else source.x
    return _TiledOutput.apply(_TiledBackward.apply(run, real, x, *run.parameters), real, run)


def tiled_sum(compute: Compute, x: Tensor, sums: GradientSums, tiles: int) -> Tensor:
    """The sum over tiles of compute(tile), a scalar; otherwise as `tiled`. sums: of the parameters that compute uses
    and that want gradients; compute may add to them itself (`GradientSums.linear`). Gradients are computed in forward,
    and backward multiplies them by the gradient that arrives. A second backward raises RuntimeError."""
    run = _TiledForward(compute, x, sums.parameters, tiles)
    return _Summed.apply(run, sums, torch.is_grad_enabled() and not run.needs_loss_scale(x), x, *sums.parameters)


def tile_slices(tokens: int, tiles: int) -> list[slice]:
    """The slices of `tokens` tokens into `tiles` tiles that are as even as possible. There are at most as many as
    tokens, and at least one."""
    tiles = max(1, min(tiles, tokens))
    ends = [tokens * i // tiles for i in range(tiles + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


class _TiledForward:
    """One tiled forward, with all that its backward repeats: tiles, autocast, and random numbers."""

    overwrites_source = False

    def __init__(self, compute: Compute, x: Tensor, parameters: tuple[nn.Parameter, ...], tiles: int) -> None:
        self.compute, self.parameters = dropout.drawing_by_tile(compute), parameters
        self.slices = tile_slices(x.shape[1], tiles)
        self.conditions, self.dtype = ForwardConditions.of(x), x.dtype

    def needs_loss_scale(self, x: Tensor) -> bool:
        """Whether fp16 takes part, whose gradients underflow without the loss scale."""
        dtypes = [x.dtype, *(p.dtype for p in self.parameters)]
        return torch.float16 in [*dtypes, *([self.conditions.dtype] if self.conditions.enabled else [])]

    def forward(self, x: Tensor) -> Tensor:
        out = None
        for cut in self.slices:
            tile = self.compute(x[:, cut], cut)
            if out is None:  # autocast may have chosen another dtype than x's
                out = tile.new_empty(x.shape)
            out[:, cut] = tile
        assert out is not None  # there is always a tile
        return out

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack([self.compute(x[:, cut], cut) for cut in self.slices]).sum()

    def recompute(self, x: Tensor, wants_x: bool, grad: Callable[[slice], Tensor], sums: GradientSums) -> Tensor | None:
        """The gradient of x, by a second run of the forward under its own conditions; otherwise as `gradients`."""
        with self.conditions.restored():
            return self.gradients(x, wants_x, grad, sums)[1]

    def gradients(
        self, x: Tensor, wants_x: bool, grad: Callable[[slice], Tensor] | None, sums: GradientSums
    ) -> tuple[list[Tensor], Tensor | None]:
        """(the results of tiles, if they are scalars; the gradient of x, None where it wants none). Gradients of
        parameters are added to sums. grad: gives the gradient of a tile's result; None: the results are scalars, and it
        is 1."""
        dx, results = None, []
        if wants_x:
            dx = x if self.overwrites_source else torch.empty_like(x, dtype=self.dtype)
        with _without_hooks(self.parameters):
            for cut in self.slices:
                with torch.enable_grad():
                    tile = x[:, cut].detach().requires_grad_(wants_x)
                    out = self.compute(tile, cut)
                asked = [*([tile] if wants_x else []), *self.parameters]
                given = None if grad is None else grad(cut).to(out.dtype)
                found = list(torch.autograd.grad(out, asked, given, allow_unused=True))
                if grad is None:
                    results.append(out.detach())
                if dx is not None:
                    of_tile = found.pop(0)
                    dx[:, cut] = 0 if of_tile is None else of_tile
                sums.add(found)
                del found, out  # beside the next tile's they would be there twice
        return results, dx


@contextlib.contextmanager
def _without_hooks(parameters: tuple[nn.Parameter, ...]) -> Iterator[None]:
    """A context in which the parameters have no hooks: `torch.autograd.grad` would run them for each tile, while they
    are to run once, for the sum."""
    kept = [parameter._backward_hooks for parameter in parameters]
    for parameter in parameters:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in zip(parameters, kept, strict=True):
            parameter._backward_hooks = hooks


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardConditions:
    """The autocast, the random state and the noise by token with which a forward was computed."""

    device: torch.device
    dtype: torch.dtype
    enabled: bool
    random: tuple[Tensor, Tensor | None]  # of the CPU and of x's device
    drawn: dropout.Draw | None

    @classmethod
    def of(cls, x: Tensor) -> ForwardConditions:
        kind = x.device.type
        return cls(
            device=x.device,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            random=(torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None),
            drawn=dropout.current_draw(),
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A context with forward's autocast and random numbers: LoRA inside an MLP may have dropout."""
        on_cpu, on_device = self.random
        with torch.random.fork_rng([] if on_device is None else [self.device]), dropout.redrawing(self.drawn):
            torch.set_rng_state(on_cpu)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, self.device)
            with torch.autocast(self.device.type, self.dtype, enabled=self.enabled):
                yield


class _TiledBackward(Function):
    """x, unchanged. Saves x, or its source, for the backward of all tiles, which runs here."""

    @staticmethod
    def forward(ctx: Any, run: _TiledForward, source: Tensor | None, x: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x if source is None else source)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        sums = GradientSums(ctx.run.parameters)
        dx = ctx.run.recompute(x, ctx.needs_input_grad[2], lambda cut: grad[:, cut], sums)
        return None, None, dx, *sums.pop_all()


class _TiledOutput(Function):
    """The output of all tiles. Its gradient goes on to `_TiledBackward` unchanged, since the shapes are equal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor | None, run: _TiledForward) -> Tensor:
        return run.forward(x if source is None else source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Summed(Function):
    """The sum of the tiles' results. early: whether gradients are computed in forward."""

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


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The module's parameters that want gradients."""
    return [p for p in module.parameters() if p.requires_grad]


def tile_count(total: int, most: int) -> int:
    """The number of tiles of at most `most` in each, for `total` of something; at least 1."""
    return max(1, -(-total // most))


ROWS = 4096  # of a weight's gradient that are added at once to a sum of another dtype


class GradientSums:
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
        """x (B, t, d) W^T + b. If the weight is one of the parameters, its gradient is added to the sum a few rows at a
        time: a whole gradient of a vocabulary's weight for each tile would take as much memory as the sum."""
        index = next((i for i, parameter in enumerate(self.parameters) if parameter is weight), None)
        if index is None or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return F.linear(x, weight, bias)
        return _Linear.apply(x, weight, bias, functools.partial(self._add_product, index))

    def _add_product(self, i: int, grad: Tensor, x: Tensor) -> None:
        """Adds grad^T x to sum i. grad (n, rows), x (n, d)."""
        total, shape = self.totals[i], (grad.shape[1], x.shape[1])
        if total is None:
            total = self.totals[i] = x.new_zeros(shape, dtype=_wide(x.dtype))
        if total.dtype == x.dtype:
            total.addmm_(grad.T, x)
            return
        for rows, of_rows in zip(total.split(ROWS), grad.split(ROWS, 1), strict=True):
            rows += of_rows.T @ x

    def pop_all(self, factor: Tensor | None = None) -> Iterator[Tensor | None]:
        """The sum of each parameter in the parameter's dtype, times factor, a scalar tensor; None for a parameter that
        no tile used. Each sum is dropped once it is given."""
        for i, parameter in enumerate(self.parameters):
            total, self.totals[i] = self.totals[i], None
            if total is not None and factor is not None:
                total.mul_(factor)
            yield None if total is None else total.to(parameter.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Linear(Function):
    """x W^T + b. Backward calls add(grad (n, rows), x (n, d)) in place of making the gradient of W, their product."""

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
