"""Executes transfers over torch.distributed, and counts what it receives. The only caller of isend and irecv."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CommunicationError, SeqParError
from .groups import Groups, timeout


@dataclasses.dataclass(frozen=True)
class Message:
    """A tensor to or from `peer` (an inner rank). kind: what it is, for counting. tag: the same on both ends."""

    peer: int
    kind: str
    tensor: Tensor
    tag: int


class Handle(Protocol):
    def wait(self) -> None: ...


class Comm(Protocol):
    """What a plan is walked over. received: elements that arrived from other ranks, by kind."""

    received: Counter

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        """Starts all of them; after the handle's wait the received tensors are filled and the sent ones free."""
        ...

    def all_gather(self, ranks: tuple[int, ...], kind: str, tensor: Tensor, received: list[Tensor]) -> Handle:
        """Every one of the inner ranks gives `tensor`; received[i] becomes that of ranks[i], the own one too."""
        ...

    def all_to_all(self, ranks: tuple[int, ...], kind: str, sent: list[Tensor], received: list[Tensor]) -> Handle:
        """sent[i] goes to inner rank ranks[i]; received[i] comes from it, the own one too."""
        ...

    def exchange_heads(self, kind: str, buffer: Tensor) -> Tensor:
        """buffer (members, n): row i goes to Ulysses member i; row i of the result comes from member i."""
        ...


@dataclasses.dataclass
class Together:
    """Several handles as one."""

    handles: Sequence[Handle]

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()


class _Works:
    """Owns works and tensors until they are done: a dropped isend loses its message."""

    def __init__(
        self, what: str, group: dist.ProcessGroup, works: list, tensors: list[Tensor], then: Callable | None = None
    ) -> None:
        self.what, self.group, self.works, self.tensors, self.then = what, group, works, tensors, then

    def wait(self) -> None:
        with failing(self.what, self.group):
            for work in self.works:
                work.wait()
        if self.then:
            self.then()
        self.works, self.tensors, self.then = [], [], None


TIMED_OUT = re.compile(r"timed?[ -]?out|timeout", re.IGNORECASE)
CLOSED = re.compile(r"(closed|reset) by peer|connection refused|broken pipe|remote process|remoteError", re.IGNORECASE)


@contextlib.contextmanager
def failing(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Says in one sentence how communication failed: a rank that ended is another matter than one that did not come.
    What the backend said is the cause of the CommunicationError."""
    try:
        yield
    except (torch.OutOfMemoryError, SeqParError):
        raise
    except RuntimeError as error:
        raise CommunicationError(f"{what} {_reason(str(error), group)}") from error


def _reason(said: str, group: dist.ProcessGroup) -> str:
    if TIMED_OUT.search(said):
        return (
            f"timed out after {timeout(group).total_seconds():g} s: a rank did not take part in it; all ranks must, "
            "not only rank 0, and one that caught an error of its own cannot go on without the others"
        )
    if CLOSED.search(said):
        return "failed because another rank ended or gave up: see what that one says"
    return f"failed: {said.splitlines()[0] if said else 'without a reason'}"


AGREEMENT = 0x5EA9  # the tag of what `greatest` sends: in the group of all ranks users may send things of their own


def greatest(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The greatest of every rank's numbers[i], each of 63 bits, on all ranks of a group that carries CPU tensors.

    In log2(ranks) steps, where gloo's own reductions go round all ranks: in step s a rank tells the one 2^s further
    what it knows of the 2^s before it. That some are told of twice does not change a greatest number.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    known = torch.tensor(numbers, dtype=torch.int64)
    for far in (1 << step for step in range((size - 1).bit_length())):
        theirs = known.clone()
        receive = dist.irecv(theirs, group=group, group_src=(rank - far) % size, tag=AGREEMENT)
        send = dist.isend(known, group=group, group_dst=(rank + far) % size, tag=AGREEMENT)
        receive.wait()
        send.wait()
        known = torch.maximum(known, theirs)
    return known.tolist()


class TorchComm:
    """Over process groups (gloo or NCCL). received_bytes: all that arrived from other ranks."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.received: Counter = Counter()
        self.received_bytes = 0

    def _count(self, kind: str, tensors: Sequence[Tensor]) -> None:
        self.received[kind] += sum(tensor.numel() for tensor in tensors)
        self.received_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _count_others(self, ranks: tuple[int, ...], kind: str, received: Sequence[Tensor]) -> None:
        me = self.groups.inner_rank
        self._count(kind, [tensor for rank, tensor in zip(ranks, received, strict=True) if rank != me])

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        sent = [dataclasses.replace(m, tensor=m.tensor.contiguous()) for m in sends]
        ops = [
            dist.P2POp(op, m.tensor, group=self.groups.inner, tag=m.tag, group_peer=self.groups.inner_order[m.peer])
            for op, messages in ((dist.isend, sent), (dist.irecv, receives))
            for m in messages
        ]
        for message in receives:
            self._count(message.kind, [message.tensor])
        with failing("a transfer", self.groups.inner):
            works = dist.batch_isend_irecv(ops) if ops else []
        return _Works("a transfer", self.groups.inner, works, [m.tensor for m in (*sent, *receives)])

    def all_gather(self, ranks: tuple[int, ...], kind: str, tensor: Tensor, received: list[Tensor]) -> Handle:
        members = self.groups.members[ranks]
        tensor = tensor.contiguous()
        with failing("an all-gather", members.group):
            in_order = [received[ranks.index(rank)] for rank in members.order]
            work = dist.all_gather(in_order, tensor, group=members.group, async_op=True)
        self._count_others(ranks, kind, received)
        return _Works("an all-gather", members.group, [work], [tensor, *received])

    def all_to_all(self, ranks: tuple[int, ...], kind: str, sent: list[Tensor], received: list[Tensor]) -> Handle:
        members = self.groups.members[ranks]
        places = [ranks.index(rank) for rank in members.order]
        buffer = torch.cat([sent[place].flatten() for place in places])
        result = torch.empty(sum(x.numel() for x in received), dtype=buffer.dtype, device=buffer.device)
        sizes = [received[place].numel() for place in places]
        with failing("an all-to-all", members.group):
            work = dist.all_to_all_single(
                result, buffer, sizes, [sent[place].numel() for place in places], group=members.group, async_op=True
            )

        def unpack() -> None:
            for place, part in zip(places, result.split(sizes), strict=True):
                received[place].copy_(part.view_as(received[place]))

        self._count_others(ranks, kind, received)
        return _Works("an all-to-all", members.group, [work], [buffer, result], unpack)

    def exchange_heads(self, kind: str, buffer: Tensor) -> Tensor:
        result = torch.empty_like(buffer)
        with failing("the Ulysses all-to-all", self.groups.ulysses):
            dist.all_to_all_single(result, buffer.contiguous(), group=self.groups.ulysses)
        self._count(kind, [result[1:]])
        return result
