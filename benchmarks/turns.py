"""Time contenders in turns, so that a noisy machine affects all of them equally."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

Name = TypeVar("Name")
Step = Callable[[], object]
Clock = Callable[[Step], float]  # runs a step, and returns its seconds


def order(count: int, turn: int) -> list[int]:
    """Return the order of contenders in a round: each round starts with a different one, and every other round is
    reversed.
    """
    found = [(i + turn) % count for i in range(count)]
    return found[::-1] if turn % 2 else found


def slowest(seconds: float, device: str = "cpu") -> float:
    """Return the maximum of a time over all ranks. Collective."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def wall(step: Step, read: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds until the step returns; on a GPU, host time only. `read` returns the time."""
    began = read()
    step()
    return read() - began


def settle(device: str) -> None:
    """Wait until the device is idle."""
    torch.get_device_module(device).synchronize()


def together(device: str = "cpu") -> Clock:
    """Return a clock that starts all ranks together and times the slowest rank. All ranks must run the same steps."""

    return lambda step: (dist.barrier(), slowest(until_done(device)(step), device))[1]


def of_device(device: str, cover: int = 2**30) -> Clock:
    """Return a clock of device time, based on events; on a CPU, `wall`.

    While the device clears `cover` bytes, the host launches the step. The measured time therefore covers only the
    kernels, with cold caches.
    """
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
    """Return a clock of the host time to launch a step on an idle device."""
    return lambda step: (settle(device), wall(step), settle(device))[1]


def until_done(device: str) -> Clock:
    """Return a clock of the time until the device has finished a step."""
    return lambda step: (settle(device), wall(lambda: (step(), settle(device))))[1]


def in_turns(
    steps: Mapping[Name, Step], rounds: int, clock: Clock = wall, warm: int = 1, seconds: float = math.inf
) -> dict[Name, list[float]]:
    """Return the seconds of each step in each round, after `warm` untimed rounds.

    No round starts after `seconds` have passed, except the first two.
    """
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
