"""Fine-tune with the Trainer: losses, norms, evaluation and checkpoints do not depend on the number of ranks that share
a sequence.

A group of ranks that share sequences replaces one rank of the plain Trainer. All its ranks are given the same whole
batches, and the model returns the plain model's whole outputs on each of them. Where the Trainer gathers over ranks, it
gets one value for each group (`GroupAccelerator`). So the Trainer's counting, losses and evaluation stay unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer import PREFIX_CHECKPOINT_DIR, TRAINER_STATE_NAME
from transformers.trainer_utils import has_length

from ds_seqpar import SequenceParallelConfig
from ds_seqpar.compat import tree_map
from ds_seqpar.config.deepspeed_json import DeepSpeedJson
from ds_seqpar.cpu_launch import op_lock
from ds_seqpar.data.batches import IGNORE, counted_labels, fingerprint
from ds_seqpar.data.documents import documents_of
from ds_seqpar.engine import prepare_model
from ds_seqpar.errors import InputError, SeqParError, as_seqpar_error
from ds_seqpar.runtime import mismatch_hints
from ds_seqpar.runtime.agreement import all_reduce_sum, assert_ranks_agree
from ds_seqpar.runtime.process_exit import printed_once
from ds_seqpar.whole import plain

from .. import compat
from ..accelerators import GroupAccelerator
from ..families import unwrapped
from ..loaders import Stream, examples_of, stream_of
from ..memory.tiled_modules import evaluating_loss
from ..model import whole_calls
from ..model.patch import patch_attention, unpatch_attention
from . import accelerate_config, checks, preemption, resume, rng_state
from .callback import SequenceParallelCallback
from .job import job_of_trainer

Behind: Any = object  # stands in for the class after the mixin; type checkers then allow any attribute


class SequenceParallelMixin(Behind):
    """Mixin that makes a `Trainer`, or a subclass of it, share every sequence among a group of ranks.

    List it before `Trainer` in the bases of a class. The shape comes from the `"sequence_parallel"` section of the
    DeepSpeed JSON. `per_device_train_batch_size` and `per_device_eval_batch_size` are sequences for each group of ranks
    that share one, and all figures count sequences. `trainer.sp` is the `SequenceParallel` in use, and `sp.data_rank`
    the number of this rank's group.

    A custom loss (`label_smoothing_factor`, `compute_loss_func`, or a class's `compute_loss` or `prediction_step`) is
    given whole batches and whole outputs, as in the plain Trainer.

    Args:
        *args: Passed to the Trainer.
        gather_logits: Whether `compute_metrics` and `predict` get the logits of whole sequences, on every rank. `False`
            gives them no logits and saves that memory. A `preprocess_logits_for_metrics` such as an argmax saves it
            too; it is given the logits in parts.
        check_loss: Whether to check, in the first forward, that the model's own loss is the sum of token losses on
            `shift_labels` over `num_items_in_batch`. Pass `False` for a model that intends another loss of this rank's
            shard of a batch.
        **kwargs: Passed to the Trainer.

    Raises:
        ConfigError: If a setting would train something else than the unsplit run does (see docs/refusals.md).

    Examples:
        ```python
        class MyTrainer(SequenceParallelMixin, OtherTrainer): ...
        ```
    """

    # assigned on the instance, over methods and attributes of the Trainer
    accelerator: Any
    compute_loss: Any
    prediction_step: Any
    preprocess_logits_for_metrics: Any
    _tr_loss: Any

    @printed_once
    def __init__(self, *args: Any, gather_logits: bool = True, check_loss: bool = True, **kwargs: Any) -> None:
        compat.check_trainer(Trainer)
        checks.check_kind(type(self))
        self.gather_logits, self.check_loss = gather_logits, check_loss
        self._eval_steps: dict[str, int] = {}  # prefix of metrics -> steps of its last evaluation
        self._stream: Stream | None = None  # the data set being evaluated, if it is iterable
        super().__init__(*args, **kwargs)
        # wrap a subclass's methods, whether it comes before or after this class among the bases
        self._class_compute_loss, self.compute_loss = self.compute_loss, self._counted_loss
        self._class_prediction_step, self.prediction_step = self.prediction_step, self._whole_prediction_step
        self._preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        if self.model_init is None:
            self._patch_models()
        self._throughput = SequenceParallelCallback(self.sp)
        # after the callback that decides whether a step is logged, before those that report logs
        self.callback_handler.callbacks[1:1] = [rng_state.SharedDraws(self.sp), self._throughput]
        self._preemption = preemption.take_over(self)

    # ---- the model

    def create_accelerator_and_postprocess(self) -> None:
        checks.check_arguments(self.args)
        checks.check_json(self.args)
        op_lock.prepare_start()
        with accelerate_config.taken_from(self.args) as parallelism:
            super().create_accelerator_and_postprocess()
        plugin = self.accelerator.state.deepspeed_plugin
        checks.check_accelerator(self.accelerator)
        json = DeepSpeedJson.read(plugin.deepspeed_config)
        json.check_settings()
        self._section = accelerate_config.joined(json.section, parallelism, self.accelerator.num_processes)
        SequenceParallelConfig.from_dict(self._section)
        for key in json.left_out:  # accelerate would replace every "auto" in our section
            plugin.deepspeed_config.pop(key, None)
        self.accelerator = GroupAccelerator(self.accelerator, getattr(self, "sp", None), of_trainer=True)
        self.gather_function = self.accelerator.gather_for_metrics

    def call_model_init(self, trial: Any = None) -> PreTrainedModel:
        model = super().call_model_init(trial)
        self._patch(model)
        return model

    def _precompute_ref_logps(self, *args: Any) -> Any:
        # trl's preference trainers call this in their __init__, before the model would be patched
        self._patch_models()
        dataset = error = None
        try:
            dataset = super()._precompute_ref_logps(*args)
        except FileNotFoundError as reason:
            error = checks.unseen_file(reason)
        assert_ranks_agree(self.sp.control_world, "precomputed log-probabilities", None, error=error)
        return dataset

    def _patch_models(self) -> None:
        self._patch(self.model)
        if (reference := getattr(self, "ref_model", None)) is not None:
            patch_attention(unwrapped(reference), self.sp)

    def _patch(self, model: nn.Module) -> None:
        base = unwrapped(model)
        content = self.accelerator.state.deepspeed_plugin.deepspeed_config
        job = functools.partial(job_of_trainer, self.args, content, self.train_dataset, self.data_collator)
        self.sp = self.accelerator.sp = prepare_model(model, self._section, getattr(self, "sp", None), job=job)
        checks.count_by_rank(self.accelerator.state.deepspeed_plugin.hf_ds_config, self.sp)
        self._set_loss_check(base)
        if checks.extends(type(self), "RewardTrainer"):
            model.register_forward_pre_hook(_without_margin, with_kwargs=True, prepend=True)

    def _set_loss_check(self, base: nn.Module) -> None:
        whole_calls.set_loss_check(base, "the Trainer" if self.check_loss else None)

    # ---- data: the whole batches of this rank's group

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """Return the micro-batches of an optimizer step, and the number of its label tokens over all groups.

        Raises:
            SeqParError: On every rank, if one rank's data or collator fails, or its batches are not those of its group.
        """
        self._throughput.start()
        microbatches = self._agree_on_batches("training data", lambda: itertools.islice(epoch_iterator, num_batches))
        for batch in microbatches:
            self._throughput.count(batch)
        microbatches, items = super().get_batch_samples(iter(microbatches), len(microbatches), device)
        return microbatches, None if items is None else items.clamp(min=1)  # without any label gradients are 0, not 0/0

    def _agree_on_batches(self, name: str, load: Callable[[], Iterator[Any]]) -> list[Any]:
        """Load batches, and check that all ranks have equally many and that the ranks of a sequence have the same ones.

        For the model's own loss, labels that do not count are set to -100. Raises on every rank if one rank fails.
        """
        batches, fingerprints, error = [], [], None
        try:
            batches = list(load())
            fingerprints = [fingerprint(batch) for batch in batches]
            custom_loss = checks.has_custom_loss(self)
            for batch in batches:
                if not custom_loss and batch.get("labels") is not None:
                    batch["labels"] = counted_labels(self.sp, batch)
        except Exception as reason:
            error = as_seqpar_error("loading data failed", reason)
        assert_ranks_agree(
            self.sp.control_world, name, {"batches": len(batches)}, error=error, peers=self.sp.groups.control
        )
        assert_ranks_agree(
            self.sp.control_world, "whole batches", fingerprints, peers=self.sp.groups.control, among_peers=True,
            advice=mismatch_hints.of_batches,
        )  # fmt: skip
        return batches

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return compat.train_batch_size(self) * args.gradient_accumulation_steps * self.sp.data_size

    def num_examples(self, dataloader: DataLoader) -> int:
        stream = stream_of(getattr(dataloader, "dataset", None))
        return len(stream) if stream is not None and has_length(stream) else super().num_examples(dataloader)

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        return super().floating_point_ops(inputs) / self.sp.size  # the Trainer sums it over all ranks

    # ---- training

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        with rng_state.unchanged():
            error = checks.data_error(self)
        assert_ranks_agree(self.sp.control_world, "data sets", checks.lengths(self), error=error)
        assert_ranks_agree(self.sp.control_world, "training arguments", checks.settings(self))
        run = resume.ResumingRun.of(self.args, self.accelerator.state.deepspeed_plugin.deepspeed_config)
        folder = resume.checkpoint_of(self.sp.control_world, resume_from_checkpoint, str(self.args.output_dir), run)
        with contextlib.nullcontext() if self._preemption is None else self._preemption.listening():
            return super().train(folder, *args, **kwargs)

    def _prepare_for_training(self, max_steps: int, loader: Any, *args: Any) -> tuple[nn.Module, DataLoader]:
        assert_ranks_agree(self.sp.control_world, "training loader", None, error=checks.loader_error(loader))
        if self.args.use_liger_kernel:  # `train` has put Liger's kernels into the patched model, over any tiles
            patch_attention(unpatch_attention(self.model), self.sp)
            self._set_loss_check(unwrapped(self.model))
        return super()._prepare_for_training(max_steps, loader, *args)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(model, whole_calls.moved_batch(inputs, self.args.device), *args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # the loss since the last log, which the Trainer would add to `train_loss` separately on each rank
        self._tr_loss = self.accelerator.gather(compat.loss_since_log(self)).mean()
        return super()._finalize_training(*args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = resume.random_state(Path(checkpoint), self.args.process_index, self.args.world_size)
        if resume.is_whole(path):  # `train` has warned of a missing or damaged file
            super()._load_rng_state(checkpoint)
        rng_state.share(self.sp.groups.control)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.should_save:  # a folder that is being overwritten must not count as a checkpoint until complete
            folder = Path(compat.output_folder(self)(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    # ---- evaluation: every sequence counts once

    def evaluation_loop(self, dataloader: DataLoader, description: str, *args: Any, **kwargs: Any) -> Any:
        length, error = len(dataloader) if has_length(dataloader) else None, checks.loader_error(dataloader)
        assert_ranks_agree(self.sp.control_world, "evaluation data", length, error=error)
        self._stream = stream = stream_of(getattr(dataloader, "dataset", None))
        output = super().evaluation_loop(dataloader, description, *args, **kwargs)
        self.sp.journal.settle(last=True)
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
        (batch,) = self._agree_on_batches("evaluation batch", lambda: iter([dict(inputs)]))
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
        items = inputs.pop("num_items_in_batch", None)
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


def _without_margin(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Leave out the column of one number a pair that trl's RewardTrainer passes to the model, which ignores it."""
    return args, {name: x for name, x in kwargs.items() if name != "margin"}


class SequenceParallelTrainer(SequenceParallelMixin, Trainer):
    """transformers' `Trainer` in which a group of ranks shares every sequence.

    Takes the arguments of `Trainer`, and those of `SequenceParallelMixin`.

    Examples:
        ```python
        trainer = SequenceParallelTrainer(
            model=model,
            args=args,  # per_device_train_batch_size counts packs now
            train_dataset=Packs(documents, 8192),  # a list of whole documents each, 8,192 tokens at most
            eval_dataset=Packs(held_out, 8192),
            data_collator=PackingCollator(),
        )
        ```
    """
