"""The part of an attention module that works on some of its heads, and the gradients of its parameters."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_seqpar.compiler.heads import Stage

from .tiles import Sums

PARTS = "sequence_parallel_parts"  # of a twin: in how many stages its module is
INWARD, OUTWARD = ("q_proj", "k_proj", "v_proj", "qkv_proj"), "o_proj"


def heads_of(module: Any) -> tuple[int, int]:
    """(query heads, key/value heads) of an attention module."""
    count = module.config.num_attention_heads
    return count, count // module.num_key_value_groups


class Leaf(NamedTuple):
    """What stands for some of a parameter. place: which rows, or columns; None: all of it, in every stage."""

    parameter: nn.Parameter
    place: tuple[slice, ...] | None
    tensor: Tensor


class Slice:
    """The parts of an attention module that one of its stages works with. inward: what makes q, k and v, by name;
    outward: the output projection; twin: the module with the stage's heads. leaves_in, leaves_out, between: of the
    parameters of each, where gradients are asked for (`grad`)."""

    def __init__(self, module: Any, stages: Sequence[Stage], index: int, grad: bool) -> None:
        self.grad, one, dim = grad, stages[index], module.head_dim
        q, kv = (slice(part.start * dim, part.stop * dim) for part in one)
        self.inward: dict[str, Callable[[Tensor], Tensor]] = {}
        self.leaves_in: list[Leaf] = []
        self.leaves_out: list[Leaf] = []
        self.between: list[Leaf] = []
        for name, child in module.named_children():
            if name == "qkv_proj":
                heads, kv_heads = (count * dim for count in heads_of(module))
                keys, values = (slice(kv.start + at, kv.stop + at) for at in (heads, heads + kv_heads))
                parts = [self.rows(child, part) for part in (q, keys, values)]
                self.inward[name] = functools.partial(_joined, parts)
            elif name in INWARD:
                self.inward[name] = self.rows(child, q if name == "q_proj" else kv)
        self.outward = self.columns(getattr(module, OUTWARD), q, index == 0)
        self.twin = self.twin_of(module, one, len(stages))

    def leaf(self, into: list[Leaf], parameter: Any, *index: slice) -> Any:
        if parameter is None:
            return None
        tensor = parameter.detach()[index] if index else parameter.detach()
        if self.grad and parameter.requires_grad:
            into.append(Leaf(parameter, index or None, tensor.requires_grad_()))
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

    def twin_of(self, module: Any, one: Stage, parts: int) -> Any:
        """The module with the stage's heads, whose output projection does nothing."""
        q_heads, kv_heads = one.counts
        view = _with(module.config, num_attention_heads=q_heads, num_key_value_heads=kv_heads)
        new: dict[str, Any] = {"config": view, "num_key_value_heads": kv_heads, OUTWARD: lambda x: x}
        new |= {name: self.leaf(self.between, p, one.q) for name, p in module.named_parameters(recurse=False)}
        for name, child in module.named_children():
            if name not in (*INWARD, OUTWARD):  # norms of a head
                own = {key: self.leaf(self.between, p) for key, p in child.named_parameters(recurse=False)}
                new[name] = _with(child, **own)
        return _with(module, **{PARTS: parts, **new})

    def project(self, x: Callable[[slice], Tensor], like: Tensor, cuts: list[slice]) -> dict[str, Tensor]:
        """By projection: what it makes of x (B, s, d), of which the function gives tiles. like: of as many tokens."""
        found: dict[str, Tensor] = {}
        with torch.no_grad():
            for cut in cuts:
                given = x(cut)
                for name, projection in self.inward.items():
                    tile = projection(given)
                    if name not in found:
                        found[name] = tile.new_empty(*like.shape[:2], tile.shape[-1])
                    found[name][:, cut] = tile
        return found

    def blank(self, x: Tensor) -> dict[str, Tensor]:
        """The same shapes with nothing in them, for an attention whose result is known."""
        found = {name: projection(x[:, :1]) for name, projection in self.inward.items()}
        return {name: one.new_zeros(()).expand(*x.shape[:2], one.shape[-1]) for name, one in found.items()}

    def attend(self, forward: Callable[..., tuple], inner: dict[str, Tensor]) -> Tensor:
        """inner: what was projected, which is given up -> the attention's output of the stage's heads, (B, s, h D).
        forward: of the module's class, of a module."""
        vars(self.twin).update({name: lambda _, name=name: inner.pop(name) for name in inner})
        return forward(self.twin)[0]


def _joined(parts: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    return torch.cat([part(x) for part in parts], -1)


class _Linear:
    """A linear layer as an adapter asks for it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def _with(module: Any, **new: Any) -> Any:
    """The same object with other attributes. Of the same class: what a subclass overrides stays so. Methods that were
    put into the object, as Liger's are, are the twin's."""
    twin = object.__new__(type(module))
    own = {name: x for name, x in vars(module).items() if isinstance(x, types.MethodType) and x.__self__ is module}
    vars(twin).update(vars(module) | {name: types.MethodType(x.__func__, twin) for name, x in own.items()})
    vars(twin).update(new)
    return twin


class Gradients:
    """Of parameters. whole: those of which stages have slices, in the parameter's dtype; shared: sums over stages, in
    fp32 or wider."""

    def __init__(self) -> None:
        self.whole: dict[nn.Parameter, Tensor] = {}
        self.shared: dict[nn.Parameter, Tensor] = {}

    @contextlib.contextmanager
    def adding(self, leaves: list[Leaf]) -> Iterator[Callable[..., list[Tensor]]]:
        """A context with a function of (outputs, inputs, gradients of the outputs) that gives the gradients of the
        inputs; those of leaves are added up in fp32 or wider, and are theirs at the end."""
        tensors = [leaf.tensor for leaf in leaves]
        sums = Sums(tensors)

        def differentiate(outs: list[Tensor], asked: list[Any], grads: list[Tensor]) -> list[Tensor]:
            if not asked and not tensors:
                return []
            # a frozen projection of an input that wants no gradient has none: LoRA on others, in a first layer
            followed = [(out, grad.to(out.dtype)) for out, grad in zip(outs, grads, strict=True) if out.requires_grad]
            trained, given = zip(*followed, strict=True)
            found = list(torch.autograd.grad(trained, [*asked, *tensors], given, allow_unused=True))
            sums.add(found[len(asked) :])
            return found[: len(asked)]

        yield differentiate
        for leaf, total in zip(leaves, sums.totals, strict=True):
            if total is not None:
                self.put(leaf, total)

    def put(self, leaf: Leaf, total: Tensor) -> None:
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
