"""Record and undo the changes that a patch makes to a module.

One attribute of the module stores all changes. Copies of the module have their own copies of the attribute, so a copied
model is patched and restored independently.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from .compat import LEAF, ZERO_ID

ATTRIBUTE = "_sequence_parallel"


@dataclasses.dataclass(kw_only=True, eq=False)
class ModulePatch:
    """The changes that a patch has made to one module."""

    sp: Any = None  # for attention modules: the SequenceParallel
    mask: Any = None  # for attention modules: the Mask
    chunk: int | None = None  # the chunk length of chunked attention
    # for a module with an index: all of the model's modules with an index, which run on all local tokens at once if
    # possible
    selecting: list[nn.Module] = dataclasses.field(default_factory=list)
    head_chunks: int = 1  # for a copy with only one head chunk: the number of head chunks
    model: Any = None  # for a base model: its model's Patch
    base: str | None = None  # for a model: the name of the module that heads call, if not the base model
    # by attribute name: (new value, {} or {name: old value})
    replaced: dict[str, tuple[Any, dict[str, Any]]] = dataclasses.field(default_factory=dict)
    hooks: list[RemovableHandle] = dataclasses.field(default_factory=list)


def patch_on(module: nn.Module) -> ModulePatch | None:
    """Return the changes that a patch has made to a module, or None if there are no changes."""
    return vars(module).get(ATTRIBUTE)


def patched(module: nn.Module) -> ModulePatch:
    """Return a module's record of changes, after creating an empty record if necessary."""
    return vars(module).setdefault(ATTRIBUTE, ModulePatch())


def override(module: nn.Module, name: str, value: Any) -> None:
    """Replace an attribute of a module until `restore`. If other code replaces the attribute again, `restore` keeps the
    later value.
    """
    replaced, own = patched(module).replaced, vars(module)
    before = {name: own[name]} if name in own else {}
    if is_overridden(module, name):
        before = replaced[name][1]
    replaced[name] = value, before
    own[name] = value


def override_forward(module: nn.Module, function: Callable[..., Any]) -> None:
    """Make function(forward, module, ...) compute a module's forward until `restore`.

    Other code may wrap and keep the new `forward`, which has the same signature and calls the previous `forward` after
    `restore`.
    """
    own = vars(module).get("forward")
    forward = type(module).forward if own is None else own.__func__

    @functools.wraps(forward)
    def compute(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(forward, self, *args, **kwargs) if patch_on(self) else forward(self, *args, **kwargs)

    override(module, "forward", types.MethodType(compute, module))


def is_overridden(module: nn.Module, name: str) -> bool:
    """Return whether a module's attribute still has the value set by `override`."""
    own = patch_on(module)
    return own is not None and name in own.replaced and vars(module).get(name) is own.replaced[name][0]


def restore(*models: nn.Module) -> None:
    """Undo a patch's changes to all modules of the given models."""
    for module in dict.fromkeys(module for model in models for module in model.modules()):
        if (own := patch_on(module)) is None:
            continue
        for hook in own.hooks:
            hook.remove()
        for name, (_, before) in own.replaced.items():
            # ZeRO-3 still reads LEAF on modules that it has hooked
            if is_overridden(module, name) and not (name == LEAF and hasattr(module, ZERO_ID)):
                del vars(module)[name]
                vars(module).update(before)
        del vars(module)[ATTRIBUTE]
