"""Plans, which contain the steps of every CP rank. Files, tests, diagrams, and passes that need all ranks use plans."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from .actions import Steps

AROUND = 2  # number of steps that an error message shows before and after the incorrect step
MOST_COLUMNS = 9  # the step number and 8 ranks
StepsOf = Callable[[int], Steps]  # function that maps a rank to its steps


class Counted(abc.ABC):
    """A function that returns a rank's steps, and can count received elements without building the steps."""

    @abc.abstractmethod
    def __call__(self, rank: int) -> Steps: ...

    @abc.abstractmethod
    def received(self, units: Mapping[str, float]) -> list[float]:
        """Return the same counts as `Plan.received` for the plan of all ranks."""


@dataclasses.dataclass(frozen=True)
class BlockMask:
    """The pairs of q blocks and key/value blocks in which some query sees some key."""

    rows: tuple[int, ...]  # rows[i]: bitmask of the key/value blocks that block i's queries see
    # whether all q blocks have the same length and all k/v blocks have the same length (required by collectives)
    even: bool = True
    tokens: tuple[int, int] = dataclasses.field(default=(1, 1), compare=False)  # ratio of q tokens to k/v tokens

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.rows, self.even))

    def __hash__(self) -> int:  # cached because many cache keys contain block masks
        return self._hash

    @property
    def size(self) -> int:
        return len(self.rows)

    def __call__(self, q: int, kv: int) -> bool:
        """Return whether any query in block `q` sees any key in block `kv`."""
        return bool(self.rows[q] >> kv & 1)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield every (q block, kv block) pair in which some query sees some key."""
        return ((i, j) for i, row in enumerate(self.rows) for j in bits(row))

    @property
    def plain(self) -> bool:
        """Whether the mask is full or equals a causal mask on contiguous blocks of equal length."""
        size, rows = self.size, self.rows
        if size and rows[0] == (1 << size) - 1:
            return all(row == rows[0] for row in rows)
        return self.even and all(row == (2 << i) - 1 for i, row in enumerate(rows))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The steps of all ranks in one direction (forward or backward), built by a schedule for one block mask."""

    name: str  # name of the schedule
    direction: str  # "forward" or "backward"
    ranks: tuple[Steps, ...]  # ranks[p]: the steps of rank p; all ranks have the same number of steps
    blocks_per_rank: int = 1  # number of blocks that each rank owns

    @classmethod
    def of(cls, name: str, direction: str, size: int, steps: StepsOf, blocks_per_rank: int = 1) -> Plan:
        ranks = tuple(map(steps, range(size)))
        return cls(name=name, direction=direction, ranks=ranks, blocks_per_rank=blocks_per_rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def blocks(self) -> int:
        return self.size * self.blocks_per_rank

    def received(self, units: Mapping[str, float]) -> list[float]:
        """Return the number of elements that each rank receives.

        Args:
            units: Number of elements per block for each kind of block ("q", "kv", "out", ...).
        """
        return [received(steps, rank, units) for rank, steps in enumerate(self.ranks)]

    def table(self) -> str:
        """Return the plan as text in the format that `text.parse` reads, with one row per step and one column per
        rank.
        """
        return "\n".join([self.head, *columns(self.rows())])

    @property
    def head(self) -> str:
        blocks = f", {self.blocks_per_rank} blocks each" if self.blocks_per_rank > 1 else ""
        return f"{self.name} {self.direction}, {self.size} ranks{blocks}"

    def rows(self) -> list[list[str]]:
        """Return the cells of the text table; `Step.words` defines the format of a cell."""
        rows = [["step", *(f"rank {rank}" for rank in range(self.size))]]
        for index in range(max(map(len, self.ranks))):
            # in an invalid plan, ranks may have different numbers of steps
            row = (steps[index : index + 1] for steps in self.ranks)
            rows.append([str(index), *("".join(step.words(rank) for step in cell) for rank, cell in enumerate(row))])
        return rows

    def around(self, step: int, rank: int) -> str:
        """Return the rows of the table around a step, with the step marked; see `marked`."""
        return "\n".join([self.head, *marked(self.rows(), step + 1, rank)])


def bits(mask: int) -> Iterator[int]:
    """Return the indices of the set bits, in ascending order."""
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def received(steps: Steps, rank: int, units: Mapping[str, float]) -> float:
    """Return the number of elements that `rank` receives during its steps."""
    total: Counter = Counter()
    for step in steps:
        for move in (*step.moves, *step.results):
            if move.dst == rank:
                total[move.kind] += len(move.key)
        for collective in (*step.gathers, *step.reduces):
            total[collective.kind] += collective.received(rank)
    return sum(units[kind] * blocks for kind, blocks in total.items())


def marked(rows: list[list[str]], at: int, rank: int) -> list[str]:
    """Return the lines of a plan's table around row `at`, with row `at` marked.

    If the plan has many ranks, only the column of `rank` is shown.
    """
    first = max(1, at - AROUND)
    shown = [rows[0], *rows[first : at + AROUND + 1]]
    if len(rows[0]) > MOST_COLUMNS:
        shown = [[row[0], *row[rank + 1 : rank + 2]] for row in shown]
    lines = columns(shown)
    return [line + "  <-- here" * (number == at - first + 1) for number, line in enumerate(lines)]


def columns(rows: list[list[str]]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    widths = [max(map(len, cells)) for cells in itertools.zip_longest(*rows, fillvalue="")]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


# passes registered by add-ons; maps a setting's name to a function (plan, block mask, bytes per token for each kind)
# that returns an improved plan
PASSES: dict[str, Callable[[Plan, BlockMask, Mapping[str, float]], Plan]] = {}
