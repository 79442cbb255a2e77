"""Check the inputs and outputs of a patched model's modules for NaN and inf.

The checks run if `check_finite` is set and the code is not compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_seqpar import SequenceParallel
from ds_seqpar.base.compat import tree_leaves
from ds_seqpar.guards.finite import Finite, not_finite


def watch(model: nn.Module, sp: SequenceParallel) -> list[RemovableHandle]:
    """Register hooks on all modules and trained parameters of a model.

    Hooks that shard batches or gather outputs must be registered afterwards.

    Returns:
        The hooks; empty if `check_finite` is not set.
    """
    handles: list[RemovableHandle] = []
    if (finite := sp.finite) is None:
        return handles
    for name, module in model.named_modules():
        named = name or type(module).__name__
        before, after = functools.partial(_before, finite, named), functools.partial(_after, finite, named)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    return handles + finite.watch_gradients(model)


def _before(finite: Finite, name: str, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        for field, x in _tensors({**dict(enumerate(args)), **kwargs}):
            if "mask" not in field:  # a mask contains -inf
                what = f"{field} of {name}" if field in kwargs else f"the input of {name}"
                finite.look(what, "which came in, and which no module before it made", x, "see what made it")


def _after(finite: Finite, name: str, module: nn.Module, args: tuple, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    is_leaf = next(module.children(), None) is None
    for field, x in _tensors(output):
        if finite.found is None and not_finite(x):
            for parameter_name, parameter in module.named_parameters():
                what = f"the parameter {parameter_name} of {name}"
                finite.look(what, "with which it computes", parameter, "see the checkpoint or code that has set it")
            what = f"{field} of {name}" if isinstance(output, Mapping) else f"the output of {name}"
            finite.look(what, "which that module made of finite inputs", x, "see its inputs' size and its dtype")
        if is_leaf and x.requires_grad:
            by = "the backward of what reads it"
            x.register_hook(functools.partial(finite.look_at_made, f"the output of {name}", by=by))


def _tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (field name, tensor) for all tensors in a module's arguments or output."""
    for name, x in value.items() if isinstance(value, Mapping) else enumerate((value,)):
        yield from ((str(name), leaf) for leaf in tree_leaves(x) if isinstance(leaf, Tensor))
