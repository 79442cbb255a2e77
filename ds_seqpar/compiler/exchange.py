"""Ulysses' exchange of heads, and stages of heads, as instructions around the programs of the inner ranks.

An all-to-all among neighbouring ranks, the members, gives each of them some heads of their common tokens (DeepSpeed
Ulysses, Jacobs et al., 2023). A stage attends to some of the heads, so that the inner tensors of all heads are never
there together (Untied Ulysses). What is exchanged has names:

forward: q, k and v inward; out, and lse where it is asked for, outward.
backward: do inward, and what forward did not keep: q, k and v again, and delta = rowsum(do * out) in place of out;
dq, dk and dv outward.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from . import heads as dealing
from . import program as op
from .heads import Deal, Stage
from .program import Instruction, Program, Slot, Trade, renamed
from .shape import ITEMSIZE, Shape
from .shards import Shards, members_tokens

SIDE = {"k": "kv", "v": "kv", "dk": "kv", "dv": "kv"}  # of the others: "q"
ROWS = ("delta", "lse")  # a number a row and head, wide
# what arrives is counted as
COUNTED = {"q": "qkv", "k": "qkv", "v": "qkv", "out": "out_heads", "lse": "lse_heads", "do": "do_heads",
           "delta": "delta_heads", "dq": "dqkv", "dk": "dqkv", "dv": "dqkv"}  # fmt: skip


class Members(NamedTuple):
    """Ulysses' degree, and which of its members this rank is."""

    degree: int = 1
    member: int = 0


ONE_MEMBER = Members()


class Kept(NamedTuple):
    """What backward needs of what forward has beside the caller's own tensors and the lse. operands: the inner q, k and
    v as they arrived, so that they are not sent again; out: the inner out, so that no delta is sent for it."""

    operands: bool = True
    out: bool = True


ALL_KEPT = Kept()


class Around(NamedTuple):
    """What stands around an inner program: so many Ulysses members, and stages of heads. kept: what backward finds of
    forward. overlap: whether a stage's exchanges run while another one computes."""

    members: int = 1
    stages: int = 1
    kept: Kept = ALL_KEPT
    overlap: bool = False


ALONE = Around()


def kept_of(
    degree: int, stages: int, checkpointed: bool, keeps: bool, overlap: bool = False, chosen: bool | str = "auto"
) -> Kept:
    """What forward leaves for backward. checkpointed: whether a checkpoint is around it; keeps: whether that keeps what
    attention gives. chosen: whether the exchanged q, k and v stay. "auto": they go where stages are to save memory, and
    stay where stages hide exchanges, or a checkpoint keeps attention. A rank without other members needs none."""
    if degree == 1:
        return Kept(operands=False, out=False)
    if chosen == "auto":
        chosen = stages == 1 or overlap or (checkpointed and keeps)
    return Kept(operands=bool(chosen), out=bool(chosen) and not checkpointed)


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads of a call: all of q and of k, and the stages that they are attended to in."""

    members: Members
    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, q: int, kv: int, members: Members = ONE_MEMBER, stages: int = 1) -> Heads:
        return cls(members, dealing.stages(q, kv, stages))

    def inner(self, stage: int) -> tuple[slice, slice]:
        """Which of a stage's query heads and key/value heads this member works on."""
        return dealing.heads_of(*self.stages[stage].counts, *self.members)

    def held(self, stage: int, field: str) -> slice:
        """Which of all heads are the stage's."""
        return self.stages[stage].kv if field in SIDE else self.stages[stage].q

    def deal(self, trade: Trade) -> Deal:
        """Who gets which heads of what travels together."""
        q, kv = self.stages[trade.stage].counts
        totals = tuple(kv if field in SIDE else q for field in trade.fields)
        return dealing.deal(totals, kv, self.members.degree)

    def widths(self, trade: Trade) -> list[int]:
        """Of each tensor that travels, how many heads this member works on."""
        q, kv = self.inner(trade.stage)
        return [kv.stop - kv.start if field in SIDE else q.stop - q.start for field in trade.fields]


class Traffic(NamedTuple):
    """Elements of an exchange. outgoing: to every member; incoming: from every member; tokens: of every member; width:
    of a head; dtype: by its name in torch."""

    outgoing: tuple[int, ...]
    incoming: tuple[int, ...]
    tokens: tuple[int, ...]
    width: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def arriving(self, member: int) -> int:
        """Elements that arrive from other members."""
        return sum(self.incoming) - self.incoming[member]


def traffic(heads: Heads, trade: Trade, shape: Shape, shards: Shards, inner: int) -> Traffic:
    """shape: of any stage's inner tensors; inner: the inner rank."""
    side, row = SIDE.get(trade.fields[0], "q"), trade.fields[0] in ROWS
    tokens, width = members_tokens(shards, side, inner, heads.members.degree), 1 if row else shape.head_dim
    found = dealing.sizes(heads.deal(trade), tokens, heads.members.member, shape.batch * width)
    outgoing, incoming = found if trade.inward else found[::-1]
    return Traffic(tuple(outgoing), tuple(incoming), tuple(tokens), width, shape.wide if row else shape.dtype)


def exchanged(shape: Shape, members: int, trade: Trade) -> float:
    """Bytes that an exchange brings from other members, for each of the inner rank's tokens, of a member with this
    inner shape where all are alike."""
    heads = sum(shape.kv_heads if field in SIDE else shape.q_heads for field in trade.fields)
    each = ITEMSIZE[shape.wide] if trade.fields[0] in ROWS else shape.head_dim * shape.itemsize
    return shape.batch * heads * each * (members - 1) / members


def trades(direction: str, together: bool = True, kept: Kept = ALL_KEPT) -> list[Trade]:
    """What a call of one stage exchanges, in order."""
    inward = [Trade(0, True, fields) for fields in _inward(direction, together, kept)]
    return inward + [Trade(0, False, fields) for fields in _outward(direction, False)]


def whole(
    inner: Sequence[Program], members: int, together: bool, kept: Kept = ALL_KEPT, lse: bool = False,
    overlap: bool = False,
) -> Program:  # fmt: skip
    """The program of a call, stage by stage. inner: of each stage; together: whether q, k and v can travel as one; lse:
    whether that of own tokens is asked for. overlap: while a stage computes, the operands of the next one arrive and
    the results of the one before leave; else nothing is under way but what is waited for."""
    building, direction, overlap = _Building(members), inner[0].direction, overlap and len(inner) > 1
    ins, outs = list(_inward(direction, together, kept)), list(_outward(direction, lse))
    if members == 1:
        ins, outs = [], []
    coming: list[op.ExchangeStart] = []
    leaving: list[op.ExchangeStart] = []
    for stage, program in enumerate(inner):
        arrived = [building.end(one) for one in coming]
        if not arrived:
            arrived = [building.end(building.start(Trade(stage, True, fields))) for fields in ins]
        if overlap and stage + 1 < len(inner):
            coming = [building.start(Trade(stage + 1, True, fields)) for fields in ins]
        building.stage(stage, program, arrived)
        for one in leaving:
            building.unpack(one)
        if overlap:
            leaving = [building.start(Trade(stage, False, fields)) for fields in outs]
        else:
            for fields in outs:
                building.unpack(building.start(Trade(stage, False, fields)))
    for one in leaving:
        building.unpack(one)
    return building.program(inner[0])


def _inward(direction: str, together: bool, kept: Kept) -> Iterator[tuple[str, ...]]:
    if direction == "forward" or not kept.operands:
        yield from [("q", "k", "v")] if together else [("q",), ("k", "v")]
    if direction == "backward":
        yield ("do",)
        if not kept.out:
            yield ("delta",)


def _outward(direction: str, lse: bool) -> Iterator[tuple[str, ...]]:
    if direction == "backward":  # k and v first and apart: what is sent stands beside what arrives
        yield from [("dk", "dv"), ("dq",)]
        return
    yield ("out",)
    if lse:
        yield ("lse",)


class _Building:
    def __init__(self, members: int) -> None:
        self.ranks = tuple(range(members))
        self.code: list[Instruction] = []
        self.frees: list[list[int]] = []
        self.slots: list[Slot] = []
        self.words: list[str] = []
        self.tickets = itertools.count()

    def add(self, one: Instruction, *frees: int) -> None:
        self.code.append(one)
        self.frees.append(list(frees))

    def slot(self, trade: Trade, role: str) -> int:
        self.slots.append(Slot("+".join(trade.fields), role, ((),), trade.stage, trade))
        return len(self.slots) - 1

    def start(self, trade: Trade) -> op.ExchangeStart:
        step, ticket = len(self.words), next(self.tickets)
        self.words.append(f"exchange of heads: {trade.words}")
        sent, received = self.slot(trade, "sent"), self.slot(trade, "received")
        self.add(op.PackHeads(step, trade, sent))
        start = op.ExchangeStart(step, ticket, trade, self.ranks, sent, received)
        self.add(start)
        return start

    def end(self, one: op.ExchangeStart) -> tuple[Trade, int]:
        """Returns the slot of what has arrived, and what that is."""
        step = self.later(one)
        self.add(op.Wait(step, one.ticket), one.sent)
        return one.trade, one.received

    def unpack(self, one: op.ExchangeStart) -> None:
        self.end(one)
        self.add(op.UnpackHeads(self.later(one), one.trade, one.received), one.received)

    def later(self, one: op.ExchangeStart) -> int:
        """The step in which what follows stands: that of the start, unless there are others since."""
        if one.step == len(self.words) - 1:
            return one.step
        words = f"{one.trade.words} has been exchanged"
        if self.words[-1] != words:
            self.words.append(words)
        return len(self.words) - 1

    def stage(self, stage: int, program: Program, arrived: list[tuple[Trade, int]]) -> None:
        """An inner program, with slots, tickets and steps of its own among the others'."""
        slots, steps, tickets = len(self.slots), len(self.words), {}
        self.slots += [slot._replace(stage=stage) for slot in program.slots]
        self.words += program.words
        self.add(op.Enter(steps, stage, tuple(arrived)))
        for one, frees in zip(program.code, program.frees, strict=True):
            if isinstance(one, op.Started):
                tickets[one.ticket] = next(self.tickets)
            one = renamed(one, lambda slot: slot + slots)._replace(step=one.step + steps)
            if isinstance(one, op.Started | op.Wait):
                one = one._replace(ticket=tickets[one.ticket])
            self.add(one, *(slot + slots for slot in frees))
        self.add(op.Leave(max(steps, len(self.words) - 1), stage), *(slot for _, slot in arrived))

    def program(self, inner: Program) -> Program:
        return dataclasses.replace(
            inner,
            code=tuple(self.code),
            slots=tuple(self.slots),
            frees=tuple(map(tuple, self.frees)),
            words=tuple(self.words),
        )
