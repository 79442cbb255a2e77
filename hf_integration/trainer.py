"""HF Trainer fine-tuning: the same losses, norms, evaluation and checkpoints however many ranks share a sequence.

The Trainer keeps its own sampler, loop, counting and checkpoints. What differs with sequence parallelism is here:
its data loaders are told the data coordinate instead of the rank, a window of batches is sharded once it is complete,
and evaluation counts every sequence once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather_object, recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import has_length

from ds_seqpar import SequenceParallel, SequenceParallelConfig, cpu_op
from ds_seqpar.batches import IGNORE
from ds_seqpar.deepspeed_json import check_settings, left_out, section_of
from ds_seqpar.engine import prepare_model
from ds_seqpar.errors import ConfigError
from ds_seqpar.running import trusted
from ds_seqpar.running.agreement import agree
from ds_seqpar.running.telling import told_once

from . import randomness
from . import trainer_checks as checks
from .callback import SequenceParallelCallback
from .collator import SequenceParallelCollator
from .evaluation import check_evaluation
from .masks import add_checked_mask, drop_checked_masks, keep_mark
from .streams import Stream, examples_of, stream_of

Behind: Any = object  # to a type checker whatever the mixin goes before, a Trainer


class SequenceParallelMixin(Behind):
    """Goes before `Trainer`, or a subclass of it, in the bases of a class.

    The shape comes from the "sequence_parallel" section of the DeepSpeed JSON. `per_device_train_batch_size` and
    `per_device_eval_batch_size` then mean sequences for each group of ranks that share one; all figures count
    sequences. `trainer.sp` is the SequenceParallel in use, `sp.data_rank` the group that a rank works for.

    gather_logits: compute_metrics and predict need the logits of whole sequences, on every rank; True gathers them, by
    default they are refused (compute_metrics) or None (predict). `preprocess_logits_for_metrics` is applied before, to
    each rank's own logits and (unshifted) labels: a position at a time, such as an argmax, it saves their memory.
    check_loss: before training, one forward of the shortest sequence must give the sum of token losses on shift_labels
    over num_items_in_batch, and an evaluation step the mean of uneven labels. False is for a class whose `compute_loss`
    or `prediction_step` means to give something else.
    Raises ConfigError for whatever would train something else than the unsplit run: see docs/refusals.md.
    """

    sp: SequenceParallel
    # set over methods and attributes of the Trainer
    compute_loss: Any
    prediction_step: Any
    preprocess_logits_for_metrics: Any
    data_collator: Any
    _tr_loss: Any

    @told_once
    def __init__(self, *args: Any, gather_logits: bool = False, check_loss: bool = True, **kwargs: Any) -> None:
        checks.check_kind(type(self))
        self.gather_logits, self.check_loss = gather_logits, check_loss
        self._eval_steps: dict[str, int] = {}
        self.evaluation_was_tried = False
        self._eval_items: Tensor | None = None  # label tokens of the evaluation step, over all ranks
        self._stream: Stream | None = None  # what is being evaluated, if it is iterable
        super().__init__(*args, **kwargs)
        checks.check_trainer(self)
        # around what a subclass has, whether it comes before this class in its bases or behind it
        self._own_loss, self.compute_loss = self.compute_loss, self._divided_loss
        self._own_prediction_step, self.prediction_step = self.prediction_step, self._sharded_prediction_step
        self._preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        if self.model_init is None:
            self._patch(self.model)
        self._wrap_collator()
        self._throughput = SequenceParallelCallback(self.sp)
        # behind the one that decides whether a step is logged, before those that report what is logged
        self.callback_handler.callbacks.insert(1, self._throughput)

    # ---- the model

    def create_accelerator_and_postprocess(self) -> None:
        checks.check_arguments(self.args)
        checks.check_json(self.args)
        cpu_op.wait()
        super().create_accelerator_and_postprocess()
        plugin = self.accelerator.state.deepspeed_plugin
        checks.check_accelerator(self.accelerator)
        check_settings(plugin.deepspeed_config)
        self._section = section_of(plugin.deepspeed_config)
        SequenceParallelConfig.from_dict(self._section)
        for key in left_out(plugin.deepspeed_config):  # in our section accelerate would fill every "auto" that it finds
            plugin.deepspeed_config.pop(key, None)
        self.accelerator.prepare_data_loader = self._prepare_data_loader
        # what ranks gather is each one's part of all sequences: there is no last one to leave out
        self.accelerator.gather_for_metrics = self._gather_parts

    def call_model_init(self, trial: Any = None) -> PreTrainedModel:
        model = super().call_model_init(trial)
        self._patch(model)
        return model

    def _patch(self, model: nn.Module) -> None:
        error, base = checks.model_error(model, self.check_loss), checks.unwrapped(model)
        self.sp = prepare_model(base, self._section, getattr(self, "sp", None), error)
        drop_checked_masks(base)

    # ---- data: whole batches up to `get_batch_samples`, this rank's tokens after it

    def _wrap_collator(self) -> None:
        """Also one that was set after the Trainer was made."""
        if not isinstance(self.data_collator, SequenceParallelCollator):
            pad = checks.pad_token_id(self)
            self.data_collator = SequenceParallelCollator(self.data_collator, self.sp.multiple, pad)

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> DataLoader:
        self._wrap_collator()
        if isinstance(dataset, IterableDataset):
            dataset = Stream(dataset)
        return super()._get_dataloader(dataset, *args, **kwargs)

    def _prepare_data_loader(
        self, loader: DataLoader, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader:
        """accelerate's own preparation, told which data group this rank works for instead of which rank it is."""
        if getattr(loader, "_is_accelerate_prepared", False):
            return loader
        seeding = loader.worker_init_fn
        if isinstance(seeding, functools.partial) and "rank" in seeding.keywords:
            loader.worker_init_fn = functools.partial(seeding, rank=self.sp.data_rank)
        settings = self.accelerator
        prepared = prepare_data_loader(
            loader,
            num_processes=self.sp.data_size,
            process_index=self.sp.data_rank,
            put_on_device=False,  # whole sequences need not be on a device: `training_step` moves this rank's tokens
            even_batches=settings.even_batches,
            rng_types=settings.rng_types.copy(),
            use_seedable_sampler=settings.use_seedable_sampler,
            data_seed=settings.dataloader_config.data_seed,
            use_stateful_dataloader=settings.use_stateful_dataloader,
        )
        settings._dataloaders.append(prepared)
        return prepared

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        """This rank's part of an accumulation window, and the label tokens of the whole of it, over all ranks.

        Raises on every rank where one rank's data set or collator fails, or gives something else than its peers'.
        """
        self._throughput.start()
        window, error = [], None
        try:
            window = list(itertools.islice(epoch_iterator, num_batches))
        except Exception as reason:
            error = checks.as_error("loading data failed", reason)
        if not agree(self.sp.control_world, "training data", None, error=error, number=len(window)):
            return [], None
        shards = self.sp.shard_batches(window)
        for whole, shard in zip(window, shards, strict=True):
            del shard["num_items_in_batch"]  # the Trainer's own, below, is for how it scales the loss
            add_checked_mask(self.sp, whole, shard)
            self._throughput.count(float(shard.get("attention_mask", torch.ones_like(shard["labels"])).sum()))
        items = self._get_num_items_in_batch(shards, device)
        return shards, items.clamp(min=1)  # a window without any label has gradient 0, not 0/0

    def _prepare_input(self, data: Any) -> Any:
        moved = super()._prepare_input(data)
        keep_mark(data, moved)
        trusted.keep(data, moved)
        return moved

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return self._train_batch_size * args.gradient_accumulation_steps * self.sp.data_size

    # ---- before the first step

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._wrap_collator()
        with randomness.unchanged():
            error = checks.data_error(self)
        agree(self.sp.control_world, "data sets", checks.lengths(self), error=error)
        return super().train(*args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, DataLoader]:
        model, loader = super()._prepare_for_training(*args, **kwargs)
        if self.check_loss:
            checks.check_loss(self, model)
            if self.eval_dataset is not None:
                check_evaluation(self, model)
        randomness.share(self.sp.control_world)
        return model, loader

    def _run_epoch(self, *args: Any, **given: Any) -> None:
        # its sampler draws from each rank's own state, which data sets may have moved by other amounts
        if self.args.train_sampling_strategy == "group_by_length" and given["epoch"] > given["epochs_trained"]:
            randomness.share(self.sp.control_world)
        super()._run_epoch(*args, **given)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # the steps since the last log, which the Trainer adds to `train_loss` rank by rank
        self._tr_loss = self.accelerator.gather(self._tr_loss).mean()
        return super()._finalize_training(*args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            randomness.share(self.sp.groups.control)

    # ---- evaluation: sharded as well, and every sequence counted once

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
        if self.check_loss and inputs.get("labels") is not None:
            check_evaluation(self, model)
        inputs, has_labels = dict(inputs), inputs.get("labels") is not None
        labels = inputs["labels"] if has_labels else torch.full_like(inputs["input_ids"], IGNORE)
        shard = self.sp.shard_batch({**inputs, "labels": self._once(labels)}, training=False)
        add_checked_mask(self.sp, inputs, shard)
        for name in [] if has_labels else ["num_items_in_batch", "labels", "shift_labels"]:
            del shard[name]
        loss_only = prediction_loss_only or not self.gather_logits
        loss, logits, local_labels = self.local_prediction_step(model, shard, loss_only, ignore_keys)
        if loss is not None:
            loss = torch.tensor(self.sp.mean_loss(loss), device=loss.device)
        if logits is None:
            return loss, None, None
        if self._preprocess is not None:
            logits = self._preprocess(logits, local_labels)
        logits = self._whole(logits, shard["position_ids"].shape)
        return loss, logits, self._prepare_input(labels) if has_labels else None

    def local_prediction_step(self, model: nn.Module, shard: dict[str, Any], *args: Any) -> tuple:
        """The class's own `prediction_step` on what `sp.shard_batch` returned. Whether it calls the model, or
        `compute_loss` with a divisor or without: it divides by the label tokens of the step over all ranks."""
        if "num_items_in_batch" in shard:  # as the Trainer counts them, for a loss that it multiplies by the ranks
            items = shard["num_items_in_batch"] * dist.get_world_size()
            self._eval_items = torch.tensor(items, device=self.args.device)
        try:
            return self._own_prediction_step(model, shard, *args)
        finally:
            self._eval_items = None

    def _divided_loss(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        items = self._eval_items if num_items_in_batch is None else num_items_in_batch
        return self._own_loss(*args, num_items_in_batch=items, **kwargs)

    def _whole(self, x: Any, local: torch.Size) -> Any:
        if isinstance(x, tuple):
            return tuple(self._whole(part, local) for part in x)
        if not isinstance(x, Tensor) or x.shape[:2] != local:
            raise ConfigError(
                f"gather_logits gathers outputs of a rank's shape {tuple(local)} and more dims; got "
                f"{tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}, name what else the model returns in "
                "model.config.keys_to_ignore_at_inference, and preprocess logits a position at a time"
            )
        return self.sp.gather(x, 1)

    def _once(self, labels: Tensor) -> Tensor:
        """Labels without those of sequences that fill the last batch up a second time."""
        if (real := self._real_sequences()) is None:
            return labels
        first = self.sp.data_rank * len(labels)
        repeated = torch.arange(first, first + len(labels), device=labels.device) >= real
        return labels.masked_fill(repeated[:, None], IGNORE)

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


class SequenceParallelTrainer(SequenceParallelMixin, Trainer):
    """transformers' Trainer, with every sequence shared by a group of ranks. See SequenceParallelMixin."""
