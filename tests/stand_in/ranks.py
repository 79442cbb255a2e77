"""The ranks of `on_stand_in`, forked once everything is imported: many imports ask for CUDA too."""

import ctypes
import importlib
import os
import pickle
import sys
import traceback
import types
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from ds_seqpar.compiled import custom_ops
from ds_seqpar.core.runtime import devices, groups, transport
from ds_seqpar.guards import agreement

IMPORTED = ("torch._inductor", "transformers.models.llama.modeling_llama", "hf_integration")


def use(device: ctypes.CDLL, count: int):
    """From now on this process has so many devices."""
    device.set_devices(count)
    torch._C._cuda_getDeviceCount = lambda: count
    torch._C._cuda_getDevice = torch._C._accelerator_getDeviceIndex
    torch.cuda._exchange_device = torch._C._accelerator_exchangeDevice
    torch.cuda._maybe_exchange_device = torch._C._accelerator_maybeExchangeDevice
    torch.cuda._initialized = True
    torch.cuda.default_generators = tuple(torch.Generator() for _ in range(count))
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_name = lambda device=None: "NVIDIA Stand-in"
    FakeTensorMode.avoid_device_init = True  # there is nothing to initialize


class Options(FakeProcessGroup.Options):
    """ProcessGroupNCCL.Options, which torch's builds for CPUs lack. made: all of this process."""

    made: ClassVar = []

    def __init__(self, is_high_priority_stream=False):
        super().__init__()
        self.is_high_priority_stream, self.config = is_high_priority_stream, types.SimpleNamespace(max_ctas=None)
        self.made.append(self)


def use_groups():
    """Has torch's fake backend stand for NCCL, and ranks agree inside of a fake mode too."""
    dist.ProcessGroupNCCL, groups.NCCL = types.SimpleNamespace(Options=Options), "fake"
    devices.HOST_BACKENDS = tuple(name for name in devices.HOST_BACKENDS if name != "fake")
    agreement.all_reduce_max = really(agreement.all_reduce_max)
    groups._warm_up, transport.connect = with_fakes(groups._warm_up), with_fakes(transport.connect)
    custom_ops.runs_as_op = lambda: False  # a fake mode watches, which a real device has not


def with_fakes(function):
    """The function, of which no tensor is real."""

    def run(*args):
        with FakeTensorMode():
            return function(*args)

    return run


def really(function):
    """The function, on real tensors inside of a fake mode too."""

    def run(*args):
        with unset_fake_temporarily():
            return function(*args)

    return run


def serve(device: ctypes.CDLL):
    """Runs the calls of every folder that a line of stdin names, and says when they are done, or failed."""
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        done = run_all(device, line.strip())
        print("done" if done else "failed", flush=True)


def run_all(device: ctypes.CDLL, folder: str):
    """Whether all ranks came to their ends."""
    for number, (count, world, *function) in enumerate(pickle.loads(Path(folder, "calls").read_bytes())):
        use(device, count)  # forked with it
        children = [_forked(number, count, rank, world, function, folder) for rank in range(world)]
        failed = any([os.waitpid(child, 0)[1] for child in children])
        use(device, 0)
        if failed:
            return False
    return True


def _forked(number, count, rank, world, function, folder):
    if child := os.fork():
        return child
    said = os.open(Path(folder, "errors"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)  # where the server answers
    os.dup2(said, 2)
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        torch.set_num_threads(1)
        store, patience = f"file://{folder}/store{number}", timedelta(seconds=60)
        backend = "cpu:gloo,cuda:fake" if count else "gloo"
        dist.init_process_group(backend, store, patience, world_size=world, rank=rank)
        use_groups()
        module, name = function
        found = getattr(importlib.import_module(module), name)()
        Path(folder, f"{number}-{rank}").write_bytes(pickle.dumps(found))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
