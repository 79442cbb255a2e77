"""Send and receive over torch.distributed, and count what is received. No other module calls isend and irecv."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ...base import profiling
from ...base.errors import CommunicationError, SeqParError
from .devices import communicator_device
from .groups import Groups

Group = dist.ProcessGroup | None  # None: this rank alone
Sizes = tuple[Sequence[int], Sequence[int]]  # elements sent to each member of a group, received from each
# (group rank, count): the message that is waited for needs the `count` ranks up to that one. None: unknown
Awaited = tuple[int, int] | None
Started = tuple[Any, Awaited]  # a work of torch's, and whose part in it is waited for


class Message(NamedTuple):
    """The bytes of one unit, sent to or received from another CP rank."""

    peer: int  # CP rank
    kind: str  # of the unit, for counting
    elements: int  # of the unit, for counting
    buffer: Tensor  # bytes
    tag: int  # the same on both ends


class Handle(Protocol):
    def wait(self) -> None: ...


class Comm(Protocol):
    """The transport of a walk."""

    received: Counter  # elements that arrived from other ranks, by kind
    # in plans with overlap, a receive is posted at least so many steps before its message is sent; see `compiler.lower`
    early: int

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        """Start all messages. After the handle's wait, receive buffers are filled and send buffers may be reused."""
        ...

    def order(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the CP ranks in their order in a collective."""
        ...

    def all_gather(self, ranks: tuple[int, ...], kind: str, elements: int, sent: Tensor, received: Tensor) -> Handle:
        """Start an all-gather in which all ranks send the same number of bytes.

        Args:
            ranks: the CP ranks that take part.
            kind: kind of the units, for counting.
            elements: how many elements arrive from other ranks, for counting.
            sent: this rank's bytes.
            received: filled with the bytes of all ranks, in `order`.
        """
        ...

    def all_to_all(
        self, ranks: tuple[int, ...], kind: str, elements: int, sent: Tensor, received: Tensor, sizes: Sizes
    ) -> Handle:
        """Start an all-to-all of bytes.

        Args:
            ranks: the CP ranks that take part.
            kind: kind of the units, for counting.
            elements: how many elements arrive from other ranks, for counting.
            sent: the bytes for each rank, in `order`.
            received: filled with the bytes from each rank, in `order`.
            sizes: how many bytes are sent to, and received from, each rank.
        """
        ...

    def exchange(self, kind: str, sent: Tensor, received: Tensor, sizes: Sizes) -> Handle:
        """Start an all-to-all among the Ulysses ranks.

        Args:
            kind: kind of the units, for counting.
            sent: the first sizes[0][0] elements are sent to Ulysses rank 0, and so on.
            received: its first sizes[1][0] elements are filled by Ulysses rank 0, and so on.
            sizes: how many elements are sent to, and received from, each Ulysses rank.
        """
        ...

    def parts_of_all(self, x: Tensor, what: str, shares: bool = False) -> Tensor:
        """Return the x (n,) of each rank of the sequence as (ranks, n), in the same order on all ranks.

        Args:
            what: the operation, for errors.
            shares: whether each rank receives only its share of every x, (ranks, n / ranks), in that order.
        """
        ...


class Communication:
    """A context that raises a failed communication of ranks as a CommunicationError with the backend's reason.

    Args:
        what: what communicates; the subject of the sentence.
        group: the group that communicates; None for this rank alone.

    Attributes:
        awaited: the rank whose message is waited for.
    """

    def __init__(self, what: str, group: Group) -> None:
        self.what, self.group = what, group
        self.awaited: Awaited = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, SeqParError):
            raise CommunicationError(f"{self.what} {self.reason(str(error))}") from error

    def reason(self, message: str) -> str:
        """Return the rest of the sentence. message: the backend's."""
        return f"failed: {message.splitlines()[0] if message else 'without a reason'}"


class Works:
    """torch's works and their tensors, which are kept until `wait`: a dropped isend loses its message.

    NCCL sends on its own stream, after all work that was queued on the current stream before the post. In `wait` the
    current stream waits for NCCL, and the host does not. So the tensors must not be used between post and wait. While
    this object refers to them, their memory is not reused.

    Args:
        communication: the context in which they are started and waited for.
        works: one for each message, receives first, or one for all messages, in the order of waiting; each with the
            rank that is waited for.
        tensors: the tensors that are sent and received.

    Attributes:
        batch: the works of messages that run as one operation; after the wait they do not refer to tensors.
    """

    batch: list[Any] | None = None

    def __init__(self, communication: Communication, works: list[Started], tensors: list[Tensor]) -> None:
        self.communication, self.works, self.tensors = communication, works, tensors

    def wait(self) -> None:
        with self.communication as communication:
            for work, communication.awaited in self.works:
                work.wait()
        self.works, self.tensors = [], []


ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it


def send(x: Tensor, group: Group, peer: int, tag: int) -> Any:
    """Start sending a tensor to a rank of the group, and return torch's work."""
    return dist.isend(x, group=group, group_dst=peer, tag=tag)


def receive(x: Tensor, group: Group, peer: int, tag: int) -> Any:
    """Start receiving a tensor from a rank of the group, and return torch's work."""
    return dist.irecv(x, group=group, group_src=peer, tag=tag)


def _one_by_one(
    sends: Sequence[Message], receives: Sequence[Message], group: Group, peers: tuple[int, ...], first_tag: int
) -> list[Started]:
    return [
        (start(m.buffer, group, peers[m.peer], m.tag ^ first_tag), (peers[m.peer], 1))
        for start, messages in ((receive, receives), (send, sends))
        for m in messages
    ]


def _batched(
    sends: Sequence[Message], receives: Sequence[Message], group: Group, peers: tuple[int, ...], first_tag: int
) -> list[Started]:
    """Post messages as one batch, as NCCL requires: otherwise two ranks that both send first wait for each other."""
    ops = [
        dist.P2POp(op, m.buffer, group=group, tag=m.tag, group_peer=peers[m.peer])
        for op, messages in ((dist.irecv, receives), (dist.isend, sends))
        for m in messages
    ]
    return [(work, None) for work in dist.batch_isend_irecv(ops)] if ops else []


EXCHANGE_TAG = 0x6EA9  # the tag of `_all_to_all_over_gloo`, far from a program's tags
EARLY_OVER_GLOO = 1  # steps; see `Comm.early`
# of a Ulysses exchange, before its first message has arrived; by benchmarks.cluster.attention at 20 Mbit/s
SENDS_AHEAD = 3


def _all_to_all_over_gloo(
    received: Sequence[Tensor], sent: Sequence[Tensor], group: Group, ahead: int | None = None
) -> list[Started]:
    """Start an all-to-all that posts all receives before the first send; gloo's own all-to-all mixes both.

    A rank sends first to the next rank, then to the one after it, so that no two ranks begin with the same receiver.

    Args:
        received: for each rank of the group, the tensor that it fills; empty ones are not received.
        sent: for each rank of the group, this one included, the tensor that is sent to it; empty ones are not sent.
        group: the group.
        ahead: how many sends are posted at once. Each further send waits for the next message to arrive. So a link
            carries few messages at a time, and sending and receiving overlap. None: all sends are posted at once.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)  # distance: from a rank to a peer
    receives: dict[int, Any] = {
        distance: receive(received[rank - distance], group, (rank - distance) % size, EXCHANGE_TAG)
        for distance in range(1, size)
        if received[rank - distance].numel()
    }
    sends: list[Started] = []
    for distance in range(1, size):
        if ahead is not None and distance - ahead in receives:
            receives.pop(distance - ahead).wait()  # never twice: gloo would wait for another message
        peer = (rank + distance) % size
        if sent[peer].numel():
            sends.append((send(sent[peer], group, peer, EXCHANGE_TAG), (peer, 1)))
    received[rank].copy_(sent[rank])
    return [*((work, ((rank - distance) % size, 1)) for distance, work in receives.items()), *sends]


def _all_gather(received: Tensor, sent: Tensor, group: Group) -> list[Started]:
    """Start an all-gather. Over gloo each rank sends to all ranks, since gloo's own all-gather is a ring that waits at
    every step.
    """
    if sent.device.type != "cpu":
        return [(ALL_GATHER(received, sent, group=group, async_op=True), None)]
    parts = received.view(dist.get_world_size(group), sent.numel()).unbind()
    return _all_to_all_over_gloo(parts, [sent] * len(parts), group)


def _all_to_all(received: Tensor, sent: Tensor, sizes: Sizes, group: Group, ahead: int | None = None) -> list[Started]:
    """Start an all-to-all. sizes: of the parts of `sent` and `received`. Other arguments: as for
    `_all_to_all_over_gloo`.
    """
    outgoing, incoming = map(list, sizes)
    if sent.device.type != "cpu":
        return [(dist.all_to_all_single(received, sent, incoming, outgoing, group=group, async_op=True), None)]
    return _all_to_all_over_gloo(received.split(incoming), sent.split(outgoing), group, ahead)


PAIRS = 16  # members of a group of which every pair is connected when it is made; buffers of a pair take memory


def connected_to(rank: int, size: int) -> list[int]:
    """Return the members of a group that a member connects to at once: all, or its neighbors and the opposite ones."""
    distances = range(1, size) if size <= PAIRS else (1, size // 2, -(-size // 2), size - 1)
    return sorted({(rank + distance) % size for distance in distances})


def connect(group: Group, communication: type[Communication]) -> None:
    """Let members of a group with communicators on devices send one another a byte, both ways in one batch.

    NCCL connects two members at their first message, and the host waits. Members half a group apart connect both ways
    at once; the batch must contain both ways on both members.
    """
    if group is None or (device := communicator_device(group)) is None:
        return
    size = dist.get_world_size(group)
    sends, receives = (
        [Message(peer, "", 0, torch.zeros(1, dtype=torch.uint8, device=device), 0) for peer in peers]
        for peers in [connected_to(dist.get_rank(group), size)] * 2
    )
    works = _batched(sends, receives, group, tuple(range(size)), 0)
    Works(communication("connecting ranks", group), works, []).wait()


class TorchComm:
    """The transport over process groups (gloo or NCCL).

    Args:
        groups: this rank's.
        communication: the context of each communication, which may report waits and explain failures.
    """

    first_tag = 0  # of messages

    def __init__(self, groups: Groups, communication: type[Communication] = Communication) -> None:
        self.groups, self.communication = groups, communication
        self.early = EARLY_OVER_GLOO if groups.inner is not None and communicator_device(groups.inner) is None else 0
        self.received: Counter = Counter()
        self.received_bytes = 0  # all bytes that arrived from other ranks
        connect(groups.inner, communication)

    def _count(self, kind: str, elements: int, received: int) -> None:
        if elements:
            self.received[kind] += elements
        self.received_bytes += received

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        for message in receives:
            self._count(message.kind, message.elements, message.buffer.numel())
        inner, buffers = self.groups.inner, [m.buffer for m in (*sends, *receives)]
        start = _one_by_one if not buffers or buffers[0].device.type == "cpu" else _batched
        with self.communication("a transfer", inner) as transfer:
            works = start(sends, receives, inner, self.groups.cp_order, self.first_tag)
        handle = Works(transfer, works, buffers)
        if start is _batched:
            handle.batch = [work for work, _ in works]
        return handle

    def parts_of_all(self, x: Tensor, what: str, shares: bool = False) -> Tensor:
        group = self.groups.sp
        if group is None:
            return x[None]
        size = dist.get_world_size(group)
        gathered = x.new_empty(size, len(x) // size if shares else len(x))
        with profiling.span(what.removeprefix("the ")), self.communication(what, group) as gather:
            if shares:
                works = _all_to_all(gathered.view(-1), x, ([gathered.shape[1]] * size,) * 2, group)
            else:
                works = _all_gather(gathered.view(-1), x, group)
        Works(gather, works, [x, gathered]).wait()
        self._count("", 0, gathered[1:].nbytes)  # units of no plan, so no elements
        return gathered

    def exchange_with_all(self, what: str, kind: str, sent: Tensor, received: Tensor, sizes: Sizes) -> None:
        """Exchange elements with the ranks that share the sequence, under any plan, and wait.

        Args:
            what: the operation, for errors.
            kind: of the elements, for counting.
            sent, received, sizes: as for `exchange`, in the order of the group of all ranks.
        """
        group, (outgoing, incoming), width = self.groups.sp, sizes, sent.element_size()
        in_bytes = tuple(width * x for x in outgoing), tuple(width * x for x in incoming)
        sent, received = sent.view(torch.uint8), received.view(torch.uint8)
        with self.communication(what, group) as exchange:
            works = _all_to_all(received, sent, in_bytes, group)
        Works(exchange, works, [sent, received]).wait()
        others = sum(incoming) - incoming[dist.get_rank(group)]
        self._count(kind, others, others * width)

    def order(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return self.groups.collectives[ranks].order

    def all_gather(self, ranks: tuple[int, ...], kind: str, elements: int, sent: Tensor, received: Tensor) -> Handle:
        group = self.groups.collectives[ranks].group
        with self.communication("an all-gather", group) as collective:
            works = _all_gather(received, sent, group)
        self._count(kind, elements, received.numel() - sent.numel())
        return Works(collective, works, [sent, received])

    def all_to_all(
        self, ranks: tuple[int, ...], kind: str, elements: int, sent: Tensor, received: Tensor, sizes: Sizes
    ) -> Handle:
        group = self.groups.collectives[ranks].group
        with self.communication("an all-to-all", group) as collective:
            works = _all_to_all(received, sent, sizes, group)
        self._count(kind, elements, received.numel())
        return Works(collective, works, [sent, received])

    def exchange(self, kind: str, sent: Tensor, received: Tensor, sizes: Sizes) -> Handle:
        group, incoming = self.groups.ulysses, sizes[1]
        with self.communication("the Ulysses all-to-all", group) as collective:
            works = _all_to_all(received, sent, sizes, group, SENDS_AHEAD)
        others = sum(incoming) - incoming[dist.get_rank(group)]
        self._count(kind, others, others * received.element_size())
        return Works(collective, works, [sent, received])


class OneRing(TorchComm):
    """The transport of a schedule that runs on all ranks of the sequence, next to the configured one. It does not have
    its own groups and counts.
    """

    first_tag = 0x7800  # it may send in the group of all ranks; no tag is that of an agreement or an exchange

    def __init__(self, comm: TorchComm) -> None:
        self.comm, self.communication, self.received = comm, comm.communication, comm.received
        self.early = 0
        if self.groups.made:  # at the first look, for which all ranks are here
            connect(self.groups.inner, self.communication)

    @property
    def groups(self) -> Groups:  # type: ignore[override]
        return self.comm.groups.one_ring

    def _count(self, kind: str, elements: int, received: int) -> None:
        self.comm._count(kind, elements, received)
