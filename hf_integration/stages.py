"""Attention modules that work on some heads at a time, projections included.

A stage is a slice of heads: rows of the weights that make q, k and v, columns of the output projection's. It projects
from the layer's input, attends, and adds its part to the output, so that no q, k, v or attention output of all heads
stands at once. Backward goes through the stages again: it projects once more, takes what attention gave from forward,
and adds the stage's part to the gradient of the input. Gradients of a weight's slices fill the weight's gradient, which
reaches the parameter, and so ZeRO and DDP, once.

What a family does between projections and attention (norms of q and k, RoPE, sinks) is the forward of its own class, on
a twin of the module that has the stage's heads.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ds_seqpar.compiler.heads import Stage, stages
from ds_seqpar.placement import Placement
from ds_seqpar.runtime.keeping import Part, is_known
from ds_seqpar.runtime.ops import stages_of

from .families import FAMILIES
from .sums import Sums
from .tiled_loss import LEAF
from .tiles import Conditions, ceil_of, cuts, trained

STAGED = "_sequence_parallel_staged"  # of the forward that replaces a module's own
PARTS = "sequence_parallel_parts"  # of a twin: in how many stages its module is
INWARD, OUTWARD = ("q_proj", "k_proj", "v_proj", "qkv_proj"), "o_proj"


def stage(module: Any) -> None:
    """Has an attention module go through its heads in stages, as the settings of its SequenceParallel say, in forwards
    that are sharded. Under ZeRO-3 its parameters are fetched together."""
    config, unhooked = module.sequence_parallel.config, not hasattr(module, "ds_id") or hasattr(module, LEAF)
    if config.head_stages == 1 or config.overlap or "forward" in vars(module) or not unhooked:
        return

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, *args, **kwargs) if STAGED in vars(self) else type(self).forward(self, *args, **kwargs)

    setattr(module, STAGED, module.register_forward_pre_hook(_before, with_kwargs=True))
    setattr(module, LEAF, True)
    module.forward = types.MethodType(forward, module)


def unstage(module: Any) -> None:
    """Takes that back."""
    hook = vars(module).pop(STAGED, None)
    if hook is None:
        return
    hook.remove()
    del module.forward
    if not hasattr(module, "ds_id"):  # ZeRO-3 that has hooked a leaf asks it again
        vars(module).pop(LEAF, None)


def _before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """ZeRO-3 looks for a leaf's input among what has no name; where that wants no gradient (LoRA in a first layer) it
    would take those of parameters too early."""
    if "hidden_states" in kwargs:
        args = (kwargs.pop("hidden_states"), *args)
    x = args[0]
    if hasattr(module, "ds_id") and torch.is_grad_enabled() and not x.requires_grad and trained(module):
        args = (x.detach().requires_grad_(), *args[1:])
    return args, kwargs


def _forward(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    own = type(module).forward
    if torch.compiler.is_compiling() or not kwargs.get("sequence_parallel") or not _has_stages(module):
        return own(module, x, *args, **kwargs)
    q_heads, kv_heads = _heads(module)
    count = _count(module, x, q_heads, kv_heads, kwargs["sequence_parallel"])
    if count == 1:
        return own(module, x, *args, **kwargs)
    run = _Run(module, stages(q_heads, kv_heads, count), x, functools.partial(own, **kwargs), args)
    return _Staged.apply(run, x, *run.parameters), None


def _count(module: Any, x: Tensor, q_heads: int, kv_heads: int, given: bool | Placement) -> int:
    """Of stages. given: what a batch says of who sees whom."""
    sp, mask, shards = module.sequence_parallel, module.sequence_parallel_mask, None
    if isinstance(given, Placement):
        mask, shards = given.masked(mask.window), given.shards
    cast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if cast else x.dtype
    q, k = (torch.empty(*x.shape[:2], n, module.head_dim, dtype=dtype, device="meta") for n in (q_heads, kv_heads))
    return stages_of(sp.runtime, q, k, mask, shards)


def _has_stages(module: Any) -> bool:
    """Whether each stage has projections of its own: not where norms of q and k are over all heads, where projections
    are no plain linear ones or have hooks, or where adapters drop inputs at random."""
    if FAMILIES[module.config.own.model_type].norms_heads:
        return False
    return all(_is_linear(child) for name, child in module.named_children() if name in (*INWARD, OUTWARD))


def _is_linear(module: Any) -> bool:
    if any("forward" in vars(one) or one._forward_hooks or one._forward_pre_hooks for one in module.modules()):
        return False
    if type(module).forward is nn.Linear.forward:
        return True
    return _is_lora(module) and _is_linear(module.base_layer)


def _is_lora(module: Any) -> bool:
    """Whether this is a linear layer of peft's with LoRA as it first was: without dropout, magnitudes or biases."""
    if not hasattr(module, "lora_A") or not hasattr(module, "base_layer") or getattr(module, "lora_variant", None):
        return False
    plain = [*module.lora_A.values(), *module.lora_B.values()]
    drops = [one for one in module.lora_dropout.values() if module.training and getattr(one, "p", 0.0) > 0]
    return not drops and all(type(one) is nn.Linear and one.bias is None for one in plain)


def _heads(module: Any) -> tuple[int, int]:
    """(query heads, key/value heads)."""
    count = module.config.num_attention_heads
    return count, count // module.num_key_value_groups


class _Leaf(NamedTuple):
    """What stands for some of a parameter. place: which rows, or columns; None: all of it, in every stage."""

    parameter: nn.Parameter
    place: tuple[slice, ...] | None
    tensor: Tensor


class _Slice:
    """The parts of an attention module that one stage works with. inward: what makes q, k and v, by name; outward: the
    output projection; leaves of each, and of what is between. grad: whether gradients are asked for."""

    def __init__(self, run: _Run, index: int, grad: bool) -> None:
        self.run, self.grad = run, grad
        module, one, dim = run.module, run.stages[index], run.module.head_dim
        q, kv = (slice(part.start * dim, part.stop * dim) for part in one)
        self.inward: dict[str, Callable[[Tensor], Tensor]] = {}
        self.leaves_in: list[_Leaf] = []
        self.leaves_out: list[_Leaf] = []
        self.between: list[_Leaf] = []
        for name, child in module.named_children():
            if name == "qkv_proj":
                heads, kv_heads = (count * dim for count in _heads(module))
                keys, values = (slice(kv.start + at, kv.stop + at) for at in (heads, heads + kv_heads))
                parts = [self.rows(child, part) for part in (q, keys, values)]
                self.inward[name] = functools.partial(_joined, parts)
            elif name in INWARD:
                self.inward[name] = self.rows(child, q if name == "q_proj" else kv)
        self.outward = self.columns(getattr(module, OUTWARD), q, index == 0)
        self.twin = self.twin_of(module, one)

    def leaf(self, into: list[_Leaf], parameter: Any, *index: slice) -> Any:
        if parameter is None:
            return None
        tensor = parameter.detach()[index] if index else parameter.detach()
        if self.grad and parameter.requires_grad:
            into.append(_Leaf(parameter, index or None, tensor.requires_grad_()))
        return tensor

    def rows(self, module: Any, rows: slice) -> Callable[[Tensor], Tensor]:
        """A linear layer with some of its outputs."""
        leaf = functools.partial(self.leaf, self.leaves_in)
        if not hasattr(module, "base_layer"):
            return functools.partial(F.linear, weight=leaf(module.weight, rows), bias=leaf(module.bias, rows))
        downs = {name: _Linear(leaf(one.weight)) for name, one in module.lora_A.items()}
        ups = {name: _Linear(leaf(one.weight, rows)) for name, one in module.lora_B.items()}
        return _with(module, base_layer=self.rows(module.base_layer, rows), lora_A=downs, lora_B=ups)

    def columns(self, module: Any, columns: slice, first: bool) -> Callable[[Tensor], Tensor]:
        """A linear layer with some of its inputs; the first stage adds the bias."""
        leaf, every = functools.partial(self.leaf, self.leaves_out), slice(None)
        if not hasattr(module, "base_layer"):
            bias = leaf(module.bias) if first else None
            return functools.partial(F.linear, weight=leaf(module.weight, every, columns), bias=bias)
        downs = {name: _Linear(leaf(one.weight, every, columns)) for name, one in module.lora_A.items()}
        ups = {name: _Linear(leaf(one.weight)) for name, one in module.lora_B.items()}
        return _with(module, base_layer=self.columns(module.base_layer, columns, first), lora_A=downs, lora_B=ups)

    def twin_of(self, module: Any, one: Stage) -> Any:
        """The module with the stage's heads, whose output projection does nothing."""
        q_heads, kv_heads = one.counts
        view = _with(module.config, num_attention_heads=q_heads, num_key_value_heads=kv_heads)
        new: dict[str, Any] = {"config": view, "num_key_value_heads": kv_heads, OUTWARD: lambda x: x}
        new |= {name: self.leaf(self.between, p, one.q) for name, p in module.named_parameters(recurse=False)}
        for name, child in module.named_children():
            if name not in (*INWARD, OUTWARD):  # norms of a head
                own = {key: self.leaf(self.between, p) for key, p in child.named_parameters(recurse=False)}
                new[name] = _with(child, **own)
        return _with(module, **{PARTS: len(self.run.stages), **new})

    def project(self, x: Tensor) -> dict[str, Tensor]:
        """By projection: what it makes of x (B, s, d), tile by tile."""
        found: dict[str, Tensor] = {}
        for cut in self.run.cuts:
            for name, projection in self.inward.items():
                tile = projection(x[:, cut])
                if name not in found:
                    found[name] = tile.new_empty(*x.shape[:2], tile.shape[-1])
                found[name][:, cut] = tile
        return found

    def blank(self, x: Tensor) -> dict[str, Tensor]:
        """The same shapes with nothing in them, for an attention whose result is known."""
        found = {name: projection(x[:, :1]) for name, projection in self.inward.items()}
        return {name: one.new_zeros(()).expand(*x.shape[:2], one.shape[-1]) for name, one in found.items()}

    def attend(self, x: Tensor, inner: dict[str, Tensor]) -> Tensor:
        """inner: what was projected -> the attention's output of the stage's heads, (B, s, h D)."""
        vars(self.twin).update({name: lambda _, one=one: one for name, one in inner.items()})
        return self.run.own(self.twin, x, *self.run.args)[0]


def _joined(parts: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    return torch.cat([part(x) for part in parts], -1)


class _Linear:
    """A linear layer as an adapter asks for it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def _with(module: Any, **new: Any) -> Any:
    """The same object with other attributes. Of the same class: what a subclass overrides stays so."""
    twin = object.__new__(type(module))
    vars(twin).update(vars(module))
    vars(twin).update(new)
    return twin


class _Run:
    """One forward of a module, and what its backward must repeat. own: the forward of the module's class."""

    def __init__(self, module: Any, its: Sequence[Stage], x: Tensor, own: Callable[..., Any], args: tuple) -> None:
        self.module, self.stages, self.own, self.args = module, its, own, args
        self.parameters, self.conditions = tuple(trained(module)), Conditions.of(x)
        self.cuts = cuts(x.shape[1], ceil_of(x.shape[0] * x.shape[1], x.shape[2]))
        self.wanted, self.keeps = torch.is_grad_enabled(), False

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(the output, what attention gave in all stages)."""
        out, given = torch.empty(0), list[Tensor]()
        for index in range(len(self.stages)):
            part, kept = _Slice(self, index, grad=False), Part()
            self.keeps = kept.keeps
            attended = kept.run(part.attend, x, part.blank(x) if is_known() else part.project(x))
            given += kept.gave() if self.wanted else []
            for cut in self.cuts:
                tile = part.outward(attended[:, cut])
                if out.dim() == 1:
                    out = tile.new_empty(*x.shape[:2], tile.shape[-1])
                out[:, cut] = out[:, cut].add_(tile) if index else tile
        return out, given

    def backward(self, x: Tensor, given: list[Tensor], grad: Tensor, wants_x: bool) -> Iterator[Tensor | None]:
        """The gradient of x, and those of the parameters. given: what attention gave; it is used up."""
        found, dx, each = _Gradients(), torch.zeros_like(x) if wants_x else None, len(given) // len(self.stages)
        with self.conditions.again():
            for index in range(len(self.stages)):
                self.stage_backward(_Slice(self, index, grad=True), x, tuple(given[:each]), grad, dx, found)
                del given[:each]
        yield dx
        yield from map(found.taken, self.parameters)

    def stage_backward(
        self, part: _Slice, x: Tensor, given: tuple[Tensor, ...], grad: Tensor, dx: Tensor | None, found: _Gradients
    ) -> None:
        """Adds the gradients of one stage to dx and found."""
        inner = {name: one.requires_grad_() for name, one in part.project(x).items()}
        with torch.enable_grad():
            attended = Part(given, self.keeps).run(part.attend, x, inner)
        d_attended = torch.empty_like(attended)
        with found.adding(part.leaves_out) as differentiate:
            for cut in self.cuts:
                with torch.enable_grad():
                    tile = attended[:, cut].detach().requires_grad_()
                    out = part.outward(tile)
                (d_attended[:, cut],) = differentiate([out], [tile], [grad[:, cut]])
        with found.adding(part.between) as differentiate:
            d_inner = differentiate([attended], list(inner.values()), [d_attended])
        del attended, d_attended, inner
        with found.adding(part.leaves_in) as differentiate:
            for cut in self.cuts:
                with torch.enable_grad():
                    tile = x[:, cut].detach().requires_grad_(dx is not None)
                    outs = [projection(tile) for projection in part.inward.values()]
                of_tile = differentiate(outs, [tile] if dx is not None else [], [one[:, cut] for one in d_inner])
                if dx is not None:
                    dx[:, cut] += of_tile[0]


class _Gradients:
    """Of parameters. whole: those of which stages have slices, in the parameter's dtype; shared: sums over stages, in
    fp32 or wider."""

    def __init__(self) -> None:
        self.whole: dict[nn.Parameter, Tensor] = {}
        self.shared: dict[nn.Parameter, Tensor] = {}

    @contextlib.contextmanager
    def adding(self, leaves: list[_Leaf]) -> Iterator[Callable[..., list[Tensor]]]:
        """A context with a function of (outputs, inputs, gradients of the outputs) that gives the gradients of the
        inputs; those of leaves are added up in fp32 or wider, and are theirs at the end."""
        tensors = [leaf.tensor for leaf in leaves]
        sums = Sums(tensors)

        def differentiate(outs: list[Tensor], asked: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
            if not asked and not tensors:
                return []
            given = [grad.to(out.dtype) for grad, out in zip(grads, outs, strict=True)]
            found = list(torch.autograd.grad(outs, [*asked, *tensors], given, allow_unused=True))
            sums.add(found[len(asked) :])
            return found[: len(asked)]

        yield differentiate
        for leaf, total in zip(leaves, sums.totals, strict=True):
            if total is not None:
                self.put(leaf, total)

    def put(self, leaf: _Leaf, total: Tensor) -> None:
        parameter = leaf.parameter
        if leaf.place is None:
            self.shared[parameter] = self.shared[parameter].add_(total) if parameter in self.shared else total
            return
        if parameter not in self.whole:
            self.whole[parameter] = torch.zeros_like(parameter)
        self.whole[parameter][leaf.place] = total

    def taken(self, parameter: nn.Parameter) -> Tensor | None:
        """None for one that no stage used."""
        if parameter in self.shared:
            return self.shared.pop(parameter).to(parameter.dtype)
        return self.whole.pop(parameter, None)


class _Staged(Function):
    """The module's output (B, s, d). Saved are its input and what attention gave."""

    @staticmethod
    def forward(ctx: Any, run: _Run, x: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.run = run
        out, given = run.forward(x)
        ctx.save_for_backward(x, *given)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *given = ctx.saved_tensors
        return None, *ctx.run.backward(x, given, grad, ctx.needs_input_grad[1])
