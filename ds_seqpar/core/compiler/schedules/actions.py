"""The actions of ranks as data: products of blocks, and moves of operands and results between ranks.

Blocks are numbered by the CP rank that owns them. If each rank owns one block, block p is rank p's. If each owns
`blocks_per_rank`, rank p's are `owned(p, blocks_per_rank)`, in order of position. A *key* is a sorted tuple of block
numbers: one block, or several blocks gathered into one operand. Operands are "q" and "kv" (in a backward plan "q"
means all tensors of a query block: q, the output's gradient, lse, delta). Accumulators are "out" in forward and "dq",
"dkv" in backward.

In one step a rank gathers operands, posts the step's operand moves and computes products. Then it merges the results
that are due, posts the step's result moves, reduce-scatters, and waits for the operands that are due. A move is due
after `within` steps, 1 unless a pass sets another number. So operands are sent during the products of their own step,
and results during the products of the next.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from ..sharding.layout import Key

Unit = tuple[str, Key]
OPERANDS = ("q", "kv")
ACCUMULATORS = {"forward": ("out",), "backward": ("dq", "dkv")}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """One product on `rank`: every query block of `q` with every key/value block of `kv`."""

    rank: int
    q: Key
    kv: Key

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.rank,)

    def __str__(self) -> str:
        return f"q{name_of(self.q)}*kv{name_of(self.kv)}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A copy of an operand from `src` to `dst`, or an accumulator that leaves `src` and is merged into the one on
    `dst`.

    An operand that is posted in step s can be used from step s + within on. A result is merged after the products of
    step s + within, or at the end of the plan.
    """

    src: int
    dst: int
    kind: str
    key: Key
    within: int = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.src, self.dst)

    @property
    def unit(self) -> Unit:
        return self.kind, self.key

    def __str__(self) -> str:
        return f"{self.kind}{name_of(self.key)}:{self.src}>{self.dst}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """`ranks[i]` contributes (Gather) or ends with (ReduceScatter) `keys[i]`; `blocks` are the blocks of all keys."""

    ranks: tuple[int, ...]
    kind: str
    keys: tuple[Key, ...]

    @property
    def blocks(self) -> Key:
        return tuple(sorted(block for key in self.keys for block in key))

    @property
    def unit(self) -> Unit:
        return self.kind, self.blocks

    def key_of(self, rank: int) -> Key:
        return self.keys[self.ranks.index(rank)]

    def received(self, rank: int) -> int:
        """Return the number of blocks that a member receives."""
        return sum(map(len, self.keys)) - len(self.key_of(rank))

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.kind}{name_of(self.blocks)})"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gather(Collective):
    """Every member ends up with the operand of all blocks."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReduceScatter(Collective):
    """The members' accumulators of all blocks are merged; member i ends up with the one of `keys[i]`."""

    def received(self, rank: int) -> int:
        return len(self.key_of(rank)) * (len(self.ranks) - 1)


Action = Compute | Move | Collective


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The actions that one rank takes part in during one step."""

    gathers: tuple[Gather, ...] = ()
    moves: tuple[Move, ...] = ()
    computes: tuple[Compute, ...] = ()
    results: tuple[Move, ...] = ()
    reduces: tuple[ReduceScatter, ...] = ()

    @property
    def actions(self) -> Iterator[Action]:
        yield from itertools.chain(self.gathers, self.moves, self.computes, self.results, self.reduces)

    def words(self, rank: int) -> str:
        """Return the step as text that `text.parse` reads; "-" if the rank does nothing."""
        labels = [f"{gather.kind}{name_of(gather.blocks)}@" for gather in self.gathers]
        labels += map(str, self.computes)
        for move in (*self.moves, *self.results):
            arrow = f">{move.dst}" if move.src == rank else f"<{move.src}"
            labels.append(f"{move.kind}{name_of(move.key)}{arrow}" + f"+{move.within}" * (move.within != 1))
        labels += [f"{reduce.kind}{name_of(reduce.blocks)}%" for reduce in self.reduces]
        return " ".join(labels) or "-"


Steps = tuple[Step, ...]


def moves_of(rank: int, moves: Iterable[Move]) -> tuple[Move, ...]:
    """Return the moves that a rank takes part in, each once, in the same order on all ranks."""
    return tuple(sorted({move for move in moves if rank in move.ranks}, key=lambda m: (m.kind, m.key, m.dst)))


def name_of(key: Key) -> str:
    """Return blocks as text: (3), (0,1)."""
    return "(" + ",".join(map(str, key)) + ")"


def unit_name(unit: Unit) -> str:
    """Return a unit as text: kv(3), out(0,1)."""
    return f"{unit[0]}{name_of(unit[1])}"
