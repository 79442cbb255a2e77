"""Products without collectives: each rank gets every block that it reads straight from the block's owner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from ..actions import Compute, Move, Step, Steps
from ..plan import StepsOf

Pairs = Sequence[tuple[int, int]]


def direct(size: int, direction: str, products: Callable[[int], Sequence[Pairs]]) -> StepsOf:
    """The steps of any rank. products(rank)[t]: the (q block, kv block) pairs that it computes in step t; those of step
    0 of its own blocks only.

    What a mesh becomes where a mask leaves holes in its groups, or blocks differ in length: no block is sent that its
    receiver does not read, and results go straight home. As many bytes as the collectives at most.
    """
    every = [products(rank) for rank in range(size)]
    length = max(len(steps) for steps in every)
    moves: dict[tuple[int, int], list[Move]] = defaultdict(list)  # (rank, step) -> its moves
    results: dict[tuple[int, int], list[Move]] = defaultdict(list)
    for rank, steps in enumerate(every):
        for move, t in _operands(rank, steps):
            for end in move.ranks:
                moves[end, t].append(move)
        for move, t in _results(rank, steps, direction):
            for end in move.ranks:
                results[end, t].append(move)

    def of(rank: int) -> Steps:
        mine = every[rank]
        return tuple(
            Step(
                moves=tuple(moves[rank, t]),
                computes=tuple(Compute(rank=rank, q=(i,), kv=(j,)) for i, j in (mine[t] if t < len(mine) else ())),
                results=tuple(results[rank, t]),
            )
            for t in range(length)
        )

    return of


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
