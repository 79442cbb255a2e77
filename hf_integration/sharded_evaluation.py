"""Evaluation with shared sequences: sharded as training is, and every sequence counted once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object, recursively_apply
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from transformers.trainer_utils import has_length

from ds_seqpar import SequenceParallel
from ds_seqpar.batches import IGNORE, fingerprint
from ds_seqpar.documents import documents_of
from ds_seqpar.errors import ConfigError, InputError, as_error
from ds_seqpar.placement import Placement
from ds_seqpar.runtime import causes
from ds_seqpar.runtime.agreement import Alike, agree
from ds_seqpar.whole import WholeTensor

from .evaluation import check_evaluation
from .experts import having_share
from .masks import add_checked_mask
from .streams import Stream, examples_of, stream_of
from .tiling import evaluated

Behind: Any = object  # to a type checker whatever the mixin goes before, a Trainer


class _OfGroups:
    """accelerate's Accelerator with another number of processes."""

    def __init__(self, own: Any, groups: int) -> None:
        self.own, self.num_processes = own, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class ShardedEvaluation(Behind):
    """What SequenceParallelMixin, which makes its attributes, puts around a Trainer's evaluation and prediction."""

    sp: SequenceParallel
    gather_logits: bool
    check_loss: bool
    _eval_steps: dict[str, int]  # by prefix: of the last evaluation
    _eval_items: Tensor | None  # label tokens of the evaluation step, over all ranks
    _stream: Stream | None  # what is being evaluated, if it is iterable
    accelerator: Any

    def evaluation_loop(self, dataloader: DataLoader, description: str, *args: Any, **kwargs: Any) -> Any:
        length = len(dataloader) if has_length(dataloader) else None
        agree(self.sp.control_world, "evaluation data", length)
        self._stream = stream = stream_of(getattr(dataloader, "dataset", None))
        self.gather_function = self._gather_sequences  # the Trainer puts its own back at the end
        output = super().evaluation_loop(dataloader, description, *args, **kwargs)
        if stream is not None:  # the Trainer counts those of one group
            examples = examples_of(stream) or output.num_samples * self.sp.data_size
            output = output._replace(num_samples=examples)
        prefix = kwargs.get("metric_key_prefix", args[2] if len(args) > 2 else "eval")
        self._eval_steps[prefix] = math.ceil(output.num_samples / (self.args.eval_batch_size * self.sp.data_size))
        return output

    def _sharded_prediction_step(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Tensor | None]:
        """(loss, logits, labels): the mean token loss of the step's sequences, over all ranks; logits and labels are
        whole, or None. Around the class's own `prediction_step`, which sees this rank's tokens."""
        loss_only = prediction_loss_only or not self.gather_logits
        if self.whole_batches:
            return self._whole_prediction_step(model, dict(inputs), loss_only, ignore_keys)
        if self.check_loss and inputs.get("labels") is not None:
            check_evaluation(self, model)
        inputs, has_labels = dict(inputs), inputs.get("labels") is not None
        labels = inputs["labels"] if has_labels else torch.full_like(inputs["input_ids"], IGNORE)
        shard = self.sp.shard_batch({**inputs, "labels": self._once(inputs, labels)}, training=False)
        add_checked_mask(self.sp, inputs, shard)
        for name in [] if has_labels else ["num_items_in_batch", "labels", "shift_labels"]:
            del shard[name]
        loss, logits, local_labels = self.local_prediction_step(model, shard, loss_only, ignore_keys)
        if loss is not None:
            loss = torch.tensor(self.sp.mean_loss(loss), device=loss.device)
        if logits is None:
            return loss, None, None
        if self._preprocess is not None:
            logits = self._preprocess(logits, local_labels)
        logits = self._whole(logits, shard["position_ids"].shape, shard.get("placement"))
        return loss, logits, self._prepare_input(labels) if has_labels else None

    def _whole_prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any) -> tuple:
        """The same of a class whose loss is of whole outputs: the loss of this group's sequences, with repetitions, as
        a plain rank has it. The Trainer weights it by the sequences that are none."""
        self._agree_on([inputs])
        loss, logits, labels = self._own_prediction_step(model, inputs, *args)
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        agree(self.sp.control_world, "evaluation losses", {"loss": shape})  # which all ranks are about to gather
        if logits is not None and self._preprocess is not None:
            logits = self._preprocess(logits, labels)
        return loss, tree_map(lambda x: x.whole() if isinstance(x, WholeTensor) else x, logits), labels

    def _agree_on(self, batches: list[dict[str, Any]]) -> None:
        """Raises DisagreementError on every rank where those of a sequence have other whole batches."""
        peers = Alike(self.sp.data_rank, self.sp.groups.control)
        value = [fingerprint(batch) for batch in batches]
        agree(self.sp.control_world, "whole batches", value, alike=peers, advice=causes.of_batches)

    def local_prediction_step(self, model: nn.Module, shard: dict[str, Any], loss_only: bool, *args: Any) -> tuple:
        """The class's own `prediction_step` on what `sp.shard_batch` returned. Whether it calls the model, or
        `compute_loss` with a divisor or without: it divides by the label tokens of the step over all ranks."""
        if "num_items_in_batch" in shard:  # as the Trainer counts them, for a loss that it multiplies by the ranks
            items = shard["num_items_in_batch"] * dist.get_world_size()
            self._eval_items = torch.tensor(items, device=self.args.device)
        try:
            with evaluated(model, "loss" if loss_only else None):
                return self._own_prediction_step(model, shard, loss_only, *args)
        finally:
            self._eval_items = None

    def _divided_loss(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        if self.whole_batches:
            with self._multiplying_by(self.sp.data_size):
                return self._own_loss(*args, num_items_in_batch=num_items_in_batch, **kwargs)
        items = self._eval_items if num_items_in_batch is None else num_items_in_batch
        # the Trainer multiplies by all ranks what they average: in training the loss for balanced experts is summed
        # over micro-steps and data groups, as the plain one has it, in evaluation it is the mean
        share = 1 / (self.sp.size if self._eval_items is None else dist.get_world_size())
        with having_share(self.model, share):
            return self._own_loss(*args, num_items_in_batch=items, **kwargs)

    @contextlib.contextmanager
    def _multiplying_by(self, groups: int) -> Iterator[None]:
        """A context in which the Trainer takes groups for the ranks whose mean is taken, by which it multiplies."""
        own, self.accelerator = self.accelerator, _OfGroups(self.accelerator, groups)
        try:
            yield
        finally:
            self.accelerator = own

    def _whole(self, x: Any, local: torch.Size, placement: Placement | None) -> Any:
        if isinstance(x, tuple):
            return tuple(self._whole(part, local, placement) for part in x)
        if not isinstance(x, Tensor) or x.shape[:2] != local:
            raise ConfigError(
                f"gather_logits gathers outputs of a rank's shape {tuple(local)} and more dims; got "
                f"{tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}, name what else the model returns in "
                "model.config.keys_to_ignore_at_inference, and preprocess logits a position at a time"
            )
        return self.sp.gather(x, 1, placement)

    def _once(self, inputs: Mapping[str, Any], labels: Tensor) -> Tensor:
        """Labels without those of examples that fill the last batch up a second time. Where a collator has laid all
        examples end to end, each must be one document, or there must be one."""
        real = self._real_sequences()
        if real is None or self.sp.data_size == 1:  # a group alone is given a shorter batch
            return labels
        error = None
        try:
            labels = self._without_repeated(inputs, labels, real)
        except Exception as reason:
            error = as_error("telling the last examples apart failed", reason)
        agree(self.sp.control_world, "evaluation step", None, error=error)
        return labels

    def _without_repeated(self, inputs: Mapping[str, Any], labels: Tensor, real: int) -> Tensor:
        examples = self.args.eval_batch_size
        first = self.sp.data_rank * examples
        repeated = torch.arange(first, first + examples, device=labels.device) >= real
        if len(labels) == examples:
            return labels.masked_fill(repeated[:, None], IGNORE)
        if bool(repeated.all()) or not bool(repeated.any()):
            return labels.masked_fill(repeated[0], IGNORE)
        lengths = documents_of(inputs, *labels.shape) or (labels.shape[1],) * len(labels)
        if len(lengths) != examples:
            raise InputError(
                f"evaluation of packs needs to know whose tokens are whose, where the last batch repeats some; got "
                f"{examples} examples in {len(lengths)} documents, set per_device_eval_batch_size=1, or "
                "dataloader_drop_last=True"
            )
        of_example = torch.repeat_interleave(repeated.cpu(), torch.tensor(lengths)).view(labels.shape)
        return labels.masked_fill(of_example.to(labels.device), IGNORE)

    def _real_sequences(self) -> int | None:
        """How many of the current step's sequences, over all groups, are no repetitions; None: all of them."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader:
            return None
        remainder = state.remainder  # -1 where it is not known
        if self._stream is not None and not self.args.dataloader_drop_last:
            remainder = (examples_of(self._stream) or 0) % (self.args.eval_batch_size * self.sp.data_size)
        return remainder if remainder > 0 else None

    def _gather_sequences(self, data: Any) -> Any:
        """What each sequence of the step has, over all data groups: ranks that share one have copies."""
        world = dist.get_world_size()
        first = [self.sp.topology.index(rank, "data") for rank in range(world)]
        first = [first.index(group) for group in range(self.sp.data_size)]

        def pick(x: Tensor) -> Tensor:
            return x.unflatten(0, (world, -1))[first].flatten(0, 1)[: self._real_sequences()]

        return recursively_apply(pick, self.accelerator.gather(data), error_on_other_type=True)

    def _gather_parts(self, data: Any, use_gather_object: bool = False) -> Any:
        return gather_object(data) if use_gather_object else self.accelerator.gather(data)

    def num_examples(self, dataloader: DataLoader) -> int:
        stream = stream_of(getattr(dataloader, "dataset", None))
        return len(stream) if stream is not None and has_length(stream) else super().num_examples(dataloader)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        output = super().predict(*args, **kwargs)
        self._count_steps(output.metrics)
        return output

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self._count_steps(logs)
        super().log(logs, *args, **kwargs)

    def _count_steps(self, metrics: dict[str, Any]) -> None:
        """The Trainer divides by the batch size of all ranks as if each had sequences of its own."""
        for prefix, steps in self._eval_steps.items():
            if f"{prefix}_steps_per_second" in metrics and metrics[f"{prefix}_runtime"]:
                metrics[f"{prefix}_steps_per_second"] = round(steps / metrics[f"{prefix}_runtime"], 3)
