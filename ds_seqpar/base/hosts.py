"""Determine this process's host, device, and local rank as set by the launcher."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from . import compat
from .errors import ConfigError

# set by torchrun, Open MPI, Intel MPI and MPICH, srun; last, since srun may have started a script that calls mpirun
LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE",
)  # fmt: skip


def local_rank() -> int | None:
    """Return this rank's index on its machine as set by the launcher, or None if the index is not set."""
    return _first_set(LOCAL_RANKS)


def _first_set(names: Sequence[str]) -> int | None:
    """Return the leading integer in the first variable that is set, such as 8 from srun's "8(x2)"."""
    found = (re.match(r"\d+", os.environ.get(name, "")) for name in names)
    return next((int(number[0]) for number in found if number), None)


def this_device() -> torch.device | None:
    """Return this rank's accelerator, or None on a machine without accelerators.

    The accelerator is the process's current device or, by default, the device with the index `local_rank`.

    Raises:
        ConfigError: The machine has fewer accelerators than ranks, or the accelerator to use cannot be determined.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return None
    count, chosen = torch.accelerator.device_count(), torch.accelerator.current_device_index()
    return torch.device(accelerator.type, _index(count, chosen, local_rank()))


def _index(count: int, chosen: int, local_rank: int | None) -> int:
    """Return the index of this rank's device among the `count` visible devices.

    `chosen` is the index of the current device, or 0 if no device was set.
    """
    # a launcher may expose only one device to each process; DeepSpeed's launcher lists several devices even on a
    # machine with one
    is_only_device = count == 1 and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if chosen or is_only_device:
        return chosen
    if local_rank is None:
        is_up = dist.is_initialized()
        world = compat.default_group().size() if is_up else int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1 or (is_up and dist.get_rank() == 0):  # device 0 may have been set, or may be the default
            return chosen
        raise ConfigError(
            f"every rank of a machine needs a device of its own; got {count} devices, and none of "
            f"{', '.join(LOCAL_RANKS)} says which is this rank's, set LOCAL_RANK or call torch.cuda.set_device on "
            "every rank"
        )
    if local_rank >= count:
        raise ConfigError(
            f"every rank of a machine needs a device of its own; got LOCAL_RANK {local_rank} and {count} devices, "
            f"start at most {count} ranks on it"
        )
    return local_rank


def device_name(device: torch.device) -> str:
    """Return the device's model name, such as "NVIDIA H100 80GB HBM3", or "cpu" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def set_device() -> torch.device | None:
    """Make this rank's accelerator the current device, and return it.

    Call `set_device` before creating groups, since a communicator stays on the device that was current when it was
    created.
    """
    if (device := this_device()) is not None:
        torch.accelerator.set_device_index(device.index)
    return device


def ranks_per_node(world: int) -> int:
    """Return the number of ranks per node as set by the launcher, or `world` if the number is not set."""
    return _first_set(LOCAL_SIZES) or world


class Host(NamedTuple):
    """A rank's host."""

    name: str  # the result of `host_name`
    device: str  # the accelerator's name, or "" without an accelerator
    cores: tuple[int, ...]  # the cores that this rank may use
    memory: int  # host memory in bytes
    device_memory: int = 0  # accelerator memory in bytes, or 0 without an accelerator


def host_name() -> str:
    """Return a name that is unique among hosts, and among containers with separate networks."""
    names = [socket.gethostname()]
    with contextlib.suppress(OSError):  # only the host name without /proc
        names += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return " ".join(names)


def this_host() -> Host:
    device, device_memory = "", 0
    if torch.cuda.is_available():
        device, device_memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties().total_memory
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = os.sched_getaffinity(0) if has_affinity else range(os.cpu_count() or 1)
    return Host(host_name(), device, tuple(sorted(cores)), host_memory(), device_memory)


def host_memory() -> int:
    """Return the host's total memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def ranks_per_host(hosts: Sequence[Host]) -> int:
    """Return the number of ranks on each host.

    Args:
        hosts: Each rank's host, indexed by rank.

    Raises:
        ConfigError: Hosts have different numbers of ranks, or the ranks of a host are not consecutive.
    """
    runs = [len(list(ranks)) for _, ranks in itertools.groupby(host.name for host in hosts)]
    if len(set(runs)) > 1 or len(runs) > len({host.name for host in hosts}):
        raise ConfigError(
            f"planning needs as many ranks on each host, and those of a host numbered one after another; got runs of "
            f"{', '.join(map(str, runs[:8]))}{' ...' if len(runs) > 8 else ''} ranks, launch them so or leave seq_len, "
            "machine and memory out"
        )
    return runs[0]
