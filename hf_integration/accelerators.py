"""Accelerators that count groups of ranks instead of processes, for custom training loops and the Trainer.

A group of ranks that share sequences takes the place of one process in the plain script. Batches must therefore be
distributed, gathered and split once per group, and schedulers must step once per group, not once per process. Devices,
barriers, random states, files and gradient averaging are still handled per process. `docs/own_loop.md` lists which
Accelerator members count groups and which count processes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import PartialState
from accelerate.utils import DummyOptim, DummyScheduler, gather_object, recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ds_seqpar import SequenceParallel
from ds_seqpar.base.errors import ConfigError, InputError
from ds_seqpar.base.log import log_once
from ds_seqpar.core.runtime.operator import describe
from ds_seqpar.deepspeed.config import DeepSpeedJson
from ds_seqpar.deepspeed.counts import count_by_rank
from ds_seqpar.engine import assert_same_training, hook_engine
from ds_seqpar.guards.agreement import assert_ranks_agree
from ds_seqpar.guards.process_exit import is_of_library
from ds_seqpar.whole import plain

from . import accelerate_config, compat
from .loaders import examples_of, prepare_loader, stream_of
from .module_patch import patch_on

# arguments of `prepare` that indicate training
TRAINED = (Optimizer, DummyOptim, LRScheduler, DummyScheduler)


class GroupState:
    """A proxy for an accelerate state that counts groups instead of processes.

    All other attributes are forwarded to the wrapped state, `own`.

    With `sp=None` the proxy counts processes, like the wrapped state.
    """

    def __init__(self, wrapped: Any, sp: SequenceParallel | None) -> None:
        vars(self).update(own=wrapped, sp=sp)

    @property
    def num_processes(self) -> int:
        return self.own.num_processes if self.sp is None else self.sp.data_size

    @property
    def process_index(self) -> int:
        return self.own.process_index if self.sp is None else self.sp.data_rank

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Any:
        return PartialState.split_between_processes(self, inputs, apply_padding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self).update(sp=value) if name == "sp" else setattr(self.own, name, value)


class GroupScheduler(AcceleratedScheduler):
    """accelerate's scheduler, changed to step once per group instead of once per process."""

    sp: SequenceParallel

    def step(self, *args: Any, **kwargs: Any) -> None:
        with compat.counting_processes(self.sp.data_size):
            super().step(*args, **kwargs)


class GroupAccelerator(GroupState):
    """An Accelerator whose processes are groups of ranks.

    Args:
        accelerator: The Accelerator of all ranks, kept as `own`.
        sp: The SequenceParallel of the model, or None until the model is patched.
        of_trainer: Whether the Accelerator belongs to a Trainer. A Trainer compares values among ranks and moves whole
            batches to the device itself.
    """

    of_trainer: bool

    def __init__(self, accelerator: Accelerator, sp: SequenceParallel | None, of_trainer: bool = False) -> None:
        super().__init__(accelerator, sp)
        vars(self).update(of_trainer=of_trainer)
        _counted.add(accelerator)
        self._count_groups()

    @property
    def state(self) -> GroupState:
        return GroupState(self.own.state, self.sp)

    # ---- preparing

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        dummies = [x for x in args if isinstance(x, DummyScheduler) and x.total_num_steps is not None]
        size = 1 if self.sp is None else self.sp.size
        attributes, plugin = vars(self.own), self.own.state.deepspeed_plugin
        if plugin is not None and self.sp is not None:
            count_by_rank(plugin.deepspeed_config, self.sp)
        if self.sp is not None and any(isinstance(x, (nn.Module, *TRAINED)) for x in args):
            json = plugin and DeepSpeedJson.read(plugin.deepspeed_config)
            given = {type(x).__name__: x for x in args if isinstance(x, TRAINED)}
            model = next((x for x in args if isinstance(x, nn.Module)), nn.Module())
            assert_same_training(self.sp.control_world, json=json, given=given, model=model, call="accelerator.prepare")
        attributes["prepare_data_loader"] = self.prepare_data_loader
        for dummy in dummies:  # accelerate divides total_num_steps by the number of processes
            dummy.total_num_steps *= size
        try:
            return self.own.prepare(*args, **kwargs)
        finally:
            for dummy in dummies:
                dummy.total_num_steps //= size
            del attributes["prepare_data_loader"]
            self._count_groups()

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        prepared = self.own.prepare_scheduler(scheduler)
        self._count_groups()
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader:
        """Prepare a loader with accelerate so that the loader serves this rank's group instead of this rank alone."""
        accelerator: Any = self.own
        if accelerator.dispatch_batches:
            raise ConfigError(
                "an Accelerator whose model shares sequences needs dispatch_batches=False, or the first rank would "
                "hand every rank another part of a batch; got True, leave it out"
            )
        if not getattr(data_loader, compat.PREPARED, False):
            put_on_device = accelerator.device_placement if device_placement is None else device_placement
            data_loader = prepare_loader(
                data_loader,
                self.sp,
                put_on_device=put_on_device and not self.of_trainer,
                device=accelerator.device,
                even_batches=accelerator.even_batches,
                split_batches=accelerator.split_batches,
                rng_types=accelerator.rng_types.copy(),
                use_seedable_sampler=accelerator.use_seedable_sampler,
                data_seed=accelerator.dataloader_config.data_seed,
                non_blocking=accelerator.non_blocking,
                use_stateful_dataloader=accelerator.use_stateful_dataloader or hasattr(data_loader, "state_dict"),
            )
        if data_loader not in (loaders := compat.loaders(accelerator)):
            loaders.append(data_loader)
        return data_loader

    def _count_groups(self) -> None:
        """Make the schedulers and DeepSpeed engines prepared by `own` count groups."""
        if self.sp is None:
            return
        for scheduler in compat.schedulers(self.own):
            if type(scheduler) is AcceleratedScheduler:
                scheduler.__class__, scheduler.sp = GroupScheduler, self.sp
        for engine in compat.models(self.own):
            if hasattr(engine, compat.ENGINE):
                hook_engine(engine, self.sp, of_loop=False)

    # ---- gathering

    def gather(self, tensor: Any) -> Any:
        """Concatenate one value per group along the first dim."""
        if self.sp is None or (self.of_trainer and self.sp.data_size == 1):
            return tensor
        by_group = self._by_group(tensor, "gather")
        return recursively_apply(lambda x: x.flatten(0, 1) if x.dim() > 1 else x, by_group)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather one value per group, without the repeated examples that pad the last batch."""
        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        data = self.gather_objects(input_data) if use_gather_object else self.gather(input_data)
        real = self.real_examples()
        if use_gather_object:
            return data[:real]
        return recursively_apply(lambda x: x[:real] if x.dim() else x, data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce a tensor to its sum, mean or maximum over groups."""
        if self.sp is None:
            return self.own.reduce(tensor, reduction, scale)
        groups = self.sp.data_size

        def over_groups(x: Tensor) -> Tensor:
            if reduction == "max":
                return x.amax(0)
            total = x.sum(0, dtype=x.dtype)
            return total.div_(groups) if reduction == "mean" else total

        return recursively_apply(over_groups, self._by_group(tensor, "reduce"))

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return self.own.pad_across_processes(recursively_apply(plain, tensor), *args, **kwargs)

    def on_process(self, function: Callable | None = None, process_index: int | None = None) -> Any:
        """Decorate a function to run only on the first rank of a group."""
        if self.sp is not None and process_index is not None:
            process_index = self._ranks_by_group()[process_index][0]
        return self.own.on_process(function, process_index=process_index)

    def real_examples(self) -> int | None:
        """Return the number of non-repeated examples in the last batch across all groups.

        Return None if no example is repeated, or if a Trainer cannot determine the number.
        """
        state = self.own.gradient_state
        if not state.end_of_dataloader:
            return None
        shard = getattr(state.active_dataloader, "dataset", None)
        stream = stream_of(shard)
        if stream is not None and isinstance(shard, IterableDatasetShard) and not shard.drop_last:
            examples = examples_of(stream)
            if examples is None and not self.of_trainer:
                raise InputError(
                    "gather_for_metrics needs to know how many examples a stream has, to leave out repetitions in its "
                    "last batch; got none, give the data set a __len__ or its loader num_workers=0"
                )
            if examples is not None:
                batch = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
                state.active_dataloader.remainder = examples % batch
        return state.remainder if state.remainder > 0 else None

    def _ranks_by_group(self) -> list[list[int]]:
        if self.sp is None:
            return [[rank] for rank in range(self.own.num_processes)]
        groups = [self.sp.topology.index(rank, "data") for rank in range(self.sp.topology.world_size)]
        return [[rank for rank, of in enumerate(groups) if of == group] for group in range(self.sp.data_size)]

    def gather_objects(self, data: Any) -> list[Any]:
        """Concatenate one list per group, whereas accelerate's `gather_object` concatenates one list per process."""
        by_rank = gather_object([data])
        return [x for ranks in self._ranks_by_group() for x in by_rank[ranks[0]]]

    def _by_group(self, data: Any, name: str) -> Any:
        """Gather each of this rank's tensors into a tensor of shape (groups, ...).

        Raises InputError on every rank if the ranks of a group hold different values, and DisagreementError if their
        shapes differ.
        """
        assert self.sp is not None
        ranks, shapes = self._ranks_by_group(), []
        order = [rank for group in ranks for rank in group]
        data = recursively_apply(plain, data, error_on_other_type=True)
        recursively_apply(lambda x: shapes.append(describe(x)), data)
        if not self.of_trainer:
            assert_ranks_agree(
                self.sp.control_world, f"tensors for accelerator.{name}", shapes, call=f"accelerator.{name}"
            )

        def first_of_each_group(x: Tensor) -> Tensor:
            values = self.own.gather(x).view(len(order), *x.shape)[order].unflatten(0, (len(ranks), -1))
            if not self.of_trainer and not _same_in_groups(values):
                raise InputError(
                    f"accelerator.{name} takes each group of ranks once, whose ranks must hold the same values; they "
                    f"hold different ones, use accelerator.own.{name}, which takes every rank, or sp.mean_loss for "
                    "losses of sharded batches"
                )
            return values[:, 0]

        return recursively_apply(first_of_each_group, data)


def _same_in_groups(values: Tensor) -> bool:
    """Return whether all ranks of each group hold equal values, up to rounding.

    Args:
        values: (groups, ranks of a group, ...).
    """
    first = values[:, :1]
    if not values.is_floating_point():
        return bool((values == first).all())
    tolerance = torch.finfo(values.dtype).eps ** 0.5
    largest = float(first.nan_to_num(0, 0, 0).abs().amax()) if values.numel() else 0.0
    return bool(torch.isclose(values, first, rtol=tolerance, atol=tolerance * largest, equal_nan=True).all())


def share_accelerator(accelerator: Accelerator, sp: SequenceParallel) -> GroupAccelerator:
    """Return an Accelerator whose processes are the groups of ranks that share sequences.

    The new Accelerator distributes batches to groups, steps schedulers once per group, and gathers, reduces and splits
    by group. All other members are forwarded to the given Accelerator, which is kept as `own` and still counts ranks.

    Args:
        accelerator: The Accelerator of all ranks, before `prepare`.
        sp: The `SequenceParallel` of the model, from `share_sequences`.

    Returns:
        The Accelerator that counts groups.

    Raises:
        ConfigError: The Accelerator covers fewer ranks than `sp`, or has a ParallelismConfig with different sizes.

    Examples:
        ```python
        accelerator = share_accelerator(accelerator, sp)
        loader = accelerator.prepare(DataLoader(...))
        ```
    """
    if isinstance(accelerator, GroupAccelerator) and accelerator.sp is sp:
        return accelerator
    if not isinstance(accelerator, Accelerator) or not isinstance(sp, SequenceParallel):
        raise ConfigError(
            "share_accelerator needs an Accelerator and the SequenceParallel of its model; got "
            f"{type(accelerator).__name__} and {type(sp).__name__}, pass accelerator, sp"
        )
    if accelerator.state.num_processes != sp.topology.world_size:
        raise ConfigError(
            f"share_accelerator needs an Accelerator of all {sp.topology.world_size} ranks; got one of "
            f"{accelerator.state.num_processes}, on a machine without GPUs make it by Accelerator(cpu=True)"
        )
    parallelism, given = accelerate_config.removed_from(accelerator), {"size": sp.size, "kernel": sp.config.kernel}
    accelerate_config.joined(given, parallelism, sp.topology.world_size)
    if parallelism is not None and parallelism.sp_size == 1:
        raise ConfigError(
            "share_accelerator takes sp_size of a ParallelismConfig, and no meshes; got one without, leave it out"
        )
    return GroupAccelerator(accelerator, sp)


# ---- detecting Accelerators that count ranks instead of groups

# Accelerator members that count processes; `prepare` does so only if it is passed a scheduler
COUNTS = ("prepare", "prepare_scheduler", "gather", "gather_for_metrics", "reduce", "split_between_processes",
          "num_processes")  # fmt: skip
# packages that intend to count ranks when they call COUNTS, or that use their own Accelerator
EXEMPT_CALLERS = ("accelerate", "transformers", "trl", "hf_integration")
_patched: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # base models that may share sequences
_counted: weakref.WeakSet[Accelerator] = weakref.WeakSet()  # Accelerators passed to `share_accelerator`


def watch(model: nn.Module) -> None:
    """Make every Accelerator report calls that would count the ranks of a group separately.

    Args:
        model: A patched base model.
    """
    _guard()
    _patched.add(model)


@functools.cache
def _guard() -> None:
    for name in COUNTS:
        compat.watch_member(name, functools.partial(_check, name))


def _check(name: str, accelerator: Accelerator, frame: FrameType, args: tuple) -> None:
    """Raise ConfigError if user code calls a rank-counting member of an Accelerator whose model shares sequences.

    Calls from library code, which the user cannot change, cause a single warning instead.
    """
    caller = frame.f_globals.get("__name__", "")
    is_exempt = caller.partition(".")[0] in EXEMPT_CALLERS
    counts = name != "prepare" or any(isinstance(x, LRScheduler | DummyScheduler) for x in args)
    if not counts or (is_exempt and caller != "accelerate.local_sgd"):
        return
    patches = [own.model for model in _patched if (own := patch_on(model))]
    if accelerator in _counted or not any(patch and patch.sp.size > 1 and not patch.whole for patch in patches):
        return
    subject = "a scheduler for accelerator.prepare" if name.startswith("prepare") else f"accelerator.{name}"
    if is_of_library(frame) and not is_exempt:
        log_once(f"sequence_parallel: {subject} counts every rank where {caller} calls it, and not groups of ranks")
        return
    raise ConfigError(
        f"{subject} needs an Accelerator that counts groups of ranks, since a model shares sequences; got one that "
        "counts every rank, write accelerator = share_accelerator(accelerator, sp) before"
    )
