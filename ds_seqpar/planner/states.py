"""The parameters, gradients and optimizer states that DeepSpeed's ZeRO keeps between steps, and where: in the rank's
memory, in its host's, or on drives. Does not import torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ..config.deepspeed_json import Zero
from .request import Model

MASTER = 4  # bytes of an fp32 copy of an element, of its gradient, and of each of Adam's two moments


@dataclasses.dataclass(frozen=True)
class States:
    """The states that a rank keeps."""

    device: Mapping[str, int]  # item -> bytes in the rank's memory
    host: Mapping[str, int]  # item -> bytes in its host's memory
    pinned: tuple[tuple[int, int], ...]  # pinned tensors in host memory: (how many, bytes of each)
    elements_on_device: int  # elements of the rank's shard whose optimizer states are in its own memory
    drives: int = 0  # bytes on drives


def pinned_bytes(size: int) -> int:
    """Return the bytes that torch allocates for pinned memory of this size: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def states(model: Model, zero: Zero, world: int, size: int) -> States:
    """Return the states of one rank. `size` is the bytes of a parameter's element. ZeRO makes fp32 copies of fp32
    parameters too."""
    count, stage = model.parameters, zero.stage
    local = count // world if stage else count  # elements whose states the rank has
    if not zero.optimiser_away:
        moments = MASTER if stage else size
        device = {
            "parameters": (local if stage == 3 else count) * size + (MASTER * local if stage else 0),
            "gradients": local * size if stage == 3 else 0,
            "optimiser": 2 * local * moments,
        }
        result = States(device, {}, (), elements_on_device=local)
    else:
        result = (
            _offloaded_at_stage_3(zero, local, size)
            if stage == 3
            else _offloaded_before_stage_3(model, zero, local, size)
        )
    if zero.parameters_away:
        result = _with_parameters_offloaded(result, zero, local, size)
    if stage == 3:
        result = dataclasses.replace(result, device={**result.device, "buckets": zero.reduce_bucket_size * size})
    return result


def _offloaded_before_stage_3(model: Model, zero: Zero, local: int, size: int) -> States:
    """Return the states with the optimizer in host memory, at stages 1 and 2. Gradients pass through a buffer on the
    device and one on the host, each as large as the largest parameter. The host also holds new parameters in their own
    dtype."""
    largest = size * max(model.embedding, model.hidden * model.intermediate)
    device = {"parameters": model.parameters * size, "gradients": largest}
    host = {
        "parameters": (MASTER + size) * local,
        "gradients": MASTER * local + largest,
        "optimiser": 2 * MASTER * local,
    }
    pinned = _pinned(zero.offload_optimizer.pin_memory, (2, MASTER * local), (1, size * local), (1, largest))
    return States(device, host, pinned, elements_on_device=0)


def _offloaded_at_stage_3(zero: Zero, local: int, size: int) -> States:
    """Return the states with the optimizer in host memory, or on drives, at stage 3. Some sub-groups may stay on the
    device. The host has gradients twice: in the parameters' dtype, and in fp32 for the optimizer."""
    offload, group = zero.offload_optimizer, min(local, zero.sub_group_size)
    if offload.device == "nvme":
        buffers = MASTER * offload.buffer_count * group
        host = {"gradients": size * local, "buffers": buffers}
        pinned = _pinned(offload.pin_memory, (1, size * local))
        return States({"parameters": size * local}, host, pinned, elements_on_device=0, drives=4 * MASTER * local)
    group = max(1, group)
    elements_on_device = min(local, int((1 - offload.ratio) * math.ceil(local / group)) * group)
    on_host = local - elements_on_device
    device = {
        "parameters": size * local + MASTER * elements_on_device,
        "gradients": MASTER * elements_on_device,
        "optimiser": 2 * MASTER * elements_on_device,
    }
    host = {
        "parameters": MASTER * on_host,
        "gradients": MASTER * on_host + size * local,
        "optimiser": 2 * MASTER * on_host,
    }
    gradients = (on_host // group, MASTER * group), (1, MASTER * (on_host % group))
    return States(device, host, _pinned(offload.pin_memory, (1, size * local), *gradients), elements_on_device)


def _with_parameters_offloaded(result: States, zero: Zero, local: int, size: int) -> States:
    """Return the states with the rank's parameters in pinned host memory, or on drives except for `max_in_cpu`."""
    offload = zero.offload_param
    kept = min(local, offload.max_in_cpu) if offload.device == "nvme" else local
    host = dict(result.host)
    host["parameters"] = host.get("parameters", 0) + size * kept
    if kept < local:  # a pool of buffers, and room for a sub-group that is read back
        pool = offload.buffer_count * offload.buffer_size + min(local, zero.sub_group_size)
        host["buffers"] = host.get("buffers", 0) + size * pool
    device = {**result.device, "parameters": result.device["parameters"] - size * local}
    drives = result.drives + size * (local - kept)
    return dataclasses.replace(
        result, device=device, host=host, pinned=(*result.pinned, (1, size * kept)), drives=drives
    )


def _pinned(pin: bool, *sizes: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return sizes if pin else ()
