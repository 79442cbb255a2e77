"""The device backends of a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...base import compat
from ...base.hosts import this_device

HOST_BACKENDS = ("gloo", "fake", "mpi", "ucc")  # backends without a device communicator, even for device tensors


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Map each device type to the name of the group's backend for tensors of that type."""
    return {device.type: compat.backend_of(group, device).name() for device in compat.device_types(group)}


def communicator_device(group: dist.ProcessGroup) -> torch.device | None:
    """Return this rank's device if the group has a communicator on a device (NCCL on "cuda"), otherwise None."""
    for device_type, backend in backends(group).items():
        if device_type != "cpu" and backend not in HOST_BACKENDS:
            return torch.device(device_type, torch.accelerator.current_device_index())
    return None


def bind_device(group: dist.ProcessGroup) -> torch.device | None:
    """Select this rank's device and return it, or return None if the group has no communicators on devices.

    The selected device is the device to which the group is bound, or `this_device` by default. Bind other groups to the
    same device.
    """
    if communicator_device(group) is None:
        return None
    device = group.bound_device_id or this_device()
    if device is not None:
        torch.accelerator.set_device_index(device.index)
    return device
