"""All undocumented names from torch, DeepSpeed and other packages that ds_seqpar uses.

New releases of a package may remove or change undocumented names. Each entry names the feature that fails without the
name. The first use of a missing name raises ConfigError, which mentions that feature, on every rank.
`tests/unit/test_compat.py` checks that the installed releases contain all names, and that private names are used only
in this module.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import pkgutil
import re
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.autograd import profiler

from .errors import ConfigError

# releases known to contain all names, by package
SEEN = {
    "torch": "2.12.0 and 2.13.0",
    "deepspeed": "0.19.8",
    "transformers": "5.18.0 and 5.23.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "trl": "1.16.0",
    "datasets": "5.2.0",
    "flash_attn": "2.7 (read, not run)",
    "flash_attn_interface": "3.0.0 of November 2025 (read, not run)",
}


def private(name: str, breaks: str) -> Any:
    """Return an object from another package.

    Args:
        name: "module:attributes".
        breaks: The feature that fails if the object is missing.

    Returns:
        The object or, if the object is missing, a function that raises ConfigError.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return functools.partial(_raise_missing, name, breaks)


def attribute(name: str, breaks: str) -> Callable[[Any], Any]:
    """Return a function that reads an object's attribute, and raises ConfigError if the attribute is missing.

    Args:
        name: "module:class.attribute", or "module:attribute".
        breaks: The feature that fails if the attribute is missing.
    """
    last = re.split("[.:]", name)[-1]

    def read(owner: Any) -> Any:
        try:
            return getattr(owner, last)
        except AttributeError:
            raise missing(name, breaks) from None

    return read


def mark(name: str) -> str:
    """Return the name of an attribute that one package sets and another package reads.

    A missing attribute is meaningful too, so a release that renames the attribute causes no error in this function.

    Args:
        name: "module:attribute", for the module that reads or sets the attribute.
    """
    return name.rpartition(":")[2]


def missing(name: str, breaks: str) -> ConfigError:
    """Return the error for a name that is missing in the installed release."""
    package = name.partition(":")[0].partition(".")[0]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = "of no known version"
    return ConfigError(
        f"{breaks} needs {name.replace(':', '.')}, as in {package} {SEEN[package]}; got {package} {version}, which has "
        "none, install one of those"
    )


def _raise_missing(name: str, breaks: str, *_: object, **__: object) -> NoReturn:
    raise missing(name, breaks)


# ---- torch: autograd

_BACKWARD = "the order of backward, which ranks agree on,"
graph_task = private("torch:_C._current_graph_task_id", _BACKWARD)  # negative outside of backward
autograd_node = private("torch:_C._current_autograd_node", _BACKWARD)
next_node = private("torch:_C._autograd._get_sequence_nr", _BACKWARD)  # sequence number of this thread's next node
_number = attribute("torch:_C._FunctionBase._sequence_nr", _BACKWARD)
after_backward = private("torch.autograd:Variable._execution_engine.queue_callback", _BACKWARD)  # per graph task
without_dispatch_modes = private("torch:_C._DisableTorchDispatch", "a comparison of ranks inside a checkpoint")
dispatch_modes = private("torch:_C._len_torch_dispatch_stack", "attention inside a selective checkpoint")
in_torch_func = private("torch:_C._are_functorch_transforms_active", "the refusal of torch.func's transforms")
without_torch_func = private(
    "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack", "the refusal of torch.func's transforms"
)
_forward_level = attribute("torch.autograd.forward_ad:_current_level", "the refusal of forward-mode derivatives")
forward_level = functools.partial(_forward_level, torch.autograd.forward_ad)  # below 0 outside of `dual_level`
# set by torch.compiler.assume_constant_result, which would import the compiler
CONSTANT = mark("torch._dynamo.decorators:_dynamo_marked_constant")


def is_profiling() -> bool:
    """Return whether a torch profiler is running. The function is minimal, since every instruction calls it."""
    try:
        return profiler._is_profiler_enabled
    except AttributeError:
        raise missing("torch.autograd.profiler:_is_profiler_enabled", "telling whether a profiler is on") from None


def number_of(node: Any) -> int:
    """Return the sequence number of an autograd node. Each thread numbers its nodes in creation order."""
    return _number(node)()


def is_autograd_thread(thread: threading.Thread) -> bool:
    """Return whether the current thread was started by autograd's engine rather than by Python."""
    return isinstance(thread, threading._DummyThread) and graph_task() >= 0


def frames_of_threads() -> dict[int, FrameType]:
    """Return each Python thread's innermost frame, by thread ident."""
    return sys._current_frames()


# ---- torch: tensors

tensor_version = attribute("torch:Tensor._version", "telling that a batch was written to")
is_fake = private("torch._subclasses.fake_tensor:is_fake", "looking at a tensor on a device")
make_wrapper = private("torch:Tensor._make_wrapper_subclass", "a whole output of a model")
without_torch_function = private("torch:_C.DisableTorchFunctionSubclass", "a whole output of a model")
schema = attribute("torch._ops:OpOverload._schema", "a whole output of a model")
tensor_data = private("torch:_C.TensorBase.data", "a whole output of a model")  # the descriptor
tree_leaves = private("torch.utils._pytree:tree_leaves", "a whole output of a model")
tree_map = private("torch.utils._pytree:tree_map", "a whole output of a model")
compiled_module = attribute("torch._dynamo.eval_frame:OptimizedModule._orig_mod", "a model in torch.compile")

# ---- torch, flash-attn: kernels

_CPU, _FLASH, _EFFICIENT, _CUDNN = (
    f'"kernel": "{name}"' for name in ("cpu_flash", "cuda_flash", "cuda_efficient", "cudnn")
)
cpu_forward = private("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu", _CPU)
cpu_backward = private("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", _CPU)
flash_forward = private("torch:ops.aten._flash_attention_forward", _FLASH)
flash_backward = private("torch:ops.aten._flash_attention_backward", _FLASH)
efficient_forward = private("torch:ops.aten._efficient_attention_forward", _EFFICIENT)
efficient_backward = private("torch:ops.aten._efficient_attention_backward", _EFFICIENT)
cudnn_forward = private("torch:ops.aten._scaled_dot_product_cudnn_attention", _CUDNN)
cudnn_backward = private("torch:ops.aten._scaled_dot_product_cudnn_attention_backward", _CUDNN)


def flash_attn_function(direction: str, several: bool) -> Callable[..., Any]:
    """Return flash-attn's "forward" or "backward" function, for several blocks (varlen) or a single block."""
    name = f"_flash_attn_{'varlen_' if several else ''}{direction}"
    return private(f"flash_attn.flash_attn_interface:{name}", '"kernel": "flash_attn"')


def flash_attn_3_function(direction: str) -> Callable[..., Any]:
    """Return FlashAttention 3's "forward" or "backward" function."""
    return private(f"flash_attn_interface:_flash_attn_{direction}", '"kernel": "flash_attn_3"')


# ---- torch: process groups

_GROUPS = "sequence parallelism's process groups"
default_group = private("torch.distributed.distributed_c10d:_get_default_group", _GROUPS)
Future = private("torch:_C.Future", "the watchdog")  # class of the result of Work.get_future()
default_store = private("torch.distributed.distributed_c10d:_get_default_store", _GROUPS)
_world = private("torch.distributed.distributed_c10d:_world", _GROUPS)
_known_groups = attribute("torch.distributed.distributed_c10d:_World.pg_map", _GROUPS)
_ranks_of_groups = attribute("torch.distributed.distributed_c10d:_World.pg_group_ranks", _GROUPS)
backend_of = private("torch.distributed:ProcessGroup._get_backend", _GROUPS)  # (group, device)
device_types = attribute("torch.distributed:ProcessGroup._device_types", _GROUPS)


def is_known(group: dist.ProcessGroup) -> bool:
    """Return whether a process group still exists."""
    return group in _known_groups(_world)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return a process group's timeout, or torch's default timeout if the backend does not report one."""
    backend = backend_of(group, device_types(group)[0])
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    try:
        return backend.options._timeout  # exists for gloo, NCCL and XCCL
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout


def nccl_options(max_ctas: int | str) -> Any:
    """Return the options of an NCCL group with a high-priority stream, so that transfers overlap with matrix products.

    With equal priority, NCCL's thread blocks would wait until all thread blocks of a matrix product have started, near
    the end of the product.

    Args:
        max_ctas: Maximum number of thread blocks per operation. With "auto", NCCL chooses the number.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout_of(default_group())  # torch requires the timeouts of group and options to be equal
    if isinstance(max_ctas, int):
        options.config.max_ctas = max_ctas
    return options


def new_group(ranks: tuple[int, ...], rank: int, backend: str, **settings: Any) -> dist.ProcessGroup:
    """Create a process group only on its own ranks, using the internal function behind torch's `new_group`.

    Args:
        ranks: The global ranks in the group.
        rank: This rank's global rank.
        backend: The name of the backend.
        **settings: group_name, timeout, device_id, group_desc and backend_options.
    """
    name = "torch.distributed.distributed_c10d:_new_process_group_helper"
    local_rank = ranks.index(rank)
    arguments = len(ranks), local_rank, list(ranks), dist.Backend(backend), default_store()
    helper = private(name, _GROUPS)
    try:
        inspect.signature(helper).bind(*arguments, **settings)
    except TypeError:  # the signature has changed
        raise missing(name, _GROUPS) from None
    group, _ = helper(*arguments, **settings)
    _ranks_of_groups(_world)[group] = {rank: group_rank for group_rank, rank in enumerate(ranks)}
    return group


# ---- torch, DeepSpeed: the op that is compiled on CPUs


def shm_op() -> Any:
    """Return DeepSpeed's shared-memory all-reduce, compiled on first use, or None if DeepSpeed has none."""
    return private("deepspeed.comm.torch:build_shm_op", "all-reduces of ranks on one machine without GPUs")()


def build_folder(op: str) -> str:
    """Return the folder in which torch compiles an op."""
    name = "torch.utils.cpp_extension:_get_build_directory"
    return private(name, "waiting for another process to compile DeepSpeed's op")(op, verbose=False)


# ---- DeepSpeed: its engine's figures

_FIGURES = "a train_batch_size that counts sequences"
engine_config = attribute("deepspeed.runtime.engine:DeepSpeedEngine._config", _FIGURES)
engine_timer = attribute("deepspeed.runtime.engine:DeepSpeedEngine.tput_timer", _FIGURES)
profiled_engine = attribute("deepspeed.profiling.flops_profiler.profiler:FlopsProfiler.ds_engine", _FIGURES)

# writes two scripts next to a checkpoint; disabled, since errors would occur before other ranks have finished writing
COPY_SCRIPTS = mark("deepspeed.runtime.engine:_copy_recovery_script")

# ---- DeepSpeed: what an optimizer step has changed

basic_optimizer = attribute("deepspeed.runtime.engine:DeepSpeedEngine.basic_optimizer", '"check_finite": true')
SUMMED = mark("deepspeed.runtime.zero.stage3:averaged_gradients")  # attribute of a ZeRO optimizer, before its step
PARTITION = mark("deepspeed.runtime.zero.partition_parameters:ds_tensor")  # this rank's part of a ZeRO-3 parameter
_STEPS = "a step of ZeRO-3 in which parameters have no gradient"
_zero3_gradients = attribute("deepspeed.runtime.zero.stage3:grad_partitions_flat_buffer", _STEPS)
_zero3_weights = attribute("deepspeed.runtime.zero.stage3:fp32_partitioned_groups_flat", _STEPS)


def forget_gradients(optimizer: Any) -> None:
    """Clear the gradients that ZeRO-3 keeps after a step.

    If the next micro-batch does not use a parameter, ZeRO-3 would otherwise reuse the old gradient or add the next
    gradient to it. For example, text-only micro-batches do not use the vision tower.
    """
    _zero3_gradients(optimizer).zero_()
    for x in _zero3_weights(optimizer):
        if x.grad is not None:  # if the optimizer is offloaded
            x.grad.zero_()


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return a parameter's full shape. ZeRO-3 stores the shape separately, because the tensor itself is empty."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


# ---- datasets

SPLIT = mark("datasets.iterable_dataset:_distributed")  # set by split_dataset_by_node; examples repeat without it
