"""A schedule's actions as data: products of blocks, and moves of operands and results between ranks.

Blocks are numbered in the order of the CP ranks that own them. With one block per rank, rank p owns block p. With
several blocks per rank, rank p owns the blocks `owned(p, blocks_per_rank)`, in order of position. A *key* is a sorted
tuple of block numbers: one block, or several blocks gathered into one operand. Operands are "q" and "kv". In a backward
plan, "q" refers to all tensors of a query block: q, the output's gradient, lse and delta. Accumulators are "out" in the
forward pass, and "dq" and "dkv" in the backward pass.

In each step, a rank gathers operands, posts its operand moves and computes products. The rank then merges the results
that are due, posts its result moves, reduce-scatters accumulators, and waits for the operands that are due. A move is
due `within` steps after it is posted. `within` defaults to 1, and only optimization passes set other values. By
default, operands are therefore transferred while the products of the same step are computed, and results while the
products of the next step are computed.
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
    """A product computed on `rank`: attention from all query blocks in `q` to all key/value blocks in `kv`."""

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
    """A transfer from `src` to `dst` of an operand, or of an accumulator to be merged into the accumulator on `dst`.

    An operand posted in step s is available from step `s + within` onward. A result posted in step s is merged after
    the products of step `s + within`, or at the end of the plan.
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
    """A `Gather` or `ReduceScatter` among `ranks`.

    In a `Gather`, `ranks[i]` contributes the blocks in `keys[i]`. In a `ReduceScatter`, `ranks[i]` ends up with the
    merged blocks in `keys[i]`. The property `blocks` lists the blocks in all keys.
    """

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
    """A collective after which every member has the operand for all blocks."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReduceScatter(Collective):
    """A collective that merges the members' accumulators and leaves member i with the blocks in `keys[i]`."""

    def received(self, rank: int) -> int:
        return len(self.key_of(rank)) * (len(self.ranks) - 1)


Action = Compute | Move | Collective


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The actions that involve a given rank in one step."""

    gathers: tuple[Gather, ...] = ()
    moves: tuple[Move, ...] = ()
    computes: tuple[Compute, ...] = ()
    results: tuple[Move, ...] = ()
    reduces: tuple[ReduceScatter, ...] = ()

    @property
    def actions(self) -> Iterator[Action]:
        yield from itertools.chain(self.gathers, self.moves, self.computes, self.results, self.reduces)

    def words(self, rank: int) -> str:
        """Return the step as text that `text.parse` can parse, or "-" if the rank is idle."""
        labels = [f"{gather.kind}{name_of(gather.blocks)}@" for gather in self.gathers]
        labels += map(str, self.computes)
        for move in (*self.moves, *self.results):
            arrow = f">{move.dst}" if move.src == rank else f"<{move.src}"
            labels.append(f"{move.kind}{name_of(move.key)}{arrow}" + f"+{move.within}" * (move.within != 1))
        labels += [f"{reduce.kind}{name_of(reduce.blocks)}%" for reduce in self.reduces]
        return " ".join(labels) or "-"


Steps = tuple[Step, ...]


def moves_of(rank: int, moves: Iterable[Move]) -> tuple[Move, ...]:
    """Return the distinct moves that involve a rank, in an order that is the same on all ranks."""
    return tuple(sorted({move for move in moves if rank in move.ranks}, key=lambda m: (m.kind, m.key, m.dst)))


def name_of(key: Key) -> str:
    """Return block numbers as text, such as "(3)" or "(0,1)"."""
    return "(" + ",".join(map(str, key)) + ")"


def unit_name(unit: Unit) -> str:
    """Return a unit as text, such as "kv(3)" or "out(0,1)"."""
    return f"{unit[0]}{name_of(unit[1])}"
