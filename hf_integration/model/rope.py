"""RoPE whose frequencies depend on the longest position of a batch ("dynamic", "longrope"). A rank holds some positions
only. So its embedding is given the longest one too, and the result for that is dropped."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from ds_seqpar.data.batch_layout import BatchLayout

KINDS = ("dynamic", "longrope")
TOKENS = "_sequence_parallel_tokens"  # attribute of an embedding: tokens up to the longest position, see `tell`


def embeddings(model: nn.Module) -> tuple[nn.Module, ...]:
    """The RoPE embeddings of a model whose frequencies depend on the longest position."""
    return tuple(module for module in model.modules() if set(KINDS) & set(_kinds(module)))


def _kinds(module: nn.Module) -> tuple[str, ...]:
    kind = getattr(module, "rope_type", ())  # by kind of layer, in families that have several
    return (kind,) if isinstance(kind, str) else tuple(kind.values() if isinstance(kind, dict) else ())


def hook(module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Hooks an embedding, so that it is given the longest position where `tell` has set it."""
    setattr(module, TOKENS, None)
    return module.register_forward_pre_hook(_before, with_kwargs=True), module.register_forward_hook(_after)


def tell(modules: tuple[nn.Module, ...], tokens: int | None) -> None:
    """Sets the number of tokens up to the longest position, for the next forward; None: the forward is local."""
    for module in modules:
        setattr(module, TOKENS, tokens)


def tokens_up_to_the_longest(own: int, size: int, placement: BatchLayout | None) -> int:
    """The tokens up to the longest position. own: tokens of a row that a rank holds, where `size` ranks share sequences
    equally."""
    if placement is None:
        return own * size
    return max(b - a for a, b in itertools.pairwise((*placement.restarts, placement.tokens)))


def _before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    tokens = getattr(module, TOKENS)
    if tokens is None:
        return None
    given = {**dict(zip(("x", "position_ids", "layer_type"), args, strict=False)), **kwargs}
    return (), {**given, "position_ids": F.pad(given["position_ids"], (0, 1), value=tokens - 1)}


def _after(module: nn.Module, args: tuple, output: tuple[Tensor, Tensor]) -> tuple[Tensor, ...] | None:
    return None if getattr(module, TOKENS) is None else tuple(x[..., :-1, :] for x in output)
