"""Fine-tuning with the Trainer, with results that do not depend on the number of ranks that share a sequence.

A group of ranks that share sequences takes the place of one rank of the plain Trainer. All ranks of a group get the
same whole batches, and the model returns whole outputs on every rank, as in the plain run. When the Trainer gathers
from ranks, it gets one value per group (see `GroupAccelerator`). The Trainer's counts, losses and evaluation therefore
stay unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer import PREFIX_CHECKPOINT_DIR, TRAINER_STATE_NAME
from transformers.trainer_utils import has_length, rotate_checkpoints, set_seed

from ds_seqpar import SequenceParallelConfig
from ds_seqpar.base.errors import ConfigError, InputError
from ds_seqpar.base.log import log_once
from ds_seqpar.data.batches import counted_labels, fingerprint
from ds_seqpar.data.inputs import InputSpec
from ds_seqpar.deepspeed.config import DeepSpeedJson
from ds_seqpar.deepspeed.cpu_launch import op_lock
from ds_seqpar.deepspeed.saving.atomic import AtomicCheckpoint, atomic_checkpoint, is_whole
from ds_seqpar.doctor import require_sound
from ds_seqpar.engine import prepare_model
from ds_seqpar.guards import mismatch_hints
from ds_seqpar.guards.agreement import assert_ranks_agree, together
from ds_seqpar.guards.process_exit import wait_at_exit
from ds_seqpar.lengths import Rows

from .. import accelerate_config, compat
from ..accelerators import GroupAccelerator, GroupState
from ..families import patch_of, unwrapped
from ..loaders import stream_of
from ..model.agreement import common_misuse
from ..model.checkpointing import layers_of
from ..model.patch import patch_attention, unpatch_attention
from . import checks, packs, preemption, resume, rng_state, rollouts
from .callback import SequenceParallelCallback
from .evaluation import Evaluation
from .job import job_of_trainer
from .vllm import ServerOfGroups


class SequenceParallelMixin(packs.Packed, Evaluation, rollouts.Rollouts):
    """Mixin with which a `Trainer` or a subclass shares every sequence among a group of ranks.

    List the mixin before `Trainer` in the bases of a class. The shape comes from the `"sequence_parallel"` section of
    the DeepSpeed JSON. `per_device_train_batch_size` and `per_device_eval_batch_size` are the numbers of sequences per
    group of ranks, and all metrics count sequences. `trainer.sp` is the `SequenceParallel` in use, and `sp.data_rank`
    the index of this rank's group.

    A custom loss (`label_smoothing_factor`, `compute_loss_func`, or a class's `compute_loss` or `prediction_step`)
    receives whole batches and whole outputs, as in the plain Trainer.

    Args:
        *args: Passed to the Trainer.
        gather_logits: Whether `compute_metrics` and `predict` get the logits for whole sequences on every rank. With
            `False`, neither gets logits, which saves memory. A `preprocess_logits_for_metrics` function such as an
            argmax, which receives the logits in parts, also saves memory.
        check_loss: Whether to check in the first forward that the model's own loss is the sum of token losses on
            `shift_labels` divided by `num_items_in_batch`. Pass `False` for a model that intentionally computes another
            loss on this rank's shard of a batch.
        group_generation_over: For GRPO and RLOO, the maximum length of a row that one rank generates alone. A row's
            length is the prompt length plus `max_completion_length`. All ranks of a group generate longer rows
            together, with a sharded cache.
        inputs: See `patch_attention`.
        **kwargs: Passed to the Trainer.

    Raises:
        ConfigError: A setting would make training differ from the unsplit run (see docs/troubleshooting.md).

    Examples:
        ```python
        class MyTrainer(SequenceParallelMixin, OtherTrainer): ...
        ```
    """

    # assigned on the instance, overriding the Trainer's methods and attributes
    accelerator: Any
    compute_loss: Any
    prediction_step: Any
    preprocess_logits_for_metrics: Any
    _tr_loss: Any

    def __init__(
        self,
        *args: Any,
        gather_logits: bool = True,
        check_loss: bool = True,
        group_generation_over: int | None = None,
        inputs: Mapping[str, InputSpec] | None = None,
        **kwargs: Any,
    ) -> None:
        wait_at_exit()
        compat.check_trainer(Trainer)
        checks.check_kind(type(self))
        rollouts.check_length(self, group_generation_over)
        self.gather_logits, self.check_loss, self._inputs = gather_logits, check_loss, inputs
        self.group_generation_over = group_generation_over
        self._eval_steps: dict[str, int] = {}  # steps of the last evaluation, by metric prefix
        self._writers = 0  # the number of ranks that wrote the resumed checkpoint
        self._unfinished: AtomicCheckpoint | None = None  # the checkpoint being written
        with compat.generation_with(ServerOfGroups, type(self)):
            super().__init__(*args, **kwargs)
        # wrap a subclass's methods, whether the subclass comes before or after this class in the bases
        self._class_compute_loss, self.compute_loss = self.compute_loss, self._counted_loss
        self._class_prediction_step, self.prediction_step = self.prediction_step, self._whole_prediction_step
        self._preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        if self.model_init is None:
            self._patch_models()
        self._throughput = SequenceParallelCallback(self.sp)
        # our callbacks run after the callback that decides on logging and before the callbacks that report logs
        if rolls_out := rollouts.rolls_out(self):
            rollouts.check_together(self)
            rollouts.count_groups(self.args, self.sp.data_size)
            # trl seeds each process differently, and a group takes the place of one process
            set_seed(self.args.seed + self.sp.data_rank)
        self.callback_handler.callbacks[1:1] = [rng_state.SharedDraws(self.sp, by_group=rolls_out), self._throughput]
        self._preemption = preemption.take_over(self)

    # ---- the model

    def create_accelerator_and_postprocess(self) -> None:
        checks.check_arguments(self.args)
        checks.check_json(self.args)
        op_lock.prepare_start()
        super().create_accelerator_and_postprocess()
        plugin = self.accelerator.state.deepspeed_plugin
        checks.check_accelerator(self.accelerator)
        json = DeepSpeedJson.read(plugin.deepspeed_config)
        json.check_settings()
        self._section, world = json.section, self.accelerator.num_processes
        for parallelism in (accelerate_config.removed_from(self.accelerator), self.args.parallelism_config):
            self._section = accelerate_config.joined(self._section, parallelism, world)
        size = SequenceParallelConfig.from_dict(self._section).size
        if rollouts.rolls_out(self):
            rollouts.check(self)
            if isinstance(size, int):  # otherwise the number of groups is determined when the model is patched
                rollouts.count_groups(self.args, max(1, world // size))
        for key in json.left_out:  # accelerate would replace each "auto" in our section
            plugin.deepspeed_config.pop(key, None)
        self.accelerator = GroupAccelerator(self.accelerator, getattr(self, "sp", None), of_trainer=True)
        self.gather_function = self.accelerator.gather_for_metrics
        dynamo, self._compile = self.accelerator.state.dynamo_plugin, {}
        # whole batches are sharded between graphs, so only the layers are compiled
        if dynamo.backend != DynamoBackend.NO:
            self._compile, dynamo.backend = dynamo.to_kwargs(), DynamoBackend.NO
            log_once("sequence_parallel: torch_compile compiles each layer by itself, in place of the model")

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
        except FileNotFoundError:
            error = checks.unseen_file()
        assert_ranks_agree(self.sp.control_world, "precomputed log-probabilities", None, error=error)
        return dataset

    def _patch_models(self) -> None:
        self._patch(self.model)
        if (reference := getattr(self, "ref_model", None)) is not None:
            patch_attention(unwrapped(reference), self.sp)
        for reward in self.reward_funcs if rollouts.rolls_out(self) else ():
            self._patch_reward(reward)

    def _patch_reward(self, reward: Any) -> None:
        if isinstance(reward, nn.Module) and isinstance(unwrapped(reward), PreTrainedModel):
            try:
                patch_attention(unwrapped(reward), self.sp)
            except ConfigError as reason:
                log_once(f"sequence_parallel: every rank computes a reward model's whole sequences, since {reason}")

    def _patch(self, model: nn.Module) -> None:
        base = unwrapped(model)
        content = self.accelerator.state.deepspeed_plugin.deepspeed_config
        trainer: Any = weakref.proxy(self)  # the job can be requested until the process ends
        job = functools.partial(job_of_trainer, trainer, content)
        self.sp = self.accelerator.sp = prepare_model(model, self._section, getattr(self, "sp", None), job=job)
        patch_attention(base, self.sp, self._inputs)
        checks.count_by_rank(self.accelerator.state.deepspeed_plugin.hf_ds_config, self.sp)
        self._set_loss_check(base)
        for layer in layers_of(base) if self._compile else ():
            layer.compile(**self._compile)
        if rollouts.base_of_trl(type(self), "RewardTrainer"):
            model.register_forward_pre_hook(_without_margin, with_kwargs=True, prepend=True)

    def _set_loss_check(self, base: nn.Module) -> None:
        patch_of(base).agreement.loss_option_of = "the Trainer" if self.check_loss else None

    # ---- data: the whole batches of this rank's group

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """Return the micro-batches of an optimizer step, and the step's number of label tokens over all groups.

        Raises:
            SeqParError: On every rank, if any rank's data or collator fails, or if batches differ within a group.
        """
        self._throughput.start()
        batches: Iterator[Any] = itertools.islice(epoch_iterator, num_batches)
        if self._is_packed:
            of_step, count = self._packs_of(batches)
            batches = iter(of_step)
        microbatches = self._agree_on_batches("training data", lambda: batches, labeled=True)
        for batch in microbatches:
            if isinstance(batch, Mapping):  # prompts are counted after generation
                self._throughput.count(batch)
        microbatches, items = super().get_batch_samples(iter(microbatches), len(microbatches), device)
        if self._is_packed:
            microbatches = packs.in_last(microbatches, count)
        # without labels, gradients are 0 instead of 0/0
        return microbatches, None if items is None else items.clamp(min=1)

    def _agree_on_batches(self, name: str, load: Callable[[], Iterator[Any]], labeled: bool = False) -> list[Any]:
        """Load batches, and check that all ranks agree on them.

        All ranks must have the same number of batches, and ranks that share a sequence must have the same batches. For
        the model's own loss, labels that do not count are set to -100. Raises an error on every rank if any rank fails.

        Args:
            labeled: Whether the model's own loss needs labels.
        """
        world, peers = self.sp.control_world, self.sp.groups.control
        with together(world, "loading data", name, peers=peers) as agreed:
            batches = list(load())
            agreed.value = {"batches": len(batches)}
            fingerprints = [fingerprint(batch) for batch in batches]
            custom_loss = checks.has_custom_loss(self)
            for batch in batches:
                text = checks.text_of(self, batch)
                if isinstance(batch, Mapping) and (wrong := common_misuse(text)):
                    raise InputError(wrong)
                if not custom_loss and (labeled or batch.get("labels") is not None):
                    batch["labels"] = counted_labels(self.sp.sharding, text)
        assert_ranks_agree(
            world, "whole batches", fingerprints, peers=peers, among_peers=True,
            advice=functools.partial(mismatch_hints.of_batches, began=self.sp.calls.count > 0),
        )  # fmt: skip
        return batches

    def _get_train_sampler(self, *args: Any) -> Any:
        own, self.args.distributed_state = self.args.distributed_state, GroupState(self.args.distributed_state, self.sp)
        try:  # batch_rebalance reads the number of processes from the arguments
            return super()._get_train_sampler(*args)
        finally:
            self.args.distributed_state = own

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return compat.train_batch_size(self) * args.gradient_accumulation_steps * self.sp.data_size

    def num_examples(self, dataloader: DataLoader) -> int:
        stream = stream_of(getattr(dataloader, "dataset", None))
        return len(stream) if stream is not None and has_length(stream) else super().num_examples(dataloader)

    # ---- training

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        error = checks.columns_error(self) or (packs.error_of(self) if self._is_packed else None)
        assert_ranks_agree(self.sp.control_world, "data sets", checks.lengths(self), error=error)
        assert_ranks_agree(self.sp.control_world, "training arguments", checks.settings(self))
        content = self.accelerator.state.deepspeed_plugin.deepspeed_config
        folder, self._writers = resume.checkpoint_of(self.sp.control_world, resume_from_checkpoint, self.args, content)
        with contextlib.nullcontext() if self._preemption is None else self._preemption.listening():
            return super().train(folder, *args, **kwargs)

    def _prepare_for_training(self, max_steps: int, loader: Any, *args: Any) -> tuple[nn.Module, DataLoader]:
        assert_ranks_agree(self.sp.control_world, "training loader", None, error=checks.loader_error(loader))
        if self.args.use_liger_kernel:  # `train` has replaced modules of the patched model by Liger's kernels
            patch_attention(unpatch_attention(self.model), self.sp, self._inputs)
            self._set_loss_check(unwrapped(self.model))
        if self.sp.config.doctor:
            require_sound(self.sp, self.model, self.accelerator.state.deepspeed_plugin.deepspeed_config, loader)
        self._watch(loader)
        return super()._prepare_for_training(max_steps, loader, *args)

    def _watch(self, loader: Any) -> None:
        """Make a loader report errors in examples, and keep its workers alive while training handles SIGTERM."""
        base = getattr(loader, "base_dataloader", loader)  # inside accelerate's loader
        if not isinstance(base, DataLoader):
            return
        if not isinstance(base.collate_fn, checks.CheckedCollator | Rows):
            base.collate_fn = checks.CheckedCollator(base.collate_fn)
        if self._preemption is not None:
            self._preemption.guard(base)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # the Trainer would add each rank's own loss since the last log to `train_loss`
        self._tr_loss = self.accelerator.gather(compat.loss_since_log(self)).mean()
        return super()._finalize_training(*args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = resume.random_state(Path(checkpoint), self.args.process_index, self._writers)
        if not is_whole(path):
            drawn = "what this rank draws (dropout, random changes of examples) may be other numbers"
            warnings.warn(f"resuming without random states, since {path} cannot be read: {drawn}", stacklevel=2)
        elif self._writers == self.args.world_size:
            super()._load_rng_state(checkpoint)
        else:
            rng_state.load(path)
        rng_state.share(self.sp.groups.control)

    # ---- saving, so that a checkpoint is complete or does not exist

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run, name = self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        best = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        try:
            with atomic_checkpoint(self.sp.control_world, Path(run), name, self.args.should_save) as self._unfinished:
                super()._save_checkpoint(model, trial)
                if best == name or os.path.isdir(os.path.join(run, best)):
                    self.state.best_model_checkpoint = os.path.join(run, best)
                if self.args.should_save:
                    self.state.save_to_json(str(self._unfinished.path / TRAINER_STATE_NAME))
        finally:
            self._unfinished = None
        if self.args.push_to_hub:
            self._push_from_checkpoint(os.path.join(run, name))
        if self.args.should_save:
            rotate_checkpoints(run, self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._unfinished is None else str(self._unfinished.path.parent)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        with contextlib.nullcontext() if self._unfinished is None else self._unfinished.keeping_errors():
            super()._save(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # otherwise `_save_checkpoint` calls this method again when the folder has its final name
        if self._unfinished is None:
            super()._push_from_checkpoint(checkpoint_folder)


def _without_margin(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Remove the margin column, which trl's RewardTrainer passes to models that do not use it."""
    return args, {name: x for name, x in kwargs.items() if name != "margin"}


class SequenceParallelTrainer(SequenceParallelMixin, Trainer):
    """transformers' `Trainer`, except that a group of ranks shares every sequence.

    Accepts the arguments of `Trainer` and `SequenceParallelMixin`.

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
