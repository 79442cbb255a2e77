"""Check the dtypes, shapes and ranges of a batch's token ids and labels, and find labels predicted from padding."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..base.errors import InputError
from .sharding import Vocabulary
from .value_checks import ValueChecks, describe

IGNORE = -100  # the label of tokens that do not count toward the loss


def labels_of(batch: Mapping[str, Any]) -> Tensor:
    """Return a batch's labels, int64 (rows, tokens), or raise InputError if the labels are missing or malformed."""
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


def check_range(batch: Mapping[str, Any], vocabulary: Vocabulary | None, checks: ValueChecks) -> dict[str, Tensor]:
    """Check that every label is -100 or a class of the model's head, and that every token id is in the vocabulary.

    Every rank checks the whole batch. If each rank checked only its own shard, the rank with an invalid token would
    fail alone, and the other ranks would wait.

    Args:
        batch: Batch that may have labels (rows, tokens), and input_ids of the same shape.
        vocabulary: The model's vocabulary; None if unknown.
        checks: Collector that raises InputError for invalid values immediately or later.

    Returns:
        Replacements, by name, for tensors whose values are checked later. The replacements contain no invalid values,
        because kernels would otherwise abort the process before the error is raised.
    """
    tokens, classes = vocabulary or (None, None)
    labels, ids = batch.get("labels"), batch.get("input_ids")
    usable = {}
    if labels is not None:
        wrong = (labels < 0) & (labels != IGNORE)
        if classes is not None:
            wrong |= labels >= classes
        most = "from 0 on" if classes is None else f"from 0 to {classes - 1}"
        sentence = f"labels must be tokens {most}, or -100; got {{}}, set what does not count to -100"
        _require_none(labels, wrong, sentence, checks)
        if not checks.reads(labels):
            usable["labels"] = labels.masked_fill(wrong, IGNORE)
    if tokens is None or not isinstance(ids, Tensor):
        return usable
    if ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"input_ids must be int64 or int32; got {describe(ids)}, call .long() on them")
    wrong = (ids < 0) | (ids >= tokens)
    sentence = (
        f"input_ids must be from 0 to {tokens - 1}, the tokens that the model has; got {{}}, take the model's own "
        "tokenizer, or call model.resize_token_embeddings before training"
    )
    _require_none(ids, wrong, sentence, checks)
    if not checks.reads(ids):
        usable["input_ids"] = ids.masked_fill(wrong, 0)
    return usable


def _require_none(x: Tensor, wrong: Tensor, sentence: str, checks: ValueChecks) -> None:
    """Check that `wrong`, a bool tensor with the shape of `x`, is False everywhere.

    `x` has shape (rows, tokens). The format string `sentence` contains {} for the first invalid value and its location.
    """
    if not x.numel():
        return
    wrong, tokens = wrong.reshape(-1), x.shape[1]
    index = wrong.to(torch.uint8).argmax()[None]  # first invalid value

    def judge(values: list[int]) -> InputError | None:
        is_wrong, place, value = values
        row, token = divmod(place, tokens)
        return InputError(sentence.format(f"{value} at token {token} of row {row}")) if is_wrong else None

    checks.require(torch.cat([wrong.gather(0, index), index, x.reshape(-1).gather(0, index)]).to(torch.int64), judge)


def predicted_from_padding(labels: Tensor, mask: Tensor) -> Tensor:
    """Count the rows that begin with padding and have a non-ignored label at their first real token.

    The label of a row's first real token could only be predicted from padding.

    Args:
        labels: int64 (rows, tokens).
        mask: bool tensor with the same shape and device, with False for padding.

    Returns:
        An int64 tensor of shape (1,).
    """
    is_first = torch.nn.functional.pad(mask[:, 1:] > mask[:, :-1], (1, 0), value=False)
    return ((labels != IGNORE) & is_first).sum()[None]


@functools.cache
def warn_of_left_padding() -> None:
    """Warn once per process about labels that only left padding could predict."""
    warnings.warn(
        "padding on the left: the first token of a row has a label, which only padding could predict. Such labels do "
        "not count here, while an unsplit model counts them. Set them to -100, and both give the same loss "
        "(docs/trainer.md)",
        stacklevel=2,
    )
