"""Executes transfers over torch.distributed, and counts what it receives. The only caller of isend and irecv."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CommunicationError, SeqParError
from .devices import accelerated
from .groups import Groups, timeout

Group = dist.ProcessGroup | None  # None: of this rank alone
Sizes = tuple[Sequence[int], Sequence[int]]  # elements that go to every member of a group, and that come from each


class Message(NamedTuple):
    """The bytes of one unit, to or from `peer` (an inner rank). kind: what it is, and elements: how many, for counting.
    tag: the same on both ends."""

    peer: int
    kind: str
    elements: int
    buffer: Tensor
    tag: int


class Handle(Protocol):
    def wait(self) -> None: ...


class Comm(Protocol):
    """What a program is walked over. received: elements that arrived from other ranks, by kind. early: steps before a
    message leaves in which it is asked for, at the latest, of plans with overlap: see `compiler.lower`."""

    received: Counter
    early: int

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        """Starts all of them; after the handle's wait the receives' buffers are filled and the sends' free."""
        ...

    def order(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The same inner ranks in the order in which a collective has them."""
        ...

    def all_gather(self, ranks: tuple[int, ...], sent: Message, received: Tensor) -> Handle:
        """Every one of the ranks gives as many bytes; they arrive in `order`. sent.elements: of one of them."""
        ...

    def all_to_all(
        self, ranks: tuple[int, ...], kind: str, elements: int, sent: Tensor, received: Tensor, sizes: Sizes
    ) -> Handle:
        """Bytes (so many) for each of the ranks, and from each, in `order`. elements: that arrive from others."""
        ...

    def exchange(self, kind: str, sent: Tensor, received: Tensor, sizes: Sizes) -> Handle:
        """An all-to-all among Ulysses' members: the first sizes[0][0] elements of sent go to member 0, and so on; the
        first sizes[1][0] of received come from it."""
        ...


class Works:
    """Owns works and tensors until they are done: a dropped isend loses its message. works: of each message, those that
    arrive first, or one of all; they are waited for in this order.

    NCCL works on a stream of its own, which begins after all that the current stream was given before the post. In
    `wait` the current stream waits for it, and the host does not. So between the two nobody may touch the tensors, and
    their memory may go to nobody else, which holding them here sees to.
    """

    def __init__(self, what: str, group: Group, works: list, tensors: list[Tensor]) -> None:
        self.what, self.group, self.works, self.tensors = what, group, works, tensors

    def wait(self) -> None:
        with failing(self.what, self.group):
            for work in self.works:
                work.wait()
        self.works, self.tensors = [], []


ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it
TIMED_OUT = re.compile(r"timed?[ -]?out|timeout", re.IGNORECASE)
CLOSED = re.compile(r"(closed|reset) by peer|connection refused|broken pipe|remote process|remoteError", re.IGNORECASE)


class failing:  # no generator: at every transfer that would be felt
    """Says in one sentence how communication failed: a rank that ended is another matter than one that did not come.
    What the backend said is the cause of the CommunicationError."""

    def __init__(self, what: str, group: Group) -> None:
        self.what, self.group = what, group

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError | SeqParError):
            raise CommunicationError(f"{self.what} {_reason(str(error), self.group)}") from error


def _reason(said: str, group: Group) -> str:
    if TIMED_OUT.search(said):
        return (
            f"timed out after {timeout(group).total_seconds():g} s: a rank did not take part in it; all ranks must, "
            "not only rank 0, and one that caught an error of its own cannot go on without the others"
        )
    if CLOSED.search(said):
        return "failed because another rank ended or gave up: see what that one says"
    return f"failed: {said.splitlines()[0] if said else 'without a reason'}"


AGREEMENT = 0x5EA9  # the first tag of what `greatest` sends: in the group of all ranks users may send things too


def greatest(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The greatest of every rank's numbers[i], each of 63 bits, on all ranks of a group that carries CPU tensors.

    It takes log4(ranks) steps, where gloo's own reductions go round all ranks. In step s a rank tells the ranks 1, 2
    and 3 times 4^s further what it knows of the 4^s before it. That some are told of twice does not change a greatest
    number. Every step's numbers have their places from the start: no peer waits until this rank asks for its numbers.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    known, steps = torch.tensor(numbers, dtype=torch.int64, device="cpu"), distances(size)
    places = [[torch.empty_like(known) for _ in step] for step in steps]
    arriving = [
        [
            dist.irecv(place, group=group, group_src=(rank - far) % size, tag=AGREEMENT + index)
            for place, far in zip(theirs, step, strict=True)
        ]
        for index, (theirs, step) in enumerate(zip(places, steps, strict=True))
    ]
    for index, (theirs, step) in enumerate(zip(places, steps, strict=True)):
        leaving = [dist.isend(known, group=group, group_dst=(rank + far) % size, tag=AGREEMENT + index) for far in step]
        for work in (*arriving[index], *leaving):
            assert work is not None  # torch has none for ranks outside the group
            work.wait()
        known = torch.stack([known, *theirs]).amax(0)
    return known.tolist()


@functools.lru_cache(maxsize=64)
def distances(size: int) -> list[list[int]]:
    """Of every step of `greatest`, how far the ranks are that one tells."""
    found, reach = [], 1
    while reach < size:
        found.append([far for far in (reach, 2 * reach, 3 * reach) if far < size])
        reach *= 4
    return found


def _one_by_one(sends: Sequence[Message], receives: Sequence[Message], group: Group, peers: tuple[int, ...]) -> list:
    works = [dist.irecv(m.buffer, group=group, tag=m.tag, group_src=peers[m.peer]) for m in receives]
    return works + [dist.isend(m.buffer, group=group, tag=m.tag, group_dst=peers[m.peer]) for m in sends]


def _batched(sends: Sequence[Message], receives: Sequence[Message], group: Group, peers: tuple[int, ...]) -> list:
    """NCCL starts what is posted together as one, or ranks that both send first would wait for each other."""
    ops = [
        dist.P2POp(op, m.buffer, group=group, tag=m.tag, group_peer=peers[m.peer])
        for op, messages in ((dist.irecv, receives), (dist.isend, sends))
        for m in messages
    ]
    return dist.batch_isend_irecv(ops) if ops else []


EXCHANGE = 0x6EA9  # the tag of what `_told_first` sends: far from those of a program
EARLY = 1  # step, over gloo; see `Comm`
AHEAD = 3  # messages of a Ulysses exchange that leave before the first has come; docs/archive has others


def _told_first(coming: Sequence[Tensor], going: Sequence[Tensor], group: Group, ahead: int | None = None) -> list:
    """An all-to-all over gloo that asks for everything before anything leaves, where gloo's own mixes both; measured
    in docs/archive. coming, going: from and to each rank of the group, this one too; what is empty is not sent. The
    first to be sent to is the next rank, then the one after, so that no two begin with the same.

    ahead: of that many ranks in turn; then this waits, before each further one, for the next to arrive. A link then has
    few messages on it at a time, and none comes in while nothing goes out. None: all leave at once, and nothing waits.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    arriving: dict[int, Any] = {
        far: dist.irecv(coming[rank - far], group=group, group_src=(rank - far) % size, tag=EXCHANGE)
        for far in range(1, size)
        if coming[rank - far].numel()
    }
    leaving: list[Any] = []
    for far in range(1, size):
        if ahead is not None and far - ahead in arriving:
            arriving.pop(far - ahead).wait()  # never twice: gloo would wait for another message
        to = (rank + far) % size
        if going[to].numel():
            leaving.append(dist.isend(going[to], group=group, group_dst=to, tag=EXCHANGE))
    coming[rank].copy_(going[rank])
    return [*arriving.values(), *leaving]


def _gathered(received: Tensor, sent: Tensor, size: int, group: Group) -> list:
    """Over gloo everybody sends to all: its own all-gather goes round, and waits for a neighbour at every step."""
    if sent.device.type != "cpu":
        return [ALL_GATHER(received, sent, group=group, async_op=True)]
    return _told_first(received.split([sent.numel()] * size), [sent] * size, group)


def _traded(received: Tensor, sent: Tensor, sizes: Sizes, group: Group, ahead: int | None = None) -> list:
    """An all-to-all. ahead: as `_told_first` takes it."""
    outgoing, incoming = map(list, sizes)
    if sent.device.type != "cpu":
        return [dist.all_to_all_single(received, sent, incoming, outgoing, group=group, async_op=True)]
    return _told_first(received.split(incoming), sent.split(outgoing), group, ahead)


class TorchComm:
    """Over process groups (gloo or NCCL). received_bytes: all that arrived from other ranks."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.early = EARLY if groups.inner is not None and accelerated(groups.inner) is None else 0
        self.received: Counter = Counter()
        self.received_bytes = 0

    def _count(self, kind: str, elements: int, received: int) -> None:
        self.received[kind] += elements
        self.received_bytes += received

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        for message in receives:
            self._count(message.kind, message.elements, message.buffer.numel())
        inner, buffers = self.groups.inner, [m.buffer for m in (*sends, *receives)]
        start = _one_by_one if not buffers or buffers[0].device.type == "cpu" else _batched
        with failing("a transfer", inner):
            works = start(sends, receives, inner, self.groups.inner_order)
        return Works("a transfer", inner, works, buffers)

    def order(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return self.groups.members[ranks].order

    def all_gather(self, ranks: tuple[int, ...], sent: Message, received: Tensor) -> Handle:
        group = self.groups.members[ranks].group
        with failing("an all-gather", group):
            works = _gathered(received, sent.buffer, len(ranks), group)
        others = len(ranks) - 1
        self._count(sent.kind, others * sent.elements, others * sent.buffer.numel())
        return Works("an all-gather", group, works, [sent.buffer, received])

    def all_to_all(
        self, ranks: tuple[int, ...], kind: str, elements: int, sent: Tensor, received: Tensor, sizes: Sizes
    ) -> Handle:
        group = self.groups.members[ranks].group
        with failing("an all-to-all", group):
            works = _traded(received, sent, sizes, group)
        self._count(kind, elements, received.numel())
        return Works("an all-to-all", group, works, [sent, received])

    def exchange(self, kind: str, sent: Tensor, received: Tensor, sizes: Sizes) -> Handle:
        group, incoming = self.groups.ulysses, sizes[1]
        with failing("the Ulysses all-to-all", group):
            works = _traded(received, sent, sizes, group, AHEAD)
        others = sum(incoming) - incoming[dist.get_rank(group)]
        self._count(kind, others, others * received.element_size())
        return Works("the Ulysses all-to-all", group, works, [sent, received])
