"""A model of CUDA's streams, which says when memory is read, written or given to others too early.

A stream does one thing after another. Of what another stream does it knows only what it has waited for, by events. What
a group sends runs on a stream of the group, as NCCL does it: that waits for the current one when something is posted,
and the current one waits for it in `wait`. Freed memory goes to whoever allocates next on the stream that it was made
on, unless `record_stream` has named the stream that still uses it.
"""

import contextlib
import dataclasses
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_seqpar.core.runtime import transport


class TooEarly(AssertionError):
    """Memory is used before the stream that does it has waited for another one that used it."""


class Event(Counter):
    """What a stream had seen. It has come at once, or never if the stream is stuck."""

    def __init__(self, stream):
        super().__init__(stream.seen)
        self.has_come = not stream.is_stuck

    def query(self):
        return self.has_come


class Stream:
    """seen: of every stream, how many of its operations end before the next one here begins."""

    is_stuck = False

    def __init__(self, device=None):
        self.seen = Counter()

    def record_event(self):
        return Event(self)

    def wait_event(self, event):
        self.seen |= event  # the greater of both counts

    def wait_stream(self, other):
        self.wait_event(other.seen)


@dataclasses.dataclass
class Memory:
    """home: the stream that it was made on. writes, reads: the last of each stream. kept_for: see `record_stream`."""

    storage: StorageWeakRef
    home: Stream
    writes: Counter = dataclasses.field(default_factory=Counter)
    reads: Counter = dataclasses.field(default_factory=Counter)
    kept_for: set = dataclasses.field(default_factory=set)


class Streams(TorchDispatchMode):
    """Follows what is done on a device. Raises TooEarly. done: operations, by stream."""

    def __init__(self):
        super().__init__()
        self.current, self.groups, self.memory, self.done = Stream(), {}, {}, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.free()
        result = function(*args, **(kwargs or {}))
        given, made = _tensors((args, kwargs)), _tensors(result)
        if function.is_view or not any(x.device.type == "cuda" for x in (*given, *made)):
            return result
        if function.namespace == "c10d":
            self.send(function, args)
            return result
        names = zip(args, function._schema.arguments, strict=False)
        written = _tensors([x for x, its in names if its.alias_info and its.alias_info.is_write])
        self.do(self.current, given, [*written, *made])
        return result

    def send(self, function, args):
        """An operation of a group. It writes its first argument, unless it is a send, and reads the second. One that is
        not asynchronous runs on the current stream."""
        named = {its.name: x for x, its in zip(args, function._schema.arguments, strict=False)}
        group = dist.ProcessGroup.unbox(named["process_group"]).group_name
        stream = self.current if named.get("async_op") is False else self.groups.setdefault(group, Stream())
        stream.wait_stream(self.current)
        written, *read = ((), *args) if function is torch.ops.c10d.send.default else args
        self.do(stream, _tensors(read), _tensors(written))

    def do(self, stream, read, written):
        stream.seen[stream] += 1
        self.done[stream] += 1
        for x in read:
            memory = self.of(x, stream)
            _check(stream, memory.writes, "read")
            memory.reads[stream] = stream.seen[stream]
        for x in written:
            memory = self.of(x, stream)
            _check(stream, memory.writes | memory.reads, "written")
            memory.writes[stream] = stream.seen[stream]

    def of(self, x, stream):
        storage = StorageWeakRef(x.untyped_storage())
        return self.memory.setdefault(storage.cdata, Memory(storage, stream))

    def free(self):
        for key, memory in [(key, memory) for key, memory in self.memory.items() if memory.storage.expired()]:
            del self.memory[key]
            used = memory.writes | memory.reads
            _check(memory.home, Counter({s: n for s, n in used.items() if s not in memory.kept_for}), "given to others")

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def in_place_of_torch(self):
        """A context in which this follows, and stands where the code under test finds torch's own."""
        of_torch = transport.Works.wait

        def wait(works):
            if works.works:
                self.current.wait_stream(self.groups[works.group.group_name])
            of_torch(works)

        with self, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "Stream", Stream)
            patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
            patch.setattr(torch.cuda, "stream", self.stream)
            patch.setattr(torch.Tensor, "record_stream", lambda x, by: self.of(x, by).kept_for.add(by))
            patch.setattr(transport.Works, "wait", wait)
            yield self


def _tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _check(stream, uses, what):
    if any(stream.seen[other] < count for other, count in uses.items()):
        raise TooEarly(f"memory is {what} before the stream has waited for another that uses it")
