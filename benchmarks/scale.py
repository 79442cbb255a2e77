"""What must not grow with the world, among 1,024 ranks on torch's fake backend: seconds to make a SequenceParallel, and
seconds and memory to derive one rank's programs of every schedule; and to validate whole plans of 256 ranks.

python -m benchmarks.scale [WORLD]
"""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.compiler.compile import pattern_of
from ds_seqpar.compiler.cuts import Takes
from ds_seqpar.compiler.masks import CAUSAL
from ds_seqpar.compiler.schedules import SCHEDULES
from ds_seqpar.compiler.shape import shape_of
from ds_seqpar.compiler.shards import EvenShards
from ds_seqpar.compiler.validate import validate

ULYSSES, HEADS, VALIDATED = 8, (64, 8), 256


def seconds_to_make(rank: int, world: int, **config: object) -> tuple[float, int]:
    """(seconds, groups made) of one rank's SequenceParallel."""
    began = time.perf_counter()
    with SequenceParallel(SequenceParallelConfig(**config)) as sp:
        return time.perf_counter() - began, len(sp.groups.made)


def cost_of_programs(**config: object) -> tuple[float, float]:
    """(seconds, MiB at most) to derive one rank's forward and backward program, with all tiles, for the first time."""
    with SequenceParallel(SequenceParallelConfig(**config), heads=HEADS) as sp:
        q, k = (torch.empty(1, 1024, heads // ULYSSES, 128, dtype=torch.bfloat16, device="meta") for heads in HEADS)
        shape = shape_of(sp.config.travel_dtype, "bfloat16", 1, (q.shape[2], k.shape[2], q.shape[3]))

        def derive() -> None:
            compiler = type(sp.runtime.compiler)(sp.runtime.compiler.recipe, sp.runtime.rank)
            for direction in ("forward", "backward"):
                bound = compiler.bound(direction, CAUSAL, sp.runtime.shards(q.shape[1]), shape, Takes(square=True))
                bound.all_calls()

        began = time.perf_counter()
        derive()
        seconds = time.perf_counter() - began
        tracemalloc.start()
        derive()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return seconds, most / 2**20


def seconds_to_validate(name: str, size: int) -> float:
    """A whole plan, in the slower direction."""
    config = SequenceParallelConfig(size=size, ulysses=1, schedule=name).resolve(size, heads=HEADS)
    recipe = config.recipe(config.topology(size))
    pattern = pattern_of(CAUSAL, EvenShards(config.layout, 4 * size, size))
    plans = [
        recipe.plan(way, pattern, shape_of("fp32", "bfloat16", 1, (*HEADS, 128))) for way in ("forward", "backward")
    ]
    began = time.perf_counter()
    for plan in plans:
        validate(plan, pattern.pairs())
    return time.perf_counter() - began


def shapes(world: int) -> dict[str, dict]:
    """Name -> settings for all ranks of the world."""
    every = {
        name: {"ulysses": ULYSSES, "schedule": name}
        for name, its in SCHEDULES.items()
        if list(its.shapes(world // ULYSSES))
    }
    return every | {"default, 16 groups": {"ulysses": ULYSSES, "size": world // 16}}


def main(world: int = 1024) -> None:
    rank = world // 2 + 3
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    print(f"rank {rank} of {world}, ulysses {ULYSSES}; seconds, for the programs and tiles of both directions\n")
    print(f"| schedule | SequenceParallel | groups | programs | their MiB | a plan of {VALIDATED} validated |")
    print(f"|---|{'---|' * 5}")
    for name, config in shapes(world).items():
        made, groups = seconds_to_make(rank, world, **config)
        seconds, most = cost_of_programs(**config)
        validated = f"{seconds_to_validate(name, VALIDATED):.1f}" if name in SCHEDULES else "-"
        print(f"| {name} | {made:.3f} | {groups} | {seconds:.3f} | {most:.1f} | {validated} |")
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
