"""Counts what the host waits for on a stand-in: its device, and other ranks.

Tensors on the device are fake, and those on the CPU real, as they are to a program. A look at a value on the device is
a wait. So is a copy to or from it that is not `non_blocking`: CUDA then ends all that its stream was given before. The
values that come to the host are those that were copied to the device, or else zeros.

What a `non_blocking` copy brings may be read once an event that was recorded after it was seen. An event of an earlier
call has come, as a host runs about a call ahead of its device; for one of the same call the host waits.
"""

import contextlib
import functools
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from tests.stand_in import ROOT, streams
from tests.stand_in.streams import TooEarly

aten = torch.ops.aten
READS = torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__  # which are no operators
LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# what waits for other ranks, unless a device's group made it
BLOCKING = (
    (dist.Work, "wait"), (dist.Work, "synchronize"), (dist.Work, "result"), (torch._C.Future, "wait"),
    (dist.Store, "get"), (dist.Store, "wait"),
)  # fmt: skip
KNOWN = {torch.Tensor, torch.nn.Parameter, FakeTensor}
POLLS = 100  # tests of works in one step; with so many the host waits in a loop
HERE, CODE = Path(__file__).parent, [ROOT / name for name in ("ds_seqpar", "hf_integration", "tests")]
# where every agreement waits; the caller is what is of interest
SHARED = ("core/runtime/transport.py", "guards/agreement.py", "guards/consistency.py", "guards/waits.py")


class Wait(NamedTuple):
    step: int
    kind: str  # "device" or "ranks"
    where: str  # file:line
    again: bool  # of ranks: whether nothing was launched on the device since the wait before


class Event:
    """torch.cuda.Event. host: who looks at it."""

    def __init__(self, host, *_, **__):
        self.host, self.seen, self.call = host, Counter(), None

    def record(self, stream=None):
        self.seen, self.call = Counter((stream or self.host.current).seen), self.host.call

    def wait(self, stream=None):
        (stream or self.host.current).wait_event(self)

    def query(self):
        has_come = self.call != self.host.call
        if has_come:
            self.host.sees.wait_event(self)
        return has_come

    def synchronize(self):
        if not self.query():
            self.host.count("device")
            self.host.sees.wait_event(self)


class Stream(streams.Stream):
    """torch.cuda.Stream."""

    def __init__(self, host, *_, **__):
        super().__init__()
        self.host = host

    def record_event(self, event=None):
        event = event or Event(self.host)
        event.record(self)
        return event

    def wait_event(self, event):
        super().wait_event(event.seen)

    def wait_stream(self, other):
        super().wait_event(other.seen)

    def synchronize(self):
        self.host.count("device")
        self.host.sees.wait_stream(self)


class Reads(TorchFunctionMode):
    """The host's reads that come to no operator."""

    def __init__(self, host):
        super().__init__()
        self.host = host

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READS:
            self.host.check(args[0])
        return function(*args, **(kwargs or {}))


class Host(TorchDispatchMode):
    """Runs a program of a rank that has a device. Inside of `watching` it finds torch's streams and events here.

    Attributes:
        waits: every `Wait`. A program sets `step`, and adds to `call` before each of its calls.
    """

    def __init__(self):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.current, self.sees = Stream(self), Stream(self)  # sees: what the host knows to have ended, of each stream
        self.values = WeakTensorKeyDictionary()  # of tensors that were copied to the device and not written to since
        self.arriving = {}  # storage -> (a reference to it, the stream that fills it, the number of the operation)
        self.waits, self.step, self.call = [], 0, 0
        self.launched = self.launched_before = 0  # operations on the device; those before the last wait for ranks
        self.tests, self.done = Counter(), weakref.WeakSet()  # of works, by step; those that are known to be done

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "prim":  # x.device
            return function(*args)
        if not KNOWN.issuperset(types):
            return NotImplemented  # a tensor in parts, which calls operators on its parts
        if _is_composite(function):
            with self:
                return function.decompose(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # for which there must be a driver
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_host = [x for x in given if not isinstance(x, FakeTensor)]
        device = kwargs.get("device")
        if len(on_host) == len(given) and (device is None or torch.device(device).type == "cpu"):
            if not function.is_view:
                for x in given:
                    self.check(x)
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        copies = function in (aten._to_copy.default, aten.copy_.default)
        waits = not (copies and (kwargs.get("non_blocking") or args[2:3] == (True,)))
        # what a copy writes is its first argument, or made on the device that a keyword names
        to_device = isinstance(args[0], FakeTensor) if args[1:] else torch.device(device or "cuda").type != "cpu"
        if copies and not to_device:
            with unset_fake_temporarily():
                return self.to_host(args, kwargs, waits)
        looks = not LOOKS.isdisjoint(function.tags)
        if function is aten.index.Tensor:  # only a mask is looked at
            looks = any(x.dtype == torch.bool for x in args[1] if x is not None)
        if looks or (waits and any(x.dim() or copies for x in on_host)):
            self.count("device")
        if function is aten._local_scalar_dense.default:
            with unset_fake_temporarily():
                return self.values_of(args[0]).item()
        if function is aten.equal.default:
            return True
        named = zip(args, function._schema.arguments, strict=False)
        for x in tree_leaves([x for x, its in named if its.alias_info and its.alias_info.is_write]):
            self.values.pop(x, None)
        result = function(*args, **kwargs)  # in the fake mode, which lies below this one
        self.launched += not function.is_view
        if copies and not args[1:] and on_host:
            with unset_fake_temporarily():
                self.values[result] = args[0].clone()
        return result

    def to_host(self, args, kwargs, waits):
        """Copies a tensor of the device into one of the host."""
        x = args[1] if args[1:] else args[0]
        there = args[0] if args[1:] else torch.empty(x.shape, dtype=kwargs.get("dtype") or x.dtype)
        there.copy_(self.values_of(x))
        self.launched += 1
        if waits:
            self.count("device")
            self.sees.wait_stream(self.current)
        else:
            self.current.seen[self.current] += 1
            storage = StorageWeakRef(there.untyped_storage())
            self.arriving[storage.cdata] = storage, self.current, self.current.seen[self.current]
        return there

    def values_of(self, x):
        return self.values.get(x, torch.zeros((), dtype=x.dtype))

    def check(self, x):
        """Raises TooEarly where the host reads what may not have come."""
        if not isinstance(x, FakeTensor) and self.arriving:
            key = StorageWeakRef(x.untyped_storage()).cdata
            _, stream, number = self.arriving.get(key, (None, self.current, 0))
            if self.sees.seen[stream] < number:
                raise TooEarly("the host reads what it copied from the device before it has seen an event after that")
            self.arriving.pop(key, None)

    def count(self, kind):
        """Counts a wait. Those of a thread of our own stop nobody."""
        thread = threading.current_thread()
        if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread):  # autograd's
            return
        again = False
        if kind == "ranks":
            again, self.launched_before = self.launched == self.launched_before, self.launched
        self.waits.append(Wait(self.step, kind, _where(), again))

    def synchronize(self, *_):
        self.count("device")
        self.arriving.clear()

    def blocking(self, of_torch):
        @functools.wraps(of_torch)
        def wait(owner, *args, **kwargs):
            if not isinstance(owner, FakeWork) and owner not in self.done:
                self.count("ranks")
            return of_torch(owner, *args, **kwargs)

        return wait

    def is_completed(self, work, of_torch=dist.Work.is_completed):
        self.tests[self.step] += 1
        if self.tests[self.step] == POLLS:
            self.count("ranks")
        if is_done := of_torch(work):
            self.done.add(work)
        return is_done

    def sleep(self, seconds, of_python=time.sleep):
        self.count("ranks")
        of_python(seconds)

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def watching(self):
        from ds_seqpar.core.runtime import admit
        from hf_integration.model import weights

        cuda = {
            "Stream": functools.partial(Stream, self), "Event": functools.partial(Event, self), "stream": self.on,
            "current_stream": lambda device=None: self.current, "synchronize": self.synchronize,
        }  # fmt: skip
        with pytest.MonkeyPatch.context() as patch, Reads(self), self.fake, self:
            for name, value in cuda.items():
                patch.setattr(torch.cuda, name, value)
            for name in ("current_stream", "synchronize"):
                patch.setattr(torch.accelerator, name, cuda[name])
            patch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
            patch.setattr(time, "sleep", self.sleep)
            patch.setattr(admit, "Parameter", FakeTensor)  # so that one on the device is known as a plain tensor
            patch.setattr(weights, "Tensor", FakeTensor)
            torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device) moves what it has made
            patch.setattr(dist.Work, "is_completed", lambda work: self.is_completed(work))
            for owner, name in BLOCKING:
                patch.setattr(owner, name, self.blocking(getattr(owner, name)))
            yield self


@functools.cache
def _is_composite(function):
    """Whether an operator is made of others, as x.to(device) is. Autograd has taken it apart before it comes here."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")


def _where():
    """The line that waits, of the product or of a test."""
    frame, shared = sys._getframe(2), "elsewhere"
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if any(map(path.is_relative_to, CODE)) and path.parent != HERE:
            where = f"{path.relative_to(ROOT)}:{frame.f_lineno}"
            if not str(path).endswith(SHARED):
                return where
            shared = where
        frame = frame.f_back
    return shared
