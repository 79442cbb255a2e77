"""Products without collectives: each rank gets every block that it reads straight from the block's owner."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from ..actions import OPERANDS, Compute, Move, Step, Steps
from ..plan import Counted, bits

Pairs = Sequence[tuple[int, int]]


def direct(
    size: int,
    direction: str,
    products: Callable[[int], Sequence[Pairs]],
    reads: Callable[[int], tuple[int, int]],
) -> Counted:
    """The steps of any rank. products(rank)[t]: the (q block, kv block) pairs that it computes in step t; those of step
    0 of its own blocks only. reads(rank): bitmasks of the q and the kv blocks in these pairs.

    What a mesh becomes where a mask leaves holes in its groups, or blocks differ in length: no block is sent that its
    receiver does not read, and results go straight home. As many bytes as the collectives at most.
    """
    return _Direct(size, direction, products, reads)


class _Direct(Counted):
    def __init__(
        self,
        size: int,
        direction: str,
        products: Callable[[int], Sequence[Pairs]],
        reads: Callable[[int], tuple[int, int]],
    ) -> None:
        self.size, self.direction, self.products, self.reads = size, direction, products, reads

    @functools.cached_property
    def every(self) -> list[Sequence[Pairs]]:
        return [self.products(rank) for rank in range(self.size)]

    @functools.cached_property
    def moves(self) -> tuple[dict[tuple[int, int], list[Move]], dict[tuple[int, int], list[Move]]]:
        """(rank, step) -> its moves of operands, and of results."""
        operands: dict[tuple[int, int], list[Move]] = defaultdict(list)
        results: dict[tuple[int, int], list[Move]] = defaultdict(list)
        for rank, steps in enumerate(self.every):
            for move, t in _operands(rank, steps):
                for end in move.ranks:
                    operands[end, t].append(move)
            for move, t in _results(rank, steps, self.direction):
                for end in move.ranks:
                    results[end, t].append(move)
        return operands, results

    def __call__(self, rank: int) -> Steps:
        mine, (operands, results) = self.every[rank], self.moves
        return tuple(
            Step(
                moves=tuple(operands[rank, t]),
                computes=tuple(Compute(rank=rank, q=(i,), kv=(j,)) for i, j in (mine[t] if t < len(mine) else ())),
                results=tuple(results[rank, t]),
            )
            for t in range(max(map(len, self.every)))
        )

    def received(self, units: Mapping[str, float]) -> list[float]:
        """Of a rank: what it reads of others, and a result from each other that reads what it owns."""
        found: list[float] = [0] * self.size
        results = (units["out"], 0) if self.direction == "forward" else (units["dq"], units["dkv"])
        for rank in range(self.size):
            for kind, blocks, result in zip(OPERANDS, self.reads(rank), results, strict=True):
                foreign = blocks & ~(1 << rank)
                found[rank] += units[kind] * foreign.bit_count()
                for owner in bits(foreign) if result else ():
                    found[owner] += result
        return found


def _operands(rank: int, steps: Sequence[Pairs]) -> list[tuple[Move, int]]:
    """Each foreign block arrives in the step before the first that reads it."""
    first: dict[tuple[str, int], int] = {}
    for t, pairs in enumerate(steps):
        for i, j in pairs:
            for unit in (("q", i), ("kv", j)):
                first.setdefault(unit, t)
    return [(Move(src=b, dst=rank, kind=kind, key=(b,)), t - 1) for (kind, b), t in first.items() if b != rank]


def _results(rank: int, steps: Sequence[Pairs], direction: str) -> list[tuple[Move, int]]:
    """Each foreign block's result goes home after the last step that adds to it."""
    last: dict[tuple[str, int], int] = {}
    for t, pairs in enumerate(steps):
        for i, j in pairs:
            for unit in (("out", i),) if direction == "forward" else (("dq", i), ("dkv", j)):
                last[unit] = t
    return [(Move(src=rank, dst=b, kind=kind, key=(b,)), t) for (kind, b), t in last.items() if b != rank]
