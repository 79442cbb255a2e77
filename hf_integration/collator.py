"""A data collator around the user's own: pads every batch to a length that the ranks of a sequence can share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_seqpar.batches import IGNORE
from ds_seqpar.errors import InputError

# what a position that does not count holds; padding on the right is never seen under a causal mask, so that any token
# would do, but what cannot be padded by rule is refused and not guessed
PADDING = {"labels": IGNORE, "attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1}
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx", "seq_lengths")


class SequenceParallelCollator:
    """Calls the user's collator, then pads what it returns on the right to a multiple of `multiple` tokens.

    collator: examples -> {name: tensor (batch, seq, ...)}. multiple: tokens, from `SequenceParallel.multiple`.
    pad_token_id: for input_ids; None raises InputError where padding is needed. Sharding comes later, once ranks have
    agreed that they hold the same batch: a collator may run in a worker process, where they cannot.
    """

    def __init__(
        self, collator: Callable[[list], Mapping[str, Any]], multiple: int, pad_token_id: int | None = None
    ) -> None:
        self.collator, self.multiple, self.pad_token_id = collator, multiple, pad_token_id
        # the Trainer saves a collator's tokenizer with the model
        self.tokenizer = getattr(collator, "tokenizer", None)

    def __call__(self, examples: list) -> dict[str, Any]:
        batch = dict(self.collator(examples))
        refuse_packed(batch, "a collator")
        tokens = batch.get("labels", batch.get("input_ids"))
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            return batch  # said on every rank, by `SequenceParallel.shard_batches`
        seq = tokens.shape[1]
        if short := -seq % self.multiple:
            batch.setdefault("attention_mask", torch.ones_like(tokens))  # so that padding is not counted as tokens
            batch = {name: self._pad(name, x, seq, short) for name, x in batch.items()}
        return batch

    def _pad(self, name: str, x: object, seq: int, short: int) -> object:
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != seq:
            return x
        if name == "position_ids":  # go on counting: what follows packed documents is then refused for them alone
            return torch.cat([x, x[:, -1:] + torch.arange(1, short + 1, device=x.device)], dim=1)
        value = self.pad_token_id if name == "input_ids" else PADDING.get(name)
        if value is None:
            what = "a pad_token_id" if name == "input_ids" else f"a rule for {name!r}"
            how = (
                "set model.config.pad_token_id, or give the Trainer a processing_class that has a pad token"
                if name == "input_ids"
                else "pad it in your own collator"
            )
            raise InputError(
                f"a sequence's length must be a multiple of {self.multiple}, and to pad one of {seq} needs {what}; "
                f"got none, {how}"
            )
        return torch.nn.functional.pad(x, (0, short), value=value)


def refuse_packed(given: Mapping[str, Any], source: str) -> None:
    """Raises InputError for an example, or a batch, in which documents lie one after another and must not attend across
    their ends."""
    if packed := [name for name in PACKED if name in given]:
        raise InputError(
            f"packed documents are not supported yet; got {source} that gives {packed[0]}, give one document an "
            "example and pad it (with trl's SFTConfig: packing=False, padding_free=False)"
        )
