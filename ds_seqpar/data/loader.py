"""Data loaders that return the same batches on all ranks that share a sequence, and different batches to each group.

A loader over the whole data set is divided among groups in the same way as accelerate divides loaders among ranks:
group d of D reads batches d, d + D, and so on. Before each batch, ranks check that every rank has a batch. If one rank
has an error, all ranks therefore raise an error.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from ..base.compat import SPLIT
from ..base.errors import ConfigError, SeqParError, as_seqpar_error
from ..base.fingerprint import Fields, Fingerprint
from ..guards.agreement import assert_ranks_agree, differing, together
from ..guards.waits import explaining_failure
from .random_states import random_state, set_random_state
from .sharding import Sharding

CALL = "a loader of sp.loader"
ORDER, BATCHES = "order of examples", "batches"  # names of the values that ranks compare


class Loader:
    """This group's batches from a DataLoader, identical on all ranks in the group; see `SequenceParallel.loader`.

    Attributes such as `dataset`, `batch_size` and `num_workers` are looked up in the wrapped DataLoader.

    Args:
        sp: The SequenceParallel.
        loader: A torch DataLoader, or DeepSpeed's own data loader.
        read_once: Whether only the first rank in a group reads batches and sends them to the other ranks.
        groups: Number of groups that share the batches. Defaults to all groups.
    """

    def __init__(self, sp: Sharding, loader: Any, read_once: bool = False, groups: int | None = None) -> None:
        self.sp, self.read_once, self.groups = sp, read_once, groups or sp.data_size
        self.epoch: int | None = None  # last value passed to `set_epoch`
        self.batches = 0  # number of batches returned in this epoch
        self.passes = 0  # number of completed epochs
        self._random: list[torch.Tensor] = []  # random states at the start of the epoch
        self._state: dict[str, Any] | None = None  # state to resume from in the next iteration
        self._order: _Indices | None = None  # batch indices of the whole loader
        self._indices: _Indices | None = None  # batch indices that this group reads
        with together(sp.control_world, "preparing a loader", "loader", call="sp.loader") as agreed:
            self.given = loader
            examples = _length(getattr(loader, "dataset", None))
            batch_size = getattr(loader, "batch_size", None)
            agreed.value = {"examples": examples, "batch_size": batch_size, "read_once": read_once}
            self.loader = self.dealt(loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("given", "loader"):
            raise AttributeError(name)
        return getattr(self.given, name)

    def __len__(self) -> int:
        return len(self.loader)

    def dealt(self, loader: Any) -> Any:
        """Return a copy of the loader that reads only this group's batches."""
        if not isinstance(loader, DataLoader):
            if hasattr(loader, "data_sampler"):  # DeepSpeed's own loader from `initialize`
                return loader
            raise ConfigError(f"sp.loader needs a DataLoader of torch; got {type(loader).__name__}, make one of it")
        # a copy keeps the class and settings; DataLoader does not allow changes to its attributes
        group_loader = copy.copy(loader)
        must_deal = not is_dealt(self.sp, loader) and self.groups > 1
        if isinstance(loader.dataset, IterableDataset):
            vars(group_loader)["dataset"] = self._dealt_stream(loader) if must_deal else loader.dataset
        elif loader.batch_sampler is not None:
            self._order = _Indices(loader.batch_sampler, self.groups if not is_dealt(self.sp, loader) else 0)
            dealt: Any = self._order
            if must_deal:
                dealt = _accelerate().BatchSamplerShard(dealt, self.groups, self.sp.data_rank)
            self._indices = _Indices(dealt)
            vars(group_loader)["batch_sampler"] = self._indices
        elif must_deal:
            raise ConfigError(
                "sp.loader deals batches to groups; got batch_size=None, which makes none, give the DataLoader "
                "sampler=sp.sampler(dataset)"
            )
        return group_loader

    def _dealt_stream(self, loader: DataLoader) -> IterableDataset:
        shard = _accelerate().IterableDatasetShard(
            loader.dataset,
            batch_size=loader.batch_size or 1,
            drop_last=loader.drop_last,
            num_processes=self.groups,
            process_index=self.sp.data_rank,
        )
        shard.epoch = 0  # accelerate reads `epoch` even if set_epoch was never called
        return shard

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of samplers and data sets that shuffle by epoch."""
        self.epoch = epoch
        for source in (*_samplers(self.given), getattr(self.loader, "dataset", None)):
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)

    # ---- an epoch

    @property
    def _sends_to_group(self) -> bool:
        return self.read_once and self.sp.groups.control is not None

    @property
    def _reads(self) -> bool:
        return self.sp.rank == 0 or not self._sends_to_group

    def __iter__(self) -> Iterator[Any]:
        state, self._state = self._state, None
        self.batches = state["batches"] if state else 0
        local_batches = self._batches_from(state)
        while True:
            batch, compared, error = self._next_batch(local_batches) if self._reads else (None, {}, None)
            if self._sends_to_group:
                batch, compared = self._broadcast_batch(batch, compared)
            groups = self.sp.groups
            assert_ranks_agree(
                groups.world, "loader", compared, error=error, peers=groups.control, call=CALL, advice=_cause
            )
            if compared[BATCHES] != "another":
                break
            self.batches += 1
            yield batch
        self.batches, self.passes = 0, self.passes + 1

    def _batches_from(self, state: Mapping[str, Any] | None) -> Iterator[Any]:
        """Yield the batches that this rank reads, after skipping the batches counted in the state."""
        generators = self._generators()
        if state is None:
            self._random = [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
            yield from self.loader
            return
        self._random, skipped = state["random"], state["batches"]
        with torch.random.fork_rng(devices=[]):  # samplers draw their order before the first batch
            torch.set_rng_state(self._random[0])
            for generator, generator_state in zip(generators, self._random[1:], strict=True):
                generator.set_state(generator_state)
            if "loader" in state:
                self.loader.load_state_dict(state["loader"])
                skipped = 0
            elif self._indices is not None:
                self._indices.skip, skipped = skipped, 0
            batches = (batch for batch in self.loader)  # DeepSpeed's loader restarts at every call of `iter`
            first = list(itertools.islice(batches, skipped, skipped + 1))
        yield from itertools.chain(first, batches)

    def _generators(self) -> list[torch.Generator]:
        """Return the generators, other than torch's global generator, that may determine an epoch's order."""
        generators = [getattr(source, "generator", None) for source in (self.given, *_samplers(self.given))]
        return list({id(x): x for x in generators if isinstance(x, torch.Generator)}.values())

    def _next_batch(self, local_batches: Iterator[Any]) -> tuple[Any, dict[str, Any], SeqParError | None]:
        """Return the next batch, the values that all ranks compare, and this rank's error, if any.

        If the batch is sent to other ranks, it is pickled.
        """
        try:
            batch, compared = next(local_batches), {BATCHES: "another", "number": self.batches}
            if self._sends_to_group:
                batch = pickle.dumps(batch)
        except StopIteration:
            batch, compared = None, {BATCHES: "no more"}
        except Exception as reason:
            return None, {}, as_seqpar_error("loading data failed", reason)
        if self._order is not None and self._order.compared:
            compared[ORDER] = str(self._order.fingerprint)
        return batch, compared, None

    def _broadcast_batch(self, batch: Any, compared: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Send the first rank's batch and random states to all ranks in the group."""
        generators = self._generators()
        states = random_state(), [generator.get_state() for generator in generators]
        group, message = self.sp.groups.control, [(batch, compared, states)]
        with explaining_failure(CALL, group):
            dist.broadcast_object_list(
                message, group=group, group_src=self.sp.groups.sp_order.index(0), device=torch.device("cpu")
            )
        [(content, compared, (global_state, generator_states))] = message
        set_random_state(global_state)
        for generator, state in zip(generators, generator_states, strict=False):
            generator.set_state(state)
        return None if content is None else pickle.loads(content), compared

    # ---- continuing an epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the current epoch, to be saved with `torch.save`. The state from rank 0 is valid on
        all ranks.
        """
        if self._state is not None:
            return self._state
        state = {"epoch": self.epoch, "passes": self.passes, "batches": self.batches, "random": self._random}
        state |= {"groups": self.groups, "batch_size": self._batch_size(), "length": _length(self)}
        if self.batches and self._reads and hasattr(self.loader, "state_dict"):
            state["loader"] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume a saved epoch after its last batch, the next time the loader is iterated over.

        If the number of groups or the batch size has changed, the loader resumes after the same number of sequences.
        Optimizer steps with an unchanged number of sequences therefore contain the same sequences. Map-style data sets
        skip earlier batches without reading them, while streams re-read them. Random numbers that workers draw for
        augmentation are not restored.

        Args:
            state: State from `state_dict`.

        Raises:
            ConfigError: The number of groups or the batch size has changed, and the loader cannot resume at the saved
                position.
        """
        state = {"passes": 0, **state, "batches": self._batches_after(state)}
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        self.passes = state["passes"]
        own = {"groups": self.groups, "batch_size": self._batch_size(), "length": _length(self)}
        self._state = state | own if state["batches"] else None

    def _batches_after(self, state: Mapping[str, Any]) -> int:
        """Return how many of this loader's batches precede the position stored in a state."""
        own_size = self._batch_size()
        batches, groups, size = state["batches"], state["groups"], state.get("batch_size", own_size)
        together = (own_size or 0) * self.groups
        if not batches or (groups, size) == (self.groups, own_size):
            return batches
        if batches == state.get("length"):
            return len(self)
        sequences = batches * groups * (size or 0)
        if "loader" in state or not sequences or not together or sequences % together:
            raise ConfigError(
                f"a loader goes on where all groups have had equally many batches; got a state after {batches} of "
                f"{size} sequences in {groups} groups, for batches of {own_size} in {self.groups}, "
                "resume with the same sizes"
            )
        return sequences // together

    def _batch_size(self) -> int | None:
        """Return the number of sequences in a batch, or None if a batch sampler does not specify it."""
        size = getattr(self.given, "batch_size", None)
        return getattr(getattr(self.given, "batch_sampler", None), "batch_size", None) if size is None else size


class _Indices:
    """Batch sampler that wraps another batch sampler. Samplers that draw the same order have the same `fingerprint`."""

    def __init__(self, batches: Iterable[Any], compared: int = 0) -> None:
        # compared: number of leading batches in `fingerprint`. skip: number of batches that the next epoch skips
        self.given, self.compared, self.skip = batches, compared, 0
        self.fingerprint = Fingerprint()
        self.batch_size = getattr(batches, "batch_size", None)
        self.drop_last = getattr(batches, "drop_last", False)

    def __len__(self) -> int:
        return len(self.given)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        self.fingerprint = Fingerprint()
        for number, batch in enumerate(self.given):
            if number < self.compared:
                self.fingerprint = Fingerprint.of(int(self.fingerprint), batch)
            if number >= skip:
                yield batch


def is_dealt(sp: Sharding, loader: DataLoader) -> bool:
    """Return whether a loader's sampler or data set already divides batches among groups.

    Raises:
        ConfigError: Batches are already divided in another way, for example among ranks.
    """
    for source in (*_samplers(loader), getattr(loader.dataset, SPLIT, None)):
        count = getattr(source, "num_replicas", getattr(source, "world_size", None))
        if count is None or not hasattr(source, "rank"):
            continue
        if (count, source.rank) != (sp.data_size, sp.data_rank):
            raise ConfigError(
                f"the ranks of a sequence must be given the same samples, by sp.data_rank {sp.data_rank} of "
                f"sp.data_size {sp.data_size}; got a loader for rank {source.rank} of {count} by its "
                f"{type(source).__name__}, use sampler=sp.sampler(dataset), or leave that out"
            )
        return True
    return False


def _samplers(loader: Any) -> list[Any]:
    """Return the samplers that provide a loader's indices."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = [getattr(loader, name, None) for name in ("sampler", "data_sampler")]
    return [x for x in (*samplers, batch_sampler, getattr(batch_sampler, "sampler", None)) if x is not None]


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def _accelerate() -> Any:
    """Return accelerate's data loader module, or raise ConfigError if accelerate is not installed."""
    try:
        from accelerate import data_loader
    except ModuleNotFoundError as error:
        raise ConfigError(
            "sp.loader deals whole data sets by accelerate, which is not installed; give the DataLoader "
            "sampler=sp.sampler(dataset), or pip install accelerate"
        ) from error
    return data_loader


def _cause(by_rank: Mapping[int, Fields]) -> str:
    """Explain why ranks have different batches and name the remedy, or return "" if the cause is unknown."""
    names = differing(by_rank)
    if ORDER in names:
        return (
            "their samplers draw other orders, as from other seeds: seed all ranks alike before each epoch, or give "
            "the DataLoader a generator"
        )
    return "some have no more batches: give each group as many" if BATCHES in names else ""
