"""Bytes of causal attention: the triangle beside the best mesh, a ring and the floor. The tables of docs/triangle.md.

    python -m benchmarks.attention.triangle [RANKS ...]

Received by the busiest rank for one layer, as multiples of the q of its own tokens in bf16; of each schedule the shape
and what travels that bring it least; in brackets the triangle's strips, where it has more than one. Partial results and
gradients travel in the dtype named. Nothing is built.

The floor: a rank that has x query rows and y k/v rows, in its own tokens' number n, sees x y n^2 pairs at most, less
the half of its own n^2 that the mask hides, and its share of S = A n tokens' pairs is A n^2 / 2. So x y >= (A + 1) / 2.
Each query row that is not its own is received, and its partial result by somebody; each k/v row likewise, with
gradients in backward. No equal share of work has a smaller mean over ranks, whatever the schedule.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from benchmarks import tables
from benchmarks.attention.blocks import block_bytes, unit
from ds_seqpar.compiler.actions import ACCUMULATORS
from ds_seqpar.compiler.compile import side_of
from ds_seqpar.compiler.layout import multiple
from ds_seqpar.compiler.schedules import SCHEDULES
from ds_seqpar.compiler.schedules.base import Own
from ds_seqpar.compiler.shape import Shape, shape_of
from ds_seqpar.compiler.shards import EvenShards
from ds_seqpar.config import SequenceParallelConfig

TABLES = {  # heads, ranks
    "MHA": ((32, 32), (6, 10, 12, 15, 20, 24, 28, 30, 36, 40, 48, 60, 66, 84, 120, 496)),
    "GQA 4:1": ((32, 8), (6, 12, 20, 24, 28, 40, 48, 60, 84, 112, 120, 180, 496)),
    "GQA 8:1": ((64, 8), (12, 24, 28, 40, 48, 60, 80, 112, 120, 168, 224, 360, 496)),
}
HEAD_DIM = 128
SHOWN = ("triangle", "mesh", "ring")


def least(name: str, ranks: int, direction: str, shape: Shape) -> tuple[float, Own]:
    """Units that the busiest rank receives, in the best of all shapes, and that; inf where the schedule has none."""
    schedule = SCHEDULES[name]
    found: tuple[float, Own] = math.inf, {}
    heads = shape.q_heads, shape.kv_heads
    for own in schedule.shapes(ranks):
        config = SequenceParallelConfig(size=ranks, ulysses=1, schedule=name, **own).resolve(ranks, heads)
        recipe = config.recipe(config.topology(ranks))
        shards = EvenShards(config.layout, multiple(config.layout, ranks, 1), ranks)
        sizes = block_bytes(shape, direction, shards)
        for travels in schedule.travellers:
            units = max(recipe.received(direction, travels, sizes)) / unit(shape, shards)
            found = min(found, (units, own), key=lambda one: one[0])
    return found


def floor(ranks: int, direction: str, shape: Shape) -> float:
    """Units that ranks receive on average at least."""
    costs, sizes = {"q": 0.0, "kv": 0.0}, shape.bytes_per_token(direction)
    for kind in ("q", "kv", *ACCUMULATORS[direction]):
        costs[side_of(kind)] += sizes[kind] / shape.bytes_per_token("forward")["q"]
    area = max(1.0, (ranks + 1) / 2)
    x = min(area, max(1.0, math.sqrt(area * costs["kv"] / costs["q"])))
    return costs["q"] * (x - 1) + costs["kv"] * (area / x - 1)


def cell(ranks: int, direction: str, shape: Shape) -> str:
    (ours, own), *others = (least(name, ranks, direction, shape) for name in SHOWN)
    beside = [units for units, _ in others] + [floor(ranks, direction, shape)]
    strips = f" ({own['strips']})" if own.get("strips", 1) > 1 else ""
    return f"{ours:.2f}{strips} / {' / '.join(f'{units:.2f}' for units in beside)}: {ours / beside[0]:.2f}"


def main(numbers: Sequence[int]) -> None:
    ways = [(way, travel) for way in ("forward", "backward") for travel in ("fp32", "bf16")]
    for name, (heads, usual) in TABLES.items():
        print(f"\n{name} ({heads[0]}/{heads[1]} heads, D = {HEAD_DIM}): triangle / best mesh / ring / floor: "
              "triangle over mesh\n")  # fmt: skip
        print(tables.head("ranks", *(f"{way}, {travel}" for way, travel in ways)))
        for ranks in numbers or usual:
            shapes = [(way, shape_of(travel, "bfloat16", 1, (*heads, HEAD_DIM))) for way, travel in ways]
            tables.row(ranks, *(cell(ranks, *one) for one in shapes))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
