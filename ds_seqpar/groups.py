"""Topology -> process groups. The only caller of new_group: every rank makes every group, in one sorted order."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from .topology import Topology

Group = dist.ProcessGroup


def control_world() -> Group:
    """A group of all ranks that carries CPU tensors, for agreement."""
    return dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """This rank's groups. sp: all that share its sequence; inner: those that run the schedule, group rank = inner rank;
    ulysses: those that trade heads; control: the ranks of `sp`, for CPU tensors."""

    sp: Group
    inner: Group
    ulysses: Group
    control: Group


def create(topology: Topology, rank: int) -> Groups:
    """Collective over the world."""
    inner, sp_axes = topology.inner_axes, ("ulysses", *topology.inner_axes)
    found = {
        "sp": _mine(topology, rank, sp_axes),
        "inner": _mine(topology, rank, inner),
        "ulysses": _mine(topology, rank, ("ulysses",)),
    }
    found["control"] = found["sp"] if dist.get_backend() == "gloo" else _mine(topology, rank, sp_axes, "gloo")
    if dist.get_backend() == "nccl":
        # a communicator's first call must come from all its members; a schedule's first transfer need not
        for name in ("sp", "inner", "ulysses"):
            dist.all_reduce(torch.zeros(1, device="cuda"), group=found[name])
    return Groups(**found)


def _mine(topology: Topology, rank: int, axes: tuple[str, ...], backend: str | None = None) -> Group:
    mine = None
    for ranks in topology.groups(*axes):
        group = dist.new_group(list(ranks), backend=backend)
        if rank in ranks:
            mine = group
    return mine
