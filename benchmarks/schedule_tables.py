"""Prints what each schedule moves, calls and waits for, from the plans alone: the tables of docs/schedules.md.

    python -m benchmarks.schedule_tables [RANKS ...]

Bytes are those a rank receives for one layer, as multiples of the q of its own tokens in bf16 (B n Hq D x 2 bytes): the
greatest over ranks, and the mean in brackets where ranks differ. Full attention; causal for those that are nothing
else. A schedule is left out where it does not fit the number of ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence

from benchmarks.blocks import block_bytes, unit
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


def settings(ranks: int) -> list[dict]:
    return [setting for setting in _settings(ranks, int(ranks**0.5)) if _fits(ranks, setting)]


def _fits(ranks: int, setting: dict) -> bool:
    try:
        config_of(ranks, setting)
    except ConfigError:
        return False
    return True


def _settings(ranks: int, side: int) -> list[dict]:
    return [
        {"schedule": "ring"},
        {"schedule": "ring", "backward": "q"},
        {"schedule": "double_ring", "window": side},
        {"schedule": "distflash"},
        {"schedule": "attention2d", "rows": side},
        {"schedule": "attention2d", "rows": side * 2},
        {"schedule": "attention2d", "rows": side // 2},
        *({"schedule": "wallfacer", "team": team} for team in sorted({2, side // 2})),
        {"schedule": "mesh", "mesh": [side // 2, 1, 2 * ranks // side]},
        {"schedule": "mesh", "mesh": [side // 2, 1, 2 * ranks // side], "backward": "q"},
        {"schedule": "triangle"},
    ]


def name_of(setting: dict) -> str:
    rest = ", ".join(f"{key} {value}" for key, value in setting.items() if key not in ("schedule", "mesh"))
    shape = f" {setting['mesh']}" if "mesh" in setting else ""
    return f"{setting['schedule']}{shape}{', ' if rest else ''}{rest}"


def config_of(ranks: int, setting: dict) -> SequenceParallelConfig:
    both = {way: "kv" for way in ("forward", "backward") if not causal(setting)}
    return SequenceParallelConfig(**{"size": ranks, "ulysses": 1, **both, **setting}).resolve(ranks)


def causal(setting: dict) -> bool:
    """Whether its schedule computes nothing else: no product of the first block with a later one."""
    return not SCHEDULES[setting["schedule"]].takes(0, 1)


def plan_of(ranks: int, setting: dict, direction: str, shape: Shape, overlap: bool = False) -> tuple[Plan, Shards]:
    config = dataclasses.replace(config_of(ranks, setting), overlap=overlap)
    shards = EvenShards(config.layout, 64 * multiple(config.layout, ranks, 1), ranks)
    pattern = pattern_of(CAUSAL if causal(setting) else FULL, shards)
    return config.recipe(config.topology(ranks)).plan(direction, pattern, shape), shards


def shape_for(heads: tuple[int, int], travel: str) -> Shape:
    return shape_of(travel, "bfloat16", 1, (*heads, HEAD_DIM))


def received(ranks: int, setting: dict, direction: str, shape: Shape) -> str:
    plan, shards = plan_of(ranks, setting, direction, shape)
    found = [value / unit(shape, shards) for value in plan.received(block_bytes(shape, direction, shards))]
    mean = sum(found) / len(found)
    return f"{max(found):.2f}" + (f" ({mean:.2f})" if max(found) > 1.001 * mean else "")


def bytes_table(ranks: int, heads: tuple[int, int]) -> None:
    print("| schedule | forward, fp32 | forward, bf16 | backward, fp32 | backward, bf16 |\n|---|---|---|---|---|")
    for setting in settings(ranks):
        cells = [
            received(ranks, setting, direction, shape_for(heads, travel))
            for direction in ("forward", "backward")
            for travel in ("fp32", "bf16")
        ]
        print(f"| {name_of(setting)} | {' | '.join(cells)} |")


def calls(plan: Plan, layout: str, square: bool) -> int:
    """Kernel calls of the busiest rank in the busiest step, under a causal mask."""
    shards = EvenShards(layout, 64 * multiple(layout, plan.size, 1), plan.size)

    @functools.cache
    def count(q: Key, kv: Key) -> int:
        return len(tiles(shards.runs("q", q), shards.runs("kv", kv), CAUSAL, square))

    return max(sum(count(c.q, c.kv) for c in step.computes) for steps in plan.ranks for step in steps)


def shape_table(ranks: int) -> None:
    print(
        "| schedule | kernel calls a step, zigzag: top-left / square kernels | striped | steps "
        "| critical path | with overlap |\n|---|---|---|---|---|---|"
    )
    for setting in settings(ranks):
        shape = shape_for((32, 32), "bf16")
        plan, shards = plan_of(ranks, setting, "forward", shape)
        share = weight(CAUSAL if causal(setting) else FULL, shards)
        costs = Costs(transfer=block_bytes(shape, "forward", shards), product=1.0, weight=share).balanced(plan)
        bound = max(communication(plan, costs), computation(plan, costs))
        over, _ = plan_of(ranks, setting, "forward", shape, overlap=True)
        own = config_of(ranks, setting).layout
        wide = "zigzag" in SCHEDULES[setting["schedule"]].layouts
        count = " / ".join(str(calls(plan, "zigzag" if wide else own, square)) for square in (False, True))
        count += f" | {calls(plan, 'striped', False)}" if wide else f" ({own}) | -"
        times = [f"{simulate(programs_of(p), costs).seconds / bound:.2f}" for p in (plan, over)]
        print(f"| {name_of(setting)} | {count} | {len(plan.ranks[0])} | {' | '.join(times)} |")


def wallfacer_example() -> None:
    """P = 64, 65,536 tokens, hidden 6,656, bf16 with bf16 partial outputs, forward, lse apart."""
    one = 65536 // 64 * 6656 * 2 / 2**30
    sizes = {"q": one, "kv": 2 * one, "out": one}
    for shape in ([4, 4, 4], [4, 1, 16], [8, 8, 1], [1, 1, 64]):
        plan, _ = plan_of(64, {"schedule": "mesh", "mesh": shape}, "forward", shape_for((52, 52), "bf16"))
        print(f"| {tuple(shape)} | {max(plan.received(sizes)):.3f} |")


def main(numbers: Sequence[int] = (16, 64)) -> None:
    for ranks in numbers:
        for name, heads in SHAPES.items():
            print(f"\n### Received bytes, {ranks} ranks, {name}\n")
            bytes_table(ranks, heads)
    print("\n### WallFacer's example, GiB received a rank (P = 64, 65,536 tokens, hidden 6,656)\n")
    print("| mesh (a, b, R) | GiB |\n|---|---|")
    wallfacer_example()
    for ranks in numbers:
        print(f"\n### Kernel calls and critical path, {ranks} ranks, forward, MHA, bf16 partial results\n")
        shape_table(ranks)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or (16, 64))
