"""Which of a program's buffers share a slot: those of one size that do not live together."""

from __future__ import annotations

from collections import defaultdict

from .program import GatherStart, Instruction, Post, ScatterStart, Slot, Wait, is_own, renamed, slots_of

Pool = tuple[str, str, int]


def pool_of(buffer: Slot) -> Pool:
    """Buffers of one pool can share slots."""
    return buffer.kind, buffer.role, len(buffer.keys[0])


def last_uses(code: list[Instruction]) -> dict[int, int]:
    """Buffer -> the last instruction that names it, or the wait for its transfer."""
    last: dict[int, int] = {}
    under_way: dict[int, list[int]] = {}  # ticket -> buffers
    for at, instruction in enumerate(code):
        named = slots_of(instruction)
        if isinstance(instruction, Post | GatherStart | ScatterStart):
            under_way[instruction.ticket] = named
        if isinstance(instruction, Wait):
            named = under_way[instruction.ticket]
        last.update(dict.fromkeys(named, at))
    return last


def assign(code: list[Instruction], buffers: list[Slot]) -> dict:
    """Code, slots and frees of a program: a linear scan in which buffers of one size that do not live together share a
    slot. A buffer lives from the first instruction that names it to its last use."""
    last = last_uses(code)
    slots: list[Slot] = []
    free: dict[Pool, list[int]] = defaultdict(list)
    place: dict[int, int] = {}
    dying: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, int] = {}  # slot -> where its last buffer ends
    lowered = []
    for at, instruction in enumerate(code):
        for buffer in slots_of(instruction):
            if buffer not in place:
                wanted = buffers[buffer]
                pool = free[pool_of(wanted)]
                place[buffer] = pool.pop() if pool else len(slots)
                if place[buffer] == len(slots):
                    slots.append(wanted)
                else:
                    slots[place[buffer]] = slots[place[buffer]]._replace(keys=slots[place[buffer]].keys + wanted.keys)
                dying[last[buffer]].append(buffer)
                ends[place[buffer]] = last[buffer]
        lowered.append(renamed(instruction, lambda slot: slot if is_own(slot) else place[slot]))
        for buffer in dying.pop(at, []):
            wanted = buffers[buffer]
            free[pool_of(wanted)].append(place[buffer])
    frees: list[list[int]] = [[] for _ in code]
    for slot, at in ends.items():
        frees[at].append(slot)
    return {"code": tuple(lowered), "slots": tuple(slots), "frees": tuple(map(tuple, frees))}
