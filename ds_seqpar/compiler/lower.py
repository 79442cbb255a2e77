"""From a rank's steps to its program: what is copied where, which transfers are waited for when, and in which slots."""

from __future__ import annotations

import itertools
from collections import defaultdict

from .actions import ACCUMULATORS, OPERANDS, Compute, Gather, Key, Move, ReduceScatter, Step, Steps, Unit, owned
from .early import asked_early
from .program import (
    OWN,
    Assemble,
    Export,
    Finish,
    Fold,
    GatherStart,
    Instruction,
    Merge,
    Pack,
    Post,
    Product,
    Program,
    ScatterStart,
    Slot,
    Transfer,
    Wait,
    is_own,
    own_slot,
)
from .slots import assign

KINDS = ("q", "kv", "out", "dq", "dkv")


def lower(
    name: str, direction: str, rank: int, size: int, steps: Steps, wide_travel: bool, parts: int = 1, early: int = 0
) -> Program:
    """The program of one rank. wide_travel: whether results travel in the dtype that they are accumulated in; what
    arrives is then added to where it lies, and sent on from there. parts: blocks that each rank owns. early: see
    `asked_early`; 0 asks for each message in the step in which it leaves."""
    lowering = _Lowering(direction, rank, size, wide_travel, parts)
    for index, step in enumerate(steps):
        lowering.step(index, step)
    code, buffers = lowering.finish(len(steps)), lowering.buffers
    if early:
        code = asked_early(code, buffers, early)
    return Program(
        name=name,
        direction=direction,
        rank=rank,
        size=size,
        parts=parts,
        words=tuple(step.words(rank) for step in steps),
        **assign(code, buffers),
    )


class _Lowering:
    """Every unit gets a buffer of its own here; `assign` lets them share slots."""

    def __init__(self, direction: str, rank: int, size: int, wide_travel: bool, parts: int) -> None:
        self.direction, self.rank, self.wide_travel = direction, rank, wide_travel
        self.blocks, self.own = size * parts, owned(rank, parts)
        self.code: list[Instruction] = []
        self.buffers: list[Slot] = []
        self.tickets = itertools.count()
        self.operands: dict[Unit, int] = {
            (kind, (b,)): own_slot(n) for kind in OPERANDS for n, b in enumerate(self.own)
        }
        self.messages: dict[Unit, int] = {}  # own operands as they are sent
        self.results: dict[Unit, int] = {}  # running ones -> their buffer
        self.arriving: dict[int, list[int]] = defaultdict(list)  # tickets of operands that are due at the end of a step
        self.merging: dict[int, list[tuple[int, tuple[Transfer, ...]]]] = defaultdict(list)  # results, after products

    def buffer(self, kind: str, role: str, key: Key) -> int:
        self.buffers.append(Slot(kind, role, (key,)))
        return len(self.buffers) - 1

    def step(self, index: int, step: Step) -> None:
        started = [self.start_gather(index, gather) for gather in step.gathers]
        for gather, ticket, received in started:  # all are under way before the first is waited for
            self.code.append(Wait(index, ticket))
            whole = self.operands[gather.kind, gather.whole] = self.buffer(gather.kind, "operand", gather.whole)
            self.code.append(Assemble(index, gather, received, whole))
        for within, moves in _by_within(step.moves):
            sends = [(move, self.message(index, move.unit)) for move in moves if move.src == self.rank]
            receives = [(move, self.buffer(move.kind, "operand", move.key)) for move in moves if move.dst == self.rank]
            self.operands.update({move.unit: slot for move, slot in receives})
            if sends or receives:
                self.arriving[index + within - 1].append(self.post(index, sends, receives)[0])
        for compute in step.computes:
            self.product(index, compute)
        self.merge(index, index)  # before results leave: what arrived may have to leave with them
        for within, moves in _by_within(step.results):
            sends = [(move, self.export(index, move.unit)) for move in moves if move.src == self.rank]
            role = "wide" if self.wide_travel else "travel"
            receives = [(move, self.buffer(move.kind, role, move.key)) for move in moves if move.dst == self.rank]
            if sends or receives:
                self.merging[index + within].append(self.post(index, sends, receives))
        for reduce in [self.start_scatter(index, reduce) for reduce in step.reduces]:
            self.code += reduce
        self.code += [Wait(index, ticket) for ticket in self.arriving.pop(index, [])]

    def finish(self, steps: int) -> list[Instruction]:
        last = max(0, steps - 1)
        for due in sorted(self.merging):
            self.merge(last, due)
        own = [(kind, (block,)) for kind in ACCUMULATORS[self.direction] for block in self.own]
        # a slot also for what nothing is added to: an empty block, or keys that no query sees
        self.code.append(Finish(last, tuple((unit, self.running(unit)) for unit in own)))
        return self.code

    def message(self, index: int, unit: Unit) -> int:
        """The buffer that an operand is sent from."""
        if not is_own(self.operands[unit]):
            return self.operands[unit]
        if unit not in self.messages:
            self.messages[unit] = self.buffer(unit[0], "operand", unit[1])
            self.code.append(Pack(index, unit, self.messages[unit]))
        return self.messages[unit]

    def post(
        self, index: int, sends: list[tuple[Move, int]], receives: list[tuple[Move, int]]
    ) -> tuple[int, tuple[Transfer, ...]]:
        ticket = next(self.tickets)
        coming = tuple(Transfer(move.src, move.unit, slot, self.tag(move.unit)) for move, slot in receives)
        going = tuple(Transfer(move.dst, move.unit, slot, self.tag(move.unit)) for move, slot in sends)
        self.code.append(Post(index, ticket, going, coming))
        return ticket, coming

    def tag(self, unit: Unit) -> int:
        """The same on both ends without asking, and no other message's between the same two ranks meanwhile: a unit
        goes by its first block."""
        return KINDS.index(unit[0]) * self.blocks + unit[1][0]

    def product(self, index: int, compute: Compute) -> None:
        results = []
        for kind in ACCUMULATORS[self.direction]:
            unit = kind, compute.kv if kind == "dkv" else compute.q
            results.append((unit, self.running(unit)))
        slots = self.operands["q", compute.q], self.operands["kv", compute.kv]
        self.code.append(Product(index, compute.q, compute.kv, *slots, tuple(results)))

    def running(self, unit: Unit) -> int:
        if unit not in self.results:
            self.results[unit] = self.buffer(unit[0], "wide", unit[1])
        return self.results[unit]

    def merge(self, index: int, due: int) -> None:
        for ticket, arrived in self.merging.pop(due, []):
            self.code.append(Wait(index, ticket))
            for transfer in arrived:
                own = self.results.get(transfer.unit, OWN)
                into = transfer.slot if self.wide_travel else self.running(transfer.unit)
                self.results[transfer.unit] = into
                self.code.append(Merge(index, transfer.unit, transfer.slot, own, into))

    def export(self, index: int, unit: Unit) -> int:
        own = self.results.pop(unit)
        into = own if self.wide_travel else self.buffer(unit[0], "travel", unit[1])
        self.code.append(Export(index, unit, own, into))
        return into

    def start_gather(self, index: int, gather: Gather) -> tuple[Gather, int, int]:
        ticket, part = next(self.tickets), gather.part(self.rank)
        sent = self.message(index, (gather.kind, part))
        received = self.buffer(gather.kind, "operand", gather.whole)
        self.code.append(GatherStart(index, ticket, gather, sent, received))
        return gather, ticket, received

    def start_scatter(self, index: int, reduce: ReduceScatter) -> list[Instruction]:
        """Starts it; returns what ends it."""
        ticket, part = next(self.tickets), reduce.part(self.rank)
        unit = reduce.kind, part
        own, kept = self.results.pop((reduce.kind, reduce.whole)), self.running(unit)
        others = tuple(block for block in reduce.whole if block not in part)
        sent = self.buffer(reduce.kind, "travel", others)
        received = self.buffer(reduce.kind, "travel", part * (len(reduce.ranks) - 1))
        self.code.append(ScatterStart(index, ticket, reduce, own, kept, sent, received))
        return [Wait(index, ticket), Fold(index, unit, received, kept, len(reduce.ranks) - 1)]


def _by_within(moves: tuple[Move, ...]) -> list[tuple[int, list[Move]]]:
    """What is due together is posted together."""
    groups: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        groups[move.within].append(move)
    return sorted(groups.items())
