"""Modules with latents and an index that run once on all of a rank's tokens, and attend to what their queries pick.

The module's own code runs. Its cache and its mask are one object of ours, which gathers the latents and the index's
keys. The index computes its scores by steps of its own with these keys. In their place it gets an object that keeps
what it is multiplied by, and computes scores in blocks where the greatest are asked for. Last, the module calls our
attention as it would a kernel, with the indices.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from ds_seqpar.operators.gathered import Piece
from ds_seqpar.operators.sparse import sparse_attention, top_keys

from .compat import ATTENTION
from .latent import EXPAND, PROJECTION, is_linear, matrix_of

NAME = "ds_seqpar_sparse"  # of our attention function in transformers


class Selection:
    """What a module sees as its cache and its mask.

    Args:
        pieces: The tokens that the module runs on.
        gather: Returns tensors of all tokens, of those of the rank's (B, local tokens, ...).
        tokens: How many tokens the rank has: none where the module runs on one that is not there.
    """

    dtype = torch.bool  # of a mask

    def __init__(self, pieces: Sequence[Piece], gather: Callable[[list[Tensor]], list[Tensor]], tokens: int) -> None:
        self.pieces, self.gather, self.tokens = pieces, gather, tokens

    def __getitem__(self, rows: Any) -> Selection:
        return self

    def __invert__(self) -> Selection:
        return self

    def update(self, kv_nope: Tensor, k_rot: Tensor, *args: Any) -> Sequence[Tensor]:
        (latent,) = self.gather([torch.cat([kv_nope, k_rot], 3)[:, 0, : self.tokens]])
        return latent[:, None].split([kv_nope.shape[3], k_rot.shape[3]], 3)

    def update_indexer(self, keys: Tensor, *args: Any) -> _Scores:
        return _Scores(self.pieces, *self.gather([keys[:, : self.tokens]]))


class _Scores:
    """An index's keys, then its scores of heads, then their sums, in the steps in which a module computes them."""

    def __init__(self, pieces: Sequence[Piece], keys: Tensor) -> None:
        self.pieces, self.keys, self.factors, self.scale = pieces, keys, list[Tensor](), 1.0
        self.shape = torch.Size([*keys.shape[:1], sum(piece.length for piece in pieces), keys.shape[1]])

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Take what keys or scores are multiplied by, and leave ReLU to `top_keys`."""
        if function is torch.matmul and isinstance(args[1], cls):
            args[1].factors.append(args[0])
            return args[1]
        return args[0] if function is F.relu else NotImplemented

    def __mul__(self, scale: float) -> _Scores:
        self.scale *= scale
        return self

    def _same(self, *args: Any) -> _Scores:
        return self

    transpose = float = unsqueeze = squeeze = masked_fill = _same

    def topk(self, count: int, dim: int) -> Any:
        q, weights = self.factors
        return types.SimpleNamespace(indices=top_keys(q, weights.squeeze(2), self.keys, self.pieces, count, self.scale))


def selects(module: Any) -> bool:
    """Return whether an attention module has latents and an index, or picks what a layer before it picks."""
    has_index = getattr(module, "indexer", None) is not None or getattr(module, "skip_topk", False)
    return has_index and hasattr(type(module), EXPAND) and hasattr(module, PROJECTION)


def can_run(modules: Sequence[nn.Module]) -> bool:
    """Return whether all modules can: one picks what another has picked."""
    return bool(modules) and all(is_linear(module) for module in modules)


def run(module: Any, inputs: dict[str, Any]) -> Any:
    """Run a module with a `Selection` as its cache and its mask."""
    AttentionInterface.register(NAME, _attention)
    with _configured(module):
        return type(module).forward(module, **inputs)


@contextlib.contextmanager
def _configured(module: Any) -> Iterator[None]:
    """Context manager in which a module hands its latents to our attention."""
    own = vars(module)
    before = {name: own[name] for name in ("config", EXPAND) if name in own}
    config = copy.copy(module.config)
    setattr(config, ATTENTION, NAME)
    own.update({"config": config, EXPAND: types.MethodType(_latent, module)})
    try:
        yield
    finally:
        del own[EXPAND]
        own.update(before)


def _latent(module: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([kv_nope, k_rot], 3).squeeze(1), matrix_of(module, kv_nope, k_rot)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float,
    indices: Tensor,
    s_aux: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface, with a latent (B, T, R) and its matrix in place of keys and values.

    The matrix is what autocast makes of weights, where RoPE mixes fp32 into queries and latents.
    """
    q, latent = query.transpose(1, 2).to(value.dtype), key.to(value.dtype)
    return sparse_attention(q, latent, value, indices, attention_mask.pieces, scaling, s_aux), None
