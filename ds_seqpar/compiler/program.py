"""What one rank executes: a flat list of instructions over numbered slots. It is made once and walked at every call.

The walker, the simulator, the memory figure and error texts all read it. A slot is a buffer for one unit at a time;
`lower` makes the instructions, and says which of them share a buffer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from .actions import Collective, Key, Unit, name_of, unit_name

LINE = 600  # characters of a step that `place` shows: one may have a product for each of many blocks
SlotNumber = Annotated[int, "slot"]  # or `own_slot`
OWN = -1  # in place of a slot: the stage's own tensors, or those of its first block; see `own_slot`


def own_slot(part: int) -> int:
    """In place of a slot: the part of the caller's own tensors that is its block number `part`."""
    return OWN - part


def is_own(slot: int) -> bool:
    return slot <= OWN


class Transfer(NamedTuple):
    """A message to or from inner rank `peer`: everything that a unit brings, in one slot."""

    peer: int
    unit: Unit
    slot: int
    tag: int


class Pack(NamedTuple):
    """Own tensors of an operand are copied into a message."""

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
    """The members' `sent` start to arrive in `received`, member after member."""

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
    """Attention of q and kv, added to the running results, each with the slot that it takes once it must be wide."""

    step: int
    q: Key
    kv: Key
    q_slot: SlotNumber
    kv_slot: SlotNumber
    results: tuple[tuple[Unit, int], ...]


class Merge(NamedTuple):
    """A result that arrived and the running one (in slot `own`, if there is one) become one, in slot `into`."""

    step: int
    unit: Unit
    arrived: SlotNumber
    own: SlotNumber
    into: SlotNumber


class Export(NamedTuple):
    """A running result ends as the message that takes it away."""

    step: int
    unit: Unit
    own: SlotNumber
    into: SlotNumber


class ScatterStart(NamedTuple):
    """The other members' parts of a running result start on their way; the own part is kept in slot `kept`."""

    step: int
    ticket: int
    collective: Collective
    own: SlotNumber
    kept: SlotNumber
    sent: SlotNumber
    received: SlotNumber

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.collective.ranks

    @property
    def label(self) -> str:
        return str(self.collective)


class Fold(NamedTuple):
    """The parts that the other members sent are merged into the running result of `unit`."""

    step: int
    unit: Unit
    received: SlotNumber
    own: SlotNumber
    parts: int


class Finish(NamedTuple):
    """What is left: the own blocks' results."""

    step: int
    results: tuple[tuple[Unit, int], ...]


class Trade(NamedTuple):
    """Tensors of a stage's heads that Ulysses' members exchange together. inward: own tokens of all the stage's heads
    become the inner rank's tokens of a member's own heads; else the reverse. fields: of `compiler.exchange`."""

    stage: int
    inward: bool
    fields: tuple[str, ...]

    @property
    def words(self) -> str:
        return f"{' '.join(self.fields)} {'in' if self.inward else 'out'}"


class PackHeads(NamedTuple):
    """What each member is sent stands together: inward some of the caller's tensors, outward results of the stage."""

    step: int
    trade: Trade
    into: SlotNumber


class ExchangeStart(NamedTuple):
    """An all-to-all among `ranks`, Ulysses' members by their numbers."""

    step: int
    ticket: int
    trade: Trade
    ranks: tuple[int, ...]
    sent: SlotNumber
    received: SlotNumber

    @property
    def label(self) -> str:
        return self.trade.words


class Enter(NamedTuple):
    """From here on own tensors are those of a stage. arrived: what its members sent, by slot."""

    step: int
    stage: int
    arrived: tuple[tuple[Trade, int], ...]


class Leave(NamedTuple):
    """What the stage's `Finish` gave is its result; its operands are given up."""

    step: int
    stage: int


class UnpackHeads(NamedTuple):
    """Results that came outward go to their heads of the caller's tokens."""

    step: int
    trade: Trade
    received: SlotNumber


Instruction = (
    Pack | Post | Wait | GatherStart | Assemble | Product | Merge | Export | ScatterStart | Fold | Finish
    | PackHeads | ExchangeStart | Enter | Leave | UnpackHeads
)  # fmt: skip
Started = Post | GatherStart | ScatterStart | ExchangeStart  # what a `Wait` ends
# the fields of each that are slots; transfers and results name more
SLOTS: dict[type, list[str]] = {
    kind: [field for field, hint in get_type_hints(kind, include_extras=True).items() if hint == SlotNumber]
    for kind in get_args(Instruction)
}
# what each that takes its rank's time is called in a time line
KINDS = {Product: "product", Merge: "merge", Fold: "merge", Post: "post", GatherStart: "post", ScatterStart: "post",
         ExchangeStart: "post", Wait: "post", Pack: "copy", Assemble: "copy", Export: "copy", Finish: "copy",
         PackHeads: "copy", UnpackHeads: "copy", Enter: "copy", Leave: "copy"}  # fmt: skip


def name_of_kind(kind: type) -> str:
    """Of a kind of instruction, in lower case: "pack_heads"."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def methods_of(reader: type) -> dict[type, Callable[[Any, Any], None]]:
    """Kind of instruction -> the method of a reader of programs that has its name and takes it."""
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
            return f"{name_of_kind(type(one))} {one.trade.words}".replace("_heads", "")
        case Enter() | Leave():
            return f"{name_of_kind(type(one))} stage {one.stage}"
        case _:
            return name_of_kind(type(one))


def renamed(instruction: Instruction, name: Callable[[int], int]) -> Instruction:
    """The instruction with other slots; `own` ones stay."""

    def new_name(slot: int) -> int:
        return slot if is_own(slot) else name(slot)

    new: dict[str, Any] = {field: new_name(getattr(instruction, field)) for field in SLOTS[type(instruction)]}
    if isinstance(instruction, Post):
        for field in ("sends", "receives"):
            new[field] = tuple(t._replace(slot=name(t.slot)) for t in getattr(instruction, field))
    if isinstance(instruction, Product | Finish):
        new["results"] = tuple((unit, new_name(slot)) for unit, slot in instruction.results)
    if isinstance(instruction, Enter):
        new["arrived"] = tuple((trade, name(slot)) for trade, slot in instruction.arrived)
    return instruction._replace(**new)


def slots_of(instruction: Instruction) -> list[int]:
    """The slots that an instruction names."""
    found: list[int] = []

    def same(slot: int) -> int:
        found.append(slot)
        return slot

    renamed(instruction, same)
    return found


class Slot(NamedTuple):
    """A buffer. kind: of the units it holds. role: "operand"; "wide", a running result; "travel", a result in the dtype
    that it travels in; "sent" or "received" in an exchange of heads, `trade`. keys: the units' blocks, as many in each.
    stage: whose heads it has."""

    kind: str
    role: str
    keys: tuple[Key, ...]
    stage: int = 0
    trade: Trade | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """parts: blocks that each rank owns. code: in order. slots: by number. frees[i]: slots that nobody names after
    instruction i. words[s]: what the rank does in step s, for people."""

    name: str
    direction: str
    rank: int
    size: int
    code: tuple[Instruction, ...]
    slots: tuple[Slot, ...]
    frees: tuple[tuple[int, ...], ...]
    words: tuple[str, ...]
    parts: int = 1

    def place(self, at: int, around: int = 2) -> str:
        """Where instruction `at` stands: its step, some before and after it, and the ranks that take part in it."""
        step = self.code[at].step
        peers = sorted({peer for one in self.code if one.step == step for peer in _peers(one)} - {self.rank})
        near = range(max(0, step - around), min(len(self.words), step + around + 1))
        words = {s: self.words[s][:LINE] + " ..." * (len(self.words[s]) > LINE) for s in near}
        lines = [f"{'->' if s == step else '  '} step {s}: {words[s]}" for s in near]
        who = f", with ranks {', '.join(map(str, peers[:8]))}{' ...' if len(peers) > 8 else ''}" if peers else ""
        head = f"{self.name} {self.direction}, inner rank {self.rank} of {self.size}, step {step}{who}"
        return "\n".join([head, *lines])


def _peers(instruction: Instruction) -> tuple[int, ...]:
    if isinstance(instruction, Post):
        return tuple(transfer.peer for transfer in (*instruction.sends, *instruction.receives))
    if isinstance(instruction, GatherStart | ScatterStart):
        return instruction.collective.ranks
    return ()
