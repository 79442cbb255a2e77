"""What checks read of a transformers Trainer with SequenceParallelMixin, which imports them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from transformers import TrainingArguments

from ds_seqpar import SequenceParallel


class ShardingTrainer(Protocol):
    """The mixin's own come first, then transformers'."""

    sp: SequenceParallel
    gather_logits: bool
    check_loss: bool
    evaluation_was_tried: bool

    @property
    def whole_batches(self) -> bool: ...

    def local_prediction_step(self, model: nn.Module, shard: dict[str, Any], loss_only: bool, *args: Any) -> tuple: ...

    args: TrainingArguments
    accelerator: Any
    model: Any
    model_accepts_loss_kwargs: bool
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    processing_class: Any
    compute_loss: Callable[..., Any]
    compute_loss_func: Callable | None
    compute_metrics: Callable | None

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Callable: ...
