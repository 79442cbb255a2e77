"""What DeepSpeed asks of CUDA beyond what the stand-in has: streams that do nothing, counters of memory at 0, and no
checks that look at values on the device."""

import contextlib
import os

import torch


class Nothing:
    """A stream, or an event."""

    device = None

    def __init__(self, *_, **__): ...

    def done(self, *_):
        return self

    __enter__ = wait_stream = wait_event = record_event = record = wait = synchronize = query = done

    def __exit__(self, *_): ...

    def __eq__(self, other):
        return type(other) is Nothing  # there is one stream

    def __hash__(self):
        return 0


def for_deepspeed():
    """From now on this process can make an engine of a fake model."""
    os.environ.pop("DS_ACCELERATOR", None)  # tests say that it is the CPU
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    set_accelerator(CUDA_Accelerator())
    from deepspeed.runtime.zero import partitioned_param_coordinator, stage3

    cuda = torch.cuda
    cuda.Stream = cuda.Event = Nothing
    cuda.current_stream = cuda.default_stream = Nothing
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda device=None: None
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.nvtx.range_push = cuda.nvtx.range_pop = cuda.empty_cache = cuda.reset_peak_memory_stats = lambda *_: None
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda device=None: 0)
    cuda.memory_stats = lambda device=None: {}
    torch._C._cuda_setDevice = torch._C._accelerator_setDeviceIndex
    torch.Tensor.record_stream = lambda x, stream: None
    torch.nn.Module.to = torch.nn.Module.bfloat16 = lambda module, *_: module  # a fake parameter cannot be exchanged
    # DeepSpeed's own looks at values: once a forward in the first steps, and at the norm before each step
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda numbers: None
    stage3.is_invalid_grad_norm = lambda norm: False
