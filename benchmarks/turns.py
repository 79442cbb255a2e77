"""Contenders take turns, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist


def order(count: int, turn: int) -> list[int]:
    """All contenders: another one is first in every round, and every other round goes backwards."""
    found = [(i + turn) % count for i in range(count)]
    return found[::-1] if turn % 2 else found


def slowest(seconds: float, device: str = "cpu") -> float:
    """The greatest over all ranks; collective."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def in_turns(steps: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu") -> dict[str, list[float]]:
    """Seconds of the slowest rank in each round, after one round to warm up. All ranks call it with the same steps."""
    names, found = list(steps), {name: [] for name in steps}
    for turn in range(-1, rounds):
        for index in order(len(names), turn + 1):
            dist.barrier()
            began = time.perf_counter()
            steps[names[index]]()
            if device != "cpu":
                torch.cuda.synchronize()
            took = slowest(time.perf_counter() - began, device)
            if turn >= 0:
                found[names[index]].append(took)
    return found
