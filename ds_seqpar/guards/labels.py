"""Label each instruction in a profiler's trace with the names used in the plan."""

from __future__ import annotations

import contextlib

from torch import Tensor

from ..base import profiling
from ..core.compiler.compile import BoundProgram
from ..core.compiler.program import instructions as op
from ..core.compiler.program.instructions import Transfer, label_of, name_of_kind
from ..core.compiler.schedules.actions import name_of, unit_name
from ..core.runtime.walk import Observer, Walk


class Labels(Observer):
    """Observer that labels each instruction in a running profiler's trace, nested in the program's label."""

    def begin(self, walk: Walk) -> bool:
        if not profiling.is_on():
            return False
        program, self.labels, self.spans = walk.program, iter(labels_of(walk.bound)), contextlib.ExitStack()
        self.span = contextlib.ExitStack()  # trace span of the current instruction
        self.spans.enter_context(
            profiling.span(f"{program.name} {program.direction}, CP rank {program.rank} of {program.size}")
        )
        return True

    def before(self, walk: Walk, instruction: op.Instruction) -> None:
        self.span.enter_context(profiling.span(next(self.labels)))

    def after(self, walk: Walk, instruction: op.Instruction) -> None:
        self.span.close()

    def end(self, walk: Walk, results: list[Tensor] | None) -> None:
        self.span.close()  # still open if the instruction raised an error
        self.spans.close()


def labels_of(bound: BoundProgram) -> list[str]:
    """Return the label of each instruction, which contains the step, the operation, the ranks involved and the number
    of bytes.

    A message's label contains the number of bytes that this rank sends or receives, and a collective's label the number
    of bytes that this rank receives. Message labels name CP ranks. For example, "kv(3):3>0 4096 B" is sent from rank 3
    to rank 0.
    """
    labels, started = [], dict[int, str]()  # labels of started transfers, by ticket
    for instruction in bound.program.code:
        if isinstance(instruction, op.Started):
            started[instruction.ticket] = _transfers(bound, instruction)
            text = f"{name_of_kind(type(instruction))} {started[instruction.ticket]}"
        elif isinstance(instruction, op.Wait):
            text = f"wait {started[instruction.ticket]}"
        else:
            text = label_of(instruction)
        labels.append(f"step {instruction.step} {text}")
    return labels


def _transfers(bound: BoundProgram, instruction: op.Started) -> str:
    if isinstance(instruction, op.Post):
        rank, (sends, receives) = bound.program.rank, (instruction.sends, instruction.receives)
        messages = [_message(bound, t, rank, t.peer) for t in sends]
        return ", ".join(messages + [_message(bound, t, t.peer, rank) for t in receives])
    if isinstance(instruction, op.ExchangeStart):
        sizes = bound.exchange_sizes(instruction.exchange)
        received = sizes.arriving(bound.heads.ulysses.rank) * sizes.itemsize
        return f"{label_of(instruction)} of Ulysses ranks {name_of(instruction.ranks)} {received} B"
    collective, rank = instruction.collective, bound.program.rank
    others = [key for member, key in zip(collective.ranks, collective.keys, strict=True) if member != rank]
    keys = others if isinstance(instruction, op.GatherStart) else [collective.key_of(rank)] * len(others)
    size = sum(bound.unit_bytes(instruction.received, collective.kind, key) for key in keys)
    return f"{label_of(instruction)} of ranks {name_of(collective.ranks)} {size} B"


def _message(bound: BoundProgram, transfer: Transfer, source: int, destination: int) -> str:
    size = bound.unit_bytes(transfer.slot, *transfer.unit)
    return f"{unit_name(transfer.unit)}:{source}>{destination} {size} B"
