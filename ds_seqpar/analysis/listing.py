"""A bound program as text: one line for each instruction, then one for each slot with its bytes."""

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
    """The text of one rank's bound program: its instructions in order, its slots, and its peak of memory in bytes.

    `[3]` is slot 3, and `local` are the tensors that the caller gave. `#2` is a ticket: what an instruction starts with
    it runs until `wait #2`. The last column names the slots that are free after an instruction."""
    program = bound.program
    code = [["step", "instruction", "free after it"]]
    for instruction, freed in zip(program.code, program.frees, strict=True):
        code.append([str(instruction.step), _words(instruction), " ".join(map(_slot, freed))])
    slots = [["slot", "holds", "bytes"]]
    for number, (kind, role, keys, _, exchange) in enumerate(program.slots):
        units = dict.fromkeys(unit_name((kind, key)) for key in keys)
        held = f"{role} {exchange.words}" if exchange else ", ".join(units)
        held += " in the dtype of sums" * (role == "accum")
        slots.append([_slot(number), held, str(bound.slot_bytes(number))])
    head = f"{program.name} {program.direction}, the program of CP rank {program.rank} of {program.size}"
    peak = f"peak memory: {memory.peak(bound)} bytes, results included, inputs not"
    return "\n".join([head, *columns(code), "", *columns(slots), "", peak])


def _words(one: Instruction) -> str:
    """An instruction as text."""
    shown = {field: _shown(one, field) for field in one._fields}
    if isinstance(one, op.Post):
        sends = [f"{_slot(t.slot)} {unit_name(t.unit)} to rank {t.peer}" for t in one.sends]
        receives = [f"{_slot(t.slot)} {unit_name(t.unit)} from rank {t.peer}" for t in one.receives]
        shown["messages"] = ", ".join(sends + receives)
    elif isinstance(one, op.Merge) and one.accumulator == LOCAL:
        shown["accumulator"] = "none"
    return TEXTS[type(one)].format(**shown)


def _shown(one: Instruction, field: str) -> str:
    """A field of an instruction as text."""
    value = getattr(one, field)
    if field in SLOTS[type(one)]:
        return _slot(value)
    return SHOWN[field](value) if field in SHOWN else str(value)


def _arrived(arrived: Sequence[tuple[HeadExchange, int]]) -> str:
    return ", ".join(f"{' '.join(exchange.fields)} {_slot(slot)}" for exchange, slot in arrived) or "local tensors"


def _results(results: Sequence[tuple[Unit, int]]) -> str:
    return ", ".join(f"{unit_name(unit)} {_slot(slot)}" for unit, slot in results)


def _slot(slot: int) -> str:
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
# field of an instruction -> its value as text, for fields that are neither numbers nor slots
SHOWN: dict[str, Callable[[Any], str]] = {
    "unit": unit_name,
    "collective": lambda collective: unit_name(collective.unit),
    "q": name_of,
    "kv": name_of,
    "results": _results,
    "exchange": lambda exchange: exchange.words,
    "ranks": lambda ranks: str(len(ranks)),
    "arrived": _arrived,
}
