"""Slice an attention module's weights to compute one head chunk, and sum the gradients of the slices.

Linear layers may include LoRA (peft's `base_layer`, `lora_A`, `lora_B`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_seqpar.core.compiler.sharding.heads import HeadChunk

from ..module_patch import ATTRIBUTE, patched
from .tiled_function import GradientSums

# names of the projections before and after attention
INWARD, OUTWARD = ("q_proj", "k_proj", "v_proj", "qkv_proj"), "o_proj"


def heads_of(module: Any) -> tuple[int, int]:
    """Return (query heads, key/value heads) of an attention module."""
    count = module.config.num_attention_heads
    return count, count // module.num_key_value_groups


class Leaf(NamedTuple):
    """A tensor that is differentiated in place of a parameter or a slice of a parameter."""

    parameter: nn.Parameter
    # the index of the slice, or None if the tensor replaces a whole parameter, which all head chunks use
    place: tuple[slice, ...] | None
    tensor: Tensor


class Slice:
    """The part of an attention module that computes one head chunk.

    Args:
        module: The attention module.
        head_chunks: All head chunks.
        index: The index of this head chunk.
        grad: Whether gradients are needed. If not, the lists of leaves are empty.

    Attributes:
        inward: Projections with only the rows for the head chunk's q, k and v, by name.
        outward: The output projection with only the columns for the head chunk's heads.
        twin: A copy of the module with the head chunk's heads, for the computation between projections.
        leaves_in: The leaves of `inward`.
        leaves_out: The leaves of `outward`.
        leaves_between: The leaves of `twin`.
    """

    def __init__(self, module: Any, head_chunks: Sequence[HeadChunk], index: int, grad: bool) -> None:
        self.grad, heads, dim = grad, head_chunks[index], module.head_dim
        q, kv = (slice(span.start * dim, span.stop * dim) for span in heads)
        self.inward: dict[str, Callable[[Tensor], Tensor]] = {}
        self.leaves_in: list[Leaf] = []
        self.leaves_out: list[Leaf] = []
        self.leaves_between: list[Leaf] = []
        for name, child in module.named_children():
            if name == "qkv_proj":
                q_rows, kv_rows = (count * dim for count in heads_of(module))
                keys, values = (slice(kv.start + offset, kv.stop + offset) for offset in (q_rows, q_rows + kv_rows))
                projections = [self.rows(child, span) for span in (q, keys, values)]
                self.inward[name] = functools.partial(_concatenated, projections)
            elif name in INWARD:
                self.inward[name] = self.rows(child, q if name == "q_proj" else kv)
        self.outward = self.columns(getattr(module, OUTWARD), q, index == 0)
        self.twin = self.twin_of(module, heads, len(head_chunks))

    def leaf(self, into: list[Leaf], parameter: Any, *index: slice) -> Any:
        """Return a tensor with the data of parameter[index].

        If gradients are needed, a Leaf for the tensor is added to `into`.
        """
        if parameter is None:
            return None
        tensor = parameter.detach()[index] if index else parameter.detach()
        if self.grad and parameter.requires_grad:
            into.append(Leaf(parameter, index or None, tensor.requires_grad_()))
        return tensor

    def rows(self, module: Any, rows: slice) -> Callable[[Tensor], Tensor]:
        """Return a linear layer, including LoRA, that computes only the given output features."""
        leaf = functools.partial(self.leaf, self.leaves_in)
        if not hasattr(module, "base_layer"):
            return functools.partial(F.linear, weight=leaf(module.weight, rows), bias=leaf(module.bias, rows))
        downs = {name: _Linear(leaf(layer.weight)) for name, layer in module.lora_A.items()}
        ups = {name: _Linear(leaf(layer.weight, rows)) for name, layer in module.lora_B.items()}
        return _copy_with(module, base_layer=self.rows(module.base_layer, rows), lora_A=downs, lora_B=ups)

    def columns(self, module: Any, columns: slice, first: bool) -> Callable[[Tensor], Tensor]:
        """Return a linear layer, including LoRA, for only the given input features.

        The first head chunk adds the bias.
        """
        leaf, every = functools.partial(self.leaf, self.leaves_out), slice(None)
        if not hasattr(module, "base_layer"):
            bias = leaf(module.bias) if first else None
            return functools.partial(F.linear, weight=leaf(module.weight, every, columns), bias=bias)
        downs = {name: _Linear(leaf(layer.weight, every, columns)) for name, layer in module.lora_A.items()}
        ups = {name: _Linear(leaf(layer.weight)) for name, layer in module.lora_B.items()}
        return _copy_with(module, base_layer=self.columns(module.base_layer, columns, first), lora_A=downs, lora_B=ups)

    def twin_of(self, module: Any, heads: HeadChunk, chunks: int) -> Any:
        """Return a copy of the module with the head chunk's heads, and with the identity as its output projection."""
        q_heads, kv_heads = heads.counts
        view = _copy_with(module.config, num_attention_heads=q_heads, num_key_value_heads=kv_heads)
        attributes: dict[str, Any] = {"config": view, "num_key_value_heads": kv_heads, OUTWARD: lambda x: x}
        attributes |= {
            name: self.leaf(self.leaves_between, p, heads.q) for name, p in module.named_parameters(recurse=False)
        }
        for name, child in module.named_children():
            if name not in (*INWARD, OUTWARD):  # norms over the channels of a head
                weights = {key: self.leaf(self.leaves_between, p) for key, p in child.named_parameters(recurse=False)}
                attributes[name] = _copy_with(child, **weights)
        own = dataclasses.replace(patched(module), head_chunks=chunks)
        return _copy_with(module, **{ATTRIBUTE: own, **attributes})

    def project(self, x: Tensor, cuts: list[slice]) -> dict[str, Tensor]:
        """Compute the projections before attention, without autograd.

        Args:
            x: (B, s, d).
            cuts: The slices of tokens, which are projected one after another.

        Returns:
            The output (B, s, features of the head chunk) of each projection, by name.
        """
        outputs: dict[str, Tensor] = {}
        with torch.no_grad():
            for cut in cuts:
                for name, projection in self.inward.items():
                    tile = projection(x[:, cut])
                    if name not in outputs:
                        outputs[name] = tile.new_empty(*x.shape[:2], tile.shape[-1])
                    outputs[name][:, cut] = tile
        return outputs

    def blank(self, x: Tensor) -> dict[str, Tensor]:
        """Return tensors that have the shapes of `project`'s results but occupy no memory.

        Tensors without memory suffice if attention only returns results that a checkpoint stored.
        """
        outputs = {name: projection(x[:, :1]) for name, projection in self.inward.items()}
        return {name: output.new_zeros(()).expand(*x.shape[:2], output.shape[-1]) for name, output in outputs.items()}

    def attend(self, forward: Callable[..., tuple], projected: dict[str, Tensor]) -> Tensor:
        """Return the attention output of the head chunk's heads (B, s, heads of the head chunk x head_dim).

        Args:
            forward: The forward of the module's class, which is called with the twin.
            projected: The result of `project`. The dict is emptied, so that each tensor is freed after its use.
        """
        vars(self.twin).update({name: lambda _, name=name: projected.pop(name) for name in projected})
        return forward(self.twin)[0]


def _concatenated(projections: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    return torch.cat([projection(x) for projection in projections], -1)


class _Linear:
    """A linear layer without bias. The `weight` attribute exists for peft's forward."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def _copy_with(module: Any, **new: Any) -> Any:
    """Return a shallow copy of a module with some attributes replaced.

    Methods set on the module object itself, for example by Liger, are bound to the copy.
    """
    twin = object.__new__(type(module))
    methods = {name: x for name, x in vars(module).items() if isinstance(x, types.MethodType) and x.__self__ is module}
    vars(twin).update(vars(module) | {name: types.MethodType(x.__func__, twin) for name, x in methods.items()})
    vars(twin).update(new)
    return twin


class Gradients:
    """Gradients of an attention module's parameters, collected by head chunk."""

    def __init__(self) -> None:
        # gradients of parameters that are sliced by head chunk, in the parameter's dtype
        self.whole: dict[nn.Parameter, Tensor] = {}
        # gradients of parameters that every head chunk uses, summed over head chunks in fp32 or wider
        self.shared: dict[nn.Parameter, Tensor] = {}

    @contextlib.contextmanager
    def adding(self, leaves: list[Leaf]) -> Iterator[Callable[..., list[Tensor]]]:
        """Context manager for differentiating tile by tile.

        On exit, the leaves' gradients are added to the parameters' gradients.

        Yields:
            A function that returns the gradients of inputs, given (outputs or their edges, inputs, gradients of the
            outputs). Each call of that function also sums the gradients of the leaves, in fp32 or wider.
        """
        tensors = [leaf.tensor for leaf in leaves]
        sums = GradientSums(tensors)

        def differentiate(outs: list[Any], inputs: list[Any], grads: list[Tensor]) -> list[Tensor]:
            if not inputs and not tensors:
                return []
            # frozen projections of inputs without gradients have no gradient (LoRA in other modules of a first layer)
            pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if getattr(out, "requires_grad", True)]
            grad_outputs = [grad.to(getattr(out, "dtype", grad.dtype)) for out, grad in pairs]
            gradients = list(
                torch.autograd.grad([out for out, _ in pairs], [*inputs, *tensors], grad_outputs, allow_unused=True)
            )
            sums.add(gradients[len(inputs) :])
            return gradients[: len(inputs)]

        yield differentiate
        for leaf, total in zip(leaves, sums.totals, strict=True):
            if total is not None:
                self.put(leaf, total)

    def put(self, leaf: Leaf, total: Tensor) -> None:
        """Add a leaf's gradient from one head chunk to the parameter's gradient."""
        parameter = leaf.parameter
        if leaf.place is None:
            self.shared[parameter] = self.shared[parameter].add_(total) if parameter in self.shared else total
            return
        if parameter not in self.whole:
            self.whole[parameter] = torch.zeros_like(parameter)
        self.whole[parameter][leaf.place] = total

    def pop(self, parameter: nn.Parameter) -> Tensor | None:
        """Remove and return a parameter's gradient in the parameter's dtype, or None if no head chunk used the
        parameter.
        """
        if parameter in self.shared:
            return self.shared.pop(parameter).to(parameter.dtype)
        return self.whole.pop(parameter, None)
