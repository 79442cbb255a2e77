"""Contenders take turns, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

Step = Callable[[], object]
Clock = Callable[[Step], float]  # makes a step, and returns its seconds


def order(count: int, turn: int) -> list[int]:
    """All contenders: another one is first in every round, and every other round goes backwards."""
    found = [(i + turn) % count for i in range(count)]
    return found[::-1] if turn % 2 else found


def slowest(seconds: float, device: str = "cpu") -> float:
    """The greatest over all ranks; collective."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def wall(step: Step, read: Callable[[], float] = time.perf_counter) -> float:
    """Seconds until the step returns: on a GPU, those of the host alone. read: gives the time."""
    began = read()
    step()
    return read() - began


def settle(device: str) -> None:
    """Waits for all that the device has to do."""
    torch.get_device_module(device).synchronize()


def together(device: str = "cpu") -> Clock:
    """All ranks begin together, and the slowest one's seconds count. All ranks make the same steps."""

    return lambda step: (dist.barrier(), slowest(until_done(device)(step), device))[1]


def of_device(device: str, cover: int = 2**30) -> Clock:
    """Seconds of the device, by events. While it clears `cover` bytes the host runs ahead and launches the step, whose
    time is then that of its kernels; the caches are cold. Of a CPU: `wall`."""
    if device == "cpu":
        return wall
    module, cleared = torch.get_device_module(device), torch.empty(cover, dtype=torch.uint8, device=device)

    def clock(step: Step) -> float:
        marks = [module.Event(enable_timing=True) for _ in range(2)]
        cleared.zero_()
        marks[0].record()
        step()
        marks[1].record()
        marks[1].synchronize()
        return marks[0].elapsed_time(marks[1]) / 1e3

    return clock


def of_host(device: str) -> Clock:
    """Seconds that the host works to launch a step, on a device that has nothing else to do."""
    return lambda step: (settle(device), wall(step), settle(device))[1]


def until_done(device: str) -> Clock:
    """Seconds until the device is done with a step."""
    return lambda step: (settle(device), wall(lambda: (step(), settle(device))))[1]


def in_turns(
    steps: Mapping[str, Step], rounds: int, clock: Clock = wall, warm: int = 1, seconds: float = math.inf
) -> dict[str, list[float]]:
    """Seconds of each step in each round, after `warm` rounds that do not count. seconds: after which no round begins
    any more, but for the first two."""
    names, found = list(steps), {name: [] for name in steps}
    until = time.perf_counter() + seconds
    for turn in range(-warm, rounds):
        if turn > 1 and time.perf_counter() > until:
            break
        for index in order(len(names), turn + warm):
            took = clock(steps[names[index]])
            if turn >= 0:
                found[names[index]].append(took)
    return found
