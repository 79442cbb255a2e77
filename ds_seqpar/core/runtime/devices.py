"""The backends of a process group that work on devices."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...base import compat
from ...base.hosts import this_device

HOST_BACKENDS = ("gloo", "fake", "mpi", "ucc")  # they have no communicator on a device, whatever tensors they take


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend that carries each device type's tensors in a group, by device type."""
    return {device.type: compat.backend_of(group, device).name() for device in compat.device_types(group)}


def communicator_device(group: dist.ProcessGroup) -> torch.device | None:
    """Return this rank's device if a backend of the group has communicators on it (NCCL on "cuda"), otherwise None."""
    for device_type, backend in backends(group).items():
        if device_type != "cpu" and backend not in HOST_BACKENDS:
            return torch.device(device_type, torch.accelerator.current_device_index())
    return None


def bind_device(group: dist.ProcessGroup) -> torch.device | None:
    """Set this rank's device if a backend of the group has communicators on devices, and return it; otherwise return
    None. It is the device that the group is bound to, or by default `this_device`. Bind other groups to it too.
    """
    if communicator_device(group) is None:
        return None
    device = group.bound_device_id or this_device()
    if device is not None:
        torch.accelerator.set_device_index(device.index)
    return device
