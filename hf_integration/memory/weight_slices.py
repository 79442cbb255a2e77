"""The slices of an attention module's weights that compute one head chunk, and the sums of their gradients.

Linear layers may have LoRA (peft's `base_layer`, `lora_A`, `lora_B`).
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_seqpar.compiler.sharding.heads import HeadChunk

from .tiled_function import GradientSums

PARTS = "sequence_parallel_parts"  # attribute of a twin: the number of its module's head chunks
# names of the projections before attention, and of the one after it
INWARD, OUTWARD = ("q_proj", "k_proj", "v_proj", "qkv_proj"), "o_proj"


def heads_of(module: Any) -> tuple[int, int]:
    """(query heads, key/value heads) of an attention module."""
    count = module.config.num_attention_heads
    return count, count // module.num_key_value_groups


class Leaf(NamedTuple):
    """A tensor that is differentiated in place of a parameter, or of a slice of it.

    place: the index of the slice in the parameter; None: it stands for the whole parameter, which every head chunk
    uses."""

    parameter: nn.Parameter
    place: tuple[slice, ...] | None
    tensor: Tensor


class Slice:
    """The part of an attention module that computes one head chunk.

    inward: name -> a projection with only the rows that make the head chunk's q, k, v. outward: the output projection
    with only the columns of the head chunk's heads. twin: a copy of the module with the head chunk's heads, for what
    comes between projections. normed: the norm that is applied to the input first; norm: (module, forward) of it; None:
    there is none. With `grad`, leaves_in (those of the norm included), leaves_out and leaves_between are the leaves of
    these parts; else they are empty."""

    def __init__(
        self, module: Any, head_chunks: Sequence[HeadChunk], index: int, norm: tuple[Any, Callable[..., Tensor]] | None,
        grad: bool,
    ) -> None:  # fmt: skip
        self.grad, heads, dim = grad, head_chunks[index], module.head_dim
        q, kv = (slice(part.start * dim, part.stop * dim) for part in heads)
        self.inward: dict[str, Callable[[Tensor], Tensor]] = {}
        self.leaves_in: list[Leaf] = []
        self.leaves_out: list[Leaf] = []
        self.leaves_between: list[Leaf] = []
        for name, child in module.named_children():
            if name == "qkv_proj":
                q_rows, kv_rows = (count * dim for count in heads_of(module))
                keys, values = (slice(kv.start + at, kv.stop + at) for at in (q_rows, q_rows + kv_rows))
                parts = [self.rows(child, part) for part in (q, keys, values)]
                self.inward[name] = functools.partial(_concatenated, parts)
            elif name in INWARD:
                self.inward[name] = self.rows(child, q if name == "q_proj" else kv)
        self.normed: Callable[[Tensor], Tensor] = lambda x: x
        if norm is not None:
            own = {name: self.leaf(self.leaves_in, p) for name, p in norm[0].named_parameters(recurse=False)}
            self.normed = functools.partial(norm[1], _copy_with(norm[0], **own))
        self.outward = self.columns(getattr(module, OUTWARD), q, index == 0)
        self.twin = self.twin_of(module, heads, len(head_chunks))

    def leaf(self, into: list[Leaf], parameter: Any, *index: slice) -> Any:
        """A tensor with the data of parameter[index]. Where gradients are wanted, its Leaf is added to `into`."""
        if parameter is None:
            return None
        tensor = parameter.detach()[index] if index else parameter.detach()
        if self.grad and parameter.requires_grad:
            into.append(Leaf(parameter, index or None, tensor.requires_grad_()))
        return tensor

    def rows(self, module: Any, rows: slice) -> Callable[[Tensor], Tensor]:
        """A linear layer (LoRA included) that makes only these output features."""
        leaf = functools.partial(self.leaf, self.leaves_in)
        if not hasattr(module, "base_layer"):
            return functools.partial(F.linear, weight=leaf(module.weight, rows), bias=leaf(module.bias, rows))
        downs = {name: _Linear(leaf(one.weight)) for name, one in module.lora_A.items()}
        ups = {name: _Linear(leaf(one.weight, rows)) for name, one in module.lora_B.items()}
        return _copy_with(module, base_layer=self.rows(module.base_layer, rows), lora_A=downs, lora_B=ups)

    def columns(self, module: Any, columns: slice, first: bool) -> Callable[[Tensor], Tensor]:
        """A linear layer (LoRA included) that takes only these input features; the first head chunk adds the bias."""
        leaf, every = functools.partial(self.leaf, self.leaves_out), slice(None)
        if not hasattr(module, "base_layer"):
            bias = leaf(module.bias) if first else None
            return functools.partial(F.linear, weight=leaf(module.weight, every, columns), bias=bias)
        downs = {name: _Linear(leaf(one.weight, every, columns)) for name, one in module.lora_A.items()}
        ups = {name: _Linear(leaf(one.weight)) for name, one in module.lora_B.items()}
        return _copy_with(module, base_layer=self.columns(module.base_layer, columns, first), lora_A=downs, lora_B=ups)

    def twin_of(self, module: Any, heads: HeadChunk, parts: int) -> Any:
        """A copy of the module that has the head chunk's heads alone, and an output projection that returns its
        input."""
        q_heads, kv_heads = heads.counts
        view = _copy_with(module.config, num_attention_heads=q_heads, num_key_value_heads=kv_heads)
        new: dict[str, Any] = {"config": view, "num_key_value_heads": kv_heads, OUTWARD: lambda x: x}
        new |= {name: self.leaf(self.leaves_between, p, heads.q) for name, p in module.named_parameters(recurse=False)}
        for name, child in module.named_children():
            if name not in (*INWARD, OUTWARD):  # norms of a head
                own = {key: self.leaf(self.leaves_between, p) for key, p in child.named_parameters(recurse=False)}
                new[name] = _copy_with(child, **own)
        return _copy_with(module, **{PARTS: parts, **new})

    def project(self, x: Tensor, cuts: list[slice]) -> dict[str, Tensor]:
        """Name of a projection -> its output (B, s, features of the head chunk), without autograd. x (B, s, d). cuts:
        the slices of tokens that are projected one after another."""
        found: dict[str, Tensor] = {}
        with torch.no_grad():
            for cut in cuts:
                given = self.normed(x[:, cut])
                for name, projection in self.inward.items():
                    tile = projection(given)
                    if name not in found:
                        found[name] = tile.new_empty(*x.shape[:2], tile.shape[-1])
                    found[name][:, cut] = tile
        return found

    def blank(self, x: Tensor) -> dict[str, Tensor]:
        """Tensors in the shapes of `project` without memory, for attention that only returns what a checkpoint kept."""
        found = {name: projection(x[:, :1]) for name, projection in self.inward.items()}
        return {name: one.new_zeros(()).expand(*x.shape[:2], one.shape[-1]) for name, one in found.items()}

    def attend(self, forward: Callable[..., tuple], projected: dict[str, Tensor]) -> Tensor:
        """The attention output of the head chunk's heads (B, s, heads of the head chunk x head_dim).

        forward: the forward of the module's class, which is called with the twin. projected: as `project` returns it;
        emptied, so that each tensor is freed after its use."""
        vars(self.twin).update({name: lambda _, name=name: projected.pop(name) for name in projected})
        return forward(self.twin)[0]


def _concatenated(parts: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    return torch.cat([part(x) for part in parts], -1)


class _Linear:
    """A linear layer without bias that has a `weight`, as peft's forward asks of it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def _copy_with(module: Any, **new: Any) -> Any:
    """A shallow copy of an object, of the same class, with some attributes replaced. Methods that were set on the
    object itself, as Liger sets them, are bound to the copy."""
    twin = object.__new__(type(module))
    own = {name: x for name, x in vars(module).items() if isinstance(x, types.MethodType) and x.__self__ is module}
    vars(twin).update(vars(module) | {name: types.MethodType(x.__func__, twin) for name, x in own.items()})
    vars(twin).update(new)
    return twin


class Gradients:
    """Gradients of an attention module's parameters, head chunk by head chunk.

    whole: of parameters of which each head chunk has a slice, in the parameter's dtype. shared: of parameters that
    every head chunk uses, summed over head chunks in fp32 or wider."""

    def __init__(self) -> None:
        self.whole: dict[nn.Parameter, Tensor] = {}
        self.shared: dict[nn.Parameter, Tensor] = {}

    @contextlib.contextmanager
    def adding(self, leaves: list[Leaf]) -> Iterator[Callable[..., list[Tensor]]]:
        """A context for differentiating tile by tile; at its end it adds the gradients of the leaves.

        It gives a function (outputs or their edges, inputs, gradients of the outputs) -> gradients of the inputs. Each
        call also sums the gradients of the leaves, in fp32 or wider."""
        tensors = [leaf.tensor for leaf in leaves]
        sums = GradientSums(tensors)

        def differentiate(outs: list[Any], asked: list[Any], grads: list[Tensor]) -> list[Tensor]:
            if not asked and not tensors:
                return []
            # the output of a frozen projection of an input without gradient has none (LoRA elsewhere, in a first layer)
            pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if getattr(out, "requires_grad", True)]
            given = [grad.to(getattr(out, "dtype", grad.dtype)) for out, grad in pairs]
            found = list(torch.autograd.grad([out for out, _ in pairs], [*asked, *tensors], given, allow_unused=True))
            sums.add(found[len(asked) :])
            return found[: len(asked)]

        yield differentiate
        for leaf, total in zip(leaves, sums.totals, strict=True):
            if total is not None:
                self.put(leaf, total)

    def put(self, leaf: Leaf, total: Tensor) -> None:
        """Adds the gradient of a leaf in one head chunk to its parameter's."""
        parameter = leaf.parameter
        if leaf.place is None:
            self.shared[parameter] = self.shared[parameter].add_(total) if parameter in self.shared else total
            return
        if parameter not in self.whole:
            self.whole[parameter] = torch.zeros_like(parameter)
        self.whole[parameter][leaf.place] = total

    def pop(self, parameter: nn.Parameter) -> Tensor | None:
        """Removes and returns the gradient of a parameter, in its dtype; None where no head chunk used the
        parameter."""
        if parameter in self.shared:
            return self.shared.pop(parameter).to(parameter.dtype)
        return self.whole.pop(parameter, None)
