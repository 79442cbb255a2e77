"""Records when a rank executes the instructions of its programs. Without a recorder a walk records nothing.

While a program runs, only time stamps ("marks") are taken; on accelerators they are events of the current stream. What
each mark belongs to is read from the program afterwards.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..compiler.compile import BoundProgram
from ..compiler.overlap.timeline import Event
from ..compiler.program import instructions as op
from ..compiler.program.instructions import KINDS, Instruction, Started, Transfer, label_of
from ..compiler.schedules.actions import Collective, unit_name
from ..compiler.sharding.layout import Key
from .comm import Works
from .walk import Walk

Mark = Any  # a time stamp: a float on the host, an event on a device
Marks = tuple[Mark, Mark]  # start and end


class HostClock:
    """Takes marks by time.perf_counter."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, mark: Mark) -> float:
        return mark


class DeviceClock:
    """Takes marks as events of the current stream, and gives them in seconds of time.perf_counter."""

    def __init__(self, device: torch.device) -> None:
        self.module = torch.get_device_module(device)
        self.zero = self.mark()
        self.module.synchronize()
        self.host = time.perf_counter()

    def mark(self) -> Mark:
        event = self.module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Mark) -> float:
        mark.synchronize()
        return self.host + self.zero.elapsed_time(mark) / 1e3


class Recorder:
    """Collects the marks of one rank's walks, and turns them into events.

    rank: number of this rank among those of the sequence. watch: whether a thread waits for each message from its post
    on, so that its end is known even before the walk waits for it. For CPU ranks only: a device waits by streams."""

    def __init__(self, rank: int, device: torch.device, watch: bool = False) -> None:
        self.rank = rank
        self.clock = HostClock() if device.type == "cpu" else DeviceClock(device)
        self.work_type = WatchedWork if watch else TimedWork
        self.recorded: list[Span | TimedWalk] = []  # in the order in which they began

    def timed(self, walk: Walk) -> TimedWalk:
        """A function to call in place of `walk.advance`. It records each instruction."""
        timed = TimedWalk(walk, self.clock.mark, self.work_type)
        self.recorded.append(timed)
        return timed

    @contextlib.contextmanager
    def span(self, kind: str, label: str, bytes: int = 0) -> Iterator[None]:
        """A context that is recorded as one event. bytes: what it receives."""
        span = Span(kind, label, bytes, self.clock.mark())
        self.recorded.append(span)
        yield
        span.end = self.clock.mark()

    def events(self) -> tuple[Event, ...]:
        """All events so far in the order in which they began: messages when they were posted. Waits for the device."""
        events: list[Event] = []
        walks = 0
        for recorded in self.recorded:
            if isinstance(recorded, Span):
                if recorded.end is not None:
                    start, end = map(self.clock.seconds, (recorded.start, recorded.end))
                    events.append(Event(self.rank, recorded.kind, start, end, recorded.label, bytes=recorded.bytes))
            else:
                events += _WalkEvents(self.rank, walks, recorded, self.clock.seconds).events()
                walks += 1
        return tuple(events)


class Span:
    """The event of a `Recorder.span` context. end: None while the context runs, and if it raised."""

    def __init__(self, kind: str, label: str, bytes: int, start: Mark) -> None:
        self.kind, self.label, self.bytes, self.start = kind, label, bytes, start
        self.end: Mark | None = None


class TimedWalk:
    """A walk that is recorded. marks: start and end of each instruction that ended. works: ticket -> its works."""

    def __init__(self, walk: Walk, mark: Callable[[], Mark], work_type: type[TimedWork]) -> None:
        self.walk: Walk | None = walk
        self.bound, self.mark, self.work_type = walk.bound, mark, work_type
        self.marks: list[Marks] = []
        self.works: dict[int, list[TimedWork]] = {}

    def __call__(self) -> None:
        assert self.walk is not None
        walk, at = self.walk, self.walk.at
        start = self.mark()
        walk.advance()
        self.marks.append((start, self.mark()))
        one = walk.program.code[at]
        if isinstance(one, Started):
            handle = walk.tickets[one.ticket]
            assert isinstance(handle, Works)  # virtual ranks, which have other handles, are not recorded
            handle.works = self.works[one.ticket] = [self.work_type(work, self.mark) for work in handle.works]
        if walk.at == len(walk.program.code):
            self.walk = None  # keeps none of its tensors alive


class TimedWork:
    """A torch work that takes a mark when a wait for it ends. end: that mark; None before."""

    def __init__(self, work: Any, mark: Callable[[], Mark]) -> None:
        self.work, self.mark = work, mark
        self.end: Mark | None = None

    def wait(self) -> None:
        self.work.wait()
        self.end = self.mark()
        self.work = None  # it may hold what was sent


class WatchedWork(TimedWork):
    """A TimedWork for which a thread of its own waits from the start, since a work must be waited for only once."""

    def __init__(self, work: Any, mark: Callable[[], Mark]) -> None:
        super().__init__(work, mark)
        self.failed: BaseException | None = None
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        try:
            super().wait()
        except BaseException as error:  # raised again by who waits
            self.failed = error

    def wait(self) -> None:
        self.thread.join()
        if self.failed is not None:
            raise self.failed


class _WalkEvents:
    """Makes the events of one walk from its marks and its program. call: number of the walk."""

    def __init__(self, rank: int, call: int, timed: TimedWalk, seconds: Callable[[Mark], float]) -> None:
        self.rank, self.call, self.bound, self.works = rank, call, timed.bound, timed.works
        self.program, self.seconds = timed.bound.program, seconds
        self.marks = [(seconds(start), seconds(end)) for start, end in timed.marks]
        self.done = list(zip(self.program.code, self.marks, strict=False))  # an error leaves fewer marks
        self.waits = {one.ticket: marks for one, marks in self.done if isinstance(one, op.Wait)}

    def events(self) -> list[Event]:
        """The walk itself, then its instructions and messages in order; empty where no instruction ended."""
        if not self.marks:
            return []
        name = f"{self.program.name} {self.program.direction}"
        events = [self.event("walk", (self.marks[0][0], self.marks[-1][1]), name)]
        labels: dict[int, str] = {}
        for one, marks in self.done:
            if isinstance(one, Started):
                messages = self.messages(one, marks[0])
                labels[one.ticket] = " ".join(m.label for m in messages if m.kind != "send") or messages[0].label
                events += [self.event("post", marks, " ".join(m.label for m in messages), one.step), *messages]
            elif isinstance(one, op.Wait):
                events.append(self.event("wait", marks, labels[one.ticket], one.step))
            else:
                what, blocks = _unit(one)
                events.append(self.event(KINDS[type(one)], marks, label_of(one), one.step, what=what, blocks=blocks))
        return events

    def event(self, kind: str, marks: tuple[float, float], label: str, step: int = -1, **more: Any) -> Event:
        direction = self.program.direction
        return Event(self.rank, kind, *marks, label, call=self.call, direction=direction, step=step, **more)

    def messages(self, one: Started, start: float) -> list[Event]:
        """The events of the messages that an instruction starts: receives, then sends, in the order of their works."""
        waited, last = self.waits.get(one.ticket, (None, self.marks[-1][1]))
        messages = self.fields(one)
        ends = [last if work.end is None else self.seconds(work.end) for work in self.works[one.ticket]]
        if len(ends) != len(messages):  # several messages may share one work; a collective's works are one message
            ends = ends[-1:] * len(messages)
        return [
            self.event(kind, (start, end), label, one.step, waited=waited, **more)
            for (kind, label, more), end in zip(messages, ends, strict=True)
        ]

    def fields(self, one: Started) -> list[tuple[str, str, dict[str, Any]]]:
        """(kind, label, further fields) for the event of each message."""
        if isinstance(one, op.ExchangeStart):
            sizes = self.bound.exchange_sizes(one.exchange)
            size = sizes.arriving(self.bound.heads.ulysses.rank) * sizes.itemsize
            return [("exchange", one.label, {"what": "+".join(one.exchange.fields), "bytes": size})]
        if not isinstance(one, op.Post):
            kind, whole = one.collective.unit
            return [("move", one.label, {"what": kind, "blocks": (whole,), "bytes": _arriving(self.bound, one)})]
        messages = []
        for kind, t in [*(("move", t) for t in one.receives), *(("send", t) for t in one.sends)]:
            (what, key), size = t.unit, self.bound.unit_bytes(t.slot, *t.unit)
            more = {"what": what, "blocks": (key,), "peer": t.peer, "bytes": size}
            messages.append((kind, self.route(kind, t), more))
        return messages

    def route(self, kind: str, transfer: Transfer) -> str:
        """The label of a message as the simulator writes it: unit:source>destination."""
        src, dst = (transfer.peer, self.program.rank)[:: 1 if kind == "move" else -1]
        return f"{unit_name(transfer.unit)}:{src}>{dst}"


def _arriving(bound: BoundProgram, one: op.GatherStart | op.ScatterStart) -> int:
    """Bytes of a collective that other ranks send to this one."""
    collective: Collective = one.collective
    part, others = collective.key_of(bound.program.rank), len(collective.ranks) - 1
    slot = one.sent if isinstance(one, op.GatherStart) else one.received
    return others * bound.unit_bytes(slot, collective.kind, part)


def _unit(one: Instruction) -> tuple[str, tuple[Key, ...]]:
    """(kind, blocks) of the unit that an instruction works on. A product has no kind, and the blocks of q and of kv."""
    match one:
        case op.Product(q=q, kv=kv):
            return "", (q, kv)
        case op.Pack() | op.Assemble() | op.Merge() | op.Export() | op.Fold():
            return one.unit[0], (one.unit[1],)
        case op.PackHeads(exchange=exchange) | op.UnpackHeads(exchange=exchange):
            return "+".join(exchange.fields), ()
        case _:
            return "", ()
