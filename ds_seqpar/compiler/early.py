"""When a rank asks for what it is sent, as a pass over its code: before it leaves, where a transport profits from that.

Over gloo a message leaves once its receiver has said that it is ready, and that word stands in line behind whatever the
receiver is sending (docs/performance.md).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import NamedTuple

from .program import Instruction, Post, Slot, Wait, slots_of
from .slots import last_uses, pool_of


class Ask(NamedTuple):
    """What one step has to receive. step: in which it leaves."""

    step: int
    post: Post


def asked_early(code: list[Instruction], buffers: list[Slot], early: int) -> list[Instruction]:
    """The code, in which what is received is asked for at the start of an earlier step: `early` steps before it leaves,
    or as many more as take no slot more than that, though slots of two sizes may then be in use at once that were not.
    Nothing else moves."""
    code, asks = _apart(code)
    at = [max(0, ask.step - early) for ask in asks]
    return _with(code, asks, _sooner(_with(code, asks, at), buffers, asks, at))


def _apart(code: list[Instruction]) -> tuple[list[Instruction], list[Ask]]:
    """The code without what is received, which gets tickets of its own, and that."""
    tickets = itertools.count(1 + max((one.ticket for one in code if isinstance(one, Post | Wait)), default=0))
    asks: list[Ask] = []
    left: list[Instruction] = []
    waits: dict[int, list[int]] = {}  # ticket -> those that stand for it
    for one in code:
        if isinstance(one, Post) and one.receives:
            asks.append(Ask(one.step, one._replace(ticket=next(tickets), sends=())))
            waits[one.ticket] = [asks[-1].post.ticket, *([one.ticket] if one.sends else [])]
            left += [one._replace(receives=())] if one.sends else []
        elif isinstance(one, Wait) and one.ticket in waits:
            left += [one._replace(ticket=ticket) for ticket in waits[one.ticket]]
        else:
            left.append(one)
    return left, asks


def _with(code: list[Instruction], asks: list[Ask], at: list[int]) -> list[Instruction]:
    """The code with each of the asks at the start of a step."""
    starting, begun = defaultdict[int, list[Instruction]](list), 0
    for (_, post), step in zip(asks, at, strict=True):
        starting[step].append(post._replace(step=step))
    found: list[Instruction] = []
    for one in code:
        for step in range(begun, one.step + 1):
            found += starting.pop(step, [])
        begun = max(begun, one.step + 1)
        found.append(one)
    return found


def _sooner(code: list[Instruction], buffers: list[Slot], asks: list[Ask], at: list[int]) -> list[int]:
    """The first steps in which the asks may stand, each in its turn, so that no pool ever has more living buffers than
    it has at its most in this code, in which they stand at `at`. Messages of one tag keep their order."""
    first: dict[int, int] = {}
    for place, one in enumerate(code):
        for buffer in slots_of(one):
            first.setdefault(buffer, place)
    living: dict[tuple, list[int]] = defaultdict(lambda: [0] * len(code))
    for buffer, last in last_uses(code).items():
        for place in range(first[buffer], last + 1):
            living[pool_of(buffers[buffer])][place] += 1
    most = {pool: max(counts) for pool, counts in living.items()}
    begins = {step: next(p for p, one in enumerate(code) if one.step >= step) for step in range(max(at, default=0) + 1)}
    before: dict[tuple[int, int], int] = {}  # (peer, tag) -> the step in which the message before it is asked for
    found = []
    for (_, post), step in zip(asks, at, strict=True):
        wanted = Counter(pool_of(buffers[transfer.slot]) for transfer in post.receives)
        least = max(before.get((transfer.peer, transfer.tag), 0) for transfer in post.receives)
        place = first[post.receives[0].slot]
        while step > least and all(
            living[pool][p] + count <= most[pool]
            for pool, count in wanted.items()
            for p in range(begins[step - 1], place)
        ):
            step -= 1
            for pool, count in wanted.items():
                for p in range(begins[step], place):
                    living[pool][p] += count
            place = begins[step]
        before.update({(transfer.peer, transfer.tag): step for transfer in post.receives})
        found.append(step)
    return found
