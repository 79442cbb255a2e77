"""Prints what each schedule moves, calls and waits for, from the plans alone: the tables of docs/schedules.md.

    python benchmarks/schedule_tables.py

Bytes are those a rank receives for one layer, as multiples of its own query block in bf16 (B n Hq D x 2 bytes): the
greatest over ranks, and the mean in brackets where ranks differ. Full attention, distflash causal (it is nothing else).
"""

from __future__ import annotations

import dataclasses

from ds_seqpar.config import SequenceParallelConfig
from ds_seqpar.planning.compile import pattern_of
from ds_seqpar.planning.layout import multiple
from ds_seqpar.planning.masks import CAUSAL, FULL
from ds_seqpar.planning.plan import Plan
from ds_seqpar.planning.recipes import recipe_of, shape_of
from ds_seqpar.planning.shape import Shape
from ds_seqpar.planning.shards import EvenShards
from ds_seqpar.planning.simulate import Costs, communication, computation, programs_of, simulate
from ds_seqpar.planning.tiles import tiles

HEAD_DIM = 128
SHAPES = {"MHA (32/32 heads)": (32, 32), "GQA 8:1 (64/8 heads)": (64, 8)}


def settings(ranks: int) -> list[dict]:
    side = int(ranks**0.5)
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
    ]


def name_of(setting: dict) -> str:
    rest = ", ".join(f"{key} {value}" for key, value in setting.items() if key not in ("schedule", "mesh"))
    shape = f" {setting['mesh']}" if "mesh" in setting else ""
    return f"{setting['schedule']}{shape}{', ' if rest else ''}{rest}"


def plan_of(ranks: int, setting: dict, direction: str, shape: Shape, overlap: bool = False) -> Plan:
    config = SequenceParallelConfig(**{"size": ranks, "ulysses": 1, "forward": "kv", "backward": "kv", **setting})
    if config.schedule == "distflash":
        config = SequenceParallelConfig(size=ranks, ulysses=1, schedule="distflash")
    config = dataclasses.replace(config, overlap=overlap).resolve(ranks)
    shards = EvenShards(config.layout, 4 * multiple(config.layout, ranks, 1), ranks)
    pattern = pattern_of(CAUSAL if config.schedule == "distflash" else FULL, shards)
    return recipe_of(config, config.topology(ranks)).plan(direction, pattern, shape)


def shape_for(heads: tuple[int, int], travel: str) -> Shape:
    return shape_of(travel, "bfloat16", 1, (*heads, HEAD_DIM))


def received(plan: Plan, sizes: dict, unit: int) -> str:
    found = [value / unit for value in plan.received(sizes)]
    mean = sum(found) / len(found)
    return f"{max(found):.2f}" + (f" ({mean:.2f})" if max(found) > 1.001 * mean else "")


def bytes_table(ranks: int, heads: tuple[int, int]) -> None:
    print("| schedule | forward, fp32 | forward, bf16 | backward, fp32 | backward, bf16 |\n|---|---|---|---|---|")
    for setting in settings(ranks):
        cells = []
        for direction in ("forward", "backward"):
            for travel in ("fp32", "bf16"):
                shape = shape_for(heads, travel)
                plan, sizes = plan_of(ranks, setting, direction, shape), shape.bytes_per_token(direction)
                cells.append(received(plan, sizes, 2 * heads[0] * HEAD_DIM))
        print(f"| {name_of(setting)} | {' | '.join(cells)} |")


def calls(plan: Plan, layout: str, square: bool) -> int:
    """Kernel calls of the busiest rank in the busiest step, under a causal mask."""
    shards = EvenShards(layout, 64 * multiple(layout, plan.size, 1), plan.size)
    products = {(c.q, c.kv) for steps in plan.ranks for step in steps for c in step.computes}
    return max(len(tiles(shards.runs("q", q), shards.runs("kv", kv), CAUSAL, square)) for q, kv in products)


def shape_table(ranks: int) -> None:
    print(
        "| schedule | kernel calls a step, zigzag: top-left / square kernels | striped | steps "
        "| critical path | with overlap |\n|---|---|---|---|---|---|"
    )
    for setting in settings(ranks):
        shape = shape_for((32, 32), "bf16")
        plan = plan_of(ranks, setting, "forward", shape)
        costs = Costs(transfer=shape.bytes_per_token("forward"), product=1.0).balanced(plan)
        bound = max(communication(plan, costs), computation(plan, costs))
        over = plan_of(ranks, setting, "forward", shape, overlap=True)
        if setting["schedule"] == "distflash":
            count = ["1 / 1 (contiguous)", "-"]
        else:
            count = [f"{calls(plan, 'zigzag', False)} / {calls(plan, 'zigzag', True)}",
                     str(calls(plan, "striped", False))]  # fmt: skip
        times = [f"{simulate(programs_of(p), costs).seconds / bound:.2f}" for p in (plan, over)]
        print(f"| {name_of(setting)} | {count[0]} | {count[1]} | {len(plan.ranks[0])} | {' | '.join(times)} |")


def wallfacer_example() -> None:
    """P = 64, 65,536 tokens, hidden 6,656, bf16 with bf16 partial outputs, forward, lse apart."""
    unit = 65536 // 64 * 6656 * 2 / 2**30
    sizes = {"q": unit, "kv": 2 * unit, "out": unit}
    for shape in ([4, 4, 4], [4, 1, 16], [8, 8, 1], [1, 1, 64]):
        plan = plan_of(64, {"schedule": "mesh", "mesh": shape}, "forward", shape_for((52, 52), "bf16"))
        print(f"| {tuple(shape)} | {max(plan.received(sizes)):.3f} |")


def main() -> None:
    for ranks in (16, 64):
        for name, heads in SHAPES.items():
            print(f"\n### Received bytes, {ranks} ranks, {name}\n")
            bytes_table(ranks, heads)
    print("\n### WallFacer's example, GiB received a rank (P = 64, 65,536 tokens, hidden 6,656)\n")
    print("| mesh (a, b, R) | GiB |\n|---|---|")
    wallfacer_example()
    for ranks in (16, 64):
        print(f"\n### Kernel calls and critical path, {ranks} ranks, forward, MHA, bf16 partial results\n")
        shape_table(ranks)


if __name__ == "__main__":
    main()
