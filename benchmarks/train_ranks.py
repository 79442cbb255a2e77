"""What `benchmarks.train` runs on a rank: one contender's engine, and its steps, each begun by all ranks at once."""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import deepspeed.comm.comm as deepspeed_comm

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


COLLECTIVES = ("all_gather_into_tensor", "all_gather", "reduce_scatter_tensor", "all_reduce", "broadcast", "barrier")


class Waited:
    """What DeepSpeed waits for, timed from the outside: the seconds of each call of its backend and of each wait."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0
        self.backend = deepspeed_comm.cdb
        for name in COLLECTIVES:
            setattr(self.backend, name, self.timed(getattr(self.backend, name)))

    def timed(self, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = function(*args, **kwargs)
            self.seconds += time.perf_counter() - began
            self.calls += 1
            return Work(found, self) if hasattr(found, "wait") else found

        return call

    def close(self) -> None:
        for name in COLLECTIVES:
            delattr(self.backend, name)


class Work:
    """A collective on its way."""

    def __init__(self, work: Any, waited: Waited) -> None:
        self.work, self.waited = work, waited

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return self.work.wait(*args, **kwargs)
        finally:
            self.waited.seconds += time.perf_counter() - began


def spent(start: float) -> dict[str, float]:
    """One more step, begun by all ranks at `start`, with clocks inside: seconds of this rank in it all, in attention
    forward and backward (with what it sends and waits for), where DeepSpeed waits for parameters and gradients, and in
    the optimiser's step. What is left is the model's other work and the host."""
    found: dict[str, float] = {}
    last = [0.0, 0.0]
    sp, waited = memory_peers.ENGINE[0].sequence_parallel, Waited()

    def mark(phase: str) -> None:
        now, zero = time.perf_counter(), waited.seconds
        found[phase], found[f"{phase}: ZeRO"] = now - last[0], zero - last[1]
        last[:] = [now, zero]

    time.sleep(max(0.0, start - time.monotonic()))
    began = last[0] = time.perf_counter()
    try:
        with sp.record() as record:
            STEP[0](mark)
    finally:
        waited.close()
    found["all"] = time.perf_counter() - began
    for event in record.events:
        if event.kind in ("walk", "agree"):
            found["attention"] = found.get("attention", 0.0) + event.end - event.start
        if event.kind in ("wait", "agree"):
            found["attention: links"] = found.get("attention: links", 0.0) + event.end - event.start
    found["ZeRO"], found["collectives"] = waited.seconds, waited.calls
    return found
