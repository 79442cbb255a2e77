"""Data loaders that give the ranks of a sequence the same batches, and other groups other ones.

A loader over the whole data set is dealt to groups as accelerate deals one to ranks: group d of D takes the batches d,
d + D, and so on. With every batch all ranks agree that each has one, so an error of one rank is raised on all.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from ..errors import ConfigError, InputError, SeqParError, as_seqpar_error
from ..runtime.agreement import Fields, assert_ranks_agree, differing
from ..runtime.comm import explaining_failure
from .sharding import Sharding

CALL = "a loader of sp.loader"
ORDER, BATCHES = "order of examples", "batches"  # what ranks compare, by name


class Loader:
    """The batches of a DataLoader that are this group's, the same on all of its ranks. See `SequenceParallel.loader`.

    What it does not have itself (`dataset`, `batch_size`, `num_workers`) is the DataLoader's. epoch: what `set_epoch`
    was told last, for samplers and data sets that shuffle by it. batches: how many of this epoch were given.
    """

    def __init__(self, sp: Sharding, loader: Any, read_once: bool = False) -> None:
        self.sp, self.read_once = sp, read_once
        self.epoch: int | None = None
        self.batches = 0
        self._random: list[torch.Tensor] = []  # random states at the beginning of the epoch, which its order comes from
        self._state: dict[str, Any] | None = None  # of `load_state_dict`, for the next epoch
        self._order: _Indices | None = None  # of the whole loader
        self._indices: _Indices | None = None  # those of them that this group reads
        error = None
        try:
            self.given = loader
            self.loader = self._dealt(loader)
        except Exception as reason:
            error = as_seqpar_error("preparing a loader failed", reason)
        examples = _length(getattr(loader, "dataset", None))
        value = {"examples": examples, "batch_size": getattr(loader, "batch_size", None), "read_once": read_once}
        assert_ranks_agree(sp.control_world, "loader", value, error=error, call="sp.loader")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("given", "loader"):
            raise AttributeError(name)
        return getattr(self.given, name)

    def __len__(self) -> int:
        return len(self.loader)

    def _dealt(self, loader: Any) -> Any:
        """A copy of the loader that reads this group's batches alone."""
        if not isinstance(loader, DataLoader):
            if hasattr(loader, "data_sampler"):  # DeepSpeed's own, of initialize
                return loader
            raise ConfigError(f"sp.loader needs a DataLoader of torch; got {type(loader).__name__}, make one of it")
        own = copy.copy(loader)  # of the same class and with the same settings, which a DataLoader does not let change
        whole = not is_dealt(self.sp, loader) and self.sp.data_size > 1
        if isinstance(loader.dataset, IterableDataset):
            vars(own)["dataset"] = self._dealt_stream(loader) if whole else loader.dataset
        elif loader.batch_sampler is not None:
            self._order = _Indices(loader.batch_sampler, self.sp.data_size if not is_dealt(self.sp, loader) else 0)
            dealt: Any = self._order
            if whole:
                dealt = _accelerate().BatchSamplerShard(dealt, self.sp.data_size, self.sp.data_rank)
            self._indices = _Indices(dealt)
            vars(own)["batch_sampler"] = self._indices
        elif whole:
            raise ConfigError(
                "sp.loader deals batches to groups; got batch_size=None, which makes none, give the DataLoader "
                "sampler=sp.sampler(dataset)"
            )
        return own

    def _dealt_stream(self, loader: DataLoader) -> IterableDataset:
        shard = _accelerate().IterableDatasetShard(
            loader.dataset,
            batch_size=loader.batch_size or 1,
            drop_last=loader.drop_last,
            num_processes=self.sp.data_size,
            process_index=self.sp.data_rank,
        )
        shard.epoch = 0  # it is read even where set_epoch was never called
        return shard

    def set_epoch(self, epoch: int) -> None:
        """Tells the sampler, and the data set, where they shuffle by the epoch's number."""
        self.epoch = epoch
        for part in (*_samplers(self.given), getattr(self.loader, "dataset", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

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
        own = self._batches_from(state)
        while True:
            batch, compared, error = self._next_batch(own) if self._reads else (None, {}, None)
            if self._sends_to_group:
                batch, compared = self._broadcast_batch(batch, compared)
            groups = self.sp.groups
            assert_ranks_agree(
                groups.world, "loader", compared, error=error, after=groups.control, call=CALL, advice=_cause
            )
            if compared[BATCHES] != "another":
                break
            self.batches += 1
            yield batch
        self.batches = 0

    def _batches_from(self, state: Mapping[str, Any] | None) -> Iterator[Any]:
        """The batches that this rank reads, from where the state ends."""
        generators = self._generators()
        if state is None:
            self._random = [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
            yield from self.loader
            return
        self._random, skipped = state["random"], state["batches"]
        with torch.random.fork_rng(devices=[]):  # a sampler draws its order before its first batch
            torch.set_rng_state(self._random[0])
            for generator, its in zip(generators, self._random[1:], strict=True):
                generator.set_state(its)
            if "loader" in state:
                self.loader.load_state_dict(state["loader"])
                skipped = 0
            elif self._indices is not None:
                self._indices.skip, skipped = skipped, 0
            batches = iter(self.loader)
            first = list(itertools.islice(batches, skipped, skipped + 1))
        yield from itertools.chain(first, batches)

    def _generators(self) -> list[torch.Generator]:
        """The generators that an epoch's order may come from, beside torch's global one."""
        found = [getattr(part, "generator", None) for part in (self.given, *_samplers(self.given))]
        return list({id(x): x for x in found if isinstance(x, torch.Generator)}.values())

    def _next_batch(self, own: Iterator[Any]) -> tuple[Any, dict[str, Any], SeqParError | None]:
        """(the next batch, pickled where it is sent to others; what all ranks compare; the error, if any)."""
        try:
            batch, compared = next(own), {BATCHES: "another", "number": self.batches}
            if self._sends_to_group:
                batch = pickle.dumps(batch)
        except StopIteration:
            batch, compared = None, {BATCHES: "no more"}
        except Exception as reason:
            return None, {}, _loading_error(reason)
        if self._order is not None and self._order.compared:
            compared[ORDER] = self._order.digest.hexdigest()
        return batch, compared, None

    def _broadcast_batch(self, batch: Any, compared: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The batch of the group's first rank, on all ranks of the group."""
        group, message = self.sp.groups.control, [(batch, compared)]
        with explaining_failure(CALL, group):
            dist.broadcast_object_list(
                message, group=group, group_src=self.sp.groups.sp_order.index(0), device=torch.device("cpu")
            )
        [(content, compared)] = message
        return None if content is None else pickle.loads(content), compared

    # ---- going on with an epoch that was left

    def state_dict(self) -> dict[str, Any]:
        """Where this epoch is, for `torch.save`: rank 0's is good for all ranks."""
        if self._state is not None:
            return self._state
        state = {"epoch": self.epoch, "batches": self.batches, "random": self._random, "groups": self.sp.data_size}
        if self.batches and self._reads and hasattr(self.loader, "state_dict"):
            state["loader"] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next epoch is the one that the state was taken in, from the batch after its last one. A data set with an
        index is not read for the batches before, a stream is. What workers draw for augmentation begins anew.

        Raises ConfigError for the state of a loader for another number of groups."""
        if state["groups"] != self.sp.data_size:
            raise ConfigError(
                f"a loader's state holds for as many groups as it was taken with; got one of {state['groups']} for "
                f"{self.sp.data_size}, resume with the same sizes"
            )
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        self._state = dict(state) if state["batches"] else None


class _Indices:
    """A batch sampler around another one. skip: how many batches the next epoch leaves out. compared: how many batches,
    from the first on, go into `digest`, which is equal on ranks whose samplers draw the same order."""

    def __init__(self, batches: Iterable[Any], compared: int = 0) -> None:
        self.given, self.compared, self.skip = batches, compared, 0
        self.digest = hashlib.blake2b(digest_size=4)
        self.batch_size = getattr(batches, "batch_size", None)
        self.drop_last = getattr(batches, "drop_last", False)

    def __len__(self) -> int:
        return len(self.given)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        self.digest = hashlib.blake2b(digest_size=4)
        for number, batch in enumerate(self.given):
            if number < self.compared:
                self.digest.update(repr(batch).encode())
            if number >= skip:
                yield batch


def is_dealt(sp: Sharding, loader: DataLoader) -> bool:
    """Whether a loader's sampler, or its data set of `datasets`, deals to groups by itself. Raises ConfigError for one
    that deals to others than these groups, such as to ranks."""
    for part in (*_samplers(loader), getattr(loader.dataset, "_distributed", None)):
        parts = getattr(part, "num_replicas", getattr(part, "world_size", None))
        if parts is None or not hasattr(part, "rank"):
            continue
        if (parts, part.rank) != (sp.data_size, sp.data_rank):
            raise ConfigError(
                f"the ranks of a sequence must be given the same samples, by sp.data_rank {sp.data_rank} of "
                f"sp.data_size {sp.data_size}; got a loader for rank {part.rank} of {parts} by its "
                f"{type(part).__name__}, use sampler=sp.sampler(dataset), or leave that out"
            )
        return True
    return False


def _samplers(loader: Any) -> list[Any]:
    """The samplers that a loader gets its indices from."""
    batches = getattr(loader, "batch_sampler", None)
    found = [getattr(loader, name, None) for name in ("sampler", "data_sampler")]
    return [x for x in (*found, batches, getattr(batches, "sampler", None)) if x is not None]


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def _accelerate() -> Any:
    """accelerate's module of data loaders. Raises ConfigError where accelerate is not installed."""
    try:
        from accelerate import data_loader
    except ModuleNotFoundError as error:
        raise ConfigError(
            "sp.loader deals whole data sets by accelerate, which is not installed; give the DataLoader "
            "sampler=sp.sampler(dataset), or pip install accelerate"
        ) from error
    return data_loader


def _loading_error(reason: Exception) -> SeqParError:
    """The error for loading that failed. For a worker torch gives a traceback, whose last line is the reason."""
    *_, last = str(reason).strip().splitlines() or [""]
    if "Original Traceback" not in str(reason):
        return as_seqpar_error("loading data failed", reason)
    error = InputError(f"loading data failed in a worker, {last}")
    error.__cause__ = reason
    return error


def _cause(given: Mapping[int, Fields]) -> str:
    """The cause and the remedy where ranks have different batches; "" where they are not known."""
    names = differing(given)
    if ORDER in names:
        return (
            "their samplers draw other orders, as from other seeds: seed all ranks alike before each epoch, or give "
            "the DataLoader a generator"
        )
    return "some have no more batches: give each group as many" if BATCHES in names else ""
