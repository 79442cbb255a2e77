"""What DeepSpeed's ZeRO takes on the ranks that are to train: its collectives, and its hooks of modules."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..runtime.comm import ALL_GATHER
from .calibration import Calibration

REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # torch 2.13 renamed it
MODULES, HOOKED = 32, 5  # of a model whose hooks are looked at, and in how many steps


def zero_costs(its: Calibration) -> dict[str, Any]:
    """Collectives of all ranks as DeepSpeed calls them, and the host's time for a module with its hooks."""
    forward, backward = _hooks(its)
    kinds = ("gather", "reduce", "all_reduce")
    return {"ranks": its.world, **{kind: _collective(its, kind) for kind in kinds},
            "forward": forward, "backward": backward}  # fmt: skip


def _collective(its: Calibration, kind: str) -> dict[str, float]:
    def made(size: int) -> Callable[[], object]:
        whole = torch.zeros(max(1, size // 4 // its.world) * its.world, device=its.device)
        part = torch.zeros(whole.numel() // its.world, device=its.device)
        if kind == "gather":
            return lambda: ALL_GATHER(whole, part)
        return lambda: REDUCE_SCATTER(part, whole) if kind == "reduce" else dist.all_reduce(whole)

    latency = its.seconds(made(8), 50)
    return {"latency": latency, "rate": 1 / its.slope(made)}


def _hooks(its: Calibration) -> tuple[float, float]:
    """Seconds of the host, forward and backward, for a module that hardly computes: nothing is gathered, and
    reductions wait for a bucket that holds them all. The first two steps are another matter: ZeRO learns the
    order in which modules are called."""
    import deepspeed  # which takes seconds

    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(MODULES)))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 64, "reduce_bucket_size": 2**16}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "steps_per_print": 10**9,
              "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}  # fmt: skip
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    x = torch.ones(1, 8, device=its.device)
    took: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(2 + HOOKED):
        dist.barrier(its.group)
        marks = [time.perf_counter()]
        loss = engine(x).sum()
        marks.append(time.perf_counter())
        engine.backward(loss)
        marks.append(time.perf_counter())
        engine.step()
        for way, began, ended in zip(took, marks, marks[1:], strict=False):
            took[way].append((ended - began) / MODULES)
    engine.destroy()
    every = its.gathered([statistics.median(times[2:]) for times in took.values()])
    its.bar.update()
    forward, backward = (statistics.mean(ways) for ways in zip(*every, strict=True))
    return forward, backward
