"""What must not grow with the world: seconds to make a SequenceParallel among 1,024 ranks, on torch's fake backend.

python -m benchmarks.scale [WORLD]
"""

from __future__ import annotations

import gc
import sys
import time

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_seqpar import SequenceParallel, SequenceParallelConfig

TARGET = 3.0  # seconds


def shapes(world: int) -> dict[str, dict]:
    """Name -> settings for all ranks of the world."""
    return {
        "ring": {"ulysses": 8},
        "mesh": {"ulysses": 8, "schedule": "mesh"},
        "ring, 16 groups": {"ulysses": 8, "size": world // 16},
    }


def seconds_to_make(rank: int, world: int, **config: object) -> tuple[float, int]:
    """(seconds, groups made) of one rank's SequenceParallel."""
    began = time.perf_counter()
    with SequenceParallel(SequenceParallelConfig(**config)) as sp:
        return time.perf_counter() - began, len(sp.groups.made)


def main(world: int = 1024) -> None:
    rank = world // 2 + 3
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    print(f"{world} ranks; target {TARGET:g} s\n{'':20}{'seconds':>10}{'groups':>10}")
    for name, config in shapes(world).items():
        seconds, groups = seconds_to_make(rank, world, **config)
        print(f"{name:20}{seconds:10.3f}{groups:10}")
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
