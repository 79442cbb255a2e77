"""What `benchmarks.train` runs on a rank: one contender's engine, and its steps, each begun by all ranks at once."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from benchmarks import memory_peers
from benchmarks.memory_peers import Model


class Turn(NamedTuple):
    """One step of a rank. seconds: from when all ranks began. loss, norm: of the whole batch, the same on all ranks."""

    seconds: float
    loss: float
    norm: float


STEP: list[memory_peers.Step] = []


def build(model: Model, kind: str, options: dict[str, Any], seq: int) -> None:
    """Makes the engine, on all ranks."""
    STEP[:] = [memory_peers.made(model, kind, options, seq)]


def turn(start: float) -> Turn:
    """One step, begun by all ranks at `start` of the machine's clock."""
    time.sleep(max(0.0, start - time.monotonic()))
    loss = STEP[0](lambda _: None)
    return Turn(time.monotonic() - start, loss, memory_peers.NORM[0]())
