"""A record of attention: when this rank, or all that share its sequence, did what, for a picture or a trace."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from .compiler.timeline import Event, Timeline
from .errors import ConfigError
from .runtime.agreement import gathered
from .runtime.comm import explaining_failure
from .runtime.recorder import Recorder
from .runtime.runtime import Runtime

ROUNDS = 8  # barriers that clocks are compared by


class Record:
    """What `SequenceParallel.record` gives: inside its `with` block every attention of this rank is written down, in
    forward, in backward and in what a checkpoint runs again. One record at a time."""

    def __init__(
        self, runtime: Runtime, rank: int, device: torch.device, group: dist.ProcessGroup | None, watch: bool
    ) -> None:
        self._runtime, self._rank, self._device, self._group, self._watch = runtime, rank, device, group, watch
        self._events: tuple[Event, ...] = ()

    def __enter__(self) -> Record:
        if self._runtime.recorder is not None:
            raise ConfigError("a record needs a SequenceParallel that none is made of; got a second, end the first one")
        if self._watch and self._device.type != "cpu":
            raise ConfigError(f"record(watch=True) is for ranks on CPUs; got one on {self._device}, leave out watch")
        self._runtime.recorder = self._recorder = Recorder(self._rank, self._device, self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.recorder = None
        self._events = self._recorder.events()

    @property
    def events(self) -> tuple[Event, ...]:
        """This rank's, in the order in which they were begun; none before the block has ended. Seconds are those of
        time.perf_counter. `ds_seqpar.compiler.timeline.Event` says what they hold."""
        return self._events

    @property
    def timeline(self) -> Timeline:
        """This rank's events."""
        return Timeline(self._events)

    def save(self, file: str | Path) -> None:
        """Writes this rank's events as a trace for ui.perfetto.dev (`timeline.trace_of` says how they are laid out).
        All ranks' in one: `record.gather().save(file)`. Raises ConfigError where the file cannot be written."""
        self.timeline.save(file)

    def gather(self) -> Timeline:
        """All ranks' events, by rank, on all ranks, by the clock of the first one. Collective over the ranks that share
        the sequence; raises CommunicationError where one of them does not come.

        Clocks are compared by barriers, which nobody leaves before all have come. Those that may be the same by that,
        as the clocks of processes of one machine are, are taken to be; others are right to about half a barrier's time.
        """
        barriers = []
        for _ in range(ROUNDS):
            came = time.perf_counter()
            if self._group is not None:
                with explaining_failure("gathering a record", self._group):
                    dist.barrier(self._group)
            barriers.append(Barrier(came, time.perf_counter()))
        everyones = sorted(gathered(self._group, ("records", self._rank, barriers, self._events)), key=lambda x: x[1])
        first, found = everyones[0][2], []
        for _, _, theirs, events in everyones:
            late = ahead(first, theirs)
            found += [shifted(event, -late) if late else event for event in events]
        return Timeline(tuple(found))


class Barrier(NamedTuple):
    """When a rank came to it, and when it left, by its own clock."""

    came: float
    left: float


def ahead(first: list[Barrier], other: list[Barrier]) -> float:
    """By how many seconds another clock is ahead of the first, given the same barriers on both: 0 where that may be."""
    # nobody leaves before all have come, so other.left - ahead >= first.came, and the other way round
    most = min(theirs.left - ours.came for ours, theirs in zip(first, other, strict=True))
    least = max(theirs.came - ours.left for ours, theirs in zip(first, other, strict=True))
    return 0.0 if least <= 0.0 <= most else (least + most) / 2


def shifted(event: Event, by: float) -> Event:
    """The same event, so many seconds later."""
    waited = None if event.waited is None else event.waited + by
    return dataclasses.replace(event, start=event.start + by, end=event.end + by, waited=waited)
