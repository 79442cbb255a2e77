"""A bound program as text: one line for each instruction, then one for each slot with its bytes."""

from __future__ import annotations

from collections.abc import Sequence

from . import memory
from .actions import Unit, name_of, unit_name
from .compile import Bound
from .plan import columns
from .program import (
    OWN,
    Assemble,
    Enter,
    ExchangeStart,
    Export,
    Finish,
    Fold,
    GatherStart,
    Instruction,
    Leave,
    Merge,
    Pack,
    PackHeads,
    Post,
    Product,
    ScatterStart,
    Transfer,
    UnpackHeads,
    Wait,
    is_own,
)


def listing(bound: Bound) -> str:
    """The text of one rank's bound program: its instructions in order, its slots, and its peak of memory in bytes.

    `[3]` is slot 3, and `own` are the tensors that the caller gave. `#2` is a ticket: what an instruction starts with
    it runs until `wait #2`. The last column names the slots that are free after an instruction."""
    program = bound.program
    code = [["step", "instruction", "free after it"]]
    for instruction, freed in zip(program.code, program.frees, strict=True):
        code.append([str(instruction.step), _words(instruction), " ".join(map(_slot, freed))])
    slots = [["slot", "holds", "bytes"]]
    for number, (kind, role, keys, _, trade) in enumerate(program.slots):
        units = (
            ", ".join(dict.fromkeys(unit_name((kind, key)) for key in keys)) if not trade else f"{role} {trade.words}"
        )
        slots.append([_slot(number), f"{units}{' in the dtype of sums' * (role == 'wide')}",
                      str(bound.slot_bytes(number))])  # fmt: skip
    head = f"{program.name} {program.direction}, the program of inner rank {program.rank} of {program.size}"
    most = f"peak memory: {memory.peak(bound)} bytes, results included, inputs not"
    return "\n".join([head, *columns(code), "", *columns(slots), "", most])


def _words(one: Instruction) -> str:
    """The text of any instruction."""
    match one:
        case Pack(unit=unit, into=into):
            return f"pack {unit_name(unit)} into {_slot(into)}"
        case Post():
            return f"post #{one.ticket}: {', '.join([*_sent(one.sends), *_received(one.receives)])}"
        case Wait(ticket=ticket):
            return f"wait #{ticket}"
        case GatherStart(collective=gather):
            whole = unit_name((gather.kind, gather.whole))
            return f"gather #{one.ticket}: {whole}, {_slot(one.sent)} -> {_slot(one.received)}"
        case Assemble(collective=gather):
            return f"assemble {unit_name((gather.kind, gather.whole))}, {_slot(one.received)} -> {_slot(one.into)}"
        case PackHeads() | ExchangeStart() | UnpackHeads() | Enter() | Leave():
            return _of_heads(one)
        case _:
            return _of_results(one)


def _of_heads(one: Instruction) -> str:
    """The text of an instruction of Ulysses' exchanges, or of a stage of heads."""
    match one:
        case PackHeads(trade=trade):
            return f"pack heads of {trade.words} into {_slot(one.into)}"
        case ExchangeStart(trade=trade):
            others = f"with {len(one.ranks)} members"
            return f"exchange #{one.ticket}: {trade.words} {others}, {_slot(one.sent)} -> {_slot(one.received)}"
        case UnpackHeads(trade=trade):
            return f"unpack heads of {trade.words} from {_slot(one.received)}"
        case Enter(stage=stage, arrived=arrived):
            what = ", ".join(f"{' '.join(trade.fields)} {_slot(slot)}" for trade, slot in arrived)
            return f"enter stage {stage}: {what or 'own tensors'}"
        case Leave(stage=stage):
            return f"leave stage {stage}"
    raise AssertionError(f"an instruction without words: {one}")


def _of_results(one: Instruction) -> str:
    """The text of an instruction that makes, adds or moves results."""
    match one:
        case Product():
            operands = f"q{name_of(one.q)} {_slot(one.q_slot)} * kv{name_of(one.kv)} {_slot(one.kv_slot)}"
            return f"product {operands} -> {_results(one.results)}"
        case Merge():
            running = "none" if one.own == OWN else _slot(one.own)
            return f"merge {unit_name(one.unit)} {_slot(one.arrived)} and {running} -> {_slot(one.into)}"
        case Export():
            return f"export {unit_name(one.unit)} {_slot(one.own)} -> {_slot(one.into)}"
        case ScatterStart(collective=reduce):
            parts = f"own part -> {_slot(one.kept)}, others {_slot(one.sent)} -> {_slot(one.received)}"
            return f"scatter #{one.ticket}: {unit_name((reduce.kind, reduce.whole))} {_slot(one.own)}, {parts}"
        case Fold():
            return f"fold {one.parts} of {unit_name(one.unit)} {_slot(one.received)} -> {_slot(one.own)}"
        case Finish():
            return f"finish {_results(one.results)}"
    raise AssertionError(f"an instruction without words: {one}")


def _results(results: Sequence[tuple[Unit, int]]) -> str:
    return ", ".join(f"{unit_name(unit)} {_slot(slot)}" for unit, slot in results)


def _sent(transfers: Sequence[Transfer]) -> list[str]:
    return [f"{_slot(t.slot)} {unit_name(t.unit)} to rank {t.peer}" for t in transfers]


def _received(transfers: Sequence[Transfer]) -> list[str]:
    return [f"{_slot(t.slot)} {unit_name(t.unit)} from rank {t.peer}" for t in transfers]


def _slot(slot: int) -> str:
    return "own" if is_own(slot) else f"[{slot}]"
