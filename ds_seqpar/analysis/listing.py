"""A bound program as text: one line per instruction, then one per slot with its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..compiler import memory
from ..compiler.compile import BoundProgram
from ..compiler.program import instructions as op
from ..compiler.program.instructions import LOCAL, SLOTS, HeadExchange, Instruction, is_local
from ..compiler.schedules.actions import Unit, name_of, unit_name
from ..compiler.schedules.plan import columns


def listing(bound: BoundProgram) -> str:
    """Return the text of one rank's bound program: its instructions in order, its slots, and its peak memory in bytes.

    `[3]` is slot 3, and `local` refers to tensors of the caller. `#2` is a ticket: what an instruction with this ticket
    starts runs until `wait #2`. The last column has the slots that are free after an instruction.
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
    shown = {field: _field_text(instruction, field) for field in instruction._fields}
    if isinstance(instruction, op.Post):
        sends = [f"{_slot_text(t.slot)} {unit_name(t.unit)} to rank {t.peer}" for t in instruction.sends]
        receives = [f"{_slot_text(t.slot)} {unit_name(t.unit)} from rank {t.peer}" for t in instruction.receives]
        shown["messages"] = ", ".join(sends + receives)
    elif isinstance(instruction, op.Merge) and instruction.accumulator == LOCAL:
        shown["accumulator"] = "none"
    return TEXTS[type(instruction)].format(**shown)


def _field_text(instruction: Instruction, field: str) -> str:
    value = getattr(instruction, field)
    if field in SLOTS[type(instruction)]:
        return _slot_text(value)
    return SHOWN[field](value) if field in SHOWN else str(value)


def _arrived_text(arrived: Sequence[tuple[HeadExchange, int]]) -> str:
    return ", ".join(f"{' '.join(exchange.fields)} {_slot_text(slot)}" for exchange, slot in arrived) or "local tensors"


def _results_text(results: Sequence[tuple[Unit, int]]) -> str:
    return ", ".join(f"{unit_name(unit)} {_slot_text(slot)}" for unit, slot in results)


def _slot_text(slot: int) -> str:
    return "local" if is_local(slot) else f"[{slot}]"


TEXTS: dict[type, str] = {
    op.Pack: "pack {unit} into {into}",
    op.Post: "post #{ticket}: {messages}",
    op.Wait: "wait #{ticket}",
    op.GatherStart: "gather #{ticket}: {collective}, {sent} -> {received}",
    op.Assemble: "assemble {collective}, {received} -> {into}",
    op.Product: "product q{q} {q_slot} * kv{kv} {kv_slot} -> {results}",
    op.Merge: "merge {unit} {arrived} and {accumulator} -> {into}",
    op.Export: "export {unit} {accumulator} -> {into}",
    op.ScatterStart: (
        "scatter #{ticket}: {collective} {accumulator}, local part -> {local_part}, others {sent} -> {received}"
    ),
    op.Fold: "fold {parts} of {unit} {received} -> {accumulator}",
    op.Finish: "finish {results}",
    op.PackHeads: "pack heads of {exchange} into {into}",
    op.ExchangeStart: "exchange #{ticket}: {exchange} with {ranks} Ulysses ranks, {sent} -> {received}",
    op.Enter: "enter head chunk {head_chunk}: {arrived}",
    op.Leave: "leave head chunk {head_chunk}",
    op.UnpackHeads: "unpack heads of {exchange} from {received}",
}
# field of an instruction -> function from its value to text, for fields that are neither numbers nor slots
SHOWN: dict[str, Callable[[Any], str]] = {
    "unit": unit_name,
    "collective": lambda collective: unit_name(collective.unit),
    "q": name_of,
    "kv": name_of,
    "results": _results_text,
    "exchange": lambda exchange: exchange.words,
    "ranks": lambda ranks: str(len(ranks)),
    "arrived": _arrived_text,
}
