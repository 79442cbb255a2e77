"""Topology -> process groups. A rank makes the groups that it is in, and no other: their number does not grow with the
world. One with the same ranks as another is made once, and none is made for a rank alone.

torch's `new_group` wants every rank of the world to make every group. With `use_local_synchronization=True` it does
not, but then names a group by how many groups this rank has. Members need not have that number in common, and would
wait for one another for ever. It also comes again once a group was freed, with the old addresses in the store. So names
are ours: the number of this set of groups, which the world agrees on, the purpose, and the first rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..compiler.layout import Topology
from ..errors import ConfigError
from .devices import accelerated, backends, bind
from .telling import IDLE_PATIENCE, wait_at_exit

Group = dist.ProcessGroup


def control_world() -> Group:
    """A group of all ranks that carries CPU tensors, for agreement. The first thing that communicates."""
    wait_at_exit()
    world = all_ranks()
    return world if "cpu" in backends(world) else dist.new_group(backend="gloo", timeout=timeout())


def all_ranks() -> Group:
    """torch's group of all ranks."""
    return distributed_c10d._get_default_group()


def timeout(group: Group | None = None) -> timedelta:
    """How long an operation of the group (default: that of all ranks) may take: what its maker asked for."""
    group = group or all_ranks()
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
    """This rank's groups; None for one that would hold this rank alone: it has nobody to send to.

    sp: all that share its sequence; sp_order[i]: the SP rank of its i-th member. inner: those that run the schedule;
    inner_rank: this one's number among them; inner_order[p]: the group rank of inner rank p. ulysses: those that trade
    heads. control: the ranks of `sp`, for CPU tensors; world: all ranks, for CPU tensors. members: for collectives of
    schedules, by inner ranks. made: those that were made for this, and are freed with it: threads, sockets and all.
    """

    world: Group
    made: tuple[Group, ...]
    sp: Group | None
    sp_order: tuple[int, ...]
    inner: Group | None
    inner_rank: int
    inner_order: tuple[int, ...]
    ulysses: Group | None
    control: Group | None
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

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Nobody needs them any more, backward passes included. Not NCCL's: other ranks may be elsewhere by now."""
        if not is_finalizing():
            made = [group for group in vars(self).get("made", ()) if accelerated(group) is None]
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
    thread.join(IDLE_PATIENCE)


def create(topology: Topology, rank: int, world: Group) -> Groups:
    """Collective over the world. world: from `control_world`."""
    maker = _Maker(rank, world)
    sp_axes = ("ulysses", *topology.inner_axes)
    sp_ranks, inner_ranks = topology.group(rank, *sp_axes), topology.group(rank, *topology.inner_axes)
    # what attention sends has groups of its own: in that of all ranks it would meet what others send there
    inner = maker.own("inner", inner_ranks)
    ulysses = maker.own("ulysses", topology.group(rank, "ulysses"))
    members = {}
    for axis in topology.collective_axes:
        if group := maker.own(axis, ranks := topology.group(rank, axis)):
            order = tuple(topology.index(r, *topology.inner_axes) for r in sorted(ranks))
            members[tuple(topology.index(r, *topology.inner_axes) for r in ranks)] = Members(group, order)
    sp = maker.own_or_all("sp", sp_ranks)
    control = sp if sp is None or "cpu" in backends(sp) else maker.for_cpu(sp_ranks)
    places = {r: place for place, r in enumerate(sorted(inner_ranks))}
    _warm_up({inner, ulysses, sp, *(m.group for m in members.values())}, maker.made)
    return Groups(
        world=world,
        made=tuple(group for group in (*maker.made, world) if group is not all_ranks()),
        sp=sp,
        sp_order=tuple(topology.index(r, *sp_axes) for r in sorted(sp_ranks)),
        inner=inner,
        inner_rank=topology.index(rank, *topology.inner_axes),
        inner_order=tuple(places[r] for r in inner_ranks),
        ulysses=ulysses,
        control=control,
        members=members,
    )


_numbers = itertools.count(1)  # of sets of groups that this process has made


class _Maker:
    """Makes groups of this rank. All ranks must ask for the same ones in the same order, each for its own ranks. For a
    device's communicators are split off that of the world, which all ranks do together."""

    def __init__(self, rank: int, world: Group) -> None:
        number = torch.tensor([next(_numbers)], device="cpu")
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=world)  # a rank may have failed to make some
        self.rank, self.world, self.prefix = rank, world, f"ds_seqpar/{int(number)}"
        self.device = bind(all_ranks())
        self.found: dict[tuple[int, ...], Group] = {}
        self.made: list[Group] = []

    def own(self, purpose: str, ranks: Iterable[int]) -> Group | None:
        """A group that only this SequenceParallel uses; None for one rank."""
        ranks = tuple(sorted(ranks))
        if len(ranks) > 1 and ranks not in self.found:
            self.found[ranks] = self._make(purpose, ranks, dist.get_backend(), self.device)
        return self.found.get(ranks)

    def own_or_all(self, purpose: str, ranks: Iterable[int]) -> Group | None:
        """The group of all ranks, where it has these."""
        ranks = tuple(ranks)
        return all_ranks() if 1 < len(ranks) == dist.get_world_size() else self.own(purpose, ranks)

    def for_cpu(self, ranks: Iterable[int]) -> Group:
        """A group of more than one rank that carries CPU tensors."""
        ranks = tuple(sorted(ranks))
        return self.world if len(ranks) == dist.get_world_size() else self._make("control", ranks, "gloo", None)

    def _make(self, purpose: str, ranks: tuple[int, ...], backend: str, device: torch.device | None) -> Group:
        group, _ = _torch_helper()(
            len(ranks),
            ranks.index(self.rank),
            list(ranks),
            dist.Backend(backend),
            distributed_c10d._get_default_store(),
            group_name=f"{self.prefix}/{purpose}/{ranks[0]}",
            timeout=timeout(),
            device_id=device,
            group_desc=f"ds_seqpar {purpose}",
        )
        distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        self.made.append(group)
        return group


def _torch_helper() -> Callable[..., tuple[Group, object]]:
    """torch's own function under `new_group`, which is private. Raises ConfigError where this torch has another."""
    arguments = (1, 0, [0], "gloo", None)
    named = dict.fromkeys(("group_name", "timeout", "device_id", "group_desc"))
    try:
        helper = distributed_c10d._new_process_group_helper
        inspect.signature(helper).bind(*arguments, **named)
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"ds_seqpar makes process groups by a function of torch that torch {torch.__version__} does not have as it "
            f"is known here ({error}), install a torch of constraints.txt"
        ) from error
    return helper


def _warm_up(used: set[Group | None], made: list[Group]) -> None:
    """A communicator's first call must come from all its members; a schedule's first transfer need not."""
    for group in [group for group in (*made, all_ranks()) if group in used]:
        if device := accelerated(group):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
