"""Padding masks on their way through a Trainer's step: its own code counts tokens by them, the model takes none.

`SequenceParallel.shard_batches` checks a mask while it is whole and drops it. This rank's part of it goes on to
`compute_loss` and to what counts tokens, marked as checked; a hook takes it from what the model is given. Any other
mask still meets the check of the patched model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ds_seqpar import SequenceParallel

MARK = "was_checked_whole"


def add_checked_mask(sp: SequenceParallel, whole: Mapping[str, Any], shard: dict[str, Any]) -> None:
    """Puts this rank's part of the whole batch's attention_mask, if it has one, into its shard."""
    if (mask := whole.get("attention_mask")) is not None:
        shard["attention_mask"] = sp.shard(mask, 1, shard.get("placement"))
        setattr(shard["attention_mask"], MARK, True)


def keep_mark(mask: object, moved: object) -> None:
    """What was made of a mask on its way to the device is as checked as that."""
    if hasattr(mask, MARK):
        setattr(moved, MARK, True)


def drop_checked_masks(model: PreTrainedModel) -> None:
    """Lets the base model, and so any head around it, be called with such masks."""
    model.base_model.register_forward_pre_hook(_drop, with_kwargs=True, prepend=True)


def _drop(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args, {name: x for name, x in kwargs.items() if not hasattr(x, MARK)}
