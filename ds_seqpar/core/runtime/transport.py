"""Send and receive over torch.distributed, and count received elements. Only this module calls isend and irecv."""

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

Group = dist.ProcessGroup | None  # None: a group of only this rank
# number of elements sent to each group member, and number received from each
Sizes = tuple[Sequence[int], Sequence[int]]
# (group rank, count): the awaited message depends on `count` ranks, the last of which is this group rank. None: unknown
Awaited = tuple[int, int] | None
Started = tuple[Any, Awaited]  # torch's Work object, and the awaited ranks


class Message(NamedTuple):
    """The bytes of one unit, sent to or received from another CP rank."""

    peer: int  # CP rank
    kind: str  # kind of the unit, for counting
    elements: int  # number of elements in the unit, for counting
    buffer: Tensor  # bytes
    tag: int  # the same on both ends


class Handle(Protocol):
    def wait(self) -> None: ...


class Comm(Protocol):
    """The transport that a program uses during execution."""

    received: Counter  # number of elements received from other ranks, by kind
    # minimum number of steps by which receives are posted before their sends in plans with overlap; see
    # `compiler.lower`
    early: int

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        """Start all messages. When the returned handle's `wait` returns, all receives are complete and send buffers can
        be reused.
        """
        ...

    def order(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the CP ranks in the order that a collective uses."""
        ...

    def all_gather(self, ranks: tuple[int, ...], kind: str, elements: int, sent: Tensor, received: Tensor) -> Handle:
        """Start an all-gather in which all ranks send the same number of bytes.

        Args:
            ranks: CP ranks that take part.
            kind: Kind of the units, for counting.
            elements: Number of elements received from other ranks, for counting.
            sent: This rank's bytes.
            received: Buffer for the bytes from all ranks, in the rank order that `order` returns.
        """
        ...

    def all_to_all(
        self, ranks: tuple[int, ...], kind: str, elements: int, sent: Tensor, received: Tensor, sizes: Sizes
    ) -> Handle:
        """Start an all-to-all of bytes.

        Args:
            ranks: CP ranks that take part.
            kind: Kind of the units, for counting.
            elements: Number of elements received from other ranks, for counting.
            sent: Bytes for each rank, in the rank order that `order` returns.
            received: Buffer for the bytes from each rank, in the rank order that `order` returns.
            sizes: Number of bytes sent to each rank, and number received from each.
        """
        ...

    def exchange(self, kind: str, sent: Tensor, received: Tensor, sizes: Sizes) -> Handle:
        """Start an all-to-all among the Ulysses ranks.

        Args:
            kind: Kind of the units, for counting.
            sent: Elements to send. The first `sizes[0][0]` elements are for Ulysses rank 0, and so on.
            received: Buffer to fill. The first `sizes[1][0]` elements come from Ulysses rank 0, and so on.
            sizes: Number of elements sent to each Ulysses rank, and number received from each.
        """
        ...

    def parts_of_all(self, x: Tensor, what: str, shares: bool = False) -> Tensor:
        """Gather x (n,) from all ranks that share the sequence, and return (ranks, n) in the same order on all ranks.

        Args:
            what: Name of the operation in error messages.
            shares: Whether each rank receives only its share of every rank's x, as a tensor (ranks, n / ranks).
        """
        ...


class Communication:
    """A context manager that converts a communication failure to a CommunicationError with the backend's reason.

    Args:
        what: Name of the operation, used as the subject of error messages.
        group: The group that communicates; None for this rank alone.

    Attributes:
        awaited: The rank whose message this rank is waiting for.
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
        """Return the predicate of the error message, given the backend's `message`."""
        return f"failed: {message.splitlines()[0] if message else 'without a reason'}"


class Works:
    """torch's Work objects and their tensors, kept until `wait` because dropping an isend loses its message.

    NCCL sends on its own stream, after all work that was queued on the current stream before the post. In `wait`, the
    current stream waits for NCCL, but the host does not wait. The sent and received tensors must not be used between
    post and wait. While this object references the tensors, their memory is not reused.

    Args:
        communication: Context manager used to start the works and to wait for them.
        works: Pairs of a Work object and its awaited rank, in the order of the waits. There is one Work object per
            message (receives first), or one for all messages.
        tensors: The sent and received tensors.

    Attributes:
        batch: Work objects for messages that run as one operation. After the wait, the Work objects no longer reference
            tensors.
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
    """Start sending a tensor to a rank of the group, and return torch's Work object."""
    return dist.isend(x, group=group, group_dst=peer, tag=tag)


def receive(x: Tensor, group: Group, peer: int, tag: int) -> Any:
    """Start receiving a tensor from a rank of the group, and return torch's Work object."""
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
    """Post messages as one batch. NCCL requires a batch, because two ranks that both send first would wait for each
    other.
    """
    ops = [
        dist.P2POp(op, m.buffer, group=group, tag=m.tag, group_peer=peers[m.peer])
        for op, messages in ((dist.irecv, receives), (dist.isend, sends))
        for m in messages
    ]
    return [(work, None) for work in dist.batch_isend_irecv(ops)] if ops else []


EXCHANGE_TAG = 0x6EA9  # tag of messages in `_all_to_all_over_gloo`, outside the range of program tags
EARLY_OVER_GLOO = 1  # number of steps; see `Comm.early`
# sends of a Ulysses exchange posted before its first message arrives; chosen with benchmarks.cluster.attention at 20
# Mbit/s
SENDS_AHEAD = 3


def _all_to_all_over_gloo(
    received: Sequence[Tensor], sent: Sequence[Tensor], group: Group, ahead: int | None = None
) -> list[Started]:
    """Start an all-to-all that, unlike gloo's own, posts all receives before the first send.

    Each rank sends to the next rank first, then to the rank after that, so that no two ranks start with the same
    receiver.

    Args:
        received: For each rank of the group, the tensor to fill; empty tensors are not received.
        sent: For each rank of the group (including this rank), the tensor to send; empty tensors are not sent.
        group: The group.
        ahead: Number of sends posted immediately. Each further send waits for the next message to arrive, so that a
            link carries few messages at a time and sending overlaps with receiving. If None, all sends are posted
            immediately.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)  # distance: peer minus rank
    receives: dict[int, Any] = {
        distance: receive(received[rank - distance], group, (rank - distance) % size, EXCHANGE_TAG)
        for distance in range(1, size)
        if received[rank - distance].numel()
    }
    sends: list[Started] = []
    for distance in range(1, size):
        if ahead is not None and distance - ahead in receives:
            receives.pop(distance - ahead).wait()  # pop, because in a second wait, gloo would wait for another message
        peer = (rank + distance) % size
        if sent[peer].numel():
            sends.append((send(sent[peer], group, peer, EXCHANGE_TAG), (peer, 1)))
    received[rank].copy_(sent[rank])
    return [*((work, ((rank - distance) % size, 1)) for distance, work in receives.items()), *sends]


def _all_gather(received: Tensor, sent: Tensor, group: Group) -> list[Started]:
    """Start an all-gather. With gloo, each rank sends to all other ranks.

    gloo's own all-gather is a ring that waits in every step.
    """
    if sent.device.type != "cpu":
        return [(ALL_GATHER(received, sent, group=group, async_op=True), None)]
    parts = received.view(dist.get_world_size(group), sent.numel()).unbind()
    return _all_to_all_over_gloo(parts, [sent] * len(parts), group)


def _all_to_all(received: Tensor, sent: Tensor, sizes: Sizes, group: Group, ahead: int | None = None) -> list[Started]:
    """Start an all-to-all. `sizes` contains the sizes of the parts in `sent` and in `received`.

    `group` and `ahead` have the same meaning as in `_all_to_all_over_gloo`.
    """
    outgoing, incoming = map(list, sizes)
    if sent.device.type != "cpu":
        return [(dist.all_to_all_single(received, sent, incoming, outgoing, group=group, async_op=True), None)]
    return _all_to_all_over_gloo(received.split(incoming), sent.split(outgoing), group, ahead)


PAIRS = 16  # maximum group size for connecting every pair up front, since each connected pair needs memory for buffers


def connected_to(rank: int, size: int) -> list[int]:
    """Return the group members that a member connects to up front.

    In large groups, a member connects up front only to its neighbors and to members half a group away. In small groups,
    all members are connected up front.
    """
    distances = range(1, size) if size <= PAIRS else (1, size // 2, -(-size // 2), size - 1)
    return sorted({(rank + distance) % size for distance in distances})


def connect(group: Group, communication: type[Communication]) -> None:
    """Connect the members of a group with device communicators by exchanging one byte in both directions, in a single
    batch.

    NCCL connects two members when they first exchange a message, and the host waits for the connection. Members half a
    group apart connect in both directions at once, so the batch must contain both directions on both members.
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
    """The transport that uses process groups (gloo or NCCL).

    Args:
        groups: This rank's groups.
        communication: Context manager class used for each communication. The class may report waits and explain
            failures.
    """

    first_tag = 0  # XORed with each message's tag when gloo is used

    def __init__(self, groups: Groups, communication: type[Communication] = Communication) -> None:
        self.groups, self.communication = groups, communication
        self.early = EARLY_OVER_GLOO if groups.inner is not None and communicator_device(groups.inner) is None else 0
        self.received: Counter = Counter()
        self.received_bytes = 0  # total bytes received from other ranks
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
        self._count("", 0, gathered[1:].nbytes)  # not part of a plan, so no elements are counted
        return gathered

    def exchange_with_all(self, what: str, kind: str, sent: Tensor, received: Tensor, sizes: Sizes) -> None:
        """Exchange elements with all ranks that share the sequence, independently of any plan, and wait for the result.

        Args:
            what: Name of the operation in error messages.
            kind: Kind of the elements, for counting.
            sent, received, sizes: As in `exchange`, but in the order of the group of all ranks.
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
    """The transport for a second schedule, which runs on all ranks that share the sequence.

    `OneRing` takes its groups from the configured transport, and shares that transport's counts.
    """

    # this transport may use the group of all ranks, so it avoids the tags of agreements and exchanges
    first_tag = 0x7800

    def __init__(self, comm: TorchComm) -> None:
        self.comm, self.communication, self.received = comm, comm.communication, comm.received
        self.early = 0
        if self.groups.made:  # the first access, which is collective
            connect(self.groups.inner, self.communication)

    @property
    def groups(self) -> Groups:  # type: ignore[override]
        return self.comm.groups.one_ring

    def _count(self, kind: str, elements: int, received: int) -> None:
        self.comm._count(kind, elements, received)
