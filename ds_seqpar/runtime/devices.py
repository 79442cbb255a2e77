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

ON_HOST = ("gloo", "fake", "mpi", "ucc")  # what has no communicator on a device, whatever tensors it takes


def own_device() -> torch.device | None:
    """The accelerator that this rank works on: what the process has chosen, or else number LOCAL_RANK; None on a
    machine without one. Raises ConfigError where the machine has fewer than it has ranks."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return None
    count, chosen = torch.accelerator.device_count(), torch.accelerator.current_device_index()
    return torch.device(accelerator.type, _index(count, chosen, int(os.environ.get("LOCAL_RANK", "0"))))


def _index(count: int, chosen: int, local_rank: int) -> int:
    """This rank's of the `count` devices that the process sees. chosen: the current one, 0 where none was set."""
    # a launcher may let a process see its own device alone; DeepSpeed's says more than one, whatever there is
    alone = count == 1 and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if chosen or alone:
        return chosen
    if local_rank >= count:
        raise ConfigError(
            f"every rank of a machine needs a device of its own; got LOCAL_RANK {local_rank} and {count} devices, "
            f"start at most {count} ranks on it"
        )
    return local_rank


def name_of(device: torch.device) -> str:
    """Of its model, as "NVIDIA H100 80GB HBM3"; "cpu" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def set_device() -> torch.device | None:
    """Makes this rank's accelerator the current one. Before any group is made: a communicator stays on the device that
    was current when it was made."""
    if (device := own_device()) is not None:
        torch.accelerator.set_device_index(device.index)
    return device


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> the backend of the group that carries its tensors."""
    return {device.type: group._get_backend(device).name() for device in group._device_types}


def ranks_a_node(world: int) -> int:
    """As the launcher says (torchrun and accelerate in LOCAL_WORLD_SIZE, DeepSpeed's in LOCAL_SIZE); all where none
    does."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world)


class Host(NamedTuple):
    """What a rank sees of the host that it runs on. name: no other host has it, nor a container with a network of its
    own. device: the accelerator's name, "" for none. cores: those that this rank may run on. memory: bytes of all;
    device_memory: of the accelerator, 0 for none."""

    name: str
    device: str
    cores: tuple[int, ...]
    memory: int
    device_memory: int = 0


def own_host() -> Host:
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
    """Bytes of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def shared_by(hosts: Sequence[Host]) -> int:
    """How many ranks each host has. hosts: every rank's, by rank. Raises ConfigError where hosts have not equally many,
    or their ranks do not follow one another."""
    runs = [len(list(ranks)) for _, ranks in itertools.groupby(host.name for host in hosts)]
    if len(set(runs)) > 1 or len(runs) > len({host.name for host in hosts}):
        raise ConfigError(
            f"planning needs as many ranks on each host, and those of a host numbered one after another; got runs of "
            f"{', '.join(map(str, runs[:8]))}{' ...' if len(runs) > 8 else ''} ranks, launch them so or leave seq_len, "
            "machine and memory out"
        )
    return runs[0]


def accelerated(group: dist.ProcessGroup) -> torch.device | None:
    """This rank's device, where a backend of the group has communicators on it, as NCCL has for "cuda"."""
    for kind, backend in backends(group).items():
        if kind != "cpu" and backend not in ON_HOST:
            return torch.device(kind, torch.accelerator.current_device_index())
    return None


def bind(group: dist.ProcessGroup) -> torch.device | None:
    """Sets this rank's device, if a backend of the group works on one: that which the group was bound to, or its own.
    Returns it for groups to be bound to."""
    if accelerated(group) is None:
        return None
    device = group.bound_device_id or own_device()
    if device is not None:
        torch.accelerator.set_device_index(device.index)
    return device
