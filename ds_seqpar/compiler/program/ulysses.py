"""Ulysses' exchanges of heads, and head chunks, as instructions around the programs of the CP ranks.

An all-to-all among neighbouring ranks, the Ulysses ranks, gives each of them some heads of their common tokens
(DeepSpeed Ulysses, Jacobs et al., 2023). A head chunk attends to some of the heads, so that the inner tensors of all
heads are never there together (Untied Ulysses). These fields are exchanged:

forward: q, k and v inward; out, and lse where it is asked for, outward.
backward: do inward, and what forward did not save: q, k and v again, and delta = rowsum(do * out) in place of out;
dq, dk and dv outward.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..sharding import heads as rules
from ..sharding.heads import HeadChunk, HeadShares
from ..sharding.shards import Shards, tokens_by_ulysses_rank
from . import instructions as op
from .instructions import HeadExchange, Instruction, Program, Slot, renamed
from .shape import ITEMSIZE, Shape

SIDE = {"k": "kv", "v": "kv", "dk": "kv", "dv": "kv"}  # of the other fields: "q"
PER_ROW = ("delta", "lse")  # fields of one number a row and head, in the dtype of sums
# field -> the name under which its arriving elements are counted
COUNTERS = {"q": "qkv", "k": "qkv", "v": "qkv", "out": "out_heads", "lse": "lse_heads", "do": "do_heads",
            "delta": "delta_heads", "dq": "dqkv", "dk": "dqkv", "dv": "dqkv"}  # fmt: skip


class UlyssesGroup(NamedTuple):
    """The number of ranks that exchange heads, and which of them this rank is."""

    size: int = 1
    rank: int = 0


NO_ULYSSES = UlyssesGroup()


class SavedForBackward(enum.IntEnum):
    """What forward saves for backward beside the caller's own tensors and the lse."""

    NOTHING = 0
    QKV = 1  # after the all-to-all: backward does not exchange them again
    QKV_AND_OUT = 2  # before the second all-to-all: backward exchanges no delta

    @property
    def qkv(self) -> bool:
        return self >= SavedForBackward.QKV

    @property
    def out(self) -> bool:
        return self == SavedForBackward.QKV_AND_OUT


class HeadSplit(NamedTuple):
    """How a call divides its heads: among so many Ulysses ranks, and in head chunks. saved: what forward saves.
    overlap: whether a head chunk's exchanges run while another one computes."""

    ulysses_size: int = 1
    head_chunks: int = 1
    saved: SavedForBackward = SavedForBackward.QKV_AND_OUT
    overlap: bool = False


UNSPLIT = HeadSplit()


def saved_for_backward(
    ulysses_size: int, head_chunks: int, checkpointed: bool, keeps: bool, overlap: bool = False,
    chosen: bool | str = "auto",
) -> SavedForBackward:  # fmt: skip
    """What forward saves for backward; without other Ulysses ranks nothing, since nothing is exchanged.

    checkpointed: whether a checkpoint is around attention; keeps: whether that keeps attention's results.
    chosen: whether the exchanged q, k and v are saved. "auto": they are not where head chunks are there to save memory.
    They are where head chunks hide exchanges, or a checkpoint keeps attention."""
    if ulysses_size == 1:
        return SavedForBackward.NOTHING
    if chosen == "auto":
        chosen = head_chunks == 1 or overlap or (checkpointed and keeps)
    if not chosen:
        return SavedForBackward.NOTHING
    return SavedForBackward.QKV if checkpointed else SavedForBackward.QKV_AND_OUT


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads of a call: which Ulysses rank this rank is, and the head chunks that all heads are attended to in."""

    ulysses: UlyssesGroup
    head_chunks: tuple[HeadChunk, ...]

    @classmethod
    def of(cls, q: int, kv: int, ulysses: UlyssesGroup = NO_ULYSSES, head_chunks: int = 1) -> Heads:
        return cls(ulysses, rules.head_chunks(q, kv, head_chunks))

    def inner(self, head_chunk: int) -> tuple[slice, slice]:
        """Which of a head chunk's query heads and key/value heads this Ulysses rank works on."""
        return rules.heads_of_ulysses_rank(*self.head_chunks[head_chunk].counts, *self.ulysses)

    def of_head_chunk(self, head_chunk: int, field: str) -> slice:
        """Which of all heads of a field are the head chunk's."""
        return self.head_chunks[head_chunk].kv if field in SIDE else self.head_chunks[head_chunk].q

    def shares(self, exchange: HeadExchange) -> HeadShares:
        """Which Ulysses rank gets which heads in an exchange."""
        q, kv = self.head_chunks[exchange.head_chunk].counts
        totals = tuple(kv if field in SIDE else q for field in exchange.fields)
        return rules.head_shares(totals, kv, self.ulysses.size)

    def inner_counts(self, exchange: HeadExchange) -> list[int]:
        """For each exchanged tensor, how many of its heads this Ulysses rank works on."""
        q, kv = self.inner(exchange.head_chunk)
        return [kv.stop - kv.start if field in SIDE else q.stop - q.start for field in exchange.fields]


class ExchangeSizes(NamedTuple):
    """The sizes of an exchange for one Ulysses rank. outgoing: elements to every Ulysses rank; incoming: elements from
    every Ulysses rank; tokens: of every Ulysses rank; width: elements of a head; dtype: by its name in torch."""

    outgoing: tuple[int, ...]
    incoming: tuple[int, ...]
    tokens: tuple[int, ...]
    width: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def arriving(self, ulysses_rank: int) -> int:
        """Elements that arrive from other Ulysses ranks than this one."""
        return sum(self.incoming) - self.incoming[ulysses_rank]


def exchange_sizes(heads: Heads, exchange: HeadExchange, shape: Shape, shards: Shards, inner: int) -> ExchangeSizes:
    """shape: of any head chunk's inner tensors; inner: the CP rank."""
    side, per_row = SIDE.get(exchange.fields[0], "q"), exchange.fields[0] in PER_ROW
    tokens, width = tokens_by_ulysses_rank(shards, side, inner, heads.ulysses.size), 1 if per_row else shape.head_dim
    counts = rules.element_counts(heads.shares(exchange), tokens, heads.ulysses.rank, shape.batch * width)
    outgoing, incoming = counts if exchange.inward else counts[::-1]
    dtype = shape.accum_dtype if per_row else shape.dtype
    return ExchangeSizes(tuple(outgoing), tuple(incoming), tuple(tokens), width, dtype)


def exchange_bytes_per_token(shape: Shape, ulysses_size: int, exchange: HeadExchange) -> float:
    """Bytes that an exchange brings to a Ulysses rank from the others, for each of the CP rank's tokens, where all
    Ulysses ranks have equal shares. shape: of the Ulysses rank's inner tensors."""
    heads = sum(shape.kv_heads if field in SIDE else shape.q_heads for field in exchange.fields)
    head_bytes = ITEMSIZE[shape.accum_dtype] if exchange.fields[0] in PER_ROW else shape.head_dim * shape.itemsize
    return shape.batch * heads * head_bytes * (ulysses_size - 1) / ulysses_size


def exchanges(
    direction: str, together: bool = True, saved: SavedForBackward = SavedForBackward.QKV_AND_OUT
) -> list[HeadExchange]:
    """The exchanges of a call of one head chunk, in order. together: see `call_program`."""
    inward = [HeadExchange(0, True, fields) for fields in _inward(direction, together, saved)]
    return inward + [HeadExchange(0, False, fields) for fields in _outward(direction, False)]


def call_program(
    inner: Sequence[Program], ulysses_size: int, together: bool,
    saved: SavedForBackward = SavedForBackward.QKV_AND_OUT, lse: bool = False, overlap: bool = False,
) -> Program:  # fmt: skip
    """The program of a call, head chunk by head chunk. inner: the inner program of each head chunk. together: whether
    q, k and v can travel in one exchange. lse: whether the lse of local tokens is asked for. overlap: while a head
    chunk computes, the next head chunk's operands arrive and the previous head chunk's results leave; without it, each
    exchange is waited for at once."""
    building, direction, overlap = _CallBuilder(ulysses_size), inner[0].direction, overlap and len(inner) > 1
    inward, outward = list(_inward(direction, together, saved)), list(_outward(direction, lse))
    if ulysses_size == 1:
        inward, outward = [], []
    arriving: list[op.ExchangeStart] = []
    leaving: list[op.ExchangeStart] = []
    for head_chunk, program in enumerate(inner):
        arrived = [building.end(start) for start in arriving]
        if not arrived:
            arrived = [building.end(building.start(HeadExchange(head_chunk, True, fields))) for fields in inward]
        if overlap and head_chunk + 1 < len(inner):
            arriving = [building.start(HeadExchange(head_chunk + 1, True, fields)) for fields in inward]
        building.head_chunk(head_chunk, program, arrived)
        for start in leaving:
            building.unpack(start)
        if overlap:
            leaving = [building.start(HeadExchange(head_chunk, False, fields)) for fields in outward]
        else:
            for fields in outward:
                building.unpack(building.start(HeadExchange(head_chunk, False, fields)))
    for start in leaving:
        building.unpack(start)
    return building.program(inner[0])


def _inward(direction: str, together: bool, saved: SavedForBackward) -> Iterator[tuple[str, ...]]:
    if direction == "forward" or not saved.qkv:
        yield from [("q", "k", "v")] if together else [("q",), ("k", "v")]
    if direction == "backward":
        yield ("do",)
        if not saved.out:
            yield ("delta",)


def _outward(direction: str, lse: bool) -> Iterator[tuple[str, ...]]:
    if direction == "backward":  # dk and dv first, apart from dq: sent and received buffers of one exchange coexist
        yield from [("dk", "dv"), ("dq",)]
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

    def add(self, one: Instruction, *frees: int) -> None:
        self.code.append(one)
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
        """Waits for an exchange. Returns it with the slot of what has arrived."""
        self.add(op.Wait(self.end_step(start), start.ticket), start.sent)
        return start.exchange, start.received

    def unpack(self, start: op.ExchangeStart) -> None:
        """Waits for an exchange outward, and unpacks what has arrived."""
        self.end(start)
        self.add(op.UnpackHeads(self.end_step(start), start.exchange, start.received), start.received)

    def end_step(self, start: op.ExchangeStart) -> int:
        """The step in which an exchange ends: that of its start, or one of its own where other steps came between."""
        if start.step == len(self.words) - 1:
            return start.step
        words = f"{start.exchange.words} has been exchanged"
        if self.words[-1] != words:
            self.words.append(words)
        return len(self.words) - 1

    def head_chunk(self, head_chunk: int, program: Program, arrived: list[tuple[HeadExchange, int]]) -> None:
        """Adds a head chunk's inner program, its slots, tickets and steps renumbered. arrived: its operands, by
        slot."""
        slots, steps, tickets = len(self.slots), len(self.words), {}
        self.slots += [slot._replace(head_chunk=head_chunk) for slot in program.slots]
        self.words += program.words
        self.add(op.Enter(steps, head_chunk, tuple(arrived)))
        for one, frees in zip(program.code, program.frees, strict=True):
            if isinstance(one, op.Started):
                tickets[one.ticket] = next(self.tickets)
            one = renamed(one, lambda slot: slot + slots)._replace(step=one.step + steps)
            if isinstance(one, op.Started | op.Wait):
                one = one._replace(ticket=tickets[one.ticket])
            self.add(one, *(slot + slots for slot in frees))
        self.add(op.Leave(max(steps, len(self.words) - 1), head_chunk), *(slot for _, slot in arrived))

    def program(self, inner: Program) -> Program:
        return dataclasses.replace(
            inner,
            code=tuple(self.code),
            slots=tuple(self.slots),
            frees=tuple(map(tuple, self.frees)),
            words=tuple(self.words),
        )
