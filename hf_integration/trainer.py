"""HF Trainer fine-tuning: the same losses, norms, evaluation and checkpoints however many ranks share a sequence.

The Trainer keeps its own sampler, loop, counting and checkpoints. What differs with sequence parallelism is here:
its data loaders are told the data coordinate instead of the rank, a window of batches is sharded once it is complete,
and evaluation counts every sequence once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer import PREFIX_CHECKPOINT_DIR, TRAINER_STATE_NAME

from ds_seqpar import SequenceParallelConfig, cpu_op
from ds_seqpar.deepspeed_json import check_settings, left_out, section_of
from ds_seqpar.engine import prepare_model
from ds_seqpar.runtime import trusted
from ds_seqpar.runtime.agreement import agree
from ds_seqpar.runtime.telling import told_once

from . import preemption, randomness, resuming
from . import trainer_checks as checks
from .callback import SequenceParallelCallback
from .evaluation import check_evaluation
from .job import job_of_trainer
from .loaders import prepare_loader
from .masks import add_checked_mask, drop_checked_masks, keep_mark
from .patch import patch_attention, unpatch_attention
from .sharded_evaluation import ShardedEvaluation
from .streams import Stream


class SequenceParallelMixin(ShardedEvaluation):
    """Goes before `Trainer`, or a subclass of it, in the bases of a class.

    The shape comes from the "sequence_parallel" section of the DeepSpeed JSON. `per_device_train_batch_size` and
    `per_device_eval_batch_size` then mean sequences for each group of ranks that share one; all figures count
    sequences. `trainer.sp` is the SequenceParallel in use, `sp.data_rank` the group that a rank works for.

    A loss of one's own - label_smoothing_factor, compute_loss_func, a class's compute_loss - sees whole batches and
    whole outputs, as the plain Trainer's does (`whole_batches`).

    gather_logits: compute_metrics and predict have the logits of whole sequences, on every rank; False gives none,
    which saves their memory. `preprocess_logits_for_metrics` is applied before, to each rank's own logits and
    (unshifted) labels: a position at a time, such as an argmax, it saves it too.
    check_loss: before training, one forward of the shortest sequence must give the sum of token losses on shift_labels
    over num_items_in_batch, and an evaluation step the mean of uneven labels. False is for a class whose `compute_loss`
    or `prediction_step` means to give something else of this rank's part of a batch.
    Raises ConfigError for whatever would train something else than the unsplit run: see docs/refusals.md.
    """

    # set over methods and attributes of the Trainer
    compute_loss: Any
    prediction_step: Any
    preprocess_logits_for_metrics: Any
    data_collator: Any
    _tr_loss: Any

    @told_once
    def __init__(self, *args: Any, gather_logits: bool = True, check_loss: bool = True, **kwargs: Any) -> None:
        checks.check_kind(type(self))
        self.gather_logits, self.check_loss = gather_logits, check_loss
        self._eval_steps = {}
        self.evaluation_was_tried = False
        self._eval_items = self._stream = None
        super().__init__(*args, **kwargs)
        checks.check_trainer(self)
        # around what a subclass has, whether it comes before this class in its bases or behind it
        self._own_loss, self.compute_loss = self.compute_loss, self._divided_loss
        self._own_prediction_step, self.prediction_step = self.prediction_step, self._sharded_prediction_step
        self._preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        if self.model_init is None:
            self._patch(self.model)
        self._throughput = SequenceParallelCallback(self.sp)
        # behind the one that decides whether a step is logged, before those that report what is logged
        self.callback_handler.callbacks.insert(1, self._throughput)
        preemption.take_over(self)

    @property
    def whole_batches(self) -> bool:
        """Whether the model is called with whole batches, for a loss that is computed from its outputs."""
        return checks.has_own_loss(self)

    # ---- the model

    def create_accelerator_and_postprocess(self) -> None:
        checks.check_arguments(self.args)
        checks.check_json(self.args)
        cpu_op.make_ready()
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
        error = checks.model_error(model, self.check_loss and not self.whole_batches)
        base = checks.unwrapped(model)
        content = self.accelerator.state.deepspeed_plugin.deepspeed_config
        job = functools.partial(job_of_trainer, self.args, content, self.train_dataset, self.data_collator)
        self.sp = prepare_model(base, self._section, getattr(self, "sp", None), error, job)
        drop_checked_masks(base)

    # ---- data: whole batches up to `get_batch_samples`, this rank's tokens after it

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> DataLoader:
        if isinstance(dataset, IterableDataset):
            dataset = Stream(dataset)
        return super()._get_dataloader(dataset, *args, **kwargs)

    def _prepare_data_loader(
        self, loader: DataLoader, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader:
        """accelerate's own preparation, told which data group this rank works for instead of which rank it is."""
        if getattr(loader, "_is_accelerate_prepared", False):
            return loader
        settings = self.accelerator
        prepared = prepare_loader(
            loader,
            self.sp,
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
        shards = self._checked(window) if self.whole_batches else self._sharded(window)
        items = self._get_num_items_in_batch(shards, device)
        return shards, None if items is None else items.clamp(min=1)  # without any label gradients are 0, not 0/0

    def _sharded(self, window: list[dict[str, Any]]) -> list[dict[str, Any]]:
        shards = self.sp.shard_batches(window)
        for whole, shard in zip(window, shards, strict=True):
            del shard["num_items_in_batch"]  # the Trainer's own is for how it scales the loss
            add_checked_mask(self.sp, whole, shard)
            self._throughput.count(whole)
        return shards

    def _checked(self, window: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self._agree_on(window)
        for batch in window:
            self._throughput.count(batch)
        return window

    def _get_num_items_in_batch(self, *args: Any) -> Any:
        items = super()._get_num_items_in_batch(*args)
        # of whole batches each rank of a sequence has counted all labels
        return items / self.sp.size if self.whole_batches and items is not None else items

    def _prepare_input(self, data: Any) -> Any:
        moved = super()._prepare_input(data)
        keep_mark(data, moved)
        trusted.keep(data, moved)
        return moved

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return self._train_batch_size * args.gradient_accumulation_steps * self.sp.data_size

    # ---- before the first step

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        with randomness.unchanged():
            error = checks.data_error(self)
        agree(self.sp.control_world, "data sets", checks.lengths(self), error=error)
        agree(self.sp.control_world, "training arguments", checks.settings(self))
        run = resuming.Run.of(self.args, self.accelerator.state.deepspeed_plugin.deepspeed_config)
        folder = resuming.checkpoint_of(self.sp.control_world, resume_from_checkpoint, str(self.args.output_dir), run)
        return super().train(folder, *args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, DataLoader]:
        if self.args.use_liger_kernel:  # `train` has put its kernels into the patched model, over any tiles
            patch_attention(unpatch_attention(self.model), self.sp)
        model, loader = super()._prepare_for_training(*args, **kwargs)
        if self.check_loss and not self.whole_batches:
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
        if checkpoint is None:
            return
        path = resuming.random_state(Path(checkpoint), self.args.process_index, self.args.world_size)
        if resuming.is_whole(path):  # of others `train` has warned
            super()._load_rng_state(checkpoint)
        randomness.share(self.sp.groups.control)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.should_save:  # a folder that is written again is not whole before its end
            folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)


class SequenceParallelTrainer(SequenceParallelMixin, Trainer):
    """transformers' Trainer, with every sequence shared by a group of ranks. See SequenceParallelMixin."""
