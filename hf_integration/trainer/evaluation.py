"""Evaluation in a sequence parallel Trainer.

Every sequence counts once, regardless of the number of ranks that share it.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import has_length

from ds_seqpar.base.compat import tree_map
from ds_seqpar.base.errors import SeqParError
from ds_seqpar.data.batches import IGNORE, labels_without
from ds_seqpar.guards.agreement import all_reduce_sum, assert_ranks_agree, together
from ds_seqpar.whole import plain

from ..loaders import examples_of, stream_of
from ..memory.tiled_modules import evaluating_loss
from ..model import whole_calls
from . import checks
from .rollouts import Behind


class Evaluation(Behind):
    """The part of `SequenceParallelMixin` that implements evaluation."""

    _agree_on_batches: Any
    _class_compute_loss: Any
    _class_prediction_step: Any
    _eval_steps: dict[str, int]
    _preprocess: Any
    _watch: Any
    _weight: float

    def evaluation_loop(self, dataloader: DataLoader, description: str, *args: Any, **kwargs: Any) -> Any:
        length, error = len(dataloader) if has_length(dataloader) else None, checks.loader_error(dataloader)
        assert_ranks_agree(self.sp.control_world, "evaluation data", length, error=error)
        self._watch(dataloader)
        stream = stream_of(getattr(dataloader, "dataset", None))
        output = super().evaluation_loop(dataloader, description, *args, **kwargs)
        self.sp.checker.flush(last=True)
        if stream is not None:  # the Trainer counts the examples of one group
            examples = examples_of(stream) or output.num_samples * self.sp.data_size
            output = output._replace(num_samples=examples)
        prefix = kwargs.get("metric_key_prefix", args[2] if len(args) > 2 else "eval")
        self._eval_steps[prefix] = math.ceil(output.num_samples / (self.args.eval_batch_size * self.sp.data_size))
        return output

    def _whole_prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Return (loss, logits, labels) of the class's `prediction_step`, with whole logits.

        The model's own loss becomes the mean token loss over all groups, without repeated sequences. A custom loss has
        the same value as in the plain Trainer on this group's sequences. The Trainer then weights the loss by the
        number of unrepeated sequences.
        """
        loss_only, custom_loss = prediction_loss_only or not self.gather_logits, checks.has_custom_loss(self)
        (batch,) = self._agree_on_batches("evaluation batch", lambda: iter([copy.copy(inputs)]))
        if not custom_loss and batch.get("labels") is not None:
            batch["labels"] = self._unrepeated_labels(batch)
            items = all_reduce_sum(
                self.sp.control_world, [int((batch["labels"][:, 1:] != IGNORE).sum())], "evaluation"
            )[0]
            batch["num_items_in_batch"] = max(items / self.sp.size, 1) / self.sp.data_size
        loss, logits, labels = self._checked_step(model, batch, loss_only, custom_loss, ignore_keys)
        if loss is not None and not custom_loss:
            loss = self.accelerator.gather(loss).mean()
        if isinstance(labels, Tensor) and not custom_loss:  # return the labels without the -100s added for padding
            labels = inputs.get("labels", labels).to(labels.device)
        if logits is not None and self._preprocess is not None:
            logits = self._preprocess(logits, labels)
        return loss, tree_map(lambda x: plain(x) if isinstance(x, Tensor) else x, logits), labels

    def _checked_step(self, model: nn.Module, batch: Any, loss_only: bool, custom_loss: bool, *args: Any) -> tuple:
        """Return the result of the class's `prediction_step`.

        Raises an error on every rank if the step fails on any rank, or if only some ranks have a loss to gather.
        """
        # a SeqParError is raised on all ranks; after a RuntimeError a rank may not be able to communicate
        known, in_tiles = (SeqParError, RuntimeError), loss_only and not custom_loss
        world, peers = self.sp.control_world, self.sp.groups.control
        with together(world, "prediction_step", "evaluation losses", passing=known, peers=peers) as agreed:
            with evaluating_loss(model) if in_tiles else contextlib.nullcontext():
                batch_on_device = whole_calls.moved_batch(batch, self.args.device)
                loss, *others = self._class_prediction_step(model, batch_on_device, loss_only, *args)
            agreed.value = {"loss": tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__}
        return loss, *others

    def _counted_loss(
        self, model: nn.Module, inputs: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        """Call the class's `compute_loss`.

        In evaluation, pass the step's token count, which the Trainer does not pass. The loss of a pack of pairs is
        multiplied by the pack's weight.
        """
        items = None if checks.has_custom_loss(self) else inputs.pop("num_items_in_batch", None)
        if num_items_in_batch is None and items is not None:
            num_items_in_batch = torch.tensor(items * self.sp.data_size, device=self.args.device)
        loss = self._class_compute_loss(model, inputs, *args, num_items_in_batch=num_items_in_batch, **kwargs)
        return loss if self._weight == 1 else loss * self._weight

    def _unrepeated_labels(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the labels, with -100 for repeated examples that fill up the last batch."""
        labels, real = batch["labels"], self.accelerator.real_examples()
        if real is None or self.sp.data_size == 1:  # a single group gets a shorter last batch
            return labels
        first = self.sp.data_rank * self.args.eval_batch_size
        with together(self.sp.control_world, "telling the last examples apart", "evaluation step"):
            return labels_without(batch, torch.arange(first, first + self.args.eval_batch_size) >= real)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        output = super().predict(*args, **kwargs)
        self._count_steps(output.metrics)
        return output

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self._count_steps(logs)
        super().log(logs, *args, **kwargs)

    def _count_steps(self, metrics: dict[str, Any]) -> None:
        """Correct the steps per second, since the Trainer assumes that each rank has separate sequences."""
        for prefix, steps in self._eval_steps.items():
            if f"{prefix}_steps_per_second" in metrics and metrics[f"{prefix}_runtime"]:
                metrics[f"{prefix}_steps_per_second"] = round(steps / metrics[f"{prefix}_runtime"], 3)
