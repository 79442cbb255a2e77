"""Timeline of simulated ranks, with events, their durations, and a trace for Perfetto."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from ..base.files import write_text

# a rank's track for each kind of event
TRACKS = {
    "product": "compute",
    "merge": "compute",
    "copy": "compute",
    "post": "compute",
    "wait": "compute",
    "exchange": "receive",
    "move": "receive",
}


@dataclasses.dataclass(frozen=True)
class Event:
    """Activity of `rank` from `start` to `end`, in seconds.

    The kinds are "product", "merge", "copy", "post" (messages and collectives are started), "wait", "move" (a message
    or a shard of a collective arrives) and "exchange" (tensors from other Ulysses ranks arrive).
    """

    rank: int  # SP rank
    kind: str
    start: float
    end: float
    label: str


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Events in any order, starting at time 0."""

    events: tuple[Event, ...]

    @functools.cached_property
    def seconds(self) -> float:
        """Length of the critical path: the time at which the last event ends."""
        return max((event.end for event in self.events), default=0.0)

    @functools.cached_property
    def _by_rank(self) -> dict[int, list[Event]]:
        by_rank: dict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            by_rank[event.rank].append(event)
        return dict(by_rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._by_rank))

    def of(self, rank: int, *kinds: str) -> list[Event]:
        """Return a rank's events of these kinds, in their original order."""
        return [event for event in self._by_rank.get(rank, ()) if event.kind in kinds]

    def save(self, file: str | Path, title: str = "") -> None:
        """Write a JSON file in Chrome's trace event format, for ui.perfetto.dev.

        Each rank is a process ("pid", named by an event "M"). A rank's tracks are "compute" and "receive", plus
        "receive 2" if messages overlap. Each `Event` becomes a complete event ("X") with times in microseconds and the
        kind as "cat".

        Args:
            file: Path of the JSON file.
            title: Text that precedes the rank number in each rank's name.

        Raises:
            ConfigError: The file cannot be written.
        """
        events: list[dict[str, object]] = []
        for pid, rank in enumerate(self.ranks):
            events.append(_named("process_name", pid, 0, f"{title} rank {rank}".strip()))
            events += _process(self, rank, pid)
        write_text(file, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n", "a trace")


def lanes(events: Iterable[Event]) -> list[tuple[int, Event]]:
    """Return (lane, event) pairs sorted by start time, with each event in the first free lane."""
    placed, ends = [], list[float]()
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        lane = next((lane for lane, end in enumerate(ends) if end <= event.start), len(ends))
        ends[lane : lane + 1] = [event.end]
        placed.append((lane, event))
    return placed


def _process(timeline: Timeline, rank: int, pid: int) -> list[dict[str, object]]:
    events, tid = [], 0
    for track in ("compute", "receive"):
        # a rank's activities never overlap, but its messages do, which a single track cannot show
        placed = lanes(timeline.of(rank, *(kind for kind, on in TRACKS.items() if on == track)))
        count = 1 + max((lane for lane, _ in placed), default=-1)
        for lane in range(count):
            events.append(_named("thread_name", pid, tid + lane, track if not lane else f"{track} {lane + 1}"))
        events += [_complete(event, pid, tid + lane) for lane, event in placed]
        tid += count
    return events


def _named(field: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": field, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(event: Event, pid: int, tid: int) -> dict[str, object]:
    times = {"ts": event.start * 1e6, "dur": (event.end - event.start) * 1e6}
    return {"ph": "X", "name": event.label, "cat": event.kind, "pid": pid, "tid": tid, **times}
