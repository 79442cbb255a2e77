"""Packing: documents of a data set into packs, by a library for it, and packs into batches that say where each ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ds_seqpar.batches import IGNORE
from ds_seqpar.errors import ConfigError, InputError

Example = Mapping[str, Any]


class Packs(Dataset):
    """A data set of packs: each a list of documents with at most `tokens` tokens together.

    dataset: examples with input_ids (and labels), of a length. Which documents come together is decided once, by their
    lengths alone, the same on every rank. Raises ConfigError without the `binpacking` package, InputError for a
    document that is longer than a pack.
    """

    def __init__(self, dataset: Any, tokens: int) -> None:
        try:
            from binpacking import to_constant_volume
        except ImportError as reason:
            raise ConfigError(
                "packing needs the binpacking package; got none, pip install 'ds_seqpar[trainer]'"
            ) from reason
        lengths = {index: len(dataset[index]["input_ids"]) for index in range(len(dataset))}
        if too_long := [index for index, length in lengths.items() if length > tokens]:
            raise InputError(
                f"packs of {tokens} tokens need documents that are no longer; got one of {lengths[too_long[0]]}, cut "
                "it, or make packs larger"
            )
        self.dataset = dataset
        self.packs = [sorted(pack) for pack in to_constant_volume(lengths, tokens)]

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> list[Example]:
        return [self.dataset[document] for document in self.packs[index]]


class PackingCollator:
    """Lays documents end to end: examples, or packs of them, -> input_ids, labels and position_ids, (1, all tokens).

    position_ids begin again with each document, from which everything that takes a batch knows where it ends: no query
    sees another document, and no label is predicted from one. Examples without labels get their tokens as labels.
    Nothing is padded; an attention_mask must be all ones. Raises InputError.
    """

    def __call__(self, examples: Sequence[Example | Sequence[Example]]) -> dict[str, Tensor]:
        documents = [document for one in examples for document in ([one] if isinstance(one, Mapping) else one)]
        ids = [_tokens(document["input_ids"]) for document in documents]
        labels = [_tokens(x.get("labels", x["input_ids"])) for x in documents]
        for document, tokens, its in zip(documents, ids, labels, strict=True):
            if len(tokens) != len(its) or not len(tokens):
                raise InputError(
                    f"a document needs as many labels as tokens, one or more; got {len(tokens)} and {len(its)}"
                )
            if not all(map(bool, document.get("attention_mask", ()))):
                raise InputError("packed documents have no padding; got an attention_mask with zeros, leave it to us")
        return {
            "input_ids": torch.cat(ids)[None],
            "labels": torch.cat([torch.cat([x.new_tensor([IGNORE]), x[1:]]) for x in labels])[None],
            "position_ids": torch.cat([torch.arange(len(x)) for x in ids])[None],
        }


def _tokens(x: Any) -> Tensor:
    return torch.as_tensor(x, dtype=torch.int64).flatten()
