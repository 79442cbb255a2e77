"""Shards: the tokens in each CP rank's blocks, defined by a named layout or by explicit runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from ....base.errors import InputError, whole_number
from ....base.fingerprint import Fingerprint
from .layout import LAYOUTS, Key, Run, Runs, join, owned
from .op_handles import handle_of


@dataclasses.dataclass(frozen=True, slots=True)
class EvenShards:
    """A named layout of `seq` tokens on `size` CP ranks, identical for q and k/v."""

    layout: str
    seq: int
    size: int

    @property
    def blocks_per_rank(self) -> int:
        return LAYOUTS[self.layout].blocks_per_rank

    @property
    def even(self) -> bool:
        """Whether all q blocks have the same number of tokens and all k/v blocks have the same number of tokens."""
        return True

    def runs(self, side: str, key: Key) -> Runs:
        """Return the runs of the given blocks on side "q" or "kv", sorted by position, which is the token order of
        gathered blocks.
        """
        return join(self._block(block) for block in key)

    def _block(self, block: int) -> Runs:
        rank, index = divmod(block, self.blocks_per_rank)
        runs = LAYOUTS[self.layout].runs(self.seq, self.size, rank)
        return runs if self.blocks_per_rank == 1 else runs[index : index + 1]

    def tokens(self, side: str, key: Key) -> int:
        return self.seq // (self.size * self.blocks_per_rank) * len(key)


class UnevenShards:
    """An explicit assignment of tokens to CP ranks, replacing the configured layout.

    Tokens are given as runs (start, step, length) of global positions. The q runs of all ranks together must cover
    every position of the query sequence exactly once. The kv runs of all ranks together must cover every position of
    the key/value sequence exactly once. Instances are hashable by value.

    New tokens that attend only to cached keys (`SequenceParallel.cache_attention`) begin at position `q_start`. With a
    `q_start`, the q runs cover all positions starting at `q_start`, and the kv runs cover all positions starting at 0.

    Args:
        q: Runs of each CP rank's queries. If `blocks_per_rank` is greater than 1, pass the runs of each block; rank r's
            blocks start at index `r * blocks_per_rank`.
        kv: Runs of each CP rank's keys and values, in the same format. Defaults to `q`.
        blocks_per_rank: Number of blocks per rank: 2 for the `pairs` layouts, otherwise 1.
        q_start: Position of the first query.

    Raises:
        InputError: The runs do not cover every position exactly once, a rank's runs are not in ascending order, q and
            kv have different numbers of ranks, or ranks have different numbers of blocks.
    """

    def __init__(
        self, q: Sequence[Runs], kv: Sequence[Runs] | None = None, blocks_per_rank: int = 1, *, q_start: int = 0,
    ) -> None:  # fmt: skip
        self.q = _blocks(q)
        self.kv = self.q if kv is None else _blocks(kv)
        if len(self.q) != len(self.kv):
            raise InputError(f"shards need runs of q and of kv for every rank; got {len(self.q)} and {len(self.kv)}")
        if type(blocks_per_rank) is not int or blocks_per_rank < 1 or len(self.q) % blocks_per_rank:
            raise InputError(
                f"shards need as many blocks for each rank, a whole number from 1; got {len(self.q)}, "
                f"blocks_per_rank {blocks_per_rank!r}"
            )
        if (first := whole_number(q_start)) is None or first < 0:
            raise InputError(f"shards need a q_start that is a whole number from 0 on; got {q_start!r}")
        self.size, self.blocks_per_rank, self.q_start = len(self.q) // blocks_per_rank, blocks_per_rank, first
        self._lengths = {side: tuple(length(runs) for runs in blocks) for side, blocks in self._sides()}
        for side, blocks in self._sides():
            _check_cover(
                side, [sum(blocks[at : at + blocks_per_rank], ()) for at in range(0, len(blocks), blocks_per_rank)],
                first if side == "q" else 0,
            )  # fmt: skip
        self.even = all(len(set(lengths)) == 1 for lengths in self._lengths.values())
        extra = (blocks_per_rank, first) if blocks_per_rank > 1 or first else ()
        self._hash = hash((self.q, self.kv, *extra))
        self.handle = handle_of(self)

    def _sides(self) -> tuple[tuple[str, tuple[Runs, ...]], ...]:
        return ("q", self.q), ("kv", self.kv)

    def __reduce__(self) -> tuple:
        return functools.partial(UnevenShards, q_start=self.q_start), (self.q, self.kv, self.blocks_per_rank)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnevenShards) and self._values() == other._values()

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of(*self._values())

    def _values(self) -> tuple:
        return self.q, self.kv, self.blocks_per_rank, self.q_start

    def __repr__(self) -> str:
        blocks = f", blocks_per_rank={self.blocks_per_rank}" if self.blocks_per_rank > 1 else ""
        first = f", q_start={self.q_start}" if self.q_start else ""
        return f"UnevenShards(q={self.q!r}, kv={self.kv!r}{blocks}{first})"

    def runs(self, side: str, key: Key) -> Runs:
        blocks = self.q if side == "q" else self.kv
        return join(blocks[block] for block in key)

    def tokens(self, side: str, key: Key) -> int:
        return sum(self._lengths[side][block] for block in key)


Shards = EvenShards | UnevenShards


def _blocks(blocks: Sequence[Runs]) -> tuple[Runs, ...]:
    """Return the runs of all blocks, with integer-like values converted to int; `_check_cover` rejects other values."""

    def number(x: int) -> int:
        return x if (whole := whole_number(x)) is None else whole

    return tuple(tuple(Run(*map(number, run)) for run in runs) for runs in blocks)


def tokens_of(shards: Shards, side: str, cp_rank: int) -> int:
    """Return the number of tokens that a CP rank holds."""
    return shards.tokens(side, owned(cp_rank, shards.blocks_per_rank))


def rows_in(shards: Shards, side: str, block: int) -> slice:
    """Return the slice that a block occupies within the tokens of its owner."""
    before = shards.tokens(side, tuple(range(block - block % shards.blocks_per_rank, block)))
    return slice(before, before + shards.tokens(side, (block,)))


def tokens_by_ulysses_rank(shards: Shards, side: str, cp_rank: int, ulysses_size: int) -> list[int]:
    """Return the number of tokens on each Ulysses rank of a CP rank."""
    held = tokens_of(shards, side, cp_rank)
    return [
        held * (ulysses_rank + 1) // ulysses_size - held * ulysses_rank // ulysses_size
        for ulysses_rank in range(ulysses_size)
    ]


def runs_of_sp_rank(shards: Shards, side: str, ulysses_size: int, sp_rank: int) -> Runs:
    """Return the runs of an SP rank's tokens.

    The CP rank's tokens are divided in order among its SP ranks, in shares that differ by at most one token.
    """
    cp_rank, ulysses_rank = divmod(sp_rank, ulysses_size)
    counts = tokens_by_ulysses_rank(shards, side, cp_rank, ulysses_size)
    first, before, share = sum(counts[:ulysses_rank]), 0, list[Run]()
    end = first + counts[ulysses_rank]
    for start, step, count in shards.runs(side, owned(cp_rank, shards.blocks_per_rank)):
        a, b = max(first - before, 0), min(end - before, count)
        share += [Run(start + a * step, step, b - a)] if a < b else []
        before += count
    return tuple(share)


def length(runs: Runs) -> int:
    return sum(run.length for run in runs)


def check_blocks_per_rank(shards: Shards, layout: str) -> None:
    """Raise InputError unless the shards and the layout have the same number of blocks per rank."""
    if shards.blocks_per_rank != (blocks_per_rank := LAYOUTS[layout].blocks_per_rank):
        raise InputError(
            f"attention needs shards of {blocks_per_rank} block{'s' * (blocks_per_rank > 1)} a rank, as the {layout} "
            f"layout has; got {shards.blocks_per_rank}, give UnevenShards(..., blocks_per_rank={blocks_per_rank})"
        )


def _check_cover(side: str, blocks: Sequence[Runs], first: int = 0) -> None:
    """Raise InputError unless the runs of all ranks cover every position starting at `first` exactly once."""
    for run in (run for block in blocks for run in block):
        if any(type(x) is not int for x in run) or run.start < 0 or run.step < 1 or run.length < 0:
            raise InputError(
                f"a run of {side} is (start, step, length), whole numbers from 0 on and a step from 1 on; got "
                f"{tuple(run)}"
            )
    runs = [run for block in blocks for run in block if run.length]
    total = length(tuple(runs))
    covered = all(first <= run.start and run.last < first + total for run in runs)
    if covered:
        held = bytearray(total)  # 1 for each position that a run covers
        for run in runs:
            held[run.start - first : run.last + 1 - first : run.step] = b"\1" * run.length
        covered = 0 not in held
    if not covered or any(list(block) != sorted(block) for block in blocks):
        raise InputError(
            f"the runs of {side} must hold every position from {first} on once, each rank's in order; got others, "
            "give each rank (start, step, length) of what it holds"
        )


@functools.lru_cache(maxsize=4096)
def rows_of(shards: Shards, side: str, blocks: Key, subset: Key) -> tuple[slice, ...]:
    """Return the slices that the tokens of `subset` occupy within the tokens of `blocks`. Both are sorted by
    position.
    """
    wanted, rows, row = set(shards.runs(side, subset)), [], 0
    for run in shards.runs(side, blocks):
        if run in wanted:
            rows.append(slice(row, row + run.length))
        row += run.length
    return tuple(rows)
