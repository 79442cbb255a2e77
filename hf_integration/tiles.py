"""A function of each token applied tile by tile, so that what it needs inside never stands whole in memory.

Source: TiledMLP and the tiled loss of ALST (arXiv 2506.13996, section 3.1). DeepSpeed's (`sequence_tiled_compute`) add
up gradients of tiles in `.grad`, in the parameters' dtype. A mark on each parameter tells ZeRO when the last tile has
come. Here nothing reaches a parameter until all tiles are through. `torch.autograd.grad`, which runs no hook of a
parameter, gives the gradients of tiles. They are added up in fp32 or wider, and given back once, as those of the
function itself. So ZeRO and DDP see one gradient a parameter and backward pass, whatever the number of tiles.

In backward tiles are computed again, with the gradient that arrived. That of a loss is a factor for all of it: a loss
takes its gradients in forward, as DeepSpeed's does, and computes nothing again. In fp16 it does, since those would not
have had the loss scale.
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

from . import noise

Compute = Callable[[Tensor, slice], Tensor]  # of a tile (B, t, d) and of the tokens that it holds


class Source(NamedTuple):
    """What a tensor of `Deferred` stands for: tile by tile forward(norm, x[:, cut]), of x (B, s, d)."""

    x: Tensor
    norm: nn.Module
    forward: Callable[[Any, Tensor], Tensor]


class Deferred(Function):
    """A tensor of x's shape that has no memory: a norm's output, which its readers compute of x, tile by tile. They
    give it the gradient of x. To anybody else it is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_full((), float("nan")).expand(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def tiled(
    compute: Compute, x: Tensor, parameters: Sequence[nn.Parameter], tiles: int, source: Source | None = None,
    used_up: bool = False,
) -> Tensor:  # fmt: skip
    """compute(x) (B, s, d), of a function of each token by itself that keeps the shape, over `tiles` tiles of dim 1.

    x (B, s, d). parameters: all that compute uses and that want gradients. The gradients are x's, in one tensor, and
    the parameters' in their own dtype. What backward needs is kept before anything is computed: where a checkpoint
    computes again what it did not keep (torch's non-reentrant one), it can stop in front of the tiles. source: what x
    stands for, where it is `Deferred`. The norm's parameters have their gradients from here, too. used_up: nobody reads
    source.x after backward, so its gradient takes its place, tile by tile.
    """
    if source is None:
        run = _Run(compute, x, tuple(parameters), tiles)
    else:
        _, norm, forward = source  # the run must not hold x
        run = _Run(lambda tile, cut: compute(forward(norm, tile), cut), x, (*parameters, *trained(norm)), tiles)
        run.used_up = used_up
    real = None if source is None else source.x
    return _Computed.apply(_Held.apply(run, real, x, *run.parameters), real, run)


def tiled_sum(compute: Compute, x: Tensor, sums: Sums, tiles: int) -> Tensor:
    """The sum over tiles of what compute makes of each, a scalar. sums: of the parameters that compute uses and that
    want gradients; compute may add to them itself (`Sums.linear`). Otherwise as `tiled`. Gradients are there after
    forward, which backward multiplies by the one that arrives: once, a second backward raises RuntimeError."""
    run = _Run(compute, x, sums.parameters, tiles)
    return _Summed.apply(run, sums, torch.is_grad_enabled() and not run.scaled(x), x, *sums.parameters)


def cuts(tokens: int, tiles: int) -> list[slice]:
    """`tiles` tiles of tokens, or as many as there are tokens but at least one: as even as can be, none empty but that
    of no tokens."""
    tiles = max(1, min(tiles, tokens))
    ends = [tokens * i // tiles for i in range(tiles + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


class _Run:
    """One forward, and what its backward must repeat: the tiles, autocast, and what was drawn at random."""

    used_up = False

    def __init__(self, compute: Compute, x: Tensor, parameters: tuple[nn.Parameter, ...], tiles: int) -> None:
        self.compute, self.parameters, self.cuts = noise.by_tile(compute), parameters, cuts(x.shape[1], tiles)
        self.conditions, self.dtype = Conditions.of(x), x.dtype

    def scaled(self, x: Tensor) -> bool:
        """Whether fp16 is in it, whose gradients are nothing without the loss's scale."""
        dtypes = [x.dtype, *(p.dtype for p in self.parameters)]
        return torch.float16 in [*dtypes, *([self.conditions.dtype] if self.conditions.enabled else [])]

    def forward(self, x: Tensor) -> Tensor:
        out = None
        for cut in self.cuts:
            tile = self.compute(x[:, cut], cut)
            if out is None:  # autocast may have chosen another dtype than x's
                out = tile.new_empty(x.shape)
            out[:, cut] = tile
        assert out is not None  # there is always a tile
        return out

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack([self.compute(x[:, cut], cut) for cut in self.cuts]).sum()

    def again(self, x: Tensor, wants_x: bool, grad: Callable[[slice], Tensor], sums: Sums) -> Tensor | None:
        """`gradients` of a forward that was, under its conditions."""
        with self.conditions.again():
            return self.gradients(x, wants_x, grad, sums)[1]

    def gradients(
        self, x: Tensor, wants_x: bool, grad: Callable[[slice], Tensor] | None, sums: Sums
    ) -> tuple[list[Tensor], Tensor | None]:
        """(what tiles give, if that is scalars; the gradient of x, None where it wants none). Those of parameters are
        added to sums. grad: of a tile's result; None: 1, and that is a scalar."""
        dx, results = None, []
        if wants_x:
            dx = x if self.used_up else torch.empty_like(x, dtype=self.dtype)
        with _without_hooks(self.parameters):
            for cut in self.cuts:
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
    """A context in which hooks on parameters are off: `torch.autograd.grad` would run them for each tile, and then they
    run for the sum."""
    kept = [parameter._backward_hooks for parameter in parameters]
    for parameter in parameters:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in zip(parameters, kept, strict=True):
            parameter._backward_hooks = hooks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """Autocast, the random state and the noise by token with which a forward was computed."""

    device: torch.device
    dtype: torch.dtype
    enabled: bool
    random: tuple[Tensor, Tensor | None]  # of the CPU and of x's device
    drawn: noise.Draw | None

    @classmethod
    def of(cls, x: Tensor) -> Conditions:
        kind = x.device.type
        return cls(
            device=x.device,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            random=(torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None),
            drawn=noise.now(),
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context with forward's autocast, in which the same is drawn: LoRA inside an MLP may have dropout."""
        cpu, other = self.random
        with torch.random.fork_rng([] if other is None else [self.device]), noise.drawing(self.drawn):
            torch.set_rng_state(cpu)
            if other is not None:
                torch.cuda.set_rng_state(other, self.device)
            with torch.autocast(self.device.type, self.dtype, enabled=self.enabled):
                yield


class _Held(Function):
    """x as it is. It, or what it stands for, is kept for backward, which does all the work."""

    @staticmethod
    def forward(ctx: Any, run: _Run, source: Tensor | None, x: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x if source is None else source)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        sums = Sums(ctx.run.parameters)
        dx = ctx.run.again(x, ctx.needs_input_grad[2], lambda cut: grad[:, cut], sums)
        return None, None, dx, *sums.taken()


class _Computed(Function):
    """What the tiles make of x. Its gradient goes on to `_Held` as it is: the shapes are the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor | None, run: _Run) -> Tensor:
        return run.forward(x if source is None else source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Summed(Function):
    """The sum of what tiles give."""

    @staticmethod
    def forward(ctx: Any, run: _Run, sums: Sums, early: bool, x: Tensor, *parameters: nn.Parameter) -> Tensor:
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
            return None, None, None, dx, *sums.taken(grad)
        (x,) = ctx.saved_tensors
        dx = ctx.run.again(x, ctx.needs_input_grad[3], lambda cut: grad, sums)
        return None, None, None, dx, *sums.taken()


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Its parameters that want gradients."""
    return [p for p in module.parameters() if p.requires_grad]


def ceil_of(a: int, b: int) -> int:
    """Tiles of at most b for a of something."""
    return max(1, -(-a // b))


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
        time. For each tile, the gradient of a vocabulary's weight would be as large as the sum."""
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
