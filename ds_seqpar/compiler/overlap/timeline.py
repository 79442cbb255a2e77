"""What ranks do when, simulated or measured: events, how long they take, and the trace that Perfetto shows of them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...files import write_text
from ..sharding.layout import Key

# kind -> the track of a rank that it is on
TRACKS = {
    "walk": "compute",
    "agree": "compute",
    "product": "compute",
    "merge": "compute",
    "copy": "compute",
    "post": "compute",
    "wait": "compute",
    "exchange": "receive",
    "move": "receive",
    "send": "send",
}


@dataclasses.dataclass(frozen=True)
class Event:
    """What `rank` does from `start` to `end`, in seconds.

    A simulation has these kinds: "product", "wait", "move" (a message or a collective's part arrives here), "exchange"
    (what other Ulysses ranks send arrives here). It leaves what follows the label as it stands.

    A record has more kinds: "send" (a message leaves), "post" (messages and collectives are handed over), "merge"
    (partial results become one). Then "copy" (operands and results are put in place) and "agree" (ranks compare their
    inputs). "walk", a whole program, encloses others. A message lasts from its post until a wait has seen its end.

    rank: the SP rank. call: the number of the walk, in order, from 0. direction, step: of the program. what, blocks:
    the unit that is worked on or sent, as ("kv", ((0,),)); of a product what is "" and blocks are those of q and of kv.
    peer: the CP rank at the other end of a message. bytes: that arrive, or that leave. waited: when the wait began.
    """

    rank: int
    kind: str
    start: float
    end: float
    label: str
    _: dataclasses.KW_ONLY
    call: int = -1
    direction: str = ""
    step: int = -1
    what: str = ""
    blocks: tuple[Key, ...] = ()
    peer: int = -1
    bytes: int = 0
    waited: float | None = None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Events in any order, whose times are of one clock."""

    events: tuple[Event, ...]

    @functools.cached_property
    def start(self) -> float:
        return min((event.start for event in self.events), default=0.0)

    @functools.cached_property
    def seconds(self) -> float:
        """From the first start to the last end: of a simulation, which begins at 0, the critical path."""
        return max((event.end for event in self.events), default=0.0) - self.start

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
        """A rank's events of these kinds, in their order."""
        return [event for event in self._by_rank.get(rank, ()) if event.kind in kinds]

    def busy(self, rank: int, *kinds: str) -> float:
        """Seconds in which at least one of a rank's events of these kinds is going on."""
        total, until = 0.0, -float("inf")
        for event in sorted(self.of(rank, *kinds), key=lambda event: event.start):
            total += max(0.0, event.end - max(event.start, until))
            until = max(until, event.end)
        return total

    def alike(self, share: float = 0.01) -> list[tuple[int, ...]]:
        """The ranks in groups, whose ranks do the same kinds of things at the same times, to `share` of the whole time.
        Shorter events do not count."""
        near, groups = share * self.seconds, list[tuple[list[Event], list[int]]]()
        for rank in self.ranks:
            long = [event for event in self._by_rank[rank] if event.end - event.start > near]
            own = sorted(long, key=lambda event: (event.kind, event.start))
            same = (ranks for events, ranks in groups if _is_near(events, own, near))
            if (ranks := next(same, None)) is not None:
                ranks.append(rank)
            else:
                groups.append((own, [rank]))
        return [tuple(ranks) for _, ranks in groups]

    def after(self, other: Timeline) -> Timeline:
        """Both time lines, this one beginning where the other ends."""
        shift = other.start + other.seconds - self.start
        moved = (dataclasses.replace(e, start=e.start + shift, end=e.end + shift) for e in self.events)
        return Timeline((*other.events, *moved))

    def save(self, file: str | Path, title: str = "") -> None:
        """Writes the time line as a trace: see `save_trace`."""
        save_trace({title: self}, file)


def _is_near(first: list[Event], other: list[Event], near: float) -> bool:
    """Whether events are of the same kinds, in this order, and begin and end within `near` seconds of one another."""
    return len(first) == len(other) and all(
        a.kind == b.kind and abs(a.start - b.start) <= near and abs(a.end - b.end) <= near
        for a, b in zip(first, other, strict=True)
    )


def lanes(events: Iterable[Event]) -> list[tuple[int, Event]]:
    """(lane, event) for each event, by when it starts: the first lane that is free then."""
    placed, ends = [], list[float]()
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        lane = next((lane for lane, end in enumerate(ends) if end <= event.start), len(ends))
        ends[lane : lane + 1] = [event.end]
        placed.append((lane, event))
    return placed


def save_trace(timelines: Mapping[str, Timeline], file: str | Path) -> None:
    """Writes time lines, by title, into one JSON file in Chrome's trace event format, for ui.perfetto.dev. Raises
    ConfigError where the file cannot be written."""
    write_text(file, json.dumps(trace_of(timelines)) + "\n", "a trace")


def trace_of(timelines: Mapping[str, Timeline]) -> dict[str, object]:
    """{"traceEvents": [...], "displayTimeUnit": "ms"}. A rank of a time line is a process ("pid", named by an event
    "M"). Its tracks are "compute", "receive" and "send", with a "receive 2" where messages overlap. An Event is a
    complete event ("X"): "ts", "dur", in microseconds from the time line's start; "cat", its kind; "args", the rest."""
    events: list[dict[str, object]] = []
    for title, timeline in timelines.items():
        for rank in timeline.ranks:
            pid = len({event["pid"] for event in events})
            events.append(_named("process_name", pid, 0, f"{title} rank {rank}".strip()))
            events += _process(timeline, rank, pid)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(timeline: Timeline, rank: int, pid: int) -> list[dict[str, object]]:
    """The trace events of a rank."""
    events, tid = [], 0
    for track in ("compute", "receive", "send"):
        shown = timeline.of(rank, *(kind for kind, on in TRACKS.items() if on == track))
        # what computes is one thing at a time, or inside another; messages overlap, and a track cannot show that
        placed = [(0, event) for event in shown] if track == "compute" else lanes(shown)
        count = 1 + max((lane for lane, _ in placed), default=-1)
        for lane in range(count):
            events.append(_named("thread_name", pid, tid + lane, track if not lane else f"{track} {lane + 1}"))
        events += [_complete(event, pid, tid + lane, timeline.start) for lane, event in placed]
        tid += count
    return events


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(event: Event, pid: int, tid: int, zero: float) -> dict[str, object]:
    """args: what is known of the event beyond its name and time."""
    given = [(field, getattr(event, field.name)) for field in dataclasses.fields(Event)[5:]]
    known = {field.name: value for field, value in given if value != field.default}
    if event.waited is not None:
        known["waited"] = (event.waited - zero) * 1e6
    times = {"ts": (event.start - zero) * 1e6, "dur": (event.end - event.start) * 1e6}
    return {"ph": "X", "name": event.label, "cat": event.kind, "pid": pid, "tid": tid, **times, "args": known}
