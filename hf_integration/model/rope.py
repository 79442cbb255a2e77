"""RoPE whose frequencies depend on the longest position of a batch ("dynamic", "longrope").

A rank has only some positions. So its embedding gets the longest position too, and the result for that is dropped.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from ..context import current
from ..graph_breaks import between_graphs

ROPE_TYPES = ("dynamic", "longrope")


def embeddings(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the RoPE embeddings of a model whose frequencies depend on the longest position."""
    types = {module: getattr(module, "rope_type", None) for module in model.modules()}
    # a dict by layer type, in families that have several
    return tuple(m for m, x in types.items() if {*ROPE_TYPES} & ({*x.values()} if isinstance(x, dict) else {x}))


def hook(module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Hook an embedding, so that it gets the longest position in forwards that are not local."""
    return module.register_forward_pre_hook(_before, with_kwargs=True), module.register_forward_hook(_after)


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
