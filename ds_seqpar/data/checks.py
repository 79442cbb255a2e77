"""Check the token ids and labels of a whole batch: dtypes, shapes and ranges, and labels predicted from padding."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .sharding import Vocabulary

IGNORE = -100  # the label of a token that does not count in the loss


def labels_of(batch: Mapping[str, Any]) -> Tensor:
    """Return the labels of a batch, int64 (rows, tokens). Raises InputError where they are missing or malformed."""
    if not isinstance(batch, Mapping):
        raise InputError(f"a batch must be a mapping of names to tensors; got {describe(batch)}")
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.dtype != torch.int64:
        raise InputError(
            "a batch needs labels of shape (batch, seq), int64, -100 where a token does not count; "
            f"got {describe(labels)}, for a language model pass labels=input_ids.clone()"
        )
    if "shift_labels" in batch:
        raise InputError(
            "a batch needs labels that are not shifted; got shift_labels, leave the shift to shard_batches"
        )
    return labels


def check_range(batch: Mapping[str, Any], vocabulary: Vocabulary | None) -> None:
    """Raise InputError for a label that is neither a class of the model's head nor -100, and for an unknown token id.

    Every rank checks the whole batch. Otherwise only the rank that holds a wrong token would fail, and the others would
    wait.

    Args:
        batch: has labels, and may have input_ids of their shape.
        vocabulary: None where the model is not known.
    """
    tokens, classes = vocabulary or (None, None)
    labels, ids = batch["labels"], batch.get("input_ids")
    wrong = (labels < 0) & (labels != IGNORE)
    if classes is not None:
        wrong |= labels >= classes
    if wrong.any():
        most = "from 0 on" if classes is None else f"from 0 to {classes - 1}"
        raise InputError(
            f"labels must be tokens {most}, or -100; got {_first_of(labels, wrong)}, set what does not count to -100"
        )
    if tokens is None or not isinstance(ids, Tensor):
        return
    if ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"input_ids must be int64 or int32; got {describe(ids)}, call .long() on them")
    if (wrong := (ids < 0) | (ids >= tokens)).any():
        raise InputError(
            f"input_ids must be from 0 to {tokens - 1}, the tokens that the model has; got {_first_of(ids, wrong)}, "
            "take the model's own tokenizer, or call model.resize_token_embeddings before training"
        )


def _first_of(x: Tensor, wrong: Tensor) -> str:
    """Return the first value of x (rows, tokens) where `wrong` (bool, as x) is true, and its place, in words."""
    index = tuple(wrong.nonzero()[0].tolist())
    return f"{int(x[index])} at token {index[1]} of row {index[0]}"


def predicted_from_padding(labels: Tensor, mask: Tensor | None) -> int:
    """Return how many rows begin with padding and have a label that counts at their first real token.

    Only padding could predict such a label.

    Args:
        labels: int64 (rows, tokens).
        mask: bool of the same shape on the CPU, False for padding; None: no padding.
    """
    if mask is None:
        return 0
    first = mask[:, 1:] & ~mask[:, :-1]
    return int((labels[:, 1:].cpu()[first] != IGNORE).sum())


@functools.cache
def warn_of_left_padding() -> None:
    """Warn once in a process."""
    warnings.warn(
        "padding on the left: the first token of a row has a label, which only padding could predict. Such labels do "
        "not count here, while an unsplit model counts them. Set them to -100, and both give the same loss "
        "(docs/trainer.md)",
        stacklevel=2,
    )


def describe(x: object) -> str:
    """Return dtype and shape of a tensor, "none" for None, else the name of the type, for messages."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return "none" if x is None else type(x).__name__
