"""Record when a rank executes the instructions of its programs. Without a recorder a walk records nothing.

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
    """Takes marks with time.perf_counter."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, mark: Mark) -> float:
        return mark


class DeviceClock:
    """Takes marks as events of the current stream, and converts them to seconds of time.perf_counter."""

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

    Args:
        rank: this rank's number among those of the sequence.
        device: of this rank's tensors; it chooses the clock.
        watch: whether a thread waits for each message from its post on, so that its end is known even before the walk
            waits for it. For CPU ranks only: a device waits by streams.
    """

    def __init__(self, rank: int, device: torch.device, watch: bool = False) -> None:
        self.rank = rank
        self.clock = HostClock() if device.type == "cpu" else DeviceClock(device)
        self.work_type = WatchedWork if watch else TimedWork
        self.recorded: list[Span | TimedWalk] = []  # in the order in which they began

    def timed(self, walk: Walk) -> TimedWalk:
        """Return a function to call in place of `walk.advance`, which records each instruction."""
        timed = TimedWalk(walk, self.clock.mark, self.work_type)
        self.recorded.append(timed)
        return timed

    @contextlib.contextmanager
    def span(self, kind: str, label: str, bytes: int = 0) -> Iterator[None]:
        """Return a context that is recorded as one event. bytes: what it receives."""
        span = Span(kind, label, bytes, self.clock.mark())
        self.recorded.append(span)
        yield
        span.end = self.clock.mark()

    def events(self) -> tuple[Event, ...]:
        """Return all events so far, by when they began (messages: when they were posted). Waits for the device."""
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
    """The event of a `Recorder.span` context."""

    def __init__(self, kind: str, label: str, bytes: int, start: Mark) -> None:
        self.kind, self.label, self.bytes, self.start = kind, label, bytes, start
        self.end: Mark | None = None  # None while the context runs, and if it raised


class TimedWalk:
    """A walk that is recorded."""

    def __init__(self, walk: Walk, mark: Callable[[], Mark], work_type: type[TimedWork]) -> None:
        self.walk: Walk | None = walk
        self.bound, self.mark, self.work_type = walk.bound, mark, work_type
        self.marks: list[Marks] = []  # of each instruction that ended
        self.works: dict[int, list[TimedWork]] = {}  # by ticket

    def __call__(self) -> None:
        assert self.walk is not None
        walk, position = self.walk, self.walk.at
        start = self.mark()
        walk.advance()
        self.marks.append((start, self.mark()))
        instruction = walk.program.code[position]
        if isinstance(instruction, Started):
            handle = walk.tickets[instruction.ticket]
            assert isinstance(handle, Works)  # virtual ranks, which have other handles, are not recorded
            handle.works = self.works[instruction.ticket] = [self.work_type(work, self.mark) for work in handle.works]
        if walk.at == len(walk.program.code):
            self.walk = None  # do not keep its tensors alive


class TimedWork:
    """A torch work that takes a mark when a wait for it ends."""

    def __init__(self, work: Any, mark: Callable[[], Mark]) -> None:
        self.work, self.mark = work, mark
        self.end: Mark | None = None  # None before the wait ends

    def wait(self) -> None:
        self.work.wait()
        self.end = self.mark()
        self.work = None  # it may hold what was sent


class WatchedWork(TimedWork):
    """A TimedWork for which a thread of its own waits from the start, since a work may be waited for only once."""

    def __init__(self, work: Any, mark: Callable[[], Mark]) -> None:
        super().__init__(work, mark)
        self.failed: BaseException | None = None
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        try:
            super().wait()
        except BaseException as error:  # raised again by `wait`
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
        self.waits = {instruction.ticket: marks for instruction, marks in self.done if isinstance(instruction, op.Wait)}

    def events(self) -> list[Event]:
        """Return the walk itself, then its instructions and messages in order; nothing where no instruction ended."""
        if not self.marks:
            return []
        name = f"{self.program.name} {self.program.direction}"
        events = [self.event("walk", (self.marks[0][0], self.marks[-1][1]), name)]
        labels: dict[int, str] = {}
        for instruction, marks in self.done:
            if isinstance(instruction, Started):
                messages = self.messages(instruction, marks[0])
                labels[instruction.ticket] = (
                    " ".join(m.label for m in messages if m.kind != "send") or messages[0].label
                )
                events += [self.event("post", marks, " ".join(m.label for m in messages), instruction.step), *messages]
            elif isinstance(instruction, op.Wait):
                events.append(self.event("wait", marks, labels[instruction.ticket], instruction.step))
            else:
                unit_kind, blocks = _unit(instruction)
                events.append(
                    self.event(
                        KINDS[type(instruction)],
                        marks,
                        label_of(instruction),
                        instruction.step,
                        what=unit_kind,
                        blocks=blocks,
                    )
                )
        return events

    def event(self, kind: str, marks: tuple[float, float], label: str, step: int = -1, **fields: Any) -> Event:
        direction = self.program.direction
        return Event(self.rank, kind, *marks, label, call=self.call, direction=direction, step=step, **fields)

    def messages(self, instruction: Started, start: float) -> list[Event]:
        """Return the events of an instruction's messages: receives, then sends, in the order of their works."""
        waited, last = self.waits.get(instruction.ticket, (None, self.marks[-1][1]))
        messages = self.fields(instruction)
        ends = [last if work.end is None else self.seconds(work.end) for work in self.works[instruction.ticket]]
        if len(ends) != len(messages):  # several messages may share one work; a collective's works are one message
            ends = ends[-1:] * len(messages)
        return [
            self.event(kind, (start, end), label, instruction.step, waited=waited, **fields)
            for (kind, label, fields), end in zip(messages, ends, strict=True)
        ]

    def fields(self, instruction: Started) -> list[tuple[str, str, dict[str, Any]]]:
        """Return (kind, label, further fields) for the event of each message."""
        if isinstance(instruction, op.ExchangeStart):
            sizes = self.bound.exchange_sizes(instruction.exchange)
            size = sizes.arriving(self.bound.heads.ulysses.rank) * sizes.itemsize
            return [("exchange", instruction.label, {"what": "+".join(instruction.exchange.fields), "bytes": size})]
        if not isinstance(instruction, op.Post):
            unit_kind, block = instruction.collective.unit
            return [
                (
                    "move",
                    instruction.label,
                    {"what": unit_kind, "blocks": (block,), "bytes": _arriving(self.bound, instruction)},
                )
            ]
        messages = []
        for kind, transfer in [
            *(("move", transfer) for transfer in instruction.receives),
            *(("send", transfer) for transfer in instruction.sends),
        ]:
            (unit_kind, key), size = transfer.unit, self.bound.unit_bytes(transfer.slot, *transfer.unit)
            fields = {"what": unit_kind, "blocks": (key,), "peer": transfer.peer, "bytes": size}
            messages.append((kind, self.route(kind, transfer), fields))
        return messages

    def route(self, kind: str, transfer: Transfer) -> str:
        """Return the label of a message as the simulator writes it: unit:source>destination."""
        src, dst = (transfer.peer, self.program.rank)[:: 1 if kind == "move" else -1]
        return f"{unit_name(transfer.unit)}:{src}>{dst}"


def _arriving(bound: BoundProgram, instruction: op.GatherStart | op.ScatterStart) -> int:
    """Return the bytes of a collective that other ranks send to this one."""
    collective: Collective = instruction.collective
    key, others = collective.key_of(bound.program.rank), len(collective.ranks) - 1
    slot = instruction.sent if isinstance(instruction, op.GatherStart) else instruction.received
    return others * bound.unit_bytes(slot, collective.kind, key)


def _unit(instruction: Instruction) -> tuple[str, tuple[Key, ...]]:
    """Return (kind, blocks) of an instruction's unit. A product has no kind, and the blocks of q and of kv."""
    match instruction:
        case op.Product(q=q, kv=kv):
            return "", (q, kv)
        case op.Pack() | op.Assemble() | op.Merge() | op.Export() | op.Fold():
            return instruction.unit[0], (instruction.unit[1],)
        case op.PackHeads(exchange=exchange) | op.UnpackHeads(exchange=exchange):
            return "+".join(exchange.fields), ()
        case _:
            return "", ()
