"""Creates the process groups for a topology.

Each rank creates only the groups that it belongs to, so the number of groups does not grow with the world size. Groups
with the same ranks are created only once, and no group is created for a single rank.

torch's `new_group` requires all ranks in the world to create every group. With `use_local_synchronization=True`, only
members create a group, but torch then names the group after the number of groups on the rank. If the number differs
between members, the members wait for one another forever. The number can also be reused after a group was freed, while
old addresses are still in the store. In this module, a group's name therefore consists of the number of its set of
groups (on which all ranks agree), the group's purpose, and its first rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...base import compat
from ...base.errors import ConfigError
from ..compiler.sharding.layout import Topology
from .devices import backends, bind_device, communicator_device

Group = dist.ProcessGroup
NCCL = "nccl"  # backend that accepts NCCL's options


Meeting = Callable[[], contextlib.AbstractContextManager]  # returns a context manager for creating a gloo group


def control_world(meeting: Meeting = contextlib.nullcontext) -> Group:
    """Return a group of all ranks that carries CPU tensors. Call this function before any communication."""
    world = all_ranks()
    if "cpu" in backends(world):
        return world
    with meeting():
        return dist.new_group(backend="gloo", timeout=timeout())


def all_ranks() -> Group:
    """Return torch's default group, which contains all ranks."""
    return compat.default_group()


def timeout(group: Group | None = None) -> timedelta:
    """Return the operation timeout with which a group (by default the group of all ranks) was created."""
    return compat.timeout_of(group or all_ranks())


@dataclasses.dataclass(frozen=True)
class CollectiveGroup:
    """A group for a schedule's collectives."""

    group: Group
    order: tuple[int, ...]  # CP ranks of the members in group rank order (torch sorts members by global rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """This rank's process groups. None represents a group that would contain only this rank."""

    world: Group  # all ranks, for CPU tensors
    made: tuple[Group, ...]  # groups created for this object and freed with it, including their threads and sockets
    sp: Group | None  # ranks that share this rank's sequence
    sp_order: tuple[int, ...]  # sp_order[i]: SP rank of rank i of `sp`
    inner: Group | None  # ranks that run the schedule
    cp_rank: int  # this rank's number within the schedule
    cp_order: tuple[int, ...]  # cp_order[p]: rank of CP rank p within `inner`
    ulysses: Group | None  # Ulysses ranks that exchange heads
    control: Group | None  # ranks of `sp`, for CPU tensors
    collectives: dict[tuple[int, ...], CollectiveGroup]  # groups for the schedule's collectives, by CP ranks
    number: int  # number of this set of groups, equal on all ranks
    max_ctas: int | str = "auto"  # see `compat.nccl_options`

    @functools.cached_property
    def one_ring(self) -> Groups:
        """The groups for a schedule that runs on all ranks that share the sequence, without Ulysses.

        The first access is collective across all ranks that share the sequence. NCCL runs a group's operations one
        after another. To avoid queueing behind ZeRO's prefetched gathers, layer messages do not use the group of the
        whole job.
        """
        assert self.sp is not None
        size = self.sp.size()
        # prefer one of attention's groups if it contains all ranks, because `sp` may be the group of the whole job
        group = next(x for x in (self.inner, self.ulysses, self.sp) if x is not None and x.size() == size)
        made: list[Group] = []
        if group is all_ranks() and communicator_device(group):
            maker = _Maker(dist.get_rank(), self.world, self.max_ctas)
            group, made = maker.own("layers with a state", range(size)) or group, maker.made
            _warm_up({group}, made)
        return dataclasses.replace(
            self, made=tuple(made), sp=group, inner=group, cp_rank=self.sp_order[dist.get_rank(group)],
            cp_order=tuple(map(self.sp_order.index, range(size))), ulysses=None,
            collectives={tuple(range(size)): CollectiveGroup(group, self.sp_order)},
        )  # fmt: skip

    def close(self) -> None:
        """Free the groups. A second call has no effect. All members must free their NCCL groups in the same order."""
        if one_ring := vars(self).pop("one_ring", None):
            one_ring.close()
        groups = list(vars(self).get("made", ()))
        vars(self).clear()
        free(groups)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError("this SequenceParallel was closed, and its process groups with it; make another one")

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Free the groups without device communicators, which are no longer used, not even by a later backward pass.

        NCCL groups are not freed, because other ranks may not free the same groups at this point.
        """
        if not is_finalizing():
            groups = [group for group in vars(self).get("made", ()) if communicator_device(group) is None]
            vars(self).clear()
            free(groups)


FREE_TIMEOUT = 5.0  # maximum number of seconds to wait for the groups' threads


def free(groups: list[Group]) -> None:
    """Free all groups in the list, and clear the list. No other object may reference the groups.

    An operation that never completed keeps its group's thread alive until the operation times out. `free` does not wait
    for the threads of such operations.
    """
    for number in range(len(groups)):
        with contextlib.suppress(ValueError):  # already destroyed, together with the group of all ranks
            dist.destroy_process_group(groups[number])
    thread = threading.Thread(target=groups.clear, daemon=True)
    thread.start()
    thread.join(FREE_TIMEOUT)


def create(
    topology: Topology, rank: int, world: Group, max_ctas: int | str = "auto",
    meeting: Meeting = contextlib.nullcontext, of: Groups | None = None,
) -> Groups:  # fmt: skip
    """Return this rank's groups. Collective over all ranks.

    Args:
        topology: All ranks as named axes.
        rank: This rank.
        world: The group returned by `control_world`.
        max_ctas: See `compat.nccl_options`.
        meeting: Function that returns a context manager for creating gloo groups.
        of: Groups for the same sequences in another topology with the same SP rank numbers. The groups in `of` that
            contain all ranks sharing a sequence are reused, and are freed with `of`.
    """
    maker = _Maker(rank, world, max_ctas)
    sp_axes = ("ulysses", *topology.cp_axes)
    sp_ranks, cp_ranks = topology.group(rank, *sp_axes), topology.group(rank, *topology.cp_axes)
    # separate groups for attention, because attention's messages could be confused with others in the group of all
    # ranks
    inner = maker.own("inner", cp_ranks)
    ulysses = maker.own("ulysses", topology.group(rank, "ulysses"))
    collectives = {}
    for axis in topology.collective_axes:
        if group := maker.own(axis, ranks := topology.group(rank, axis)):
            order = tuple(topology.index(r, *topology.cp_axes) for r in sorted(ranks))
            collectives[tuple(topology.index(r, *topology.cp_axes) for r in ranks)] = CollectiveGroup(group, order)
    if of is None:
        sp = maker.own_or_all("sp", sp_ranks)
        control = sp if sp is None or "cpu" in backends(sp) else maker.for_cpu(sp_ranks, meeting)
    else:
        sp, control = of.sp, of.control
    group_ranks = {r: group_rank for group_rank, r in enumerate(sorted(cp_ranks))}
    _warm_up({inner, ulysses, sp, *(m.group for m in collectives.values())}, maker.made)
    return Groups(
        world=world,
        made=tuple(group for group in (*maker.made, *(() if of else (world,))) if group is not all_ranks()),
        sp=sp,
        sp_order=tuple(topology.index(r, *sp_axes) for r in sorted(sp_ranks)),
        inner=inner,
        cp_rank=topology.index(rank, *topology.cp_axes),
        cp_order=tuple(group_ranks[r] for r in cp_ranks),
        ulysses=ulysses,
        control=control,
        collectives=collectives,
        number=maker.number,
        max_ctas=max_ctas,
    )


def device_mesh(topology: Topology, groups: Groups, device: torch.device) -> DeviceMesh:
    """Return a device mesh of all ranks with the dims "dp", "cp" and "ulysses". Collective over all ranks.

    The dims "cp" and "ulysses" use attention's groups. The dim "dp" and all dims of size 1 get new groups, which are
    freed with `groups`.

    Raises:
        ConfigError: In some dim, the rank order differs from the order in which torch numbers the ranks.
    """
    numbers = [topology.index(r, "ulysses", *topology.cp_axes, "data") for r in range(topology.world_size)]
    if numbers != sorted(numbers):
        raise ConfigError(
            "device_mesh needs neighboring ranks along ulysses first, then along the CP axes; got another rank_order, "
            'leave it "auto"'
        )
    maker = _Maker(dist.get_rank(), groups.world, groups.max_ctas)
    dims = {"dp": (None, ("data",)), "cp": (groups.inner, topology.cp_axes), "ulysses": (groups.ulysses, ("ulysses",))}
    by_dim = [group or maker.of_dim(name, topology.group(maker.rank, *axes)) for name, (group, axes) in dims.items()]
    _warm_up({*by_dim}, maker.made)
    vars(groups).update(made=(*maker.made, *groups.made))
    ranks = torch.tensor(numbers, device="cpu").view([topology.size(*axes) for _, axes in dims.values()])
    return DeviceMesh.from_group(by_dim, device.type, ranks, mesh_dim_names=tuple(dims))


_numbers = itertools.count(1)  # numbers for this process's sets of groups


class _Maker:
    """Creates this rank's groups. All ranks must call the same methods in the same order, each for the groups to which
    it belongs.

    Device communicators are split off the world's communicator, and all ranks must take part in each split.
    """

    def __init__(self, rank: int, world: Group, max_ctas: int | str) -> None:
        number = torch.tensor([next(_numbers)], device="cpu")
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=world)  # some ranks may have failed to create earlier sets
        self.rank, self.world, self.number, self.max_ctas = rank, world, int(number), max_ctas
        self.device = bind_device(all_ranks())
        self.by_ranks: dict[tuple[int, ...], Group] = {}
        self.made: list[Group] = []

    def own(self, purpose: str, ranks: Iterable[int]) -> Group | None:
        """Return a group that is used only by this SequenceParallel, or None for a single rank."""
        ranks = tuple(sorted(ranks))
        if len(ranks) > 1 and ranks not in self.by_ranks:
            self.by_ranks[ranks] = self._make(purpose, ranks, dist.get_backend(), self.device)
        return self.by_ranks.get(ranks)

    def own_or_all(self, purpose: str, ranks: Iterable[int]) -> Group | None:
        """Return the group of all ranks if `ranks` contains every rank, otherwise a group from `own`."""
        ranks = tuple(ranks)
        return all_ranks() if 1 < len(ranks) == all_ranks().size() else self.own(purpose, ranks)

    def of_dim(self, name: str, ranks: tuple[int, ...]) -> Group:
        """Return the group from `own_or_all`, or a new group if this rank is the only member."""
        return self.own_or_all(name, ranks) or self._make(name, ranks, dist.get_backend(), self.device)

    def for_cpu(self, ranks: Iterable[int], meeting: Meeting) -> Group:
        """Return a group of several ranks that carries CPU tensors."""
        ranks = tuple(sorted(ranks))
        if len(ranks) == all_ranks().size():
            return self.world
        with meeting():
            return self._make("control", ranks, "gloo", None)

    def _make(self, purpose: str, ranks: tuple[int, ...], backend: str, device: torch.device | None) -> Group:
        is_nccls = device is not None and NCCL in backends(all_ranks()).values()
        group = compat.new_group(
            ranks,
            self.rank,
            backend,
            group_name=f"ds_seqpar/{self.number}/{purpose}/{ranks[0]}",
            timeout=timeout(),
            device_id=device,
            group_desc=f"ds_seqpar {purpose}",
            backend_options=compat.nccl_options(self.max_ctas) if is_nccls else None,
        )
        self.made.append(group)
        return group


def _warm_up(used: set[Group | None], new_groups: list[Group]) -> None:
    """Run one all-reduce on each device communicator, because all members must take part in a communicator's first
    call.

    A schedule's first transfer may involve only some members.
    """
    for group in [group for group in (*new_groups, all_ranks()) if group in used]:
        if device := communicator_device(group):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
