"""Tensors of a GPU that does not exist, with shapes, dtypes and a device but no values. So an operation between devices
raises, and so does reading a value, which would make the host wait for the device.
"""

import contextlib
from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.cuda_models import OPERATORS

aten = torch.ops.aten
NEEDS_CPU_BUILD = pytest.mark.skipif(torch.version.cuda is not None, reason="waits for a torch without CUDA")


class Driverless(TorchFunctionMode):
    """In a build without CUDA, indexing, copy_ and contiguous look for a driver before they reach their operators,
    which support fake tensors. Here they reach the same operators directly."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            return _indexed(*args)
        if function is torch.Tensor.__setitem__:
            return _put(*args)
        if function is torch.Tensor.copy_:
            return aten.copy_.default(*args, **(kwargs or {}))
        if function is torch.Tensor.contiguous:
            return (
                args[0] if args[0].is_contiguous() else aten.clone.default(*args, memory_format=torch.contiguous_format)
            )
        return function(*args, **(kwargs or {}))


def _indexed(x, index):
    dim = 0
    for part in _parts(x, index):
        if isinstance(part, int):
            x = x.select(dim, part)
            continue
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, slice):
            x = aten.slice.Tensor(x, dim, part.start, part.stop, part.step or 1)
        else:
            x = aten.index.Tensor(x, [None] * dim + [part])
        dim += 1
    return x


def _put(x, index, value):
    *outer, last = _parts(x, index)
    if isinstance(last, torch.Tensor):
        aten.index_put_.default(_indexed(x, tuple(outer)), [None] * len(outer) + [last], value)
    else:
        aten.copy_.default(_indexed(x, index), value)


def _parts(x, index):
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in parts:
        at, given = parts.index(Ellipsis), sum(part is not None for part in parts) - 1
        parts[at : at + 1] = [slice(None)] * (x.dim() - given)
    return parts


class Watch(TorchDispatchMode):
    """Counts kernel calls and checks that each has what its model takes. Only integers (document lengths, positions,
    what the host reads later) may move between devices, and without a wait."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        model = OPERATORS.get(function.name().removeprefix("aten::"))
        if model:
            self.calls[function] += 1
            found = model(*args, **kwargs)
            if function is aten._efficient_attention_backward.default:  # torch's own rule for shapes lacks arguments
                return found
        if function is aten.copy_.default:
            waits = not (args[2:] == (True,) or kwargs.get("non_blocking"))
            assert args[0].device == args[1].device or not waits
        if function is aten._to_copy.default and kwargs.get("device") not in (None, args[0].device):
            assert not args[0].is_floating_point()
            assert kwargs["non_blocking"]
        return function(*args, **kwargs)


class OneDevice(Watch):
    """As `Watch`, and no operation may have tensors on two devices: an index from the host is copied too."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
        assert len({x.device for x in given}) <= 1 or function is aten.copy_.default, function
        return super().__torch_dispatch__(function, types, args, kwargs)


@contextlib.contextmanager
def no_device():
    with FakeTensorMode(), Watch() as watch, Driverless():
        yield watch
