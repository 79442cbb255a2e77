"""What one rank executes: a flat list of instructions over numbered slots. It is made once and walked at every call.

The walker, the simulator, the memory figure and error texts all read it. A slot is a buffer that holds one unit at a
time. `lower` makes the instructions, and lets units share slots.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from ..schedules.actions import Collective, Unit, name_of, unit_name
from ..sharding.layout import Key

STEP_CHARACTERS = 600  # of a step that `Program.where` shows: it may have a product for each of many blocks
SlotNumber = Annotated[int, "slot"]  # or what `local_slot` gives
LOCAL = -1  # in place of a slot number: the tensors that the head chunk was given, or those of its first block


def local_slot(part: int) -> int:
    """In place of a slot number: block number `part` of the tensors that the head chunk was given."""
    return LOCAL - part


def is_local(slot: int) -> bool:
    """Whether a slot number stands for tensors that the head chunk was given."""
    return slot <= LOCAL


class Transfer(NamedTuple):
    """A message to or from CP rank `peer`: all tensors of a unit, from or into one slot."""

    peer: int
    unit: Unit
    slot: int
    tag: int


class Pack(NamedTuple):
    """Local tensors of an operand are copied into the slot that they are sent from."""

    step: int
    unit: Unit
    into: SlotNumber


class Post(NamedTuple):
    """Messages start; `Wait` for the same ticket ends them."""

    step: int
    ticket: int
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


class Wait(NamedTuple):
    step: int
    ticket: int


class GatherStart(NamedTuple):
    """The Ulysses ranks' `sent` start to arrive in `received`, Ulysses rank after Ulysses rank."""

    step: int
    ticket: int
    collective: Collective
    sent: SlotNumber
    received: SlotNumber

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.collective.ranks

    @property
    def label(self) -> str:
        return str(self.collective)


class Assemble(NamedTuple):
    """A gathered operand is put in order of position."""

    step: int
    collective: Collective
    received: SlotNumber
    into: SlotNumber

    @property
    def unit(self) -> Unit:
        return self.collective.unit


class Product(NamedTuple):
    """Attention of q and kv, added to the accumulators. results: each with the slot that it takes once it must be in
    the dtype of sums."""

    step: int
    q: Key
    kv: Key
    q_slot: SlotNumber
    kv_slot: SlotNumber
    results: tuple[tuple[Unit, int], ...]


class Merge(NamedTuple):
    """A result that arrived and the accumulator (in slot `accumulator`, if there is one) become one, in slot
    `into`."""

    step: int
    unit: Unit
    arrived: SlotNumber
    accumulator: SlotNumber
    into: SlotNumber


class Export(NamedTuple):
    """An accumulator becomes the message that takes it to another rank."""

    step: int
    unit: Unit
    accumulator: SlotNumber
    into: SlotNumber


class ScatterStart(NamedTuple):
    """The other members' parts of an accumulator start on their way; the local part goes into slot `local_part`."""

    step: int
    ticket: int
    collective: Collective
    accumulator: SlotNumber
    local_part: SlotNumber
    sent: SlotNumber
    received: SlotNumber

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.collective.ranks

    @property
    def label(self) -> str:
        return str(self.collective)


class Fold(NamedTuple):
    """The parts that the other members sent are merged into the accumulator of `unit`."""

    step: int
    unit: Unit
    received: SlotNumber
    accumulator: SlotNumber
    parts: int


class Finish(NamedTuple):
    """The accumulators of the local blocks become those of the head chunk."""

    step: int
    results: tuple[tuple[Unit, int], ...]


class HeadExchange(NamedTuple):
    """Tensors of a head chunk's heads that Ulysses ranks exchange in one all-to-all. inward: local tokens of all the
    head chunk's heads become all the CP rank's tokens of a Ulysses rank's own heads; else the reverse. fields: the
    tensors' names, of `compiler.program.ulysses`."""

    head_chunk: int
    inward: bool
    fields: tuple[str, ...]

    @property
    def words(self) -> str:
        return f"{' '.join(self.fields)} {'in' if self.inward else 'out'}"


class PackHeads(NamedTuple):
    """What each Ulysses rank is sent is put side by side: inward some of the caller's tensors, outward results of the
    head chunk."""

    step: int
    exchange: HeadExchange
    into: SlotNumber


class ExchangeStart(NamedTuple):
    """An all-to-all among `ranks`, Ulysses ranks by their numbers."""

    step: int
    ticket: int
    exchange: HeadExchange
    ranks: tuple[int, ...]
    sent: SlotNumber
    received: SlotNumber

    @property
    def label(self) -> str:
        return self.exchange.words


class Enter(NamedTuple):
    """A head chunk begins: from here on, local tensors are the head chunk's. arrived: the exchanges that brought them,
    with their slots."""

    step: int
    head_chunk: int
    arrived: tuple[tuple[HeadExchange, int], ...]


class Leave(NamedTuple):
    """A head chunk ends: what its `Finish` gave is its result, and its operands are given up."""

    step: int
    head_chunk: int


class UnpackHeads(NamedTuple):
    """Results that arrived outward are copied to their heads of the caller's tokens."""

    step: int
    exchange: HeadExchange
    received: SlotNumber


Instruction = (
    Pack | Post | Wait | GatherStart | Assemble | Product | Merge | Export | ScatterStart | Fold | Finish
    | PackHeads | ExchangeStart | Enter | Leave | UnpackHeads
)  # fmt: skip
Started = Post | GatherStart | ScatterStart | ExchangeStart  # what a `Wait` ends
# kind of instruction -> its fields that are slots; transfers, results and what arrived name more slots
SLOTS: dict[type, list[str]] = {
    kind: [field for field, hint in get_type_hints(kind, include_extras=True).items() if hint == SlotNumber]
    for kind in get_args(Instruction)
}
# kind of instruction -> the kind of its event in a time line
KINDS = {Product: "product", Merge: "merge", Fold: "merge", Post: "post", GatherStart: "post", ScatterStart: "post",
         ExchangeStart: "post", Wait: "post", Pack: "copy", Assemble: "copy", Export: "copy", Finish: "copy",
         PackHeads: "copy", UnpackHeads: "copy", Enter: "copy", Leave: "copy"}  # fmt: skip


def name_of_kind(kind: type) -> str:
    """The name of a kind of instruction in lower case, as "pack_heads"."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def methods_of(reader: type) -> dict[type, Callable[[Any, Any], None]]:
    """Kind of instruction -> the method of that name (`name_of_kind`) of a class that reads programs."""
    return {kind: getattr(reader, name_of_kind(kind)) for kind in SLOTS}


def label_of(one: Instruction) -> str:
    """What an instruction does, without its slots."""
    match one:
        case Product():
            return f"q{name_of(one.q)}*kv{name_of(one.kv)}"
        case Pack() | Assemble() | Merge() | Export() | Fold():
            return f"{name_of_kind(type(one))} {unit_name(one.unit)}"
        case Finish():
            return " ".join(["finish", *(unit_name(unit) for unit, _ in one.results)])
        case PackHeads() | UnpackHeads():
            return f"{name_of_kind(type(one))} {one.exchange.words}".replace("_heads", "")
        case Enter() | Leave():
            return f"{name_of_kind(type(one))} head chunk {one.head_chunk}"
        case _:
            return name_of_kind(type(one))


def renamed(instruction: Instruction, name: Callable[[int], int]) -> Instruction:
    """The instruction with the slot number `name(slot)` in place of each slot; local tensors stay."""

    def new_slot(slot: int) -> int:
        return slot if is_local(slot) else name(slot)

    new: dict[str, Any] = {field: new_slot(getattr(instruction, field)) for field in SLOTS[type(instruction)]}
    if isinstance(instruction, Post):
        for field in ("sends", "receives"):
            new[field] = tuple(t._replace(slot=name(t.slot)) for t in getattr(instruction, field))
    if isinstance(instruction, Product | Finish):
        new["results"] = tuple((unit, new_slot(slot)) for unit, slot in instruction.results)
    if isinstance(instruction, Enter):
        new["arrived"] = tuple((exchange, name(slot)) for exchange, slot in instruction.arrived)
    return instruction._replace(**new)


def slots_of(instruction: Instruction) -> list[int]:
    """The slots that an instruction names."""
    slots: list[int] = []

    def note(slot: int) -> int:
        slots.append(slot)
        return slot

    renamed(instruction, note)
    return slots


class Slot(NamedTuple):
    """A buffer. kind: of the units that it holds. role: "operand"; "accum", an accumulator in the dtype of sums;
    "comm", a result in the dtype that it travels in; "sent" or "received", of an exchange of heads, `exchange`. keys:
    the units' blocks, as many in each. head_chunk: whose heads it has."""

    kind: str
    role: str
    keys: tuple[Key, ...]
    head_chunk: int = 0
    exchange: HeadExchange | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One rank's program, of a schedule (`name`) on `size` CP ranks. blocks_per_rank: blocks that each rank owns. code:
    the instructions in order. slots: by number. frees[i]: slots that no instruction after number i names. words[s]:
    what the rank does in step s, for people."""

    name: str
    direction: str
    rank: int
    size: int
    code: tuple[Instruction, ...]
    slots: tuple[Slot, ...]
    frees: tuple[tuple[int, ...], ...]
    words: tuple[str, ...]
    blocks_per_rank: int = 1

    def where(self, at: int, around: int = 2) -> str:
        """Text that says where instruction number `at` stands: its step, `around` steps before and after it, and the
        ranks that take part in it."""
        step = self.code[at].step
        peers = sorted({peer for one in self.code if one.step == step for peer in _peers(one)} - {self.rank})
        near = range(max(0, step - around), min(len(self.words), step + around + 1))
        words = {s: self.words[s][:STEP_CHARACTERS] + " ..." * (len(self.words[s]) > STEP_CHARACTERS) for s in near}
        lines = [f"{'->' if s == step else '  '} step {s}: {words[s]}" for s in near]
        who = f", with ranks {', '.join(map(str, peers[:8]))}{' ...' if len(peers) > 8 else ''}" if peers else ""
        head = f"{self.name} {self.direction}, CP rank {self.rank} of {self.size}, step {step}{who}"
        return "\n".join([head, *lines])


def _peers(instruction: Instruction) -> tuple[int, ...]:
    if isinstance(instruction, Post):
        return tuple(transfer.peer for transfer in (*instruction.sends, *instruction.receives))
    if isinstance(instruction, GatherStart | ScatterStart):
        return instruction.collective.ranks
    return ()
