"""Ulysses head exchanges and head chunks, as instructions around the CP ranks' programs.

Neighboring ranks (the Ulysses ranks) exchange tokens for heads in an all-to-all (DeepSpeed Ulysses, Jacobs et al.,
2023). Each Ulysses rank then has all tokens of its group, but only its share of the heads. A head chunk is a subset of
the heads. Computing one head chunk at a time avoids holding the inner tensors of all heads in memory at once (Untied
Ulysses).

The forward pass exchanges q, k and v on the way in, and out (plus lse, if requested) on the way out. On the way in, the
backward pass exchanges `do` and the tensors that the forward pass did not save: q, k and v again, and delta = rowsum(do
* out) instead of out. On the way out, the backward pass exchanges dq, dk and dv.

An operator may replace k and v with other tensors (`Shape.kv`).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..sharding import heads as rules
from ..sharding.heads import HeadChunk, MessageLayout
from ..sharding.shards import Shards, tokens_by_ulysses_rank
from . import instructions as op
from .instructions import HeadExchange, Instruction, Program, Slot, renamed
from .shape import ITEMSIZE, Shape

KV = ("k", "v")  # the default key/value tensors; operators may have others


class UlyssesGroup(NamedTuple):
    """A group of ranks that exchange heads."""

    size: int = 1
    rank: int = 0  # this rank's number in the group


NO_ULYSSES = UlyssesGroup()


class SavedForBackward(enum.IntEnum):
    """The tensors saved for the backward pass, in addition to the caller's tensors and the lse."""

    NOTHING = 0
    QKV = 1  # q, k and v after the all-to-all, so that backward need not exchange them
    QKV_AND_OUT = 2  # also `out` before the second all-to-all, so that backward need not exchange delta

    @property
    def qkv(self) -> bool:
        return self >= SavedForBackward.QKV

    @property
    def out(self) -> bool:
        return self == SavedForBackward.QKV_AND_OUT


@dataclasses.dataclass(frozen=True)
class Heads:
    """A call's heads: the Ulysses group that shares the heads, and the head chunks."""

    ulysses: UlyssesGroup
    head_chunks: tuple[HeadChunk, ...]  # together, they cover all heads

    @classmethod
    def of(cls, q: int, kv: int, ulysses: UlyssesGroup = NO_ULYSSES, head_chunks: int = 1) -> Heads:
        return cls(ulysses, rules.head_chunks(q, kv, head_chunks))

    def inner(self, head_chunk: int) -> tuple[slice, slice]:
        """Return the head chunk's query heads and key/value heads that this Ulysses rank computes."""
        return rules.heads_of_ulysses_rank(*self.head_chunks[head_chunk].counts, *self.ulysses)

    def of_head_chunk(self, head_chunk: int, side: str) -> slice:
        """Return the slice of a side's heads that belongs to the head chunk."""
        return self.head_chunks[head_chunk].kv if side == "kv" else self.head_chunks[head_chunk].q


class ExchangeSizes(NamedTuple):
    """The sizes of one Ulysses rank's messages in a head exchange."""

    outgoing: tuple[int, ...]  # elements sent to each Ulysses rank
    incoming: tuple[int, ...]  # elements received from each Ulysses rank
    layout: MessageLayout
    dtype: str  # torch's name

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def arriving(self, ulysses_rank: int) -> int:
        """Return the number of elements received from Ulysses ranks other than `ulysses_rank`."""
        return sum(self.incoming) - self.incoming[ulysses_rank]


def exchange_sizes(heads: Heads, exchange: HeadExchange, shape: Shape, shards: Shards, inner: int) -> ExchangeSizes:
    """Return the sizes of this Ulysses rank's messages in a head exchange.

    Args:
        shape: Shape of the inner tensors, for any head chunk.
        inner: The CP rank.
    """
    fields = [shape.field(name) for name in exchange.fields]
    tokens = tokens_by_ulysses_rank(shards, fields[0].side, inner, heads.ulysses.size)
    q, kv = heads.head_chunks[exchange.head_chunk].counts
    totals, widths = tuple(kv if x.side == "kv" else q for x in fields), tuple(max(1, x.width) for x in fields)
    layout = rules.message_layout(totals, widths, kv, shape.batch, tuple(tokens), heads.ulysses.rank)
    return ExchangeSizes(*layout.sizes(exchange.inward), layout, fields[0].dtype)


def call_program(
    inner: Sequence[Program], ulysses_size: int, together: bool,
    saved: SavedForBackward = SavedForBackward.QKV_AND_OUT, lse: bool = False, overlap: bool = False,
    kv: tuple[str, ...] = KV,
) -> Program:  # fmt: skip
    """Return a call's program, which computes one head chunk after another.

    Args:
        inner: Inner program for each head chunk.
        together: Whether one exchange can carry all operands.
        lse: Whether the lse for local tokens is returned to the caller.
        overlap: Whether to receive the next head chunk's operands and send the previous head chunk's results during the
            current head chunk's products. If False, the program waits for every exchange immediately.
        kv: Names of the key/value tensors.
    """
    builder, direction, overlap = _CallBuilder(ulysses_size), inner[0].direction, overlap and len(inner) > 1
    inward, outward = [*inward_fields(direction, together, saved, kv)], [*outward_fields(direction, lse, kv)]
    if ulysses_size == 1:
        inward, outward = [], []
    arriving: list[op.ExchangeStart] = []
    leaving: list[op.ExchangeStart] = []
    for head_chunk, program in enumerate(inner):
        arrived = [builder.end(start) for start in arriving]
        if not arrived:
            arrived = [builder.end(builder.start(HeadExchange(head_chunk, True, fields))) for fields in inward]
        if overlap and head_chunk + 1 < len(inner):
            arriving = [builder.start(HeadExchange(head_chunk + 1, True, fields)) for fields in inward]
        builder.head_chunk(head_chunk, program, arrived)
        for start in leaving:
            builder.unpack(start)
        if overlap:
            leaving = [builder.start(HeadExchange(head_chunk, False, fields)) for fields in outward]
        else:
            for fields in outward:
                builder.unpack(builder.start(HeadExchange(head_chunk, False, fields)))
    for start in leaving:
        builder.unpack(start)
    return builder.program(inner[0])


def operands(together: bool, kv: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the names of the tensors in each exchange of operands."""
    return [("q", *kv)] if together else [("q",), kv]


def inward_fields(
    direction: str, together: bool, saved: SavedForBackward, kv: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    if direction == "forward" or not saved.qkv:
        yield from operands(together, kv)
    if direction == "backward":
        yield ("do",)
        if not saved.out:
            yield ("delta",)


def outward_fields(direction: str, lse: bool, kv: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the names of the tensors in each outward exchange, in order."""
    # dk and dv are sent first, separately from dq, to save memory, since each exchange needs a send and a receive
    # buffer
    if direction == "backward":
        yield from [tuple(f"d{name}" for name in kv), ("dq",)]
        return
    yield ("out",)
    if lse:
        yield ("lse",)


class _CallBuilder:
    """Collects the instructions of a call's program."""

    def __init__(self, ulysses_size: int) -> None:
        self.ranks = tuple(range(ulysses_size))
        self.code: list[Instruction] = []
        self.frees: list[list[int]] = []
        self.slots: list[Slot] = []
        self.words: list[str] = []
        self.tickets = itertools.count()

    def add(self, instruction: Instruction, *frees: int) -> None:
        self.code.append(instruction)
        self.frees.append(list(frees))

    def slot(self, exchange: HeadExchange, role: str) -> int:
        self.slots.append(Slot("+".join(exchange.fields), role, ((),), exchange.head_chunk, exchange))
        return len(self.slots) - 1

    def start(self, exchange: HeadExchange) -> op.ExchangeStart:
        step, ticket = len(self.words), next(self.tickets)
        self.words.append(f"exchange of heads: {exchange.words}")
        sent, received = self.slot(exchange, "sent"), self.slot(exchange, "received")
        self.add(op.PackHeads(step, exchange, sent))
        start = op.ExchangeStart(step, ticket, exchange, self.ranks, sent, received)
        self.add(start)
        return start

    def end(self, start: op.ExchangeStart) -> tuple[HeadExchange, int]:
        """Wait for a head exchange, and return the exchange and its receive slot."""
        self.add(op.Wait(self.end_step(start), start.ticket), start.sent)
        return start.exchange, start.received

    def unpack(self, start: op.ExchangeStart) -> None:
        """Wait for an outward head exchange, and unpack the received tensors."""
        self.end(start)
        self.add(op.UnpackHeads(self.end_step(start), start.exchange, start.received), start.received)

    def end_step(self, start: op.ExchangeStart) -> int:
        """Return the step in which an exchange ends: the step in which it started or, if another exchange has started
        in the meantime, a new step.
        """
        if start.step == len(self.words) - 1:
            return start.step
        text = f"{start.exchange.words} has been exchanged"
        if self.words[-1] != text:
            self.words.append(text)
        return len(self.words) - 1

    def head_chunk(self, head_chunk: int, program: Program, arrived: list[tuple[HeadExchange, int]]) -> None:
        """Add a head chunk's inner program, with renumbered slots, tickets and steps.

        `arrived` lists the exchanges that carry the head chunk's operands, each with its receive slot.
        """
        slot_offset, step_offset, new_tickets = len(self.slots), len(self.words), {}
        self.slots += [slot._replace(head_chunk=head_chunk) for slot in program.slots]
        self.words += program.words
        self.add(op.Enter(step_offset, head_chunk, tuple(arrived)))
        for instruction, frees in zip(program.code, program.frees, strict=True):
            if isinstance(instruction, op.Started):
                new_tickets[instruction.ticket] = next(self.tickets)
            instruction = renamed(instruction, lambda slot: slot + slot_offset)._replace(
                step=instruction.step + step_offset
            )
            if isinstance(instruction, op.Started | op.Wait):
                instruction = instruction._replace(ticket=new_tickets[instruction.ticket])
            self.add(instruction, *(slot + slot_offset for slot in frees))
        self.add(op.Leave(max(step_offset, len(self.words) - 1), head_chunk), *(slot for _, slot in arrived))

    def program(self, inner: Program) -> Program:
        return dataclasses.replace(
            inner,
            code=tuple(self.code),
            slots=tuple(self.slots),
            frees=tuple(map(tuple, self.frees)),
            words=tuple(self.words),
        )
