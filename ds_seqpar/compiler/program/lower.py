"""Lowering: from a rank's steps to its program.

This decides which copies are made, when each transfer is waited for, and which slots are used. `lower` first gives
every unit a buffer of its own; `assign` then lets buffers of one size share a slot if they are not live at the same
time. Over gloo a message is only sent once its receiver has reported that it is ready, and that report is queued behind
the receiver's own sends. So `receives_ahead` posts a receive at the start of an earlier step.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

from ..schedules.actions import ACCUMULATORS, OPERANDS, Compute, Gather, Move, ReduceScatter, Step, Steps, Unit
from ..sharding.layout import Key, owned
from . import instructions as op
from .instructions import LOCAL, Instruction, Program, Slot, Transfer, is_local, local_slot, renamed, slots_of

UNIT_KINDS = ("q", "kv", "out", "dq", "dkv")


def lower(
    name: str, direction: str, rank: int, size: int, steps: Steps, comm_in_accum_dtype: bool, blocks_per_rank: int = 1,
    ahead: int = 0,
) -> Program:  # fmt: skip
    """Return the program of one rank.

    Args:
        comm_in_accum_dtype: whether results are sent in accum_dtype. If so, the accumulator is added to a result where
            it arrived, and is sent on from there.
        blocks_per_rank: number of blocks that each rank owns.
        ahead: number of steps by which receives are posted early (see `receives_ahead`); 0 posts each in the step in
            which the message is sent.
    """
    lowering = _Lowering(direction, rank, size, comm_in_accum_dtype, blocks_per_rank)
    for index, step in enumerate(steps):
        lowering.step(index, step)
    code, buffers = lowering.finish(len(steps)), lowering.buffers
    if ahead:
        code = receives_ahead(code, buffers, ahead)
    return Program(
        name=name,
        direction=direction,
        rank=rank,
        size=size,
        blocks_per_rank=blocks_per_rank,
        words=tuple(step.words(rank) for step in steps),
        **assign(code, buffers),
    )


class _Lowering:
    """Collects the instructions of one rank, step by step, with a separate buffer for every unit."""

    def __init__(self, direction: str, rank: int, size: int, comm_in_accum_dtype: bool, blocks_per_rank: int) -> None:
        self.direction, self.rank, self.comm_in_accum_dtype = direction, rank, comm_in_accum_dtype
        self.blocks, self.local = size * blocks_per_rank, owned(rank, blocks_per_rank)
        self.code: list[Instruction] = []
        self.buffers: list[Slot] = []
        self.tickets = itertools.count()
        self.operands: dict[Unit, int] = {
            (kind, (b,)): local_slot(n) for kind in OPERANDS for n, b in enumerate(self.local)
        }
        self.messages: dict[Unit, int] = {}  # local operand -> the buffer that it is sent from
        self.results: dict[Unit, int] = {}  # accumulator -> its buffer
        self.arriving: dict[int, list[int]] = defaultdict(list)  # step -> tickets of operands that are due at its end
        # step -> (ticket, transfers) of results that are merged after its products
        self.merging: dict[int, list[tuple[int, tuple[Transfer, ...]]]] = defaultdict(list)

    def buffer(self, kind: str, role: str, key: Key) -> int:
        self.buffers.append(Slot(kind, role, (key,)))
        return len(self.buffers) - 1

    def step(self, index: int, step: Step) -> None:
        started = [self.start_gather(index, gather) for gather in step.gathers]
        for start in started:  # all are started before the first wait
            gather = start.collective
            into = self.operands[gather.unit] = self.buffer(gather.kind, "operand", gather.blocks)
            self.code += [op.Wait(index, start.ticket), op.Assemble(index, gather, start.received, into)]
        for within, moves in _by_within(step.moves):
            sends = [(move, self.message(index, move.unit)) for move in moves if move.src == self.rank]
            receives = [(move, self.buffer(move.kind, "operand", move.key)) for move in moves if move.dst == self.rank]
            self.operands.update({move.unit: slot for move, slot in receives})
            if sends or receives:
                self.arriving[index + within - 1].append(self.post(index, sends, receives)[0])
        for compute in step.computes:
            self.product(index, compute)
        self.merge(index, index)  # before results are sent: those that arrived may be merged into them
        for within, moves in _by_within(step.results):
            sends = [(move, self.export(index, move.unit)) for move in moves if move.src == self.rank]
            role = "accum" if self.comm_in_accum_dtype else "comm"
            receives = [(move, self.buffer(move.kind, role, move.key)) for move in moves if move.dst == self.rank]
            if sends or receives:
                self.merging[index + within].append(self.post(index, sends, receives))
        for reduce in [self.start_scatter(index, reduce) for reduce in step.reduces]:
            self.code += reduce
        self.code += [op.Wait(index, ticket) for ticket in self.arriving.pop(index, [])]

    def finish(self, steps: int) -> list[Instruction]:
        """Complete a program of so many steps, and return its code."""
        last = max(0, steps - 1)
        for due in sorted(self.merging):
            self.merge(last, due)
        local = [(kind, (block,)) for kind in ACCUMULATORS[self.direction] for block in self.local]
        # results to which nothing is added need slots too: those of an empty block, or of keys that no query sees
        self.code.append(op.Finish(last, tuple((unit, self.accumulator(unit)) for unit in local)))
        return self.code

    def message(self, index: int, unit: Unit) -> int:
        """Return the buffer that an operand is sent from, and pack local operands into it."""
        if not is_local(self.operands[unit]):
            return self.operands[unit]
        if unit not in self.messages:
            self.messages[unit] = self.buffer(unit[0], "operand", unit[1])
            self.code.append(op.Pack(index, unit, self.messages[unit]))
        return self.messages[unit]

    def post(
        self, index: int, sends: list[tuple[Move, int]], receives: list[tuple[Move, int]]
    ) -> tuple[int, tuple[Transfer, ...]]:
        """Post messages together. Return their ticket and the transfers that are received."""
        ticket = next(self.tickets)
        arriving = tuple(Transfer(move.src, move.unit, slot, self.tag(move.unit)) for move, slot in receives)
        leaving = tuple(Transfer(move.dst, move.unit, slot, self.tag(move.unit)) for move, slot in sends)
        self.code.append(op.Post(index, ticket, leaving, arriving))
        return ticket, arriving

    def tag(self, unit: Unit) -> int:
        """Return a tag that both ends can derive, and that no other message between them uses at the same time.

        It is made of the unit's kind and first block.
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
        """Export an accumulator, and return the buffer that it is sent from."""
        accumulator = self.results.pop(unit)
        into = accumulator if self.comm_in_accum_dtype else self.buffer(unit[0], "comm", unit[1])
        self.code.append(op.Export(index, unit, accumulator, into))
        return into

    def start_gather(self, index: int, gather: Gather) -> op.GatherStart:
        ticket, key = next(self.tickets), gather.key_of(self.rank)
        sent = self.message(index, (gather.kind, key))
        received = self.buffer(gather.kind, "operand", gather.blocks)
        start = op.GatherStart(index, ticket, gather, sent, received)
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
    """Return (within, moves) for each value of `within`: moves that are due together are posted together."""
    groups: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        groups[move.within].append(move)
    return sorted(groups.items())


# ---- slots

Pool = tuple[str, str, int]


def pool_of(buffer: Slot) -> Pool:
    """Return the pool of a buffer; buffers of one pool can share slots."""
    return buffer.kind, buffer.role, len(buffer.keys[0])


def last_uses(code: list[Instruction]) -> dict[int, int]:
    """Return, for each buffer, the last instruction that uses it, or the wait for its transfer."""
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
    """Assign buffers to slots, and return the code, slots and frees of a program.

    This is a linear scan, in which buffers of one size share a slot if they are not live at the same time. A buffer is
    live from the first instruction that uses it to the last.
    """
    last = last_uses(code)
    slots: list[Slot] = []
    free: dict[Pool, list[int]] = defaultdict(list)
    slot_of: dict[int, int] = {}  # buffer -> slot
    dying: dict[int, list[int]] = defaultdict(list)  # instruction -> the buffers that are last used by it
    ends: dict[int, int] = {}  # slot -> the last instruction that uses its last buffer
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


# ---- receives that are posted ahead


def receives_ahead(code: list[Instruction], buffers: list[Slot], ahead: int) -> list[Instruction]:
    """Return the code with each receive posted at the start of an earlier step.

    A receive is posted `ahead` steps before its message is sent, or even earlier where that needs no further slot.
    Slots of two sizes may then be in use together that were not before. Nothing else is moved.
    """
    code, receives = _without_receives(code)
    post_steps = [max(0, post.step - ahead) for post in receives]
    return _with_receives(
        code, receives, _earliest(_with_receives(code, receives, post_steps), buffers, receives, post_steps)
    )


def _without_receives(code: list[Instruction]) -> tuple[list[Instruction], list[op.Post]]:
    """Return the code without its receives, and the receives as separate posts with new tickets."""
    tickets = itertools.count(
        1 + max((instruction.ticket for instruction in code if isinstance(instruction, op.Post | op.Wait)), default=0)
    )
    receives: list[op.Post] = []
    others: list[Instruction] = []
    waits: dict[int, list[int]] = {}  # ticket -> the tickets that replace it
    for instruction in code:
        if isinstance(instruction, op.Post) and instruction.receives:
            receives.append(instruction._replace(ticket=next(tickets), sends=()))
            waits[instruction.ticket] = [receives[-1].ticket, *([instruction.ticket] if instruction.sends else [])]
            others += [instruction._replace(receives=())] if instruction.sends else []
        elif isinstance(instruction, op.Wait) and instruction.ticket in waits:
            others += [instruction._replace(ticket=ticket) for ticket in waits[instruction.ticket]]
        else:
            others.append(instruction)
    return others, receives


def _with_receives(code: list[Instruction], receives: list[op.Post], post_steps: list[int]) -> list[Instruction]:
    """Return the code with receives[i] posted at the start of step post_steps[i]."""
    starting, next_step = defaultdict[int, list[Instruction]](list), 0
    for post, step in zip(receives, post_steps, strict=True):
        starting[step].append(post._replace(step=step))
    joined: list[Instruction] = []
    for instruction in code:
        for step in range(next_step, instruction.step + 1):
            joined += starting.pop(step, [])
        next_step = max(next_step, instruction.step + 1)
        joined.append(instruction)
    return joined


def _earliest(
    code: list[Instruction], buffers: list[Slot], receives: list[op.Post], post_steps: list[int]
) -> list[int]:
    """Return the first step at which each receive may be posted; receives are moved one after the other.

    No pool may then have more live buffers than its maximum in this code, in which the receives are posted at
    `post_steps`. Messages of one tag stay in order.
    """
    first: dict[int, int] = {}  # buffer -> the first instruction that uses it
    for index, instruction in enumerate(code):
        for buffer in slots_of(instruction):
            first.setdefault(buffer, index)
    living: dict[tuple, list[int]] = defaultdict(lambda: [0] * len(code))  # pool -> its live buffers, by instruction
    for buffer, last in last_uses(code).items():
        for index in range(first[buffer], last + 1):
            living[pool_of(buffers[buffer])][index] += 1
    peaks = {pool: max(counts) for pool, counts in living.items()}
    begins = {
        step: next(i for i, instruction in enumerate(code) if instruction.step >= step)
        for step in range(max(post_steps, default=0) + 1)
    }
    previous: dict[tuple[int, int], int] = {}  # (peer, tag) -> the step at which its previous message is received
    earliest_steps = []
    for post, step in zip(receives, post_steps, strict=True):
        wanted = Counter(pool_of(buffers[transfer.slot]) for transfer in post.receives)
        earliest_step = max(previous.get((transfer.peer, transfer.tag), 0) for transfer in post.receives)
        index = first[post.receives[0].slot]
        while step > earliest_step and all(
            living[pool][i] + count <= peaks[pool]
            for pool, count in wanted.items()
            for i in range(begins[step - 1], index)
        ):
            step -= 1
            for pool, count in wanted.items():
                for i in range(begins[step], index):
                    living[pool][i] += count
            index = begins[step]
        previous.update({(transfer.peer, transfer.tag): step for transfer in post.receives})
        earliest_steps.append(step)
    return earliest_steps
