"""Format bound programs as text, with one line per instruction followed by one line per slot with its size in bytes."""

from __future__ import annotations

from ..core.compiler.compile import BoundProgram
from ..core.compiler.program import instructions as op
from ..core.compiler.program.instructions import LOCAL, SLOTS, Instruction, is_local, label_of
from ..core.compiler.schedules.actions import unit_name
from ..core.compiler.schedules.plan import columns
from . import memory


def listing(bound: BoundProgram) -> str:
    """Return one rank's bound program as text, with the instructions in order, the slots, and the peak memory in bytes.

    `[3]` is slot 3, and `local` denotes the caller's tensors. `#2` is a ticket. An operation started with ticket `#2`
    runs until `wait #2`. The last column lists the slots that are free after the instruction.
    """
    program = bound.program
    code = [["step", "instruction", "free after it"]]
    for instruction, freed in zip(program.code, program.frees, strict=True):
        code.append([str(instruction.step), _instruction_text(instruction), " ".join(map(_slot_text, freed))])
    slots = [["slot", "holds", "bytes"]]
    for number, (kind, role, keys, _, exchange) in enumerate(program.slots):
        units = dict.fromkeys(unit_name((kind, key)) for key in keys)
        content = f"{role} {exchange.words}" if exchange else ", ".join(units)
        content += " in the dtype of sums" * (role == "accum")
        slots.append([_slot_text(number), content, str(bound.slot_bytes(number))])
    head = f"{program.name} {program.direction}, the program of CP rank {program.rank} of {program.size}"
    peak = f"peak memory: {memory.peak(bound)} bytes, results included, inputs not"
    return "\n".join([head, *columns(code), "", *columns(slots), "", peak])


def _instruction_text(instruction: Instruction) -> str:
    label = label_of(instruction)
    operands = [f"{field} {_slot_text(getattr(instruction, field))}" for field in SLOTS[type(instruction)]]
    match instruction:
        case op.GatherStart() | op.ScatterStart() | op.ExchangeStart():
            label = f"start {label}"
        case op.Post():
            operands = [f"{_slot_text(t.slot)} {unit_name(t.unit)} to rank {t.peer}" for t in instruction.sends]
            operands += [f"{_slot_text(t.slot)} {unit_name(t.unit)} from rank {t.peer}" for t in instruction.receives]
        case op.Product() | op.Finish():
            label = "finish" if isinstance(instruction, op.Finish) else f"product {label}"
            operands += [f"{unit_name(unit)} {_slot_text(slot)}" for unit, slot in instruction.results]
        case op.Merge() if instruction.accumulator == LOCAL:
            operands.remove("accumulator local")  # no accumulator exists yet
        case op.Enter():
            operands = [f"{exchange.words} {_slot_text(slot)}" for exchange, slot in instruction.arrived]
    ticket = f" #{instruction.ticket}" if isinstance(instruction, op.Started | op.Wait) else ""
    return f"{label}{ticket}: {', '.join(operands)}".removesuffix(": ")


def _slot_text(slot: int) -> str:
    return "local" if is_local(slot) else f"[{slot}]"
