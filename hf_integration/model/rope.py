"""Correct position embeddings that would be wrong if computed from one rank's tokens alone.

RoPE frequencies may depend on the longest position in a batch ("dynamic", "longrope"), but a rank has only some of the
positions. The rank's embedding therefore also gets the longest position, and the result for that position is dropped.
In models without position_ids, embeddings count positions from the end of the cache. Patched embeddings instead get the
positions of the rank's tokens.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from ..context import current
from ..graph_breaks import between_graphs

COUNTED = "past_key_values_length"  # an argument with the position of the first token
ROPE_TYPES = ("dynamic", "longrope")


def embeddings(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return a base model's embeddings that would be wrong if computed from one rank's tokens alone."""
    numbers = "position_ids" not in inspect.signature(type(model).forward).parameters
    modules = [(module, bool({*ROPE_TYPES} & _rope_types(module))) for module in model.modules()]
    return tuple(module for module, is_rope in modules if is_rope or (numbers and counts(module)))


def counts(module: nn.Module) -> bool:
    """Return whether an embedding counts positions from the end of a cache."""
    return {COUNTED, "position_ids"} <= {*inspect.signature(type(module).forward).parameters}


def _rope_types(module: nn.Module) -> set[Any]:
    rope_type = getattr(module, "rope_type", None)  # in some families, a dict by layer type
    return {*rope_type.values()} if isinstance(rope_type, dict) else {rope_type}


def hook(module: nn.Module) -> tuple[RemovableHandle, ...]:
    """Hook an embedding so that it gets the longest position, or the tokens' positions, except in local forwards."""
    if counts(module):
        return (module.register_forward_pre_hook(_number, with_kwargs=True),)
    return module.register_forward_pre_hook(_before, with_kwargs=True), module.register_forward_hook(_after)


@between_graphs
def _number(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    context = current()
    if context is None or context.mode == "local" or context.positions is None:
        return None
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return (), {**given, "position_ids": context.positions[0]}


@between_graphs
def _tokens() -> int | None:
    context = current()
    return None if context is None else context.rope_tokens


def _before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    tokens = _tokens()
    if tokens is None:
        return None
    arguments = {**dict(zip(("x", "position_ids", "layer_type"), args, strict=False)), **kwargs}
    return (), {**arguments, "position_ids": F.pad(arguments["position_ids"], (0, 1), value=tokens - 1)}


def _after(module: nn.Module, args: tuple, output: tuple[Tensor, Tensor]) -> tuple[Tensor, ...] | None:
    return None if _tokens() is None else tuple(x[..., :-1, :] for x in output)
