"""Watch for ranks that wait for others too long, and say in one report who waits for whom.

A thread on each rank looks at the thread that communicates, once a second or so. That one waits for other ranks if it
is in a `Wait` of ours, or in a call of torch.distributed's and has slept since the last look: Linux counts how often a
thread leaves the processor. So ZeRO's collectives, barriers and accelerate's gathers are seen without a hook in them.

A rank that has waited too long raises the alarm in the job's store. Every rank then writes its state there, whether it
waits or not. The rank of the alarm joins the states (`hang_report`), and all ranks read the result. The thread has a
connection of its own to the store, since the main thread may block the other.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import itertools
import json
import linecache
import os
import re
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from .. import compat
from ..compiler.program import instructions as op
from ..compiler.program.instructions import Program, label_of
from ..compiler.schedules.actions import unit_name
from ..config.settings import SequenceParallelConfig
from ..errors import CommunicationError
from . import groups, process_exit, waits
from .hang_report import State, report
from .log import log_once

LEAST = 60.0  # seconds of waiting that "auto" calls too long
TICK, FEW = 1.0, 1024  # seconds between two looks, in jobs of so many ranks or fewer
ANSWER = 2.0  # seconds in which ranks write their states, once they have looked
END = 30  # seconds after which a process that cannot print why it ends, ends all the same
COLLECTIVES = re.compile(r"torch[/\\]distributed[/\\](distributed_c10d|c10d_logger)\.py$|deepspeed[/\\]comm[/\\]")
WAITING = re.compile(r"(?:\b([A-Za-z][\w.]*)\.)?\bwait(_tensor)?\(")
CLOSED = "has closed its last SequenceParallel, so nobody sees what it does"
BACKWARD = "_engine_run_backward"
MAKING_A_GROUP = "_new_process_group_helper"  # of torch's, which does not sleep: it tries again to reach a rank
# the end of a line is a frame's "file:function"; the innermost frame that is in one of them says what its rank does
PLACES = {
    r"[/\\][pb]db\.py:": "in a debugger",
    r"torch[/\\]utils[/\\]data[/\\]": "in its data loader",
    r":_?save(_\w+)?$": "in save",
    r":(evaluate|evaluation_loop|predict)$": "in evaluate",
    r"trainer_callback\.py:": "in a callback",
    r"torch[/\\]optim[/\\]|(deepspeed|accelerate)[/\\].*:step$": "in an optimizer step",
    r"threading\.py:_shutdown$|process_exit\.py:wait_until_idle$": "at its end",
}


class Watched:
    """Keep the watchdog going. A SequenceParallel holds one until it is closed."""


_lock = threading.Lock()
_dog: _Watchdog | None = None


def watch(config: SequenceParallelConfig) -> Watched | None:
    """Watch this rank while anybody holds what this returns. Call it once ranks can communicate."""
    global _dog
    if dist.get_world_size() == 1:
        return None
    is_auto, watched = config.watchdog_s == "auto", Watched()
    with _lock:
        if is_new := _dog is None or _dog.ended.is_set() or not _dog.is_of_this_job():
            try:
                _dog = _Watchdog()
            except RuntimeError:  # as a store that is not torch's own
                log_once("sequence_parallel.watchdog needs a store that can be cloned; this job's cannot, so none runs")
                return None
        seconds = max(LEAST, groups.timeout().total_seconds() / 2) if is_auto else config.watchdog_s
        settings: Any = (seconds, is_auto, config.watchdog == "report")
        if _dog.users:  # the most patient settings of all
            settings = map(max, settings, (_dog.seconds, _dog.is_auto, not _dog.ends))
        _dog.seconds, _dog.is_auto, goes_on = settings
        _dog.ends = not goes_on
        _dog.users.add(watched)
        if is_new:
            waits.launched = deque(maxlen=waits.MOST_LAUNCHED)
            threading.Thread(target=_dog.run, name="ds_seqpar watchdog", daemon=True).start()
            _stop_at_exit()
    return watched


@functools.cache
def _stop_at_exit() -> None:
    """Let the thread be out of the store when the interpreter ends, which would abort the process."""

    def stop() -> None:
        if _dog is not None:
            _dog.at_exit.set()
            _dog.ended.wait(ANSWER)

    atexit.register(stop)


class _Clock:
    """For how many seconds the same thing has been waited for.

    Attributes:
        mark: Identifies it; None where nothing is.
        told: What a report has told of.
    """

    mark: Any = None
    told: Any = None
    seconds = 0.0

    def look(self, mark: Any, passed: float) -> None:
        self.seconds = self.seconds + passed if mark and mark == self.mark else 0.0
        self.mark = mark

    def is_at(self, seconds: float) -> bool:
        """Return whether it has taken so long, and no report has told of it."""
        return self.seconds >= seconds and self.mark != self.told

    def is_long(self, seconds: float) -> Any:
        """Return what has taken so long, None where nothing has."""
        return self.mark if self.seconds >= seconds else None


class _Watchdog:
    """The watchdog of one rank.

    Attributes:
        seconds: How long a wait must take.
        is_auto: Whether it takes longer in groups with longer timeouts.
        ends: Whether a report ends the job.
        users: Who wants to be watched.
        number: How many alarms the job had.
        host: The wait of the thread that communicates.
        device: The walk that the device has to end next, if the host has ended it.
    """

    seconds: float
    is_auto: bool
    ends: bool

    def __init__(self) -> None:
        self.rank, self.world, self.group = dist.get_rank(), dist.get_world_size(), weakref.ref(groups.all_ranks())
        self.store = dist.PrefixStore("ds_seqpar/watchdog", compat.default_store().clone())
        self.store.set(f"where/{self.rank}", json.dumps([socket.gethostname(), os.getpid()]))
        self.store.set(f"ended/{self.rank}", "")
        self.at_exit, self.ended, self.users = threading.Event(), threading.Event(), weakref.WeakSet[Watched]()
        self.number, self.at, self.host, self.device = 0, time.monotonic(), _Clock(), _Clock()

    def is_of_this_job(self) -> bool:
        return groups.is_up(None) and self.group() is groups.all_ranks()

    @property
    def tick(self) -> float:
        return min(max(TICK, self.world / FEW), self.seconds / 4)

    def run(self) -> None:
        try:
            with contextlib.suppress(dist.DistError):  # the rank that has the store has ended, and nobody can be told
                self.watch()
        finally:
            self.ended.set()

    def watch(self) -> None:
        while self.store.check([f"{self.number}/alarm"]):  # those of an earlier watchdog of this job
            self.number += 1
        while not self.at_exit.wait(self.tick):
            with _lock:
                if not self.users or not self.is_of_this_job():
                    waits.launched = None
                    self.ended.set()  # before `watch` adds another user
                    return self.store.set(f"ended/{self.rank}", CLOSED)
            self.look()
        return self.store.set(f"ended/{self.rank}", "is at its end")

    def look(self) -> None:
        now = time.monotonic()
        passed = min(now - self.at, 2 * self.tick)  # a process that was stopped itself has not waited meanwhile
        self.at = now
        self.host.look(_mark(), passed)
        self.device.look(waits.oldest_open(), passed)
        if self.device.is_at(self.seconds) or (self.host.is_at(self.seconds) and self.host.is_at(self.limit())):
            self.store.compare_set(f"{self.number}/alarm", "", str(self.rank))
        if self.store.check([f"{self.number}/alarm"]):
            self.host.told, self.device.told = self.host.mark, self.device.mark
            self.answer(f"{self.number}/")
            self.number += 1

    def limit(self) -> float:
        """Return how long the current wait must take."""
        if self.device.seconds >= self.seconds:
            return self.seconds
        wait = waits.innermost()
        group = _group_of(_collectives(_frames())) if wait is None else wait.group
        return max(self.seconds, groups.timeout(group).total_seconds() / 2) if self.is_auto else self.seconds

    def answer(self, key: str) -> None:
        """Write this rank's state, and read the report, which the rank of the alarm writes."""
        writer = int(self.store.get(key + "alarm"))
        self.store.set(f"{key}state/{self.rank}", json.dumps(_state(self.device.is_long(self.seconds / 2))))
        self.store.add(key + "answers", 1)
        if self.rank == writer:
            self.all_have(key + "answers", self.world, self.tick + ANSWER)
            states = {rank: self.state_of(rank, key) for rank in range(self.world)}
            self.store.set(key + "report", json.dumps(report(states, writer, self.limit())))
        try:
            self.store.wait([key + "report"], timedelta(seconds=2 * (self.tick + ANSWER)))
        except dist.DistStoreError:
            return  # that rank was ended meanwhile
        details, sentence = json.loads(self.store.get(key + "report"))
        if self.rank == writer:
            print(details, file=sys.stderr, flush=True)
        if self.ends:
            self.end(sentence, writer, key)
        elif self.rank == writer:
            print(f"ds_seqpar: {sentence}", file=sys.stderr, flush=True)

    def all_have(self, key: str, count: int, seconds: float) -> None:
        """Wait until so many ranks have been counted, for so many seconds at most."""
        until = time.monotonic() + seconds
        while self.store.add(key, 0) < count and time.monotonic() < until:
            time.sleep(self.tick / 20)

    def state_of(self, rank: int, key: str) -> State:
        if self.store.check([f"{key}state/{rank}"]):
            return State(*json.loads(self.store.get(f"{key}state/{rank}")))
        host, pid = json.loads(self.store.get(where)) if self.store.check([where := f"where/{rank}"]) else ("?", 0)
        here = process_exit.state_of_thread(pid, pid) if host == socket.gethostname() else "?"
        words = "does not answer: it is stopped, in a debugger, at its end, or in code that keeps Python's lock"
        if process_exit.has_ended(host, pid):
            words = "has ended"
        elif self.store.check([f"ended/{rank}"]) and (ended := self.store.get(f"ended/{rank}").decode()):
            words = ended
        elif here[:1] in ("T", "t"):
            words = "is stopped, by a signal or in a debugger"
        return State(f"process {pid} on {host}", words)

    def end(self, sentence: str, writer: int, key: str) -> None:
        """End the process with the report's sentence as its error, which one rank prints."""
        error, printer = CommunicationError(sentence), process_exit.Printer(writer, key + "told", self.store)
        waits.ended = process_exit.with_printer(error, printer)
        faulthandler.dump_traceback_later(END, exit=True)
        with contextlib.suppress(dist.DistError):  # the rank that has the store did not wait for this one
            self.store.add(key + "ready", 1)  # all ranks know why connections are lost, before one is
            self.all_have(key + "ready", self.store.add(key + "answers", 0), ANSWER)
        sys.excepthook(type(error), error, None)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _frames() -> list[FrameType]:
    """Return the frames of the thread that communicates, the innermost first."""
    frame = compat.frames_of_threads().get(_thread().ident or 0)
    return [] if frame is None else [frame for frame, _ in traceback.walk_stack(frame)]


def _thread() -> threading.Thread:
    return groups.bound_thread() or threading.main_thread()


def _slept() -> str:
    """Return the state of that thread, as `state_of_thread` does."""
    thread = _thread()
    # after os.fork() Python's native_id is still that of the parent's thread
    return process_exit.state_of_thread(os.getpid() if thread is threading.main_thread() else thread.native_id)


def _mark() -> Any:
    """Return what identifies the wait that this rank is in; None where it is in none."""
    wait, slept = waits.innermost(), _slept()
    if wait is not None:
        return wait.since, wait.awaited, slept
    frames = _frames()
    if _makes_a_group(frames):
        return id(frames[0]), frames[0].f_lasti
    return slept if slept.startswith("S") and _is_collective(frames) else None


def _makes_a_group(frames: list[FrameType]) -> bool:
    return bool(frames) and frames[0].f_code.co_name == MAKING_A_GROUP


def _is_collective(frames: list[FrameType]) -> bool:
    """Return whether a thread that sleeps is in a call of others that waits for ranks."""
    if not frames:
        return False
    file, function = frames[0].f_code.co_filename, frames[0].f_code.co_name
    if function == BACKWARD:  # DDP's; on a device backward runs in threads of its own
        return not torch.accelerator.is_available()
    if COLLECTIVES.search(file) or file.startswith(process_exit.STDLIB):
        return bool(COLLECTIVES.search(file))
    call = WAITING.search(linecache.getline(file, frames[0].f_lineno))
    return call is not None and isinstance(_receiver(frames[0], call[1]), dist.Work | compat.Future | None)


def _receiver(frame: FrameType, name: str | None) -> Any:
    """Return what is waited for, as `handle` or `self.work`: of os.wait(), no rank's work. None: it is not known."""
    first, *others = (name or "").split(".")
    found = frame.f_locals.get(first, frame.f_globals.get(first))
    for other in others:
        found = getattr(found, other, None)
    return found


def _state(stuck: waits.Launched | None = None) -> State:
    """Return what this rank does. stuck: a walk that its device does not come to the end of."""
    frames, wait, walk, call = _frames(), waits.innermost(), waits.walk, waits.call  # which go on meanwhile
    posted = [] if walk is None else [name for names in _started(walk.program, walk.at).values() for name in names]
    what, awaited, messages, words = "", [], [], _doing(frames)
    place = "" if call is None else f", {call.place}"
    if walk is not None:
        step = walk.program.code[: walk.at + 1][-1].step  # after the last instruction the results are joined
        place = f" at step {step} of {walk.program.name} {walk.program.direction}{place}"
    if wait is not None:
        what, awaited = wait.what, wait.ranks()
        words, message = _in_wait(wait, walk, place)
        messages = [message] * len(awaited) if message else []
    elif _makes_a_group(frames) or (_slept().startswith("S") and _is_collective(frames)):
        what, awaited = _in_collective(frames)
        words = f"waits in {what} for"
    else:
        words += place
    programs = waits.walks
    if stuck is not None:  # which came before whatever the host does
        words, awaited, messages, posted = _on_device(stuck)
        what, programs = "a walk on the device" if awaited else "", stuck.number
    stack = traceback.StackSummary.extract((x, x.f_lineno) for x in reversed(frames[:1] + _own(frames[1:])))
    where = f"process {os.getpid()} on {socket.gethostname()}"
    return State(where, words, what, awaited, messages, posted, programs, "".join(stack.format()).rstrip())


def _in_wait(wait: waits.Wait, walk: Any, place: str) -> tuple[str, str]:
    """Return the words of a rank in a wait of ours, and the message that it waits for, "" for none."""
    instruction: Any = None if walk is None else walk.program.code[: walk.at + 1][-1]
    works = walk.tickets.get(instruction.ticket) if isinstance(instruction, op.Wait) else None
    awaited = [] if works is None or works.what != wait.what else [awaited for _, awaited in works.works]
    if wait.awaited not in awaited:  # a comparison is ended first
        return f"waits in {wait.what}{place} for", ""
    names = _started(walk.program, walk.at)[instruction.ticket]
    name = names[awaited.index(wait.awaited) % len(names)]
    if not (message := re.fullmatch(r"(.*):(\d+)>(\d+)", name)):
        return f"waits{place} for {name} from", name
    takes = int(message[3]) == walk.program.rank
    return f"waits{place} for {message[1]} {'from' if takes else 'to be taken by'}", name


def _on_device(stuck: waits.Launched) -> tuple[str, list[int], list[str], list[str]]:
    """Return (words, awaited ranks, the message of each, what was started) of a rank whose device is in a walk."""
    code, of_call = stuck.program.code, "" if stuck.call is None else f", {stuck.call.place}"
    at = [index for index, x in enumerate(code) if isinstance(x, op.Wait)]
    ended = [number for number, works in enumerate(stuck.batches, 1) if works and all(x.is_completed() for x in works)]
    comm, first, place = stuck.comm(), max(ended, default=0), f"{stuck.program.name} {stuck.program.direction}{of_call}"
    if comm is None or first == len(at):  # it waits for nobody
        return f"has a device that does not end {place}", [], [], []
    wait, started = code[at[first]], _started(stuck.program, at[first])
    begun = next(x for x in code if isinstance(x, op.Started) and x.ticket == wait.ticket)
    names, peers = started[wait.ticket], _peers(comm.groups, begun)
    words = f"has a device that waits at step {wait.step} of {place} for {' and '.join(names)} with"
    return words, peers, names * (len(peers) // len(names)), list(itertools.chain(*started.values()))


def _peers(of: groups.Groups, begun: op.Started) -> list[int]:
    """Return the global ranks of what an instruction starts: of each receive and send, or all others of a group."""
    if isinstance(begun, op.Post):
        ranks = dist.get_process_group_ranks(of.inner)
        return [ranks[of.cp_order[x.peer]] for x in (*begun.receives, *begun.sends)]
    group = of.ulysses if isinstance(begun, op.ExchangeStart) else of.collectives[begun.ranks].group
    return [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]


def _started(program: Program, at: int) -> dict[int, list[str]]:
    """Return by ticket what a rank has started before instruction `at`: messages in the order of `Works`, named alike
    on both ends ("kv(1):1>2"), or a collective."""
    started: dict[int, list[str]] = {}
    for x in program.code[:at]:
        if isinstance(x, op.Post):
            receives = [f"{unit_name(transfer.unit)}:{transfer.peer}>{program.rank}" for transfer in x.receives]
            sends = [f"{unit_name(transfer.unit)}:{program.rank}>{transfer.peer}" for transfer in x.sends]
            started[x.ticket] = receives + sends
        elif isinstance(x, op.Started):
            started[x.ticket] = [label_of(x)]
    return started


def _in_collective(frames: list[FrameType]) -> tuple[str, list[int]]:
    """Return in which collective of others a rank is, and which other ranks belong to it."""
    inside = _collectives(frames)
    name = [frame.f_code.co_name for frame in inside if "wrapper" not in frame.f_code.co_name][-1]  # no decorators
    caller = next((frame for frame in frames if frame not in inside), frames[0])
    what = f"{name} (called by {caller.f_globals.get('__name__')}.{caller.f_code.co_name})"
    return what, [rank for rank in dist.get_process_group_ranks(_group_of(inside)) if rank != dist.get_rank()]


def _collectives(frames: list[FrameType]) -> list[FrameType]:
    return [frame for frame in frames if COLLECTIVES.search(frame.f_code.co_filename)] or frames[:1]


def _group_of(frames: list[FrameType]) -> dist.ProcessGroup:
    """Return the group of a collective, where its innermost frame has it; otherwise that of all ranks."""
    group = frames[0].f_locals.get("group") if frames else None
    return group if isinstance(group, dist.ProcessGroup) else groups.all_ranks()


def _own(frames: list[FrameType]) -> list[FrameType]:
    """Return those frames that are in the user's own files."""
    return [x for x in frames if not x.f_code.co_filename.startswith((*process_exit.LIBRARIES, "<"))]


def _doing(frames: list[FrameType]) -> str:
    """Return what a rank does that does not wait."""
    if not frames:
        return "has ended the thread that communicates"
    user = (_own(frames) or frames)[0]
    where = f"{os.path.basename(user.f_code.co_filename)}:{user.f_lineno}, in {user.f_code.co_name}"
    names = [f"{frame.f_code.co_filename}:{frame.f_code.co_name}" for frame in frames]
    words = next((words for name in names for place, words in PLACES.items() if re.search(place, name)), "")
    return f"is {words} ({where})" if words else f"is at {where}"
