"""Detect ranks that wait too long for other ranks, and report what each rank is doing.

A thread on each rank inspects the communicating thread about once a second. The communicating thread counts as waiting
inside our own communication calls (`waits.explaining_failure`). A thread also counts as waiting if it has slept in a
function of torch.distributed since the last inspection, according to Linux's context-switch counters. Waits in ZeRO's
collectives, barriers and accelerate's gathers are therefore detected.

A rank that has waited too long sets an alarm in the job's store. Every rank then writes its state to the store, whether
or not it is waiting. The rank that set the alarm combines the states into a report, which all ranks read. The watchdog
thread has its own connection to the store, because the main thread may block the shared connection.

If a rank ends while other ranks create a process group, torch retries the connection until the group's timeout. While a
group is being created, the watchdog therefore sets the alarm at its second inspection if a process on this host has
ended.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import compat
from ..base.errors import MOST_SHOWN, CommunicationError, ranks_in_words
from ..base.hosts import ranks_per_node
from ..base.log import log_once
from ..core.compiler.program import instructions as op
from ..core.compiler.program.instructions import Program, label_of
from ..core.compiler.schedules.actions import unit_name
from ..core.runtime import groups
from ..core.runtime.transport import Comm
from ..core.runtime.walk import Observer, Walk
from ..core.settings import SequenceParallelConfig
from . import process_exit, waits
from .backward_order import Calls
from .one_thread import bound_thread

LEAST = 60.0  # minimum number of seconds after which "auto" reports a wait
TICK, FEW = 1.0, 1024  # number of seconds between inspections, in jobs with at most FEW ranks
ANSWER = 2.0  # number of seconds that ranks have to write their states after an inspection
MOST_LAUNCHED = 4096  # maximum number of remembered plan executions
END = 30  # number of seconds after which a process ends even if it cannot print the reason
# a thread that sleeps in one of these files is waiting for ranks; this file is included for the function in
# `_show_waits`
WAITING = re.compile(rf"[/\\](torch[/\\]distributed|deepspeed[/\\]comm)[/\\]|^{re.escape(__file__)}$")
# this function waits for DDP's buckets; on a device, the backward pass runs in separate threads
BACKWARD = "_engine_run_backward"
MAKING_A_GROUP = "_new_process_group_helper"  # torch function that retries connections instead of sleeping
CLOSED = "has closed its last SequenceParallel, so nobody sees what it does"
PLURAL = {"waits": "wait", "is": "are", "has": "have", "does": "do"}


class State(NamedTuple):
    """A rank's current activity.

    Attributes:
        words: Description of the activity, as a predicate without a subject.
        call: Call in which the rank is waiting; "" if the rank is not waiting.
        at: Position in an attention call, as an instruction number.
    """

    words: str
    call: str = ""
    at: int = 0


def report(states: Mapping[int, State], seconds: float) -> tuple[str, str]:
    """Return report lines for groups of ranks in the same state, and a sentence that starts with the ranks on which
    others wait.

    Ranks that are not waiting come first, followed by ranks in calls with few ranks. Within a call, the ranks with the
    least progress come first.
    """
    calls = Counter(state.call for state in states.values())
    alike: dict[str, list[int]] = {}
    for rank, state in sorted(states.items(), key=lambda x: (x[1].call != "", calls[x[1].call], x[1].at, x[0])):
        alike.setdefault(state.words, []).append(rank)
    clauses = []
    for (verb, _, rest), ranks in ((words.partition(" "), ranks) for words, ranks in alike.items()):
        clauses.append(f"{ranks_in_words(ranks)} {PLURAL[verb] if len(ranks) > 1 else verb} {rest}")
    sentence = f"after {seconds:g} s of waiting {'; '.join(clauses[:MOST_SHOWN])}"
    if len(clauses) > MOST_SHOWN:
        sentence += f", and {len(clauses) - MOST_SHOWN} more"
    if "" not in calls:
        sentence += ": they are in different calls, or a link is slow or down, or its ends send different things"
    return "\n".join(["ds_seqpar: what all ranks do:", *clauses[: 4 * MOST_SHOWN]]), sentence


class Launched(NamedTuple):
    """Plan execution that has ended on the host, but may not have ended on the device. The record keeps no tensors
    alive.
    """

    event: Any  # device event at the end of the execution
    program: Program
    call: Any  # value of `Calls.current` at launch
    comm: Any
    # Work objects for each wait's messages; None for a collective, whose Work object references tensors
    batches: list[Any]


class Watched(Observer):
    """A SequenceParallel's registration with the watchdog.

    The watchdog runs as long as there is a registration, and uses the longest timeout of all registrations.

    Attributes:
        walk: Current execution of a plan.
        launched: Plan executions that may still be running on the device, oldest first.
    """

    walk: Walk | None = None

    def __init__(self, config: SequenceParallelConfig, calls: Calls) -> None:
        self.calls = calls
        self.is_auto, self.ends = config.watchdog_s == "auto", config.watchdog == "end"
        least = max(LEAST, groups.timeout().total_seconds() / 2)
        self.seconds = least if config.watchdog_s == "auto" else config.watchdog_s
        self.launched: deque[Launched] = deque(maxlen=MOST_LAUNCHED)

    def begin(self, walk: Walk) -> bool:
        self.walk, self.batches = walk, list[Any]()
        return True

    def before(self, walk: Walk, instruction: op.Instruction) -> None:
        if isinstance(instruction, op.Wait):
            self.batches.append(getattr(walk.tickets[instruction.ticket], "batch", None))

    def end(self, walk: Walk, results: list[Tensor] | None) -> None:
        if results is not None and self.batches and (device := walk.call.device).type != "cpu":
            self.sent(device, walk.program, self.batches, walk.comm)
        self.walk = None

    def sent(self, device: torch.device, program: Program, batches: list[Any], comm: Comm) -> None:
        event = torch.get_device_module(device).current_stream(device).record_event()
        self.launched.append(Launched(event, program, self.calls.current, comm, batches))

    def oldest_open(self) -> Launched | None:
        """Return the oldest plan execution that the device has not finished, or None."""
        with contextlib.suppress(RuntimeError):  # the device has failed, and its next use raises an error
            while self.launched and self.launched[0].event.query():
                self.launched.popleft()
            return self.launched[0] if self.launched else None
        return None


_dog: _Watchdog | None = None


def watch(config: SequenceParallelConfig, calls: Calls) -> list[Observer]:
    """Watch this rank as long as the returned objects exist. Call `watch` as soon as ranks can communicate."""
    global _dog
    if groups.all_ranks().size() == 1:
        return []
    if _dog is None or not (_dog.is_alive() and _dog.is_of_this_job()):
        try:
            _dog = _Watchdog()
        except RuntimeError:  # for example, because the store is not one of torch's own
            log_once("sequence_parallel.watchdog needs a store that can be cloned; this job's cannot, so none runs")
            return []
        _show_waits()
        _dog.start()
        atexit.register(_dog.stop)
    watched = Watched(config, calls)
    _dog.users.add(watched)
    return [watched]


@functools.cache
def _show_waits() -> None:
    """Make C++ waits for torch's Work objects and futures visible as Python frames of this file."""
    for waited_for in (dist.Work, compat.Future):

        def wait(self: Any, *args: Any, of_torch: Any = waited_for.wait, **kwargs: Any) -> Any:
            return of_torch(self, *args, **kwargs)

        waited_for.wait = wait  # type: ignore[method-assign]


class _Clock:
    """Duration of the current wait.

    Attributes:
        mark: Identifier of the wait; None if there is no wait.
        told: Identifier of the last reported wait.
    """

    mark: Any = None
    told: Any = None
    seconds = 0.0

    def look(self, mark: Any, passed: float) -> None:
        self.seconds = self.seconds + passed if mark and mark == self.mark else 0.0
        self.mark = mark

    def is_at(self, seconds: float) -> bool:
        """Return whether the wait has lasted for `seconds` without being reported."""
        return self.seconds >= seconds and self.mark != self.told


class _Watchdog(threading.Thread):
    """A rank's watchdog thread.

    Attributes:
        users: Registrations that keep the watchdog running.
        near: Ranks on this host.
        number: Number of alarms in the job so far.
        host: The communicating thread's current wait.
        device: Current wait for the oldest plan execution that has ended on the host but not on the device.
    """

    def __init__(self) -> None:
        super().__init__(name="ds_seqpar watchdog", daemon=True)
        self.rank, self.world, self.group = dist.get_rank(), groups.all_ranks().size(), weakref.ref(groups.all_ranks())
        self.store, self.at_exit = compat.default_store().clone(), threading.Event()
        self.users = weakref.WeakSet[Watched]()
        size = ranks_per_node(self.world)
        self.near = range(self.rank // size * size, self.world)[:size]
        self.number, self.at, self.host, self.device = 0, time.monotonic(), _Clock(), _Clock()

    def is_of_this_job(self) -> bool:
        return waits.is_up(None) and self.group() is groups.all_ranks()

    def stop(self) -> None:
        """Make the thread stop using the store before the interpreter ends, since the process would otherwise abort."""
        self.at_exit.set()
        self.join(ANSWER)

    @property
    def seconds(self) -> float:
        """Number of seconds after which a wait is reported."""
        return max((user.seconds for user in self.users), default=LEAST)

    @property
    def tick(self) -> float:
        return min(max(TICK, self.world / FEW), self.seconds / 4)

    def run(self) -> None:
        with contextlib.suppress(dist.DistError):  # the rank that hosts the store has ended, so no report is possible
            while self.store.check([self.key("alarm")]):  # skip alarms of an earlier job that used this store
                self.number += 1
            while not self.at_exit.wait(self.tick) and self.is_of_this_job():
                self.look()

    def key(self, *of: object) -> str:
        return "/".join(map(str, ("ds_seqpar/watchdog", self.number, *of)))

    def look(self) -> None:
        now, seconds = time.monotonic(), self.seconds
        passed = min(now - self.at, 2 * self.tick)  # a process that was stopped was not waiting
        self.at = now
        self.host.look(_mark() if self.users else None, passed)
        self.device.look(next(filter(None, (user.oldest_open() for user in self.users)), None), passed)
        is_at = self.device.is_at(seconds) or (self.host.is_at(seconds) and self.host.is_at(self.limit()))
        if is_at or (self.host.is_at(self.tick / 2) and _makes_a_group(_frames()) and self.gone()):
            self.store.compare_set(self.key("alarm"), "", str(self.rank))
        if self.store.check([self.key("alarm")]):
            self.host.told, self.device.told = self.host.mark, self.device.mark
            self.answer()
            self.number += 1

    def limit(self) -> float:
        """Return how long the current wait may take. With "auto", longer group timeouts allow longer waits."""
        wait, of_torch = waits.innermost(), (x.f_locals.get("group") for x in _frames()[:3])
        group = next((x for x in of_torch if isinstance(x, dist.ProcessGroup)), None) if wait is None else wait.group
        is_auto = any(user.is_auto for user in self.users)
        return max(self.seconds, groups.timeout(group).total_seconds() / 2) if is_auto else self.seconds

    def answer(self) -> None:
        """Write this rank's state, and read the report from the rank that set the alarm."""
        writer = int(self.store.get(self.key("alarm")))
        stuck = self.device.mark if self.device.seconds >= self.seconds / 2 else None
        walk = next((user.walk for user in self.users if user.walk is not None), None)
        call = next((user.calls.current for user in self.users if user.calls.current is not None), None)
        state = _state(walk, call, stuck) if self.users else State(CLOSED)
        self.store.set(self.key("state", self.rank), json.dumps(state))
        if self.rank == writer:
            self.wait_for_all("state")
            waited = min(self.limit(), round(max(self.host.seconds, self.device.seconds), 1))
            text, sentence = report({rank: self.state_of(rank) for rank in range(self.world)}, waited)
            print(text, file=sys.stderr, flush=True)
            self.store.set(self.key("report"), sentence)
        try:
            self.store.wait([self.key("report")], timedelta(seconds=2 * (self.tick + ANSWER)))
        except RuntimeError:
            return  # the reporting rank has ended
        sentence = self.store.get(self.key("report")).decode()
        if self.users and all(user.ends for user in self.users):
            self.end(sentence)
        elif self.rank == writer:
            print(f"ds_seqpar: {sentence}", file=sys.stderr, flush=True)

    def wait_for_all(self, place: str) -> None:
        """Wait for a limited time until all ranks have reached a stage of the report."""
        with contextlib.suppress(RuntimeError):
            keys = [self.key(place, rank) for rank in sorted({*range(self.world)} - {*self.gone()})]
            self.store.wait(keys, timedelta(seconds=self.tick + ANSWER))

    def gone(self) -> list[int]:
        return process_exit.gone(self.store, self.near)

    def state_of(self, rank: int) -> State:
        if self.store.check([key := self.key("state", rank)]):
            return State(*json.loads(self.store.get(key)))
        host, pid = json.loads(self.store.get(f"{process_exit.WHERE}{rank}"))
        words = "does not answer: it is stopped, in a debugger, at its end, or in code that keeps Python's lock"
        if process_exit.has_ended(host, pid):
            words = "has ended"
        elif host == socket.gethostname() and process_exit.state_of_thread(pid, pid)[:1] in ("T", "t"):
            words = "is stopped, by a signal or in a debugger"
        return State(f"{words} (process {pid} on {host})")

    def end(self, sentence: str) -> None:
        """End the process with the report's sentence as its error. One rank prints the error."""
        faulthandler.dump_traceback_later(END, exit=True)
        for place in ("ready", "told"):  # all ranks must receive the reason before any connection is lost
            with contextlib.suppress(RuntimeError):  # the rank that hosts the store did not wait for this rank
                self.store.set(self.key(place, self.rank), "")
                if place == "ready" or self.rank == 0:  # rank 0 may host the store, so it ends last
                    self.wait_for_all(place)
            if place == "ready":
                sys.excepthook(CommunicationError, CommunicationError(sentence), None)
                sys.stdout.flush()
        os._exit(1)


def _thread() -> threading.Thread:
    return bound_thread() or threading.main_thread()


def _frames() -> list[FrameType]:
    """Return the frames of the communicating thread, innermost first."""
    frame = compat.frames_of_threads().get(_thread().ident or 0)
    return [] if frame is None else [frame for frame, _ in traceback.walk_stack(frame)]


def _slept() -> str:
    """Return the state of the communicating thread, in the format of `state_of_thread`."""
    thread = _thread()
    # after os.fork(), Python's native_id still belongs to the parent's thread
    return process_exit.state_of_thread(os.getpid() if thread is threading.main_thread() else thread.native_id)


def _mark() -> Any:
    """Return an identifier for this rank's current wait, or None if the rank is not waiting."""
    wait, frames = waits.innermost(), _frames()
    if wait is None and not _waits(frames):
        return None
    if _makes_a_group(frames):
        return id(frames[0]), frames[0].f_lasti
    return wait and (wait.since, wait.awaited), _slept()


def _makes_a_group(frames: list[FrameType]) -> bool:
    return bool(frames) and frames[0].f_code.co_name == MAKING_A_GROUP


def _waits(frames: list[FrameType]) -> bool:
    """Return whether a sleeping thread with these frames is waiting for ranks in other libraries' calls."""
    if not frames:
        return False
    code = frames[0].f_code
    if code.co_name == BACKWARD:
        return not torch.accelerator.is_available() and _slept().startswith("S")
    return _makes_a_group(frames) or (bool(WAITING.search(code.co_filename)) and _slept().startswith("S"))


def _state(walk: Walk | None, call: Any = None, stuck: Launched | None = None) -> State:
    """Return this rank's current state. `stuck` is a plan execution that the device has not finished."""
    frames, wait = _frames(), waits.innermost()  # both may change while they are read
    if stuck is not None:  # the stuck execution was launched before anything that the host does now
        return State(_on_device(stuck), "a walk on the device")
    if not frames:
        return State("has ended the thread that communicates")
    user = next((x for x in frames if not process_exit.is_of_library(x)), frames[0])
    line = f"{os.path.basename(user.f_code.co_filename)}:{user.f_lineno}, in {user.f_code.co_name}"
    place, at = "" if call is None else f", {call.place}", 0 if walk is None else walk.at
    if walk is not None:
        step = walk.program.code[: at + 1][-1].step  # `at` is past the last instruction while results are being joined
        place = f" at step {step} of {walk.program.name} {walk.program.direction}{place}"
    if wait is not None:
        return State(f"waits in {wait.what}{place} for {wait.whom()} ({line})", wait.what, at)
    if _waits(frames):
        inside = itertools.takewhile(lambda x: WAITING.search(x.f_code.co_filename), frames)
        names = [x.f_code.co_name for x in inside if "wrapper" not in x.f_code.co_name]  # skip decorators
        what = f"{names[-1] if names else 'backward'} ({line})"
        return State(f"waits in {what}", what, at)
    function = f"{frames[0].f_globals.get('__name__')}.{frames[0].f_code.co_name}"
    in_library = process_exit.is_of_library(frames[0])
    return State(f"is in {function} ({line}){place}" if in_library else f"is at {line}{place}")


def _on_device(stuck: Launched) -> str:
    """Describe the messages that a stuck device is waiting for, and the ranks that must send them."""
    program, of_call = stuck.program, "" if stuck.call is None else f", {stuck.call.place}"
    at = [x for x in program.code if isinstance(x, op.Wait)]
    ended = [number for number, works in enumerate(stuck.batches, 1) if works and all(x.is_completed() for x in works)]
    comm, first, place = stuck.comm, max(ended, default=0), f"{program.name} {program.direction}{of_call}"
    if first == len(at):  # no message is missing
        return f"has a device that does not end {place}"
    begun = next(x for x in program.code if isinstance(x, op.Started) and x.ticket == at[first].ticket)
    if isinstance(begun, op.Post):
        names = [f"{unit_name(x.unit)}:{x.peer}>{program.rank}" for x in begun.receives]
        names += [f"{unit_name(x.unit)}:{program.rank}>{x.peer}" for x in begun.sends]
        ranks = dist.get_process_group_ranks(comm.groups.inner)
        peers = [ranks[comm.groups.cp_order[x.peer]] for x in (*begun.receives, *begun.sends)]
    else:
        names = [label_of(begun)]
        exchanges = isinstance(begun, op.ExchangeStart)
        group = comm.groups.ulysses if exchanges else comm.groups.collectives[begun.ranks].group
        peers = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    whom = ranks_in_words(sorted({*peers}))
    return f"has a device that waits at step {at[first].step} of {place} for {' and '.join(names)} with {whom}"
