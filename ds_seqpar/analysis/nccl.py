"""Prove that the programs of all ranks complete under NCCL's rules, and that every message reaches its receiver.

NCCL has no tags. Between two ranks of a communicator, the n-th send is matched with the n-th receive. Messages that are
posted together run as one operation, which ends when all its messages have ended. A communicator runs operations one
after another, in the order in which the rank started them.

Two ranks connect when they first exchange data. If two ranks are half of a communicator apart, the distance is the same
in both directions. For two such ranks, NCCL connects both directions at once if the first batch contains both a send
and a receive. Therefore, the first batches of these two ranks must either both contain a send and a receive, or neither
may.

The proof assumes that all communicators of a rank share one stream, so that operations of different communicators also
run one after another. Programs that complete on one stream also complete with one stream per communicator, since no
operation then starts later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..base.errors import MOST_SHOWN, PlanError, ranks_in_words
from ..core.compiler.program import instructions as op
from ..core.compiler.program.instructions import Program, Transfer, label_of

MESSAGES = "cp_rank"  # the communicators for point-to-point messages
BETWEEN = "a collective of all ranks, such as ZeRO's gathers"


class Channel(NamedTuple):
    """Messages from one rank to another through one communicator. The n-th send is matched with the n-th receive."""

    communicator: tuple
    source: int
    target: int


class Operation(NamedTuple):
    """Messages that NCCL runs as one operation."""

    words: str
    sends: tuple[tuple[Channel, Any], ...]  # (channel, content of the message), in the order of posting
    receives: tuple[tuple[Channel, Any], ...]


def check(calls: Sequence[Sequence[Program]], ulysses_size: int = 1) -> None:
    """Check that the programs of all ranks complete under NCCL's rules.

    Args:
        calls: The attention calls in order, with forward and backward for each layer. Each call is a list with the
            programs of all ranks that share a sequence, indexed by Ulysses rank + ulysses_size * CP rank. Between two
            calls, all ranks join a collective, such as a ZeRO gather.
        ulysses_size: Number of ranks in a Ulysses group.

    Raises:
        PlanError: A rank would wait forever, or would receive a different message than it expects.
    """
    count = len(calls[0])
    queues: list[list[Operation]] = [[] for _ in range(count)]
    for number, programs in enumerate(calls):
        for rank, (queue, program) in enumerate(zip(queues, programs, strict=True)):
            if number:
                queue.append(_collective(BETWEEN, "world", rank, range(count), (BETWEEN, number)))
            queue.extend(_operations(program, rank, ulysses_size))
    _run(queues, _partners(queues))
    _check_connections(queues, ulysses_size)


def _operations(program: Program, rank: int, ulysses_size: int) -> Iterable[Operation]:
    ulysses_rank, cp_rank = rank % ulysses_size, rank // ulysses_size
    peers = range(ulysses_rank, ulysses_size * program.size, ulysses_size)  # CP rank -> rank
    for instruction in program.code:
        match instruction:
            case op.Post():
                sends, receives = (
                    [(peers[transfer.peer], _content(program, transfer)) for transfer in transfers]
                    for transfers in (instruction.sends, instruction.receives)
                )
                with_ranks = sorted({peer for peer, _ in sends + receives})
                yield Operation(
                    f"step {instruction.step}: messages with ranks {with_ranks}",
                    tuple((Channel((MESSAGES, ulysses_rank), rank, peer), content) for peer, content in sends),
                    tuple((Channel((MESSAGES, ulysses_rank), peer, rank), content) for peer, content in receives),
                )
            case op.GatherStart() | op.ScatterStart():
                ranks = [peers[peer] for peer in instruction.ranks]
                head_chunk = program.slots[instruction.received].head_chunk
                content = type(instruction), instruction.collective, head_chunk
                yield _collective(f"step {instruction.step}: {label_of(instruction)}", "axis", rank, ranks, content)
            case op.ExchangeStart():
                ranks = [ulysses_size * cp_rank + peer for peer in instruction.ranks]
                text = f"step {instruction.step}: {label_of(instruction)}"
                yield _collective(text, "ulysses", rank, ranks, instruction.exchange)


def _content(program: Program, transfer: Transfer) -> tuple:
    return transfer.unit, program.slots[transfer.slot].head_chunk, transfer.tag


def _collective(text: str, purpose: str, rank: int, ranks: Iterable[int], content: Any) -> Operation:
    """Represent a collective as messages among all participating ranks through a separate communicator."""
    communicator = purpose, *ranks
    others = [peer for peer in ranks if peer != rank]
    return Operation(
        text,
        tuple((Channel(communicator, rank, peer), content) for peer in others),
        tuple((Channel(communicator, peer, rank), content) for peer in others),
    )


def _partners(queues: list[list[Operation]]) -> list[list[set[tuple[int, int]]]]:
    """Return the operations on other ranks that must run at the same time as each operation.

    A partner is a pair (rank, index in the rank's queue).
    """
    ends: dict[Channel, tuple[list, list]] = defaultdict(lambda: ([], []))
    for rank, queue in enumerate(queues):
        for index, operation in enumerate(queue):
            for side, messages in enumerate((operation.sends, operation.receives)):
                for channel, content in messages:
                    ends[channel][side].append((rank, index, content))
    partners: list[list[set[tuple[int, int]]]] = [[set() for _ in queue] for queue in queues]
    for channel, (sent, received) in ends.items():
        if len(sent) != len(received):
            raise PlanError(
                f"NCCL would wait for ever: rank {channel.source} sends {len(sent)} messages to rank {channel.target}, "
                f"which receives {len(received)}"
            )
        for number, ((a, i, sent_content), (b, j, expected_content)) in enumerate(zip(sent, received, strict=True)):
            if sent_content != expected_content:
                raise PlanError(
                    f"NCCL knows no tags: message {number} from rank {channel.source} to rank {channel.target} is "
                    f"{sent_content} in {queues[a][i].words}, "
                    f"and {expected_content} is asked for in {queues[b][j].words}"
                )
            partners[a][i].add((b, j))
            partners[b][j].add((a, i))
    return partners


def _run(queues: list[list[Operation]], partners: list[list[set[tuple[int, int]]]]) -> None:
    """Run all queues.

    An operation ends when all its partners have started. Raise PlanError if some operations never end.
    """
    at = [0] * len(queues)
    waiting: dict[int, set[int]] = defaultdict(set)  # by rank, the ranks that are waiting for it

    def awaited(rank: int) -> set[int]:
        """Return the ranks that a rank's current operation waits for."""
        return {peer for peer, index in partners[rank][at[rank]] if at[peer] < index}

    runnable = list(range(len(queues)))
    while runnable:
        rank = runnable.pop()
        while at[rank] < len(queues[rank]):
            if peers := awaited(rank):
                for peer in peers:
                    waiting[peer].add(rank)
                break
            at[rank] += 1
            runnable += waiting.pop(rank, ())
    stuck = [rank for rank, queue in enumerate(queues) if at[rank] < len(queue)]
    if stuck:
        texts = [f"rank {r} waits in {queues[r][at[r]].words} for {ranks_in_words(sorted(awaited(r)))}" for r in stuck]
        raise PlanError(f"NCCL would wait for ever: {', '.join(texts[:MOST_SHOWN])}")


def _check_connections(queues: list[list[Operation]], ulysses_size: int) -> None:
    """Raise PlanError if two ranks half a communicator apart disagree on connecting both directions at once."""
    first: dict[tuple[int, int, bool], int] = {}  # index of the operation, by (rank, peer, whether rank sends)
    for rank, queue in enumerate(queues):
        for index, operation in enumerate(queue):
            for channel, _ in (*operation.sends, *operation.receives):
                if channel.communicator[0] == MESSAGES:
                    sends = channel.source == rank
                    first.setdefault((rank, channel.target if sends else channel.source, sends), index)
    half, rest = divmod(len(queues) // ulysses_size, 2)
    for a in range(0 if rest else half * ulysses_size):
        b = a + half * ulysses_size
        at_once = [first.get((x, y, True), -1) == first.get((x, y, False), -2) for x, y in ((a, b), (b, a))]
        if at_once[0] != at_once[1]:
            x, y = (a, b) if at_once[0] else (b, a)
            raise PlanError(
                f"NCCL would connect ranks wrongly: rank {x} first sends to rank {y} and receives from it in one batch "
                f"and rank {y} has two for rank {x}; both must have one, or both two"
            )
