"""accelerate's loaders, dealt to groups in place of ranks: for the Trainer, and for loops with an Accelerator.

Iterable data sets have no sampler that could deal to groups: each group reads all examples and takes its own.
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


class Stream(IterableDataset):
    """Wraps an iterable data set, so that accelerate deals it to groups example by example.

    accelerate would deal a streaming data set of `datasets` file by file: groups would take unequal numbers of steps,
    on other sequences than the plain Trainer's. Wrapped, its examples are dealt in order, and the last batches are
    filled up. seen: examples that the last pass has read; it tells which of the last examples are repetitions.
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
    """The number of examples of a pass of the stream; None: not known (no length, and worker processes have read
    it)."""
    return stream.seen or (len(stream) if has_length(stream) else None)


def stream_of(dataset: Any) -> Stream | None:
    """The Stream in a data set that accelerate prepared, if there is one."""
    while isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    return dataset if isinstance(dataset, Stream) else None


def prepare_loader(loader: DataLoader, sp: SequenceParallel, **settings: Any) -> DataLoader:
    """accelerate's own preparation of a loader, told which group of ranks this one works for instead of which rank it
    is. `Accelerator.prepare` then leaves it as it is. loader: over the whole data set, the same on every rank, or with
    `sp.sampler`. Its batches come to `sp.device`; whole sequences need not be on a device: put_on_device=False leaves
    them. One of torchdata's StatefulDataLoader stays one.

    settings: further ones of `accelerate.data_loader.prepare_data_loader`. Raises ConfigError for a sampler that is for
    ranks and not for groups.
    """
    parts, part = (1, 0) if is_dealt(sp, loader) else (sp.data_size, sp.data_rank)
    seeding = loader.worker_init_fn
    if isinstance(seeding, functools.partial) and "rank" in seeding.keywords:
        loader.worker_init_fn = functools.partial(seeding, rank=sp.data_rank)
    if isinstance(loader.dataset, IterableDataset):
        loader = copy.copy(loader)
        vars(loader)["dataset"] = Stream(loader.dataset)  # which a DataLoader does not let be changed
    prepared: Any = prepare_data_loader(
        loader,
        num_processes=parts,
        process_index=part,
        **{
            "device": sp.device,
            "put_on_device": True,
            "dispatch_batches": False,  # or the first rank would hand every rank another part of a batch
            "rng_types": ["generator"],
            "use_stateful_dataloader": hasattr(loader, "state_dict"),
            **settings,
        },
    )
    prepared._is_accelerate_prepared = True  # what `Accelerator.prepare` looks for
    return prepared
