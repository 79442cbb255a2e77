"""Prints what each schedule moves, calls and waits for, from the plans alone: the tables of docs/schedules.md.

    python -m benchmarks.attention.schedules [RANKS ...]

Bytes are those a rank receives for one layer, as multiples of the q of its own tokens in bf16 (B n Hq D x 2 bytes): the
greatest over ranks, and the mean in brackets where ranks differ. Full attention; causal for those that are nothing
else. A schedule is left out where it does not fit the number of ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence

from benchmarks import tables
from benchmarks.attention.blocks import block_bytes, unit
from benchmarks.contenders import parse
from ds_seqpar.compiler.actions import Key
from ds_seqpar.compiler.compile import pattern_of, weight
from ds_seqpar.compiler.layout import multiple
from ds_seqpar.compiler.masks import CAUSAL, FULL
from ds_seqpar.compiler.plan import Plan
from ds_seqpar.compiler.schedules import SCHEDULES
from ds_seqpar.compiler.shape import Shape, shape_of
from ds_seqpar.compiler.shards import EvenShards, Shards
from ds_seqpar.compiler.simulate import Costs, communication, computation, programs_of, simulate
from ds_seqpar.compiler.tiles import tiles
from ds_seqpar.config import SequenceParallelConfig
from ds_seqpar.errors import ConfigError

HEAD_DIM = 128
SHAPES = {"MHA (32/32 heads)": (32, 32), "GQA 8:1 (64/8 heads)": (64, 8)}


def names(ranks: int) -> list[str]:
    """The contenders that fit so many ranks."""
    side, others = int(ranks**0.5), 2 * ranks // int(ranks**0.5)
    mesh = f"mesh={side // 2},1,{others}"
    teams = [f"wallfacer={team}" for team in sorted({2, side // 2})]
    shapes = [f"attention2d={rows}" for rows in (side, side * 2, side // 2)]
    found = ["ring", "ring+backward=q", f"double_ring={side}", "distflash", *shapes, *teams, mesh, f"{mesh}+backward=q"]
    return [name for name in (*found, "triangle") if _fits(ranks, name)]


def _fits(ranks: int, name: str) -> bool:
    try:
        config_of(ranks, name)
    except ConfigError:
        return False
    return True


def config_of(ranks: int, name: str) -> SequenceParallelConfig:
    section = parse(name).section
    both = {way: "kv" for way in ("forward", "backward") if not causal(name)}
    return SequenceParallelConfig(**{"size": ranks, **both, **section}).resolve(ranks)


def causal(name: str) -> bool:
    """Whether its schedule computes nothing else: no product of the first block with a later one."""
    return not SCHEDULES[parse(name).section["schedule"]].takes(0, 1)


def plan_of(ranks: int, name: str, direction: str, shape: Shape, overlap: bool = False) -> tuple[Plan, Shards]:
    config = dataclasses.replace(config_of(ranks, name), overlap=overlap)
    shards = EvenShards(config.layout, 64 * multiple(config.layout, ranks, 1), ranks)
    pattern = pattern_of(CAUSAL if causal(name) else FULL, shards)
    return config.recipe(config.topology(ranks)).plan(direction, pattern, shape), shards


def shape_for(heads: tuple[int, int], travel: str) -> Shape:
    return shape_of(travel, "bfloat16", 1, (*heads, HEAD_DIM))


def received(ranks: int, name: str, direction: str, shape: Shape) -> str:
    plan, shards = plan_of(ranks, name, direction, shape)
    found = [value / unit(shape, shards) for value in plan.received(block_bytes(shape, direction, shards))]
    mean = sum(found) / len(found)
    return f"{max(found):.2f}" + (f" ({mean:.2f})" if max(found) > 1.001 * mean else "")


def bytes_table(ranks: int, heads: tuple[int, int]) -> None:
    ways = [(way, travel) for way in ("forward", "backward") for travel in ("fp32", "bf16")]
    print(tables.head("contender", *(f"{way}, {travel}" for way, travel in ways)))
    for name in names(ranks):
        tables.row(name, *(received(ranks, name, way, shape_for(heads, travel)) for way, travel in ways))


def calls(plan: Plan, layout: str, square: bool) -> int:
    """Kernel calls of the busiest rank in the busiest step, under a causal mask."""
    shards = EvenShards(layout, 64 * multiple(layout, plan.size, 1), plan.size)

    @functools.cache
    def count(q: Key, kv: Key) -> int:
        return len(tiles(shards.runs("q", q), shards.runs("kv", kv), CAUSAL, square))

    return max(sum(count(c.q, c.kv) for c in step.computes) for steps in plan.ranks for step in steps)


def shape_table(ranks: int) -> None:
    print(tables.head("contender", "kernel calls a step, zigzag: top-left / square kernels", "striped", "steps",
                      "critical path", "with overlap"))  # fmt: skip
    for name in names(ranks):
        shape = shape_for((32, 32), "bf16")
        plan, shards = plan_of(ranks, name, "forward", shape)
        share = weight(CAUSAL if causal(name) else FULL, shards)
        costs = Costs(transfer=block_bytes(shape, "forward", shards), product=1.0, weight=share).balanced(plan)
        bound = max(communication(plan, costs), computation(plan, costs))
        over, _ = plan_of(ranks, name, "forward", shape, overlap=True)
        own = config_of(ranks, name).layout
        wide = "zigzag" in SCHEDULES[parse(name).section["schedule"]].layouts
        count = " / ".join(str(calls(plan, "zigzag" if wide else own, square)) for square in (False, True))
        count, striped = (count, calls(plan, "striped", False)) if wide else (f"{count} ({own})", "-")
        times = [f"{simulate(programs_of(p), costs).seconds / bound:.2f}" for p in (plan, over)]
        tables.row(name, count, striped, len(plan.ranks[0]), *times)


def wallfacer_example() -> None:
    """P = 64, 65,536 tokens, hidden 6,656, bf16 with bf16 partial outputs, forward, lse apart."""
    one = 65536 // 64 * 6656 * 2 / 2**30
    sizes = {"q": one, "kv": 2 * one, "out": one}
    for shape in ("4,4,4", "4,1,16", "8,8,1", "1,1,64"):
        plan, _ = plan_of(64, f"mesh={shape}", "forward", shape_for((52, 52), "bf16"))
        tables.row(shape, f"{max(plan.received(sizes)):.3f}")


def main(numbers: Sequence[int] = (16, 64)) -> None:
    for ranks in numbers:
        for name, heads in SHAPES.items():
            print(f"\n### Received bytes, {ranks} ranks, {name}\n")
            bytes_table(ranks, heads)
    print("\n### WallFacer's example, GiB received a rank (P = 64, 65,536 tokens, hidden 6,656)\n")
    print(tables.head("mesh (a, b, R)", "GiB"))
    wallfacer_example()
    for ranks in numbers:
        print(f"\n### Kernel calls and critical path, {ranks} ranks, forward, MHA, bf16 partial results\n")
        shape_table(ranks)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or (16, 64))
