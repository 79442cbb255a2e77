"""One rank's program: a flat list of instructions on numbered slots.

A program is compiled once and executed in every call. The executor, the simulator, the memory estimate and error
messages all use the same program. A slot is a buffer that holds one unit at a time. `lower` creates the instructions
and lets units share slots.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from ..schedules.actions import Collective, Unit, name_of, unit_name
from ..sharding.layout import Key

# maximum length of a step's text in `Program.where`, since a step may compute products for many blocks
STEP_CHARACTERS = 600
SlotNumber = Annotated[int, "slot"]  # the index of a slot, or a result of `local_slot`
# slot number that represents the head chunk's input tensors, or the input tensors of the rank's first block
LOCAL = -1


def local_slot(index: int) -> int:
    """Return the slot number that represents block `index` of the head chunk's input tensors."""
    return LOCAL - index


def is_local(slot: int) -> bool:
    """Return whether a slot number refers to the head chunk's input tensors."""
    return slot <= LOCAL


class Transfer(NamedTuple):
    """A message to or from CP rank `peer`, which contains all tensors of a unit and is sent from or received into one
    slot.
    """

    peer: int
    unit: Unit
    slot: int
    tag: int


class Pack(NamedTuple):
    """Copy local tensors of an operand into the slot from which they are sent."""

    step: int
    unit: Unit
    into: SlotNumber


class Post(NamedTuple):
    """Start messages that the `Wait` with the same ticket completes."""

    step: int
    ticket: int
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


class Wait(NamedTuple):
    step: int
    ticket: int


class GatherStart(NamedTuple):
    """Start an all-gather from slot `sent` into slot `received`, which is filled in rank order."""

    step: int
    ticket: int
    collective: Collective
    sent: SlotNumber
    received: SlotNumber

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.collective.ranks


class Assemble(NamedTuple):
    """Sort the tokens of a gathered operand by position."""

    step: int
    collective: Collective
    received: SlotNumber
    into: SlotNumber

    @property
    def unit(self) -> Unit:
        return self.collective.unit


class Product(NamedTuple):
    """Compute attention between q and kv blocks, and add the results to the accumulators."""

    step: int
    q: Key
    kv: Key
    q_slot: SlotNumber
    kv_slot: SlotNumber
    results: tuple[tuple[Unit, int], ...]  # each unit and its slot in accum_dtype


class Merge(NamedTuple):
    """Merge a received result with the accumulator, if there is one, and write the result to slot `into`."""

    step: int
    unit: Unit
    arrived: SlotNumber
    accumulator: SlotNumber  # LOCAL if there is no accumulator yet
    into: SlotNumber


class Export(NamedTuple):
    """Convert an accumulator to a message for another rank."""

    step: int
    unit: Unit
    accumulator: SlotNumber
    into: SlotNumber


class ScatterStart(NamedTuple):
    """Start sending the other members their shards of an accumulator. The local shard is written to slot
    `local_part`.
    """

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


class Fold(NamedTuple):
    """Merge the shards received from other members into the accumulator of `unit`."""

    step: int
    unit: Unit
    received: SlotNumber
    accumulator: SlotNumber
    parts: int  # number of results in `received`


class Finish(NamedTuple):
    """Convert the accumulators of the local blocks to the results of the head chunk."""

    step: int
    results: tuple[tuple[Unit, int], ...]


class HeadExchange(NamedTuple):
    """A head chunk's tensors that Ulysses ranks exchange in one all-to-all.

    On the way in, each rank sends all heads of its own tokens and receives its share of the heads for all tokens of the
    CP rank. On the way out, each rank sends its share of the heads for all tokens, and receives all heads of its own
    tokens.
    """

    head_chunk: int
    inward: bool
    fields: tuple[str, ...]  # tensor names; see `compiler.program.ulysses`

    @property
    def kind(self) -> str:
        """The name under which the received elements are counted."""
        if (first := self.fields[0]) in ("do", "delta", "out", "lse"):
            return f"{first}_heads"
        return "qkv" if self.inward else "dqkv"

    @property
    def words(self) -> str:
        return f"{' '.join(self.fields)} {'in' if self.inward else 'out'}"


class PackHeads(NamedTuple):
    """Pack the tensors for all Ulysses ranks into one buffer: the caller's tensors (inward) or the head chunk's results
    (outward).
    """

    step: int
    exchange: HeadExchange
    into: SlotNumber


class ExchangeStart(NamedTuple):
    """Start an all-to-all among Ulysses ranks."""

    step: int
    ticket: int
    exchange: HeadExchange
    ranks: tuple[int, ...]  # Ulysses ranks
    sent: SlotNumber
    received: SlotNumber


class Enter(NamedTuple):
    """Begin a head chunk, which provides the local tensors from then on."""

    step: int
    head_chunk: int
    arrived: tuple[tuple[HeadExchange, int], ...]  # each exchange of the head chunk's operands, and its receive slot


class Leave(NamedTuple):
    """End a head chunk. The results of the chunk's `Finish` are kept, and the chunk's operands are released."""

    step: int
    head_chunk: int


class UnpackHeads(NamedTuple):
    """Copy results received in an outward exchange into the corresponding heads of the caller's tensors."""

    step: int
    exchange: HeadExchange
    received: SlotNumber


Instruction = (
    Pack | Post | Wait | GatherStart | Assemble | Product | Merge | Export | ScatterStart | Fold | Finish
    | PackHeads | ExchangeStart | Enter | Leave | UnpackHeads
)  # fmt: skip
Started = Post | GatherStart | ScatterStart | ExchangeStart  # a `Wait` completes each of these instructions
# type of instruction -> names of its slot number fields; transfers, `results` and `arrived` contain further slot
# numbers
SLOTS: dict[type, list[str]] = {
    cls: [field for field, hint in get_type_hints(cls, include_extras=True).items() if hint == SlotNumber]
    for cls in get_args(Instruction)
}
# type of instruction -> kind of its events in a timeline
KINDS = {Product: "product", Merge: "merge", Fold: "merge", Post: "post", GatherStart: "post", ScatterStart: "post",
         ExchangeStart: "post", Wait: "post", Pack: "copy", Assemble: "copy", Export: "copy", Finish: "copy",
         PackHeads: "copy", UnpackHeads: "copy", Enter: "copy", Leave: "copy"}  # fmt: skip


def name_of_kind(instruction_type: type) -> str:
    """Return the name of an instruction type in snake case, such as "pack_heads"."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", instruction_type.__name__).lower()


def methods_of(reader: type) -> dict[type, Callable[[Any, Any], None]]:
    """Map each instruction type to the method of `reader` with the same snake-case name (see `name_of_kind`)."""
    return {cls: getattr(reader, name_of_kind(cls)) for cls in SLOTS}


def label_of(instruction: Instruction) -> str:
    """Describe an instruction without its slots."""
    match instruction:
        case Product():
            return f"q{name_of(instruction.q)}*kv{name_of(instruction.kv)}"
        case Pack() | Assemble() | Merge() | Export() | Fold():
            return f"{name_of_kind(type(instruction))} {unit_name(instruction.unit)}"
        case Finish():
            return " ".join(["finish", *(unit_name(unit) for unit, _ in instruction.results)])
        case PackHeads() | UnpackHeads():
            return f"{name_of_kind(type(instruction))} {instruction.exchange.words}".replace("_heads", "")
        case GatherStart() | ScatterStart():
            return str(instruction.collective)
        case ExchangeStart():
            return instruction.exchange.words
        case Enter() | Leave():
            return f"{name_of_kind(type(instruction))} head chunk {instruction.head_chunk}"
        case _:
            return name_of_kind(type(instruction))


def renamed(instruction: Instruction, name: Callable[[int], int]) -> Instruction:
    """Return the instruction with each slot number replaced by `name(slot)`, except for local tensors."""

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
    """Return the slots that an instruction uses, excluding local tensors."""
    slots: list[int] = []

    def note(slot: int) -> int:
        slots.append(slot)
        return slot

    renamed(instruction, note)
    return slots


class Slot(NamedTuple):
    """A buffer in a program."""

    kind: str  # kind of unit in the slot
    # "operand"; "accum": an accumulator in accum_dtype; "comm": a result in comm_dtype; "sent" or "received": the
    # buffers of the head exchange `exchange`
    role: str
    keys: tuple[Key, ...]  # blocks of each unit that uses the slot; all units have the same number of blocks
    head_chunk: int = 0
    exchange: HeadExchange | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One rank's program for a schedule on `size` CP ranks."""

    name: str  # name of the schedule
    direction: str
    rank: int  # CP rank
    size: int  # number of CP ranks
    code: tuple[Instruction, ...]
    slots: tuple[Slot, ...]
    frees: tuple[tuple[int, ...], ...]  # frees[i]: slots that are no longer used after instruction i
    words: tuple[str, ...]  # words[s]: readable text of step s
    blocks_per_rank: int = 1

    def where(self, at: int, around: int = 2) -> str:
        """Describe the position of instruction `at` for error messages.

        The description contains the instruction's step, the `around` steps before and after that step, and the ranks
        that take part.
        """
        step = self.code[at].step
        peers = sorted(
            {peer for instruction in self.code if instruction.step == step for peer in _peers(instruction)}
            - {self.rank}
        )
        shown_steps = range(max(0, step - around), min(len(self.words), step + around + 1))
        texts = {
            shown: self.words[shown][:STEP_CHARACTERS] + " ..." * (len(self.words[shown]) > STEP_CHARACTERS)
            for shown in shown_steps
        }
        lines = [f"{'->' if shown == step else '  '} step {shown}: {texts[shown]}" for shown in shown_steps]
        with_ranks = f", with ranks {', '.join(map(str, peers[:8]))}{' ...' if len(peers) > 8 else ''}" if peers else ""
        head = f"{self.name} {self.direction}, CP rank {self.rank} of {self.size}, step {step}{with_ranks}"
        return "\n".join([head, *lines])


def _peers(instruction: Instruction) -> tuple[int, ...]:
    if isinstance(instruction, Post):
        return tuple(transfer.peer for transfer in (*instruction.sends, *instruction.receives))
    if isinstance(instruction, GatherStart | ScatterStart):
        return instruction.collective.ranks
    return ()
