"""Whether a loss is what sharded training needs: the sum of token losses on shift_labels over num_items_in_batch.

A loss that swallows both in its **kwargs would train silently wrong, so it is tried: a `loss_function` on two tokens,
and then what came out of a forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ds_seqpar.batches import IGNORE
from ds_seqpar.errors import ConfigError


def loss_function_error(model: PreTrainedModel, taker: str = "the Trainer") -> ConfigError | None:
    """What is wrong with `model.loss_function`. taker: who takes check_loss=False."""
    logits, labels = torch.tensor([[[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]]]), torch.tensor([[1, 0]])
    shifted = torch.tensor([[0, IGNORE]])
    expected = float(F.cross_entropy(logits[0, :1], shifted[0, :1])) / 4
    given = {"labels": labels, "vocab_size": 3, "num_items_in_batch": torch.tensor(4), "shift_labels": shifted}
    try:
        loss = float(model.loss_function(logits=logits, **given))
    except Exception as reason:
        return _error(f"a loss_function that cannot take them ({type(reason).__name__}: {reason})", taker)
    if math.isclose(loss, expected, rel_tol=1e-4):
        return None
    return _error(f"a loss_function that gives {loss:.4f} for {expected:.4f}", taker)


def loss_error(
    output: Any, labels: Tensor, found: float, items: float, taker: str = "the Trainer"
) -> ConfigError | None:
    """What is wrong with the loss `found` of a forward that gave `output`, with these shift_labels and this divisor."""
    logits = output.get("logits") if isinstance(output, Mapping) else output[1]
    if not isinstance(logits, Tensor) or logits.shape[:2] != labels.shape:
        return _error("no logits to compare its loss with", taker)
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    expected = float(losses) / items
    if math.isclose(found, expected, rel_tol=1e-2):
        return None
    return _error(f"{found:.4f} where that is {expected:.4f}", taker)


def _error(got: str, taker: str) -> ConfigError:
    got = " ".join(got.split())
    return ConfigError(
        "sequence parallel training needs a loss that divides the sum of token losses on shift_labels by "
        f"num_items_in_batch; got {got}, pass both on to transformers' loss, or give {taker} check_loss=False where "
        "another loss is meant"
    )
