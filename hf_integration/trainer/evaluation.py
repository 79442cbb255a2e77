"""Evaluation of a sequence parallel Trainer: every sequence counts once, however many ranks share it."""

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
from ds_seqpar.base.errors import InputError, SeqParError, as_seqpar_error
from ds_seqpar.data.batches import IGNORE
from ds_seqpar.data.documents import documents_of
from ds_seqpar.guards.agreement import all_reduce_sum, assert_ranks_agree
from ds_seqpar.whole import plain

from ..loaders import examples_of, stream_of
from ..memory.tiled_modules import evaluating_loss
from ..model import whole_calls
from . import checks
from .rollouts import Behind


class Evaluation(Behind):
    """The methods of `SequenceParallelMixin` that evaluate."""

    def evaluation_loop(self, dataloader: DataLoader, description: str, *args: Any, **kwargs: Any) -> Any:
        length, error = len(dataloader) if has_length(dataloader) else None, checks.loader_error(dataloader)
        assert_ranks_agree(self.sp.control_world, "evaluation data", length, error=error)
        self._watch(dataloader)
        self._stream = stream = stream_of(getattr(dataloader, "dataset", None))
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

        The model's own loss becomes the mean token loss over all groups, without repeated sequences. A custom loss is
        the plain Trainer's, of this group's sequences; the Trainer weights it by the sequences that do not repeat.
        """
        loss_only, custom_loss = prediction_loss_only or not self.gather_logits, checks.has_custom_loss(self)
        (batch,) = self._agree_on_batches("evaluation batch", lambda: iter([copy.copy(inputs)]))
        real = self._real_sequences()
        if not custom_loss and batch.get("labels") is not None:
            batch["labels"] = self._unrepeated_labels(batch, real)
            items = all_reduce_sum(
                self.sp.control_world, [int((batch["labels"][:, 1:] != IGNORE).sum())], "evaluation"
            )[0]
            batch["num_items_in_batch"] = max(items / self.sp.size, 1) / self.sp.data_size
        loss, logits, labels = self._checked_step(model, batch, loss_only, custom_loss, ignore_keys)
        if loss is not None and not custom_loss:
            loss = self.accelerator.gather(loss).mean()
        if isinstance(labels, Tensor) and not custom_loss:  # return the labels as they were before any was set to -100
            labels = inputs.get("labels", labels).to(labels.device)
        if logits is not None and self._preprocess is not None:
            logits = self._preprocess(logits, labels)
        return loss, tree_map(lambda x: plain(x) if isinstance(x, Tensor) else x, logits), labels

    def _checked_step(self, model: nn.Module, batch: Any, loss_only: bool, custom_loss: bool, *args: Any) -> tuple:
        """Return the result of the class's `prediction_step`.

        Raises on every rank if it fails on one, or if only some ranks have a loss to gather.
        """
        result, error = (None, None, None), None
        try:
            with evaluating_loss(model) if loss_only and not custom_loss else contextlib.nullcontext():
                batch_on_device = whole_calls.moved_batch(batch, self.args.device)
                result = self._class_prediction_step(model, batch_on_device, loss_only, *args)
        except (SeqParError, RuntimeError):
            raise  # a SeqParError is raised on all ranks; after a RuntimeError a rank may not be able to communicate
        except Exception as reason:
            error = as_seqpar_error("prediction_step failed", reason)
        assert_ranks_agree(self.sp.groups.control, "evaluation step", None, error=error)
        shape = tuple(result[0].shape) if isinstance(result[0], Tensor) else type(result[0]).__name__
        assert_ranks_agree(self.sp.control_world, "evaluation losses", {"loss": shape})
        return result

    def _counted_loss(
        self, model: nn.Module, inputs: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        """Call the class's `compute_loss`, in evaluation with the step's count, where the Trainer passes none."""
        items = None if checks.has_custom_loss(self) else inputs.pop("num_items_in_batch", None)
        if num_items_in_batch is None and items is not None:
            num_items_in_batch = torch.tensor(items * self.sp.data_size, device=self.args.device)
        return self._class_compute_loss(model, inputs, *args, num_items_in_batch=num_items_in_batch, **kwargs)

    def _real_sequences(self) -> int | None:
        """Return how many of the step's sequences, over all groups, are not repetitions; None means all of them."""
        return self.accelerator.real_examples()

    def _unrepeated_labels(self, batch: Mapping[str, Any], real: int | None) -> Tensor:
        """Return the labels, with -100 for examples that fill up the last batch. `real` is of `_real_sequences`."""
        labels, error = batch["labels"], None
        if real is None or self.sp.data_size == 1:  # a single group gets a shorter last batch instead
            return labels
        try:
            labels = self._mask_repeated(batch, labels, real)
        except Exception as reason:
            error = as_seqpar_error("telling the last examples apart failed", reason)
        assert_ranks_agree(self.sp.control_world, "evaluation step", None, error=error)
        return labels

    def _mask_repeated(self, batch: Mapping[str, Any], labels: Tensor, real: int) -> Tensor:
        """Return the labels, with -100 for examples from number `real` on, counted over all groups.

        Raises InputError if a collator has packed examples and their documents do not tell them apart.
        """
        examples = self.args.eval_batch_size
        first = self.sp.data_rank * examples
        repeated = torch.arange(first, first + examples, device=labels.device) >= real
        if len(labels) == examples:
            return labels.masked_fill(repeated[:, None], IGNORE)
        if bool(repeated.all()) or not bool(repeated.any()):
            return labels.masked_fill(repeated[0], IGNORE)
        lengths = documents_of(batch, *labels.shape) or (labels.shape[1],) * len(labels)
        if len(lengths) != examples:
            raise InputError(
                f"evaluation of packs needs to know whose tokens are whose, where the last batch repeats some; got "
                f"{examples} examples in {len(lengths)} documents, set per_device_eval_batch_size=1, or "
                "dataloader_drop_last=True"
            )
        of_example = torch.repeat_interleave(repeated.cpu(), torch.tensor(lengths)).view(labels.shape)
        return labels.masked_fill(of_example.to(labels.device), IGNORE)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        output = super().predict(*args, **kwargs)
        self._count_steps(output.metrics)
        return output

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self._count_steps(logs)
        super().log(logs, *args, **kwargs)

    def _count_steps(self, metrics: dict[str, Any]) -> None:
        """Correct steps a second, for which the Trainer counts steps as if each rank had separate sequences."""
        for prefix, steps in self._eval_steps.items():
            if f"{prefix}_steps_per_second" in metrics and metrics[f"{prefix}_runtime"]:
                metrics[f"{prefix}_steps_per_second"] = round(steps / metrics[f"{prefix}_runtime"], 3)
