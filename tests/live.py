"""The memory of tensors: the storages that are alive after every operation, including inside custom ops. An allocator's
report would miss what other threads free (gloo's threads hold the tensors that they send). Here a weak reference tells
for every storage that an operation returned whether it still exists. What a kernel allocates for itself and frees
before it returns is not seen.
"""

import dataclasses
import gc
import time

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Bytes of tensors beyond the inputs, q, k, v and the output's gradient. forward: the peak during forward; kept:
    what exists after forward, including the result; backward: the peak during backward, including what was kept, the
    result and the gradients; gradients: what exists after backward, without the result; left: what exists after results
    and gradients are dropped."""

    forward: int
    kept: int
    backward: int
    gradients: int
    left: int


def measure(attend, q, k, v, do):
    """The figures of `attend(q, k, v)` and its backward; the tensors are leaves."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with Live(q, k, v, do) as live:
        out = attend(q, k, v)
        forward, kept = live.peak, live.settled()
        live.restart()
        out.backward(do)
        backward = live.peak
        del out
        gradients = live.settled()
        q.grad = k.grad = v.grad = None
        left = live.settled()
    return Figures(forward=forward, kept=kept, backward=backward, gradients=gradients, left=left)


def least(measure):
    """The least figures of up to 8 measurements. Stops when each was seen twice on every rank, since gloo may release
    what it has sent late."""
    often, names = [], [field.name for field in dataclasses.fields(Figures)]
    for _ in range(8):
        often.append(dataclasses.astuple(measure()))
        again = torch.tensor(all(found.count(min(found)) > 1 for found in zip(*often, strict=True)), dtype=torch.int)
        dist.all_reduce(again, dist.ReduceOp.MIN)
        if again:
            break
    return Figures(**dict(zip(names, map(min, zip(*often, strict=True)), strict=True)))


class Live(TorchDispatchMode):
    """Context manager in which `peak` is the largest number of bytes alive at once since the last `restart`. It counts
    storages that operations inside it returned, except those of the tensors `ignored`."""

    inside = ("ds_seqpar",)  # the namespaces of the ops that are inspected

    def __init__(self, *ignored):
        super().__init__()
        self.storages = {}  # address of the storage's header -> (weak reference, bytes)
        self.ignored = {x.untyped_storage()._cdata: StorageWeakRef(x.untyped_storage()) for x in ignored}
        self.peak = self.most = 0  # most: bytes of all in `storages`, some of which may no longer be alive

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace in self.inside:
            with self:  # a mode is off while its handler runs, but must be on inside the op
                result = function.redispatch(CPU, *args, **kwargs)
        else:
            result = function(*args, **kwargs)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                self._see(x.untyped_storage())
        if self.most > self.peak:
            self.peak = max(self.peak, self.bytes())
        return result

    def _see(self, storage):
        key = storage._cdata
        known = self.ignored.get(key) or self.storages.get(key, (None,))[0]
        if known is None or known.expired():  # an address may be reused
            self.ignored.pop(key, None)
            self.most += storage.nbytes() - self.storages.get(key, (None, 0))[1]
            self.storages[key] = StorageWeakRef(storage), storage.nbytes()

    def bytes(self):
        """The bytes of the storages that are alive now."""
        self.storages = {key: seen for key, seen in self.storages.items() if not seen[0].expired()}
        self.most = sum(size for _, size in self.storages.values())
        return self.most

    def restart(self):
        self.peak = self.bytes()

    def settled(self, patience=5.0):
        """`bytes` after nothing more is freed, since another thread may be about to free something."""
        gc.collect()
        until = time.monotonic() + patience
        before, now = -1, self.bytes()
        while now and now != before and time.monotonic() < until:
            time.sleep(0.05)
            before, now = now, self.bytes()
        return now
