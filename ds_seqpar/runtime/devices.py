"""This rank's device, and which of a group's backends work on it."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import ConfigError

HOST_BACKENDS = ("gloo", "fake", "mpi", "ucc")  # they have no communicator on a device, whatever tensors they take


def this_device() -> torch.device | None:
    """The accelerator that this rank works on: the one that the process has set, or else number LOCAL_RANK. None on a
    machine without accelerators. Raises ConfigError where the machine has fewer accelerators than ranks."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return None
    count, chosen = torch.accelerator.device_count(), torch.accelerator.current_device_index()
    return torch.device(accelerator.type, _index(count, chosen, int(os.environ.get("LOCAL_RANK", "0"))))


def _index(count: int, chosen: int, local_rank: int) -> int:
    """Which of the `count` devices that the process sees is this rank's. chosen: the current one, 0 if none was set."""
    # a launcher may let a process see its own device only; DeepSpeed's lists several, even if the machine has one
    alone = count == 1 and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if chosen or alone:
        return chosen
    if local_rank >= count:
        raise ConfigError(
            f"every rank of a machine needs a device of its own; got LOCAL_RANK {local_rank} and {count} devices, "
            f"start at most {count} ranks on it"
        )
    return local_rank


def device_name(device: torch.device) -> str:
    """The name of the device's model, as "NVIDIA H100 80GB HBM3"; "cpu" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def set_device() -> torch.device | None:
    """Makes this rank's accelerator the current one, and returns it. Call it before any group is made: a communicator
    stays on the device that was current when it was made."""
    if (device := this_device()) is not None:
        torch.accelerator.set_device_index(device.index)
    return device


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> the backend of the group that carries its tensors."""
    return {device.type: group._get_backend(device).name() for device in group._device_types}


def ranks_per_node(world: int) -> int:
    """How many ranks a node has, as the launcher says: torchrun and accelerate in LOCAL_WORLD_SIZE, DeepSpeed in
    LOCAL_SIZE. All ranks where none says it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world)


class Host(NamedTuple):
    """The host that a rank runs on. name: unlike that of any other host, and of a container with a network of its own.
    device: the accelerator's name, "" for none. cores: those that this rank may run on. memory: of the whole host, in
    bytes. device_memory: of the accelerator, in bytes, 0 for none."""

    name: str
    device: str
    cores: tuple[int, ...]
    memory: int
    device_memory: int = 0


def this_host() -> Host:
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # where there is no /proc, the name alone must do
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    device, size = "", 0
    if torch.cuda.is_available():
        device, size = torch.cuda.get_device_name(), torch.cuda.get_device_properties().total_memory
    known = hasattr(os, "sched_getaffinity")
    cores = os.sched_getaffinity(0) if known else range(os.cpu_count() or 1)
    return Host(" ".join(parts), device, tuple(sorted(cores)), host_memory(), size)


def host_memory() -> int:
    """The bytes of memory that this host has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def ranks_per_host(hosts: Sequence[Host]) -> int:
    """How many ranks each host has. hosts: the host of each rank, by rank. Raises ConfigError unless all hosts have
    equally many, and the ranks of a host follow one another."""
    runs = [len(list(ranks)) for _, ranks in itertools.groupby(host.name for host in hosts)]
    if len(set(runs)) > 1 or len(runs) > len({host.name for host in hosts}):
        raise ConfigError(
            f"planning needs as many ranks on each host, and those of a host numbered one after another; got runs of "
            f"{', '.join(map(str, runs[:8]))}{' ...' if len(runs) > 8 else ''} ranks, launch them so or leave seq_len, "
            "machine and memory out"
        )
    return runs[0]


def communicator_device(group: dist.ProcessGroup) -> torch.device | None:
    """This rank's device, if a backend of the group has communicators on it, as NCCL has for "cuda"; else None."""
    for kind, backend in backends(group).items():
        if kind != "cpu" and backend not in HOST_BACKENDS:
            return torch.device(kind, torch.accelerator.current_device_index())
    return None


def bind_device(group: dist.ProcessGroup) -> torch.device | None:
    """Sets this rank's device, if a backend of the group has communicators on devices: the one that the group is bound
    to, or else `this_device`. Returns it, for groups to be bound to."""
    if communicator_device(group) is None:
        return None
    device = group.bound_device_id or this_device()
    if device is not None:
        torch.accelerator.set_device_index(device.index)
    return device
