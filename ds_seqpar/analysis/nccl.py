"""Proves that the programs of all ranks end under NCCL's rules, and that every message meets its own receiver.

The rules. NCCL knows no tags: between two ranks of a communicator the first send meets the first receive, the second
the second. What is posted together runs as one operation, which ends when all of its messages have. The operations of a
communicator run in the order in which a rank started them, each after the last has ended.

Here all communicators of a rank share one stream, so that the same holds for all of its operations together. With a
stream for each communicator an operation begins no later, so what ends here ends there.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..compiler.program import instructions as op
from ..compiler.program.instructions import Program, Transfer
from ..errors import PlanError

BETWEEN = "a collective of all ranks, such as ZeRO's gathers"


class Channel(NamedTuple):
    """Messages from one rank to another through one communicator: the n-th send meets the n-th receive."""

    communicator: tuple
    source: int
    target: int


class Operation(NamedTuple):
    """What NCCL runs as one. sends, receives: (channel, content of the message) in the order of posting."""

    words: str
    sends: tuple[tuple[Channel, Any], ...]
    receives: tuple[tuple[Channel, Any], ...]


def check(calls: Sequence[Sequence[Program]], ulysses_size: int = 1) -> None:
    """Raises PlanError where a rank would wait for ever, or would receive another message than it asked for.

    calls: the calls of attention in order, forward and backward of each layer. Each is the programs of all ranks that
    share a sequence, by rank = Ulysses rank + Ulysses ranks * CP rank. ulysses_size: of a Ulysses group. Between two
    calls all ranks meet in a collective, as in the gathers of ZeRO.
    """
    count = len(calls[0])
    queues: list[list[Operation]] = [[] for _ in range(count)]
    for number, programs in enumerate(calls):
        for rank, (queue, program) in enumerate(zip(queues, programs, strict=True)):
            if number:
                queue.append(_together(BETWEEN, ("world",), rank, range(count), (BETWEEN, number)))
            queue.extend(_operations(program, rank, ulysses_size))
    _run(queues, _partners(queues))


def _operations(program: Program, rank: int, ulysses_size: int) -> Iterable[Operation]:
    ulysses_rank, cp_rank = rank % ulysses_size, rank // ulysses_size
    peers = range(ulysses_rank, ulysses_size * program.size, ulysses_size)  # CP rank -> rank
    for one in program.code:
        words = f"step {one.step}"
        if isinstance(one, op.Post):
            where = "cp_rank", ulysses_rank
            yield Operation(
                f"{words}: messages with ranks {sorted({peers[t.peer] for t in (*one.sends, *one.receives)})}",
                tuple((Channel(where, rank, peers[t.peer]), _content(program, t)) for t in one.sends),
                tuple((Channel(where, peers[t.peer], rank), _content(program, t)) for t in one.receives),
            )
        elif isinstance(one, op.GatherStart | op.ScatterStart):
            ranks, head_chunk = [peers[peer] for peer in one.ranks], program.slots[one.received].head_chunk
            yield _together(
                f"{words}: {one.label}", ("axis", *ranks), rank, ranks, (type(one), one.collective, head_chunk)
            )
        elif isinstance(one, op.ExchangeStart):
            ranks = [ulysses_size * cp_rank + peer for peer in one.ranks]
            yield _together(f"{words}: {one.label}", ("ulysses", *ranks), rank, ranks, one.exchange)


def _content(program: Program, transfer: Transfer) -> tuple:
    return transfer.unit, program.slots[transfer.slot].head_chunk, transfer.tag


def _together(words: str, communicator: tuple, rank: int, ranks: Iterable[int], what: Any) -> Operation:
    """A collective, as messages among all that take part."""
    others = [peer for peer in ranks if peer != rank]
    return Operation(
        words,
        tuple((Channel(communicator, rank, peer), what) for peer in others),
        tuple((Channel(communicator, peer, rank), what) for peer in others),
    )


def _partners(queues: list[list[Operation]]) -> list[list[set[tuple[int, int]]]]:
    """For each operation, the operations of other ranks that must run while it does, as (rank, index in its queue)."""
    ends: dict[Channel, tuple[list, list]] = defaultdict(lambda: ([], []))
    for rank, queue in enumerate(queues):
        for index, one in enumerate(queue):
            for side, messages in enumerate((one.sends, one.receives)):
                for channel, content in messages:
                    ends[channel][side].append((rank, index, content))
    partners: list[list[set[tuple[int, int]]]] = [[set() for _ in queue] for queue in queues]
    for channel, (sent, received) in ends.items():
        if len(sent) != len(received):
            raise PlanError(
                f"NCCL would wait for ever: rank {channel.source} sends {len(sent)} messages to rank {channel.target}, "
                f"which receives {len(received)}"
            )
        for number, ((a, i, given), (b, j, asked)) in enumerate(zip(sent, received, strict=True)):
            if given != asked:
                raise PlanError(
                    f"NCCL knows no tags: message {number} from rank {channel.source} to rank {channel.target} is "
                    f"{given} in {queues[a][i].words}, and {asked} is asked for in {queues[b][j].words}"
                )
            partners[a][i].add((b, j))
            partners[b][j].add((a, i))
    return partners


def _run(queues: list[list[Operation]], partners: list[list[set[tuple[int, int]]]]) -> None:
    """Runs all queues: an operation ends when the operations that must run while it does have begun. Raises PlanError
    where some never do."""
    at = [0] * len(queues)
    waiting: dict[int, set[int]] = defaultdict(set)  # rank -> the ranks that wait for it
    open_ranks = list(range(len(queues)))
    while open_ranks:
        rank = open_ranks.pop()
        while at[rank] < len(queues[rank]):
            missing = {peer for peer, index in partners[rank][at[rank]] if at[peer] < index}
            for peer in missing:
                waiting[peer].add(rank)
            if missing:
                break
            at[rank] += 1
            open_ranks += waiting.pop(rank, ())
    stuck = [rank for rank, queue in enumerate(queues) if at[rank] < len(queue)]
    if stuck:
        raise PlanError(f"NCCL would wait for ever: {_circle(stuck[0], queues, partners, at)}")


def _circle(rank: int, queues: list[list[Operation]], partners: list[list[set[tuple[int, int]]]], at: list[int]) -> str:
    """Who waits for whom, round to the first of them again."""
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = min(peer for peer, index in partners[rank][at[rank]] if at[peer] < index)
    circle = [*seen[seen.index(rank) :], rank]
    return ", ".join(
        f"rank {one} waits in {queues[one][at[one]].words} for rank {other}"
        for one, other in itertools.pairwise(circle)
    )
