"""Which tensors are alive at the moment of the most: by place in the code, operation and shape."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from types import FrameType

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from tests.live import Live

# frames of these packages say where an operation was called
PLACES = ("ds_seqpar/", "hf_integration/", "transformers/models/", "transformers/loss/", "deepspeed/", "benchmarks/")
SKIPPED = ("benchmarks/memory/live.py", "deepspeed/comm/", "deepspeed/utils/")


@dataclasses.dataclass(frozen=True)
class Entry:
    """Storages alive at the peak that one place made alike."""

    bytes: int
    count: int
    shape: str
    operation: str
    place: str


class Sites(Live):
    """`Live` that also remembers who made each storage; `at_peak`: what was alive at the greatest peak of all."""

    inside = ("ds_seqpar", "deepspeed")

    def __init__(self, *ignored: Tensor) -> None:
        super().__init__(*ignored)
        self.made: dict[int, tuple[str, str, str]] = {}  # storage -> shape, operation, place
        self.fresh: set[int] = set()
        self.highest = 0
        self.seen: list[tuple[int, tuple[str, str, str] | None]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and x.device.type != "meta":
                self._was_there(x.untyped_storage())
        result = super().__torch_dispatch__(function, types, args, kwargs)
        where = place()
        if self.fresh:
            told = str(function), where
            for x in tree_leaves(result):
                if isinstance(x, Tensor) and x.untyped_storage()._cdata in self.fresh:
                    self.made[x.untyped_storage()._cdata] = f"{tuple(x.shape)} {str(x.dtype)[6:]}", *told
            self.fresh.clear()
        if self.peak > self.highest:
            self.highest = self.peak
            self.seen = [(size, self.made.get(key)) for key, (_, size) in self.storages.items()]
        return result

    def _was_there(self, storage):  # type: ignore[no-untyped-def]
        """What operations are given and none has returned is older than this."""
        key = storage._cdata
        known = self.ignored.get(key) or self.storages.get(key, (None,))[0]
        if known is None or known.expired():
            self.ignored[key] = StorageWeakRef(storage)
            self.storages.pop(key, None)

    def _see(self, storage):  # type: ignore[no-untyped-def]
        before = self.storages.get(storage._cdata)
        super()._see(storage)
        if self.storages.get(storage._cdata) is not before:
            self.fresh.add(storage._cdata)

    @property
    def at_peak(self) -> list[Entry]:
        return grouped(self.seen)


def grouped(seen: Iterable[tuple[int, tuple[str, str, str] | None]]) -> list[Entry]:
    """Entries, the greatest first."""
    total: Counter[tuple] = Counter()
    count: Counter[tuple] = Counter()
    for size, made in seen:
        total[made] += size
        count[made] += 1
    return [Entry(size, count[made], *(made or ("?",) * 3)) for made, size in total.most_common()]


def place(depth: int = 2) -> str:
    """Where the running operation was called: the innermost frames of `PLACES`, and autograd's node in backward."""
    found: list[str] = []
    for frame in frames():
        file = frame.f_code.co_filename
        start = next((file.rfind(package) for package in PLACES if package in file), -1)
        if start >= 0 and not any(name in file for name in SKIPPED):
            found.append(f"{file[start:]}:{frame.f_lineno} {frame.f_code.co_name}")
        if len(found) == depth:
            break
    node = torch._C._current_autograd_node()
    return " < ".join(([node.name()] if node is not None else []) + found)


def frames() -> Iterator[FrameType]:
    """Of the caller's stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
