"""Lowering, which turns a rank's steps into a program.

Lowering decides which copies to make, when to wait for each transfer, and which slots to use. `lower` first gives every
unit its own buffer. The function `assign` then lets buffers of the same size share a slot if their lifetimes do not
overlap. With gloo, a message is sent only after the receiver reports that it is ready, and the report is queued behind
the receiver's own sends. To avoid the wait, receives can be posted at the start of an earlier step.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from ..schedules.actions import ACCUMULATORS, OPERANDS, Compute, Gather, Move, ReduceScatter, Step, Steps, Unit
from ..sharding.layout import Key, owned
from . import instructions as op
from .instructions import LOCAL, Instruction, Program, Slot, Transfer, is_local, local_slot, renamed, slots_of

_Arrival = tuple[int, tuple[Transfer, ...]]  # a ticket, and the transfers that have arrived after its wait
UNIT_KINDS = ("q", "kv", "out", "dq", "dkv")


def lower(
    name: str, direction: str, rank: int, size: int, steps: Steps, comm_in_accum_dtype: bool, blocks_per_rank: int = 1,
    ahead: int = 0,
) -> Program:  # fmt: skip
    """Return one rank's program.

    Args:
        comm_in_accum_dtype: Whether results are sent in accum_dtype. If True, a rank adds its accumulator to the
            received result in place, and sends the sum from the same buffer.
        blocks_per_rank: Number of blocks that each rank owns.
        ahead: Number of steps by which receives are posted early. If 0, each receive is posted in the same step as its
            send.
    """
    local = owned(rank, blocks_per_rank)
    lowering = _Lowering(direction, rank, size * blocks_per_rank, comm_in_accum_dtype, local)
    for index, step in enumerate(steps):
        for due in range(index + ahead if index else 0, min(index + ahead + 1, len(steps))) if ahead else ():
            lowering.receive(index, due, steps[due])
        lowering.step(index, step)
    return Program(
        name=name,
        direction=direction,
        rank=rank,
        size=size,
        blocks_per_rank=blocks_per_rank,
        words=tuple(step.words(rank) for step in steps),
        **assign(lowering.finish(len(steps)), lowering.buffers),
    )


class _Lowering:
    """Collects one rank's instructions step by step, with a separate buffer for every unit."""

    def __init__(self, direction: str, rank: int, blocks: int, comm_in_accum_dtype: bool, local: Key) -> None:
        self.direction, self.rank, self.comm_in_accum_dtype = direction, rank, comm_in_accum_dtype
        self.blocks, self.local = blocks, local
        self.code: list[Instruction] = []
        self.buffers: list[Slot] = []
        self.tickets = itertools.count()
        self.operands: dict[Unit, int] = {
            (kind, (block,)): local_slot(n) for kind in OPERANDS for n, block in enumerate(local)
        }
        self.messages: dict[Unit, int] = {}  # local operand -> its send buffer
        self.results: dict[Unit, int] = {}  # accumulator -> its buffer
        self.result_role = "accum" if comm_in_accum_dtype else "comm"
        self.posted: dict[tuple, list[_Arrival]] = {}  # (step, role, within) -> receives posted early
        self.arriving: dict[int, list[_Arrival]] = defaultdict(list)  # step -> operands due at the end of the step
        self.merging: dict[int, list[_Arrival]] = defaultdict(list)  # step -> results to merge after its products

    def buffer(self, kind: str, role: str, key: Key) -> int:
        self.buffers.append(Slot(kind, role, (key,)))
        return len(self.buffers) - 1

    def step(self, index: int, step: Step) -> None:
        started = [self.start_gather(index, gather) for gather in step.gathers]
        for start in started:  # start all gathers before the first wait
            gather = start.collective
            into = self.operands[gather.unit] = self.buffer(gather.kind, "operand", gather.blocks)
            self.code += [op.Wait(index, start.ticket), op.Assemble(index, gather, start.received, into)]
        for within, moves in _by_within(step.moves):
            sends = [(move, self.message(index, move.unit)) for move in moves if move.src == self.rank]
            arrivals = self.transfer(index, (index, "operand", within), sends, moves)
            self.operands.update({transfer.unit: transfer.slot for _, received in arrivals for transfer in received})
            self.arriving[index + within - 1] += arrivals
        for compute in step.computes:
            self.product(index, compute)
        self.merge(index, index)  # merge received results before sending the sums
        for within, moves in _by_within(step.results):
            sends = [(move, self.export(index, move.unit)) for move in moves if move.src == self.rank]
            self.merging[index + within] += self.transfer(index, (index, self.result_role, within), sends, moves)
        for reduce in [self.start_scatter(index, reduce) for reduce in step.reduces]:
            self.code += reduce
        self.code += [op.Wait(index, ticket) for ticket, _ in self.arriving.pop(index, [])]

    def receive(self, index: int, due: int, step: Step) -> None:
        """Post step `due`'s receives in step `index`."""
        for role, moves_of_step in (("operand", step.moves), (self.result_role, step.results)):
            for within, moves in _by_within(moves_of_step):
                self.posted[due, role, within] = self.transfer(index, (due, role, within), [], moves)

    def transfer(
        self, index: int, group: tuple[int, str, int], sends: list[tuple[Move, int]], moves: list[Move]
    ) -> list[_Arrival]:
        """Post moves that are due in the same step, except for receives posted earlier, and return the arrivals to wait
        for.

        Args:
            group: Tuple (step of the moves, role of the receive buffers, `within` of the moves).
            sends: This rank's sends among the moves, each with its buffer.
        """
        early = self.posted.pop(group, None)
        received = [move for move in moves if move.dst == self.rank and early is None]
        receives = [(move, self.buffer(move.kind, group[1], move.key)) for move in received]
        return (early or []) + ([self.post(index, sends, receives)] if sends or receives else [])

    def finish(self, steps: int) -> list[Instruction]:
        """Complete the program after its last step, and return the list of instructions."""
        last = max(0, steps - 1)
        for due in sorted(self.merging):
            self.merge(last, due)
        local = [(kind, (block,)) for kind in ACCUMULATORS[self.direction] for block in self.local]
        # results without any product also need slots: results for an empty block, or for keys that no query sees
        self.code.append(op.Finish(last, tuple((unit, self.accumulator(unit)) for unit in local)))
        return self.code

    def message(self, index: int, unit: Unit) -> int:
        """Return an operand's send buffer. A local operand is first packed into the buffer."""
        if not is_local(self.operands[unit]):
            return self.operands[unit]
        if unit not in self.messages:
            self.messages[unit] = self.buffer(unit[0], "operand", unit[1])
            self.code.append(op.Pack(index, unit, self.messages[unit]))
        return self.messages[unit]

    def post(self, index: int, sends: list[tuple[Move, int]], receives: list[tuple[Move, int]]) -> _Arrival:
        """Post messages together, and return the ticket and the transfers to receive."""
        ticket = next(self.tickets)
        arriving = tuple(Transfer(move.src, move.unit, slot, self.tag(move.unit)) for move, slot in receives)
        leaving = tuple(Transfer(move.dst, move.unit, slot, self.tag(move.unit)) for move, slot in sends)
        self.code.append(op.Post(index, ticket, leaving, arriving))
        return ticket, arriving

    def tag(self, unit: Unit) -> int:
        """Return a message tag, built from the unit's kind and first block.

        The sender and the receiver derive the same tag. No other message between the two ranks uses the tag at the same
        time.
        """
        return UNIT_KINDS.index(unit[0]) * self.blocks + unit[1][0]

    def product(self, index: int, compute: Compute) -> None:
        results = []
        for kind in ACCUMULATORS[self.direction]:
            unit = kind, compute.kv if kind == "dkv" else compute.q
            results.append((unit, self.accumulator(unit)))
        slots = self.operands["q", compute.q], self.operands["kv", compute.kv]
        self.code.append(op.Product(index, compute.q, compute.kv, *slots, tuple(results)))

    def accumulator(self, unit: Unit) -> int:
        if unit not in self.results:
            self.results[unit] = self.buffer(unit[0], "accum", unit[1])
        return self.results[unit]

    def merge(self, index: int, due: int) -> None:
        """Merge the results that are due in step `due`."""
        for ticket, arrived in self.merging.pop(due, []):
            self.code.append(op.Wait(index, ticket))
            for transfer in arrived:
                accumulator = self.results.get(transfer.unit, LOCAL)
                into = transfer.slot if self.comm_in_accum_dtype else self.accumulator(transfer.unit)
                self.results[transfer.unit] = into
                self.code.append(op.Merge(index, transfer.unit, transfer.slot, accumulator, into))

    def export(self, index: int, unit: Unit) -> int:
        """Export an accumulator, and return its send buffer."""
        accumulator = self.results.pop(unit)
        into = accumulator if self.comm_in_accum_dtype else self.buffer(unit[0], "comm", unit[1])
        self.code.append(op.Export(index, unit, accumulator, into))
        return into

    def start_gather(self, index: int, gather: Gather) -> op.GatherStart:
        sent = self.message(index, (gather.kind, gather.key_of(self.rank)))
        received = self.buffer(gather.kind, "operand", gather.blocks)
        start = op.GatherStart(index, next(self.tickets), gather, sent, received)
        self.code.append(start)
        return start

    def start_scatter(self, index: int, reduce: ReduceScatter) -> list[Instruction]:
        """Start a reduce-scatter, and return the instructions that complete it."""
        ticket, key = next(self.tickets), reduce.key_of(self.rank)
        unit = reduce.kind, key
        accumulator, local_shard = self.results.pop((reduce.kind, reduce.blocks)), self.accumulator(unit)
        others = tuple(block for block in reduce.blocks if block not in key)
        sent = self.buffer(reduce.kind, "comm", others)
        received = self.buffer(reduce.kind, "comm", key * (len(reduce.ranks) - 1))
        self.code.append(op.ScatterStart(index, ticket, reduce, accumulator, local_shard, sent, received))
        return [op.Wait(index, ticket), op.Fold(index, unit, received, local_shard, len(reduce.ranks) - 1)]


def _by_within(moves: tuple[Move, ...]) -> list[tuple[int, list[Move]]]:
    """Group moves by `within`, since moves that are due in the same step are posted together."""
    groups: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        groups[move.within].append(move)
    return sorted(groups.items())


# ---- slots

Pool = tuple[str, str, int]


def pool_of(buffer: Slot) -> Pool:
    """Return a buffer's pool. Buffers in the same pool can share slots."""
    return buffer.kind, buffer.role, len(buffer.keys[0])


def last_uses(code: list[Instruction]) -> dict[int, int]:
    """Map each buffer to the last instruction that uses it, which may be the wait for its transfer."""
    last: dict[int, int] = {}
    under_way: dict[int, list[int]] = {}  # ticket -> buffers
    for at, instruction in enumerate(code):
        named = slots_of(instruction)
        if isinstance(instruction, op.Started):
            under_way[instruction.ticket] = named
        if isinstance(instruction, op.Wait):
            named = under_way[instruction.ticket]
        last.update(dict.fromkeys(named, at))
    return last


def assign(code: list[Instruction], buffers: list[Slot]) -> dict:
    """Assign buffers to slots, and return a program's `code`, `slots` and `frees`.

    A linear scan lets buffers of the same size share a slot if their lifetimes do not overlap. The lifetime of a buffer
    extends from the first to the last instruction that uses it.
    """
    last = last_uses(code)
    slots: list[Slot] = []
    free: dict[Pool, list[int]] = defaultdict(list)
    slot_of: dict[int, int] = {}  # buffer -> slot
    dying: dict[int, list[int]] = defaultdict(list)  # instruction -> buffers last used by the instruction
    ends: dict[int, int] = {}  # slot -> last use of the slot's last buffer
    lowered = []
    for at, instruction in enumerate(code):
        for buffer in slots_of(instruction):
            if buffer not in slot_of:
                wanted = buffers[buffer]
                pool = free[pool_of(wanted)]
                slot = slot_of[buffer] = pool.pop() if pool else len(slots)
                if slot == len(slots):
                    slots.append(wanted)
                else:
                    slots[slot] = slots[slot]._replace(keys=slots[slot].keys + wanted.keys)
                dying[last[buffer]].append(buffer)
                ends[slot] = last[buffer]
        lowered.append(renamed(instruction, slot_of.__getitem__))
        for buffer in dying.pop(at, []):
            free[pool_of(buffers[buffer])].append(slot_of[buffer])
    frees: list[list[int]] = [[] for _ in code]
    for slot, at in ends.items():
        frees[at].append(slot)
    return {"code": tuple(lowered), "slots": tuple(slots), "frees": tuple(map(tuple, frees))}
