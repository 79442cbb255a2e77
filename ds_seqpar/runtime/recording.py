"""A record of attention: when this rank, or each rank of its sequence, did what, for a picture or a trace."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..compiler.overlap.timeline import Event, Timeline
from ..errors import ConfigError
from .agreement import all_gather_objects, assert_ranks_agree
from .comm import explaining_failure
from .recorder import Recorder
from .runtime import Runtime

ROUNDS = 8  # barriers by which clocks are compared


class Record:
    """When this rank executed what in attention, as `SequenceParallel.record` returns it.

    Inside its `with` block every attention of this rank is recorded: in forward, in backward, and where a checkpoint
    runs it again. There may be one record at a time; a second one raises ConfigError at its `with`.
    """

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
        """This rank's events, in the order in which they began; empty before the block has ended.

        Times are seconds of time.perf_counter. `ds_seqpar.compiler.overlap.timeline.Event` says what an event holds.
        """
        return self._events

    @property
    def timeline(self) -> Timeline:
        """This rank's events as a Timeline."""
        return Timeline(self._events)

    def save(self, file: str | Path) -> None:
        """Write this rank's events as a trace for ui.perfetto.dev; `timeline.trace_of` describes its layout.

        `record.gather().save(file)` writes those of all ranks in one file.

        Args:
            file: the path to write to.

        Raises:
            ConfigError: if the file cannot be written.
        """
        self.timeline.save(file)

    def gather(self) -> Timeline:
        """Return all ranks' events on every rank. Collective over the ranks that share the sequence.

        Clocks are compared by barriers, which no rank leaves before all have arrived. Clocks that the barriers cannot
        tell apart count as one clock, as those of processes of one machine are. Others are right to about half a
        barrier's time.

        Returns:
            The events by rank, in seconds of the first rank's clock.

        Raises:
            DisagreementError: on all these ranks, if one of them makes another call.
            CommunicationError: if one of them does not make the call.
        """
        assert_ranks_agree(self._group, "records to gather", None, call="record.gather")
        barriers = []
        for _ in range(ROUNDS):
            arrival = time.perf_counter()
            if self._group is not None:
                with explaining_failure("gathering a record", self._group):
                    dist.barrier(self._group)
            barriers.append(Barrier(arrival, time.perf_counter()))
        records = sorted(
            all_gather_objects(self._group, ("records", self._rank, barriers, self._events)), key=lambda x: x[1]
        )
        first, merged = records[0][2], []
        for _, _, other, events in records:
            lead = ahead(first, other)
            merged += [shifted(event, -lead) if lead else event for event in events]
        return Timeline(tuple(merged))


class Barrier(NamedTuple):
    """When a rank arrived at a barrier and when it left, in seconds of the rank's own clock."""

    arrival: float
    departure: float


def ahead(first: list[Barrier], other: list[Barrier]) -> float:
    """Return by how many seconds the other clock is ahead of the first; 0 where the barriers allow it.

    Args:
        first: times of the barriers by the first clock.
        other: times of the same barriers by the other clock.
    """
    # no rank leaves before all have arrived, so other.departure - ahead >= first.arrival, and the other way round
    most = min(b.departure - a.arrival for a, b in zip(first, other, strict=True))
    least = max(b.arrival - a.departure for a, b in zip(first, other, strict=True))
    return 0.0 if least <= 0.0 <= most else (least + most) / 2


def shifted(event: Event, by: float) -> Event:
    """Return the event with all its times `by` seconds later."""
    waited = None if event.waited is None else event.waited + by
    return dataclasses.replace(event, start=event.start + by, end=event.end + by, waited=waited)
