"""Topology -> process groups. The only caller of new_group: every rank makes every group, in one sorted order."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from ..errors import ConfigError
from ..planning.topology import Topology
from .leaving import PATIENCE, wait_at_exit

Group = dist.ProcessGroup


def control_world() -> Group:
    """A group of all ranks that carries CPU tensors, for agreement. The first thing that communicates."""
    wait_at_exit()
    return dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=timeout())


def timeout(group: Group | None = None) -> timedelta:
    """How long an operation of the group (default: that of all ranks) may take: what its maker asked for."""
    group = group or dist.group.WORLD
    backend = group._get_backend(group._device_types[0])
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    try:
        return backend.options._timeout  # gloo, NCCL and XCCL have it
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout


@dataclasses.dataclass(frozen=True)
class Members:
    """A group of inner ranks. order: the inner ranks by their rank in the group (which torch sorts by global rank)."""

    group: Group
    order: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """This rank's groups.

    sp: all that share its sequence; sp_order[i]: the SP rank of its i-th member. inner: those that run the schedule;
    inner_rank: this one's number among them; inner_order[p]: the group rank of inner rank p. ulysses: those that trade
    heads. control: the ranks of `sp`, for CPU tensors; world: all ranks, for CPU tensors. members: for collectives of
    schedules, by inner ranks. made: those that were made for this, and are freed with it: threads, sockets and all.
    """

    world: Group
    made: tuple[Group, ...]
    sp: Group
    sp_order: tuple[int, ...]
    inner: Group
    inner_rank: int
    inner_order: tuple[int, ...]
    ulysses: Group
    control: Group
    members: dict[tuple[int, ...], Members]

    def close(self) -> None:
        """Frees the groups; once is enough. NCCL's want all their members to do it, in the same order."""
        made = list(vars(self).get("made", ()))
        vars(self).clear()
        free(made)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError("this SequenceParallel was closed, and its process groups with it; make another one")

    def __del__(self) -> None:
        """Nobody needs them any more, backward passes included. Not NCCL's: other ranks may be elsewhere by now."""
        if not sys.is_finalizing():
            made = [group for group in vars(self).get("made", ()) if group.name() == "gloo"]
            vars(self).clear()
            free(made)


def free(made: list[Group]) -> None:
    """Empties the list of groups, which nobody else may refer to. An operation that was never completed keeps its
    group's thread until it times out: that is left behind, not waited for."""
    for number in range(len(made)):
        with contextlib.suppress(ValueError):  # destroyed already, with the group of all ranks
            dist.destroy_process_group(made[number])
    thread = threading.Thread(target=made.clear, daemon=True)
    thread.start()
    thread.join(PATIENCE)


def create(topology: Topology, rank: int, world: Group) -> Groups:
    """Collective over the world. world: from `control_world`."""
    inner = topology.inner_axes
    sp_axes = ("ulysses", *inner)
    groups = {axes: _mine(topology, rank, axes) for axes in (sp_axes, inner, ("ulysses",))}
    control = groups[sp_axes] if dist.get_backend() == "gloo" else _mine(topology, rank, sp_axes, "gloo")
    members = {}
    for axis in topology.collective_axes:
        if topology.size(axis) > 1:
            groups[axis,] = _mine(topology, rank, (axis,))
            ranks = topology.group(rank, axis)
            order = tuple(topology.index(r, *inner) for r in sorted(ranks))
            members[tuple(topology.index(r, *inner) for r in ranks)] = Members(groups[axis,], order)
    if dist.get_backend() == "nccl":
        # a communicator's first call must come from all its members; a schedule's first transfer need not
        for group in groups.values():
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    made = {id(group): group for group in (*groups.values(), control, world) if group is not dist.group.WORLD}
    return Groups(
        world=world,
        made=tuple(made.values()),
        sp=groups[sp_axes],
        sp_order=tuple(topology.index(r, *sp_axes) for r in sorted(topology.group(rank, *sp_axes))),
        inner=groups[inner],
        inner_rank=topology.index(rank, *inner),
        inner_order=tuple(sorted(topology.group(rank, *inner)).index(r) for r in topology.group(rank, *inner)),
        ulysses=groups["ulysses",],
        control=control,
        members=members,
    )


def _mine(topology: Topology, rank: int, axes: tuple[str, ...], backend: str | None = None) -> Group:
    mine = None
    for ranks in topology.groups(*axes):
        group = dist.new_group(sorted(ranks), backend=backend, timeout=timeout())
        if rank in ranks:
            mine = group
    return mine
