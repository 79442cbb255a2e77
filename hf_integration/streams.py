"""Iterable data sets, which have no sampler to be told a rank's group: each group reads all and takes its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import IterableDataset
from transformers.trainer_utils import has_length


class Stream(IterableDataset):
    """An iterable data set as accelerate shards it by example.

    accelerate gives a streaming data set of `datasets` to groups file by file: they would make unequal numbers of
    steps, on other sequences than the plain Trainer. Behind this it deals examples, in order, and fills up the last
    batches. seen: examples that one pass read, which tells how many of the last ones are no repetitions.
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
    """All examples that a pass of the stream has; None where nobody can tell (no length, read by worker processes)."""
    return stream.seen or (len(stream) if has_length(stream) else None)


def stream_of(dataset: Any) -> Stream | None:
    """The Stream in a data set that accelerate prepared, if there is one."""
    while isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    return dataset if isinstance(dataset, Stream) else None
