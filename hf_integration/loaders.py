"""accelerate's data loaders, changed to serve groups instead of ranks.

The Trainer and custom loops with an Accelerator use these loaders.

Iterable data sets have no sampler to distribute to groups, so each group reads all examples and selects its share.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import IterableDatasetShard, prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import has_length

from ds_seqpar import SequenceParallel
from ds_seqpar.data.loader import is_dealt

from . import compat


class Stream(IterableDataset):
    """A wrapper around an iterable data set that makes accelerate distribute single examples to groups.

    accelerate would distribute a streaming data set of `datasets` file by file. Groups would then take different
    numbers of steps, and train on different sequences than with the plain Trainer. Examples of a wrapped data set are
    distributed in order, and the last batches are filled up with repeated examples.

    Attributes:
        seen: The number of examples read in the last pass, from which repetitions in the last batch are determined.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.seen = dataset, 0

    def __iter__(self) -> Iterator[Any]:
        self.seen = 0
        for example in self.dataset:
            self.seen += 1
            yield example

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


def examples_of(stream: Stream) -> int | None:
    """Return the number of examples in one pass over the stream.

    Return None if workers read a stream without a length.
    """
    return stream.seen or (len(stream) if has_length(stream) else None)


def stream_of(dataset: Any) -> Stream | None:
    """Return the Stream inside a data set that accelerate has prepared, or None."""
    while isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    return dataset if isinstance(dataset, Stream) else None


def prepare_loader(loader: DataLoader, sp: SequenceParallel, **settings: Any) -> DataLoader:
    """Prepare a loader with accelerate so that the loader serves this rank's group instead of this rank alone.

    `Accelerator.prepare` then leaves the loader unchanged. All ranks of a group get the same batches.

    Args:
        loader: A loader over the whole data set, the same on every rank, or a loader that uses `sp.sampler`.
            torchdata's `StatefulDataLoader` keeps its type.
        sp: The `SequenceParallel` of the model.
        **settings: Further arguments of `accelerate.data_loader.prepare_data_loader`. Batches are moved to `sp.device`
            by default. With `put_on_device=False`, batches are not moved, since whole sequences may stay on the CPU.

    Returns:
        The prepared loader.

    Raises:
        ConfigError: The loader's sampler divides data among ranks instead of groups.

    Examples:
        ```python
        loader = prepare_loader(DataLoader(...), sp)
        ```
    """
    num_groups, group = (1, 0) if is_dealt(sp.sharding, loader) else (sp.data_size, sp.data_rank)
    seed_worker = loader.worker_init_fn
    if isinstance(seed_worker, functools.partial) and "rank" in seed_worker.keywords:
        loader.worker_init_fn = functools.partial(seed_worker, rank=sp.data_rank)
    if isinstance(loader.dataset, IterableDataset):
        loader = copy.copy(loader)
        compat.set_dataset(loader, Stream(loader.dataset))
    prepared: Any = prepare_data_loader(
        loader,
        num_processes=num_groups,
        process_index=group,
        **{
            "device": sp.device,
            "put_on_device": True,
            "dispatch_batches": False,  # if true, the first rank would send each rank a different part of a batch
            "rng_types": ["generator"],
            "use_stateful_dataloader": hasattr(loader, "state_dict"),
            **settings,
        },
    )
    setattr(prepared, compat.PREPARED, True)
    return prepared
