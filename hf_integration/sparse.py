"""Run modules with latents and an index once on all of a rank's tokens, attending only to the selected keys.

The module's own code runs unchanged. A `Selection` serves as both the cache and the mask of the module, and gathers the
latents and index keys. The index normally multiplies keys by queries and weights to compute scores. With a `Selection`,
the index instead multiplies a `_Scores` object, which records the factors and computes scores in blocks when the index
requests the top k. Finally, the module calls our attention function with the selected indices, as it would call a
kernel. In a decode step, the same objects work on this rank's part of the cache.
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

from ds_seqpar.core.runtime.runtime import Runtime
from ds_seqpar.operators.gathered import Piece
from ds_seqpar.operators.sparse import attention_to_kept, sparse_attention, top_kept, top_keys

from .compat import ATTENTION
from .latent import EXPAND, PROJECTION, is_linear, matrix_of

NAME = "ds_seqpar_sparse"  # the name of our attention function in transformers
LATENT, INDEX = "latent", "index"  # kinds of tensors that a selection gathers or stores
Keep = Callable[[str, Tensor], Tensor]


class Selection:
    """An object that a module uses as its cache and as its mask.

    Args:
        pieces: The pieces of tokens that the module runs on.
        gather: A function that gathers tensors of all tokens from this rank's tensors (B, local tokens, ...).
        tokens: The number of this rank's tokens, or 0 if the module runs on one dummy token.
        keep: A function that stores this rank's tensor, given LATENT or INDEX, and returns the tensor of all tokens.
            None to use `gather` and store nothing.
    """

    dtype = torch.bool  # the dtype of a mask

    def __init__(
        self,
        pieces: Sequence[Piece],
        gather: Callable[[list[Tensor]], list[Tensor]],
        tokens: int,
        keep: Keep | None = None,
    ) -> None:
        self.pieces, self.tokens = pieces, tokens
        self.keep = keep or (lambda what, x: gather([x])[0])

    def __getitem__(self, rows: Any) -> Selection:
        return self

    def __invert__(self) -> Selection:
        return self

    def update(self, kv_nope: Tensor, k_rot: Tensor, *args: Any) -> Sequence[Tensor]:
        latent = self.keep(LATENT, torch.cat([kv_nope, k_rot], 3)[:, 0, : self.tokens])
        return latent[:, None].split([kv_nope.shape[3], k_rot.shape[3]], 3)

    def update_indexer(self, keys: Tensor, *args: Any) -> _Scores:
        return _Scores(self, self.keep(INDEX, keys[:, : self.tokens]))

    def seen(self, keys: Tensor) -> int:
        """Return the number of tokens that the keys cover."""
        return keys.shape[1]

    def pick(self, q: Tensor, weights: Tensor, keys: Tensor, count: int, scale: float) -> Tensor:
        return top_keys(q, weights, keys, self.pieces, count, scale)

    def attend(self, *given: Any) -> Tensor:
        q, latent, matrix, picks, scale, sinks = given
        return sparse_attention(q, latent, matrix, picks, self.pieces, scale, sinks)


class StepSelection(Selection):
    """A `Selection` for a decode step, in which each rank has each row's new token and a part of the cache.

    Args:
        runtime: This rank's runtime among all ranks that share the sequence (see `Runtime.one_ring`).
        counts: The number of tokens that the rank stores for each row, or one number for all rows.
        position: The position of the new token of the longest row.
        keep: A function that stores the new tokens' tensor, given LATENT or INDEX, and returns this rank's stored
            tensor.
    """

    def __init__(self, runtime: Runtime, counts: Sequence[int], position: int, keep: Keep) -> None:
        super().__init__([Piece(0, 1, position, 0)], list, 1, keep)
        self.runtime, self.counts = runtime, counts

    def seen(self, keys: Tensor) -> int:
        return self.pieces[0].end

    def pick(self, q: Tensor, weights: Tensor, keys: Tensor, count: int, scale: float) -> Tensor:
        return top_kept(self.runtime, q, weights, keys, self.counts, count, scale)

    def attend(self, *given: Any) -> Tensor:
        return attention_to_kept(self.runtime, *given)


class _Scores:
    """A stand-in for index keys and scores that records every multiplication in the module's score computation."""

    def __init__(self, selection: Selection, keys: Tensor) -> None:
        self.selection, self.keys, self.factors, self.scale = selection, keys, list[Tensor](), 1.0
        queries = sum(piece.length for piece in selection.pieces)
        self.shape = torch.Size([*keys.shape[:1], queries, selection.seen(keys)])

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Record the factors of keys and scores, and skip ReLU, which `top_keys` applies."""
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
        picks = self.selection.pick(q, weights.squeeze(2), self.keys, count, self.scale)
        return types.SimpleNamespace(indices=picks)


def selects(module: Any) -> bool:
    """Return whether an attention module has latents and an index, or reuses an earlier layer's selection."""
    has_index = getattr(module, "indexer", None) is not None or getattr(module, "skip_topk", False)
    return has_index and hasattr(type(module), EXPAND) and hasattr(module, PROJECTION)


def can_run(modules: Sequence[nn.Module]) -> bool:
    """Return whether all modules support a `Selection`.

    Modules reuse one another's selections, so either all modules or none use a `Selection`.
    """
    return bool(modules) and all(is_linear(module) for module in modules)


def run(module: Any, inputs: dict[str, Any]) -> Any:
    """Run a module with a `Selection` as its cache and its mask."""
    AttentionInterface.register(NAME, _attention)
    with _configured(module):
        return type(module).forward(module, **inputs)


@contextlib.contextmanager
def _configured(module: Any) -> Iterator[None]:
    """Context manager in which a module passes its latents to our attention."""
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
    return _rejoined(kv_nope, k_rot).squeeze(1), matrix_of(module, kv_nope, k_rot)


def _rejoined(a: Tensor, b: Tensor) -> Tensor:
    """Return two tensors joined along their last dim. Adjacent views of the same tensor are joined without a copy."""
    end, storages = a.storage_offset() + a.shape[-1], {x.untyped_storage().data_ptr() for x in (a, b)}
    if a.requires_grad or a.stride() != b.stride() or b.storage_offset() != end or len(storages) > 1:
        return torch.cat([a, b], -1)
    return a.as_strided((*a.shape[:-1], a.shape[-1] + b.shape[-1]), a.stride())


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
    """Implement transformers' attention interface for a latent (B, T, R) and its matrix instead of keys and values.

    Queries and latents are cast to the dtype of the matrix, since RoPE may mix fp32 into them under autocast.
    """
    q, latent = query.transpose(1, 2).to(value.dtype), key.to(value.dtype)
    return attention_mask.attend(q, latent, value, indices, scaling, s_aux), None
