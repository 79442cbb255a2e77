"""Pack documents with the `binpacking` library, and collate packs into batches that mark document boundaries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..base.errors import ConfigError, InputError
from .checks import IGNORE

Example = Mapping[str, Any]


class Packs(Dataset):
    """Map-style data set of packs. A pack is a list of documents with at most `tokens` tokens in total.

    Packs are computed once from document lengths and are the same on every rank.

    Args:
        dataset: Map-style data set of examples with `input_ids` and, optionally, `labels`. All examples are read when
            packs are computed.
        tokens: Maximum number of tokens in a pack.

    Raises:
        ConfigError: The `binpacking` package is not installed.
        InputError: `tokens` is less than 1, the data set has no documents, or a document is empty or longer than a
            pack.

    Examples:
        ```python
        trainer = SequenceParallelTrainer(
            model=model, args=args, train_dataset=Packs(documents, 8192), data_collator=PackingCollator()
        )
        ```
    """

    def __init__(self, dataset: Any, tokens: int) -> None:
        try:
            from binpacking import to_constant_volume
        except ImportError as reason:
            raise ConfigError(
                "packing needs the binpacking package; got none, pip install 'ds_seqpar[trainer]'"
            ) from reason
        if type(tokens) is not int or tokens < 1:
            raise InputError(f"packs must have a whole number of tokens from 1 on; got {tokens!r}")
        lengths = {index: len(_ids_of(dataset[index])) for index in range(len(dataset))}
        if not lengths:
            raise InputError("packs need a data set with one document or more; got none")
        if unfit := [length for length in lengths.values() if not 0 < length <= tokens]:
            raise InputError(
                f"packs of {tokens} tokens need documents of 1 to {tokens}; got one of {unfit[0]}, "
                f"{'cut it, or make packs larger' if unfit[0] else 'leave it out'}"
            )
        self.dataset, self.lengths = dataset, lengths
        self.packs = [sorted(pack) for pack in to_constant_volume(lengths, tokens)]

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> list[Example]:
        return [self.dataset[document] for document in self.packs[index]]


class PackingCollator:
    """Collator that concatenates documents into one row without padding.

    `position_ids` mark document boundaries by restarting from 0 in each document. No query attends to another document,
    and no label is predicted from another document. Examples without labels use their tokens as labels. If there is an
    `attention_mask`, all of its values must be 1.

    The collator accepts examples or packs of examples, and returns `input_ids`, `labels` and `position_ids`, each of
    shape (1, all tokens).

    Raises:
        InputError: Raised by a call if there are no documents, a document is empty, or a document's labels do not match
            its tokens. The error is also raised if a document contains padding or values other than a row of numbers,
            such as images.

    Examples:
        ```python
        trainer = SequenceParallelTrainer(
            model=model, args=args, train_dataset=Packs(documents, 8192), data_collator=PackingCollator()
        )
        ```
    """

    def __call__(self, examples: Sequence[Example | Sequence[Example]]) -> dict[str, Tensor]:
        documents: list[Any] = [x for item in examples for x in (item if isinstance(item, list | tuple) else [item])]
        if not documents:
            raise InputError("a batch of packs needs one document or more; got none")
        ids = [_tokens(_ids_of(x)) for x in documents]
        labels = [_tokens(x.get("labels", x["input_ids"])) for x in documents]
        for document, tokens, targets in zip(documents, ids, labels, strict=True):
            if len(tokens) != len(targets) or not len(tokens):
                raise InputError(
                    f"a document needs one token or more and a label for each; got {len(tokens)} tokens and "
                    f"{len(targets)} labels"
                )
            shapes = {name: _shape(x) for name, x in document.items()}
            if media := [name for name, shape in shapes.items() if len(shape) > 1 and math.prod(shape) != len(tokens)]:
                raise InputError(
                    f"this collator packs what has a number for each token; got {media[0]}, pack samples with images "
                    "by tokens_per_rank (docs/lengths.md)"
                )
            if not all(map(bool, document.get("attention_mask", ()))):
                raise InputError(
                    "documents are packed without padding; got an attention_mask with zeros, give them as they were "
                    "before they were padded"
                )
        return {
            "input_ids": torch.cat(ids)[None],
            "labels": torch.cat([torch.cat([x.new_tensor([IGNORE]), x[1:]]) for x in labels])[None],
            "position_ids": torch.cat([torch.arange(len(x)) for x in ids])[None],
        }


def _ids_of(document: Example) -> Any:
    if not isinstance(document, Mapping) or "input_ids" not in document:
        got = ", ".join(map(str, document)) if isinstance(document, Mapping) else type(document).__name__
        raise InputError(f"documents to pack need input_ids; got {got or 'no column'} alone, tokenize them first")
    return document["input_ids"]


def _shape(x: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, an array or nested lists of numbers, or () for any other object."""
    if isinstance(x, list):
        return () if not x or isinstance(x[0], str | Mapping) else (len(x), *_shape(x[0]))
    return tuple(getattr(x, "shape", ()))


def _tokens(x: Any) -> Tensor:
    return torch.as_tensor(x, dtype=torch.int64).flatten()
