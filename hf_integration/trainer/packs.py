"""Train on packs in each optimizer step, if the JSON sets `tokens_per_rank` (docs/lengths.md).

The Trainer's loop still iterates over the batches of the plain run and counts them. All samples in a step's batches are
packed together. A step's last batch represents all of the step's packs, and the earlier batches are empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ds_seqpar.base.errors import SECTION, ConfigError, InputError, SeqParError, as_seqpar_error
from ds_seqpar.base.fingerprint import Fingerprint
from ds_seqpar.data.batches import fingerprint
from ds_seqpar.guards.agreement import together
from ds_seqpar.lengths import Rows
from ds_seqpar.whole import whole_loss

from ..families import is_of_library, patch_of, unwrapped
from ..model import whole_calls
from . import checks
from .rollouts import ROLLOUTS, Behind, base_of_trl

OF_PAIRS = ("DPOTrainer", "RewardTrainer")  # trl's Trainers whose loss is a mean over pairs


class PacksOfStep(list):
    """The packs represented by one batch of the Trainer's loop."""


class WholeSteps(BatchSamplerShard):
    """accelerate's batch sampler for one group, changed to give each group the batches of all groups."""

    def __iter__(self) -> Iterator[list[int]]:
        drawn = itertools.tee(self.batch_sampler, self.num_processes)
        for batches in zip(*map(self._of_group, range(self.num_processes), drawn), strict=True):
            yield [sample for batch in batches for sample in batch]

    def _of_group(self, group: int, drawn: Iterator[Any]) -> Iterator[Any]:
        shard: Any = BatchSamplerShard(self.batch_sampler, self.num_processes, group, even_batches=self.even_batches)
        # drawn once for all groups, and copied because the shard extends the last batch in place
        shard.batch_sampler = map(list, drawn)
        return iter(shard)


def whole_steps(loader: DataLoader) -> DataLoader:
    """Make a prepared loader yield the samples of all groups on each rank, with each sample as a separate row."""
    base: Any = getattr(loader, "base_dataloader", loader)
    base.collate_fn, dataset = Rows(checks.CheckedCollator(base.collate_fn)), base.dataset
    if isinstance(dataset, IterableDatasetShard):
        dataset.batch_size *= dataset.num_processes
        dataset.num_processes, dataset.process_index = 1, 0
        vars(base)["batch_size"] = base.batch_sampler.batch_size = dataset.batch_size
    elif isinstance(base.batch_sampler, BatchSamplerShard):
        base.batch_sampler.__class__ = WholeSteps
    return loader


class Pairs(Rows):
    """A collate_fn that returns pairs unchanged. Pairs are collated after they have been distributed to groups."""

    def __call__(self, samples: Sequence[Any]) -> list[Any]:
        return [*samples]


class Packed(Behind):
    """The part of `SequenceParallelMixin` that implements training on packs."""

    # the number of pairs in each pack of the step, divided by the number in a plain batch
    _counts: Sequence[float] = ()
    _weight = 1.0  # the loss weight of the current pack

    @property
    def _is_packed(self) -> bool:
        return self.sp.config.tokens_per_rank != "auto"

    def get_train_dataloader(self) -> DataLoader:
        loader = super().get_train_dataloader()
        if not self._is_packed:
            return loader
        loader = whole_steps(loader)
        if base_of_trl(type(self), *OF_PAIRS):
            base: Any = getattr(loader, "base_dataloader", loader)
            self._collate_pairs = base.collate_fn.collate
            base.collate_fn = Pairs(self._collate_pairs)
        return loader

    def _packs_of(self, batches: Iterator[Any]) -> tuple[list[Any], int]:
        """Return this group's packs of the samples in all groups' batches, and the number of batches per group."""
        read, error = list[Any](), None
        try:
            for batch in batches:
                if not isinstance(batch, list):
                    raise ConfigError(
                        f"{SECTION}.tokens_per_rank needs the Trainer's own loader of training data; got batches of "
                        "another, leave get_train_dataloader as it is, or tokens_per_rank out"
                    )
                read.append(batch)
        except Exception as reason:
            error = as_seqpar_error("loading data failed", reason)
        if base_of_trl(type(self), *OF_PAIRS):
            return self._packs_of_pairs(read, error), len(read)
        packs = self.sp.step_dealer.packs([sample for batch in read for sample in batch], error)
        return packs if read else [], len(read)

    def _packs_of_pairs(self, read: Sequence[Any], error: SeqParError | None) -> list[Any]:
        """Return this group's packs, each with pairs of similar lengths.

        The corresponding packs of all groups have the same number of pairs. A loss is the mean over a batch's pairs,
        and the last batch of an epoch may be smaller. Only pairs from batches of the same size, which have the same
        weight, are therefore packed together.
        """
        sp, packs, counts, contents = self.sp, list[Any](), list[float](), list[Fingerprint]()
        most = sp.config.tokens_per_rank * sp.size
        with together(sp.control_world, "packing the pairs of a step", "pairs of a step", error=error) as agreed:
            for size in sorted({len(batch) for batch in read}):
                pairs = [pair for batch in read if len(batch) == size for pair in batch]
                alone = [self._collate_pairs([pair]) for pair in pairs]
                rows = [int(batch["attention_mask"].sum(1).max()) for batch in alone]
                contents.append(Fingerprint.of(*(str(fingerprint(batch)) for batch in alone)))
                order = sorted(range(len(pairs)), key=lambda pair: -rows[pair])
                while order:
                    if 2 * (longest := rows[order[0]]) > most:
                        raise InputError(
                            f"the two answers to a prompt, with it, must fit one micro-batch, {most // 2} tokens each "
                            f"(tokens_per_rank * size / 2); got {longest}, lower max_length, or raise tokens_per_rank"
                        )
                    end = most // (2 * longest) * sp.data_size
                    chosen, order = order[:end][sp.data_rank :: sp.data_size], order[end:]
                    packs.append(self._collate_pairs([pairs[pair] for pair in chosen]))
                    counts.append(len(chosen) * sp.data_size / size)
            agreed.value = {"pairs of each pack": str(counts), "tokens": str(contents)}
        self._counts = counts
        return packs

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(inputs, PacksOfStep):
            return super().training_step(model, whole_calls.moved_batch(inputs, self.args.device), *args, **kwargs)
        steps, loss = self.accelerator.sync_gradients, torch.zeros((), device=self.args.device)
        for number, batch in enumerate(inputs, 1):
            self.accelerator.sync_gradients = steps and number == len(inputs)
            batch = whole_calls.moved_batch(batch, self.args.device)
            self._weight = self._counts[number - 1] if self._counts else 1.0
            if "num_items_in_batch" in batch:  # the loss is already divided by num_items_in_batch
                self.current_gradient_accumulation_steps = 1
            loss = loss + super().training_step(model, batch, *args, **kwargs)
        self._weight = 1.0
        return whole_loss(self.sp.sharding, loss / self.sp.size) if inputs else loss

    def floating_point_ops(self, inputs: Any) -> Any:
        batches = inputs if isinstance(inputs, PacksOfStep) else [inputs]
        # the Trainer sums the result over all ranks
        return sum(super(Packed, self).floating_point_ops(batch) for batch in batches) / self.sp.size


def in_last(packs: list[Any], batches: int) -> list[PacksOfStep]:
    """Return one PacksOfStep for each batch of a step, with all packs in the last PacksOfStep."""
    return [PacksOfStep() for _ in range(batches - 1)] + [PacksOfStep(packs)] if batches else []


def has_own_forward(model: nn.Module) -> bool:
    """Return whether a user-defined forward wraps or replaces a model's forward."""
    patch = patch_of(unwrapped(model))
    return patch is not None and not all(is_of_library(head.forward) for head in patch.above)


def error_of(trainer: Any) -> ConfigError | None:
    """Return the error for a Trainer whose loss is not a sum over tokens, or whose batches cannot become packs."""
    args = trainer.args
    of_batches = {"aot", "aot_unpaired", "sft"}.intersection(getattr(trainer, "loss_types", None) or ())
    wrong: Mapping[str, bool] = {
        "a KTOTrainer, whose loss needs the mean of a batch": base_of_trl(type(trainer), "KTOTrainer") is not None,
        "a trainer that generates": base_of_trl(type(trainer), *ROLLOUTS) is not None,
        f"loss_type {' and '.join(sorted(of_batches))}, which is no mean over pairs": bool(of_batches),
        "experts whose balance is counted in each micro-batch": getattr(trainer, "aux_loss_enabled", False),
        "a loss of whole batches (label_smoothing_factor, compute_loss_func, compute_loss)": checks.changes_loss(
            trainer, but=OF_PAIRS
        ),
        "a model whose own forward may add to its loss": has_own_forward(trainer.model),
        'train_sampling_strategy="batch_rebalance", which packs do by themselves': str(args.train_sampling_strategy)
        == "batch_rebalance",
        "include_num_input_tokens_seen, which counts padding": args.include_num_input_tokens_seen != "no",
    }
    if found := [name for name, holds in wrong.items() if holds]:
        return ConfigError(
            f"{SECTION}.tokens_per_rank is for the Trainer's own loss and batches; got {found[0]}, leave that or "
            "tokens_per_rank out"
        )
    return None
