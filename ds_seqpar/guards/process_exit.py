"""Print an error only once if several ranks raise it, and prevent the process from aborting at exit.

If every rank printed the error, its message would be lost among copies and library frames. The first rank that does not
catch the error therefore writes it to the store, and prints the traceback frames in the user's own files, followed by
the message. Ranks that raise the same error, or lose a connection because of the error, wait until the error is printed
and print nothing. A rank with a different stderr prints a reference to the rank that prints the error. Before ranks can
communicate, rank 0 prints the whole error, and other ranks print only the message. A caller that catches the error
receives the complete error on every rank. Errors are printed by an excepthook, which calls the previous hook.
With DS_SEQPAR_TRACEBACK=full, all frames are printed. torchrun's summary quotes the error message.

Gloo's threads need the interpreter's lock to release the tensors of finished operations. If a thread is waiting for the
lock when the interpreter ends, the process aborts regardless of its exit code. With torch 2.13, an aborting process
prints "terminate called without an active exception". Destroying groups would not help, because a group's threads are
joined only when nothing references the group, and DeepSpeed keeps references to its own groups.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..base import compat
from ..base.errors import CommunicationError, SeqParError, ranks_in_words
from ..base.log import log_once
from .out_of_memory import explain

Returned = TypeVar("Returned")
# time for which other ranks wait for the printing rank; a launcher ends all ranks after the first has ended
PRINT_TIMEOUT = timedelta(seconds=5)
EXIT_TIMEOUT = 0.2  # seconds between the end of a process's connections and the end of the process
LOST = re.compile(
    r"(closed|reset) by peer|connection refused|broken pipe|remote process|remoteError|another rank ended|"
    r"has ended \(process",  # in a watchdog report
    re.IGNORECASE,
)
NO_MEMORY = re.compile(r"out of memory|can.?t allocate memory|cannot allocate memory|ALLOC_FAILED", re.IGNORECASE)
# folders with library files: Python, installed packages and ds_seqpar
LIBRARIES = {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
LIBRARIES.add(os.path.dirname(os.path.dirname(__file__)) + os.sep)
# store keys: first error that ended a rank, whether the error was printed, and prefix for each rank's host and process
ENDED, PRINTED, WHERE = "ds_seqpar/ended", "ds_seqpar/printed", "ds_seqpar/where/"


class Ended(NamedTuple):
    """The first error that ended a rank."""

    rank: int  # global rank
    place: str  # stderr on which the error is printed
    sentence: str

    def tells_of(self, other: Ended) -> bool:
        """Return whether both errors are the same or one error quotes the other."""
        (_, _, own), (_, _, others) = self.sentence.partition(": "), other.sentence.partition(": ")
        return own in others or others in own


def ended() -> Ended | None:
    """Return the first error that ended a rank, or None if there is no such error or the store is no longer
    available.
    """
    text = ask_store(lambda store: store.get(ENDED) if store.check([ENDED]) else None)
    return Ended(*json.loads(text)) if text else None


def _print(before: Callable, kind: type, error: BaseException, trace: TracebackType | None) -> None:
    """Print an error unless another rank prints it.

    A launcher may end all ranks as soon as one rank has ended. If torch lost a connection, for example in DDP's
    broadcast or in a user's collective, the error is printed with our own message.
    """
    ours, lost, is_up = isinstance(error, SeqParError), is_lost(error), dist.is_initialized()
    if not isinstance(error, Exception) or not (ours or is_up):
        return before(kind, error, trace)
    rank = dist.get_rank() if is_up else int(os.environ.get("RANK", "0"))
    if is_out_of_memory(error) and not ours:
        trace = _shortened(explain(error, rank))
    elif ours or lost:
        trace = _shortened(error)
    if lost and not ours and (isinstance(error, dist.DistError) or "gloo" in str(error)):
        error = CommunicationError(f"a call of torch.distributed failed because another rank ended: {_who_is_gone()}")
    own = Ended(rank, _place_of_stderr(), f"{type(error).__name__}: {error}".splitlines()[0])
    found = ask_store(lambda store: store.compare_set(ENDED, "", json.dumps(own))) if is_up else None
    first = Ended(*json.loads(found)) if found else own
    is_told = first != own and (lost or (ours and own.tells_of(first))) and _was_printed()
    _write_error_file(f"see rank {first.rank}" if is_told else own.sentence, late=lost or is_told)
    if not is_told and (found or not (lost if is_up else rank)):
        before(type(error), error, trace)
        sys.stderr.flush()
        if first == own:
            ask_store(lambda store: store.set(PRINTED, ""))
    elif not is_told:  # it is unknown which rank prints the whole error
        print(f"[rank{rank}]: {own.sentence}", file=sys.stderr)
    elif first.place != own.place:
        print(f"[rank{rank}]: {type(error).__name__}, see rank {first.rank}", file=sys.stderr)
    return None


def print_once(error: SeqParError, line: str) -> None:
    """Print a line for an error that ends the ranks, on the first rank that raises the error."""
    _print(lambda *_: print(line, file=sys.stderr), type(error), error, None)


def _was_printed() -> bool:
    """Return whether the first error has been or will be printed. If the rank with the first error ended before
    printing the error, return False.
    """
    return bool(ask_store(lambda store: store.wait([PRINTED], PRINT_TIMEOUT) or True))


_store: Any = None  # separate connection to the job's store, since another thread may block torch's connection


def ask_store(ask: Callable[[Any], Returned]) -> Returned | None:
    """Return the result of `ask` on the job's store, or None if the store is no longer available or never existed."""
    try:
        server = _store
        while hasattr(server, "underlying_store"):
            server = server.underlying_store
        if hasattr(server, "host"):  # torch prints a C++ stack for each call to a server that has ended
            with socket.create_connection((server.host, server.port), 1.0) as seen, contextlib.suppress(TimeoutError):
                seen.settimeout(0.02)
                seen.recv(1)  # a server that is about to end closes the connection
                return None
        return None if _store is None else ask(_store)
    except Exception:  # an error from a killed store must not hide the original error
        return None


def _who_is_gone() -> str:
    """Return a clause that names the ranks on this host whose processes are known to have ended."""

    def ask(store: Any) -> list[int]:
        until = time.monotonic() + EXIT_TIMEOUT
        while not (found := gone(store, range(compat.default_group().size()))) and time.monotonic() < until:
            time.sleep(EXIT_TIMEOUT / 10)
        return found

    if found := ask_store(ask):
        return f"the process of {ranks_in_words(found)} is gone, see its exit code, and dmesg where it was killed"
    return "which one cannot be seen from here, see the exit codes of all"


def is_lost(error: BaseException) -> bool:
    """Return whether an error from our code or the backend means that another rank closed its connection."""
    return isinstance(error, RuntimeError) and bool(LOST.search(str(error)))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error means that memory could not be allocated on a device or on the host."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error))))


def _shortened(error: BaseException) -> TracebackType | None:
    """Return the error's traceback with only the frames in the user's files, and shorten the error's causes in the same
    way.

    The cause of a CommunicationError is dropped, because our message already contains the backend's message.
    """
    if os.environ.get("DS_SEQPAR_TRACEBACK") == "full":
        return error.__traceback__
    if isinstance(error, CommunicationError):
        error.__cause__, error.__suppress_context__ = None, True
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = _own_frames(cause.__traceback__)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return error.__traceback__


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    if trace is None:
        return None
    next_trace = _own_frames(trace.tb_next)
    if is_of_library(trace.tb_frame):
        return next_trace
    return TracebackType(next_trace, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def is_of_library(frame: FrameType) -> bool:
    """Return whether a frame is in a library file."""
    return frame.f_code.co_filename.startswith((*LIBRARIES, "<frozen"))


def _place_of_stderr() -> str:
    """Return an identifier of stderr's file, pipe or terminal, which is equal for ranks that share stderr."""
    status = os.fstat(2)
    return f"{socket.gethostname()} {status.st_dev} {status.st_ino}"


def _write_error_file(sentence: str, late: bool) -> None:
    """Write this rank's error file for torchrun's summary. If `late` is True, the timestamp is one second later, so
    that torchrun treats other ranks' errors as earlier.
    """
    message = {"py_callstack": sentence, "timestamp": str(int(time.time()) + late)}
    with contextlib.suppress(KeyError, OSError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "x") as file:
        json.dump({"message": {"message": sentence, "extraInfo": message}}, file)


# ---- the end of the interpreter

TASKS = "/proc/self/task"
IDLE_TIMEOUT = 5.0  # maximum number of seconds to wait for a thread that never gets the processor


def wait_at_exit() -> None:
    """Install the excepthook, and delay the end of the process until gloo's threads are idle.

    Call `wait_at_exit` before any communication.
    """
    global _store
    if not hasattr(sys.excepthook, "before"):
        hook: Any = functools.partial(_print, sys.excepthook)
        hook.before = sys.excepthook
        sys.excepthook = hook
    with contextlib.suppress(RuntimeError, ValueError):  # no job exists yet, or its store cannot be cloned
        _store = compat.default_store().clone()
    here = json.dumps([socket.gethostname(), os.getpid()])
    ask_store(lambda store: store.set(f"{WHERE}{dist.get_rank()}", here))
    if (
        os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ):
        log_once(  # the agent's store keeps the addresses of ended ranks
            "torchrun --max-restarts hangs or fails when it starts ranks again, for they find addresses of the ended "
            "ones; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and say --rdzv-backend c10d"
        )
    atexit.unregister(wait_until_idle)  # one registration serves all SequenceParallel objects
    atexit.register(wait_until_idle)


def wait_until_idle() -> None:
    """Wait until no gloo thread has run or waited for the interpreter's lock for a while.

    The function returns after `IDLE_TIMEOUT` seconds at the latest. A thread that waits for the lock wakes up every
    switch interval, so its context-switch counters increase. A waiting thread receives the lock while this function
    sleeps.
    """
    deadline, previous = time.monotonic() + IDLE_TIMEOUT, None
    while os.path.isdir(TASKS) and time.monotonic() < deadline:  # Linux
        states = [state_of_thread(thread, name="pt_gloo_runloop") for thread in os.listdir(TASKS)]
        if states == previous and {state[:1] for state in states} <= {"", "S"}:
            return
        previous = states
        time.sleep(max(0.01, 2 * min(sys.getswitchinterval(), 1.0)))


def gone(store: Any, ranks: Iterable[int]) -> list[int]:
    """Return the ranks on this host whose processes are known to have ended."""
    known = [rank for rank in ranks if store.check([f"{WHERE}{rank}"])]
    return [rank for rank in known if has_ended(*json.loads(store.get(f"{WHERE}{rank}")))]


def has_ended(host: str, process: int) -> bool:
    """Return whether a process has ended, or False if the process is on another host or the system is not Linux."""
    here = host == socket.gethostname() and os.path.isdir(TASKS)
    return here and state_of_thread(process, process)[:1] in ("", "Z")


def state_of_thread(thread: object, process: object = "self", name: str = "") -> str:
    """Return a thread's context-switch counts and its state, which begins with S if the thread is sleeping.

    The result is "" if the thread has ended or has another name, or if the system is not Linux.
    """
    try:
        with open(f"/proc/{process}/task/{thread}/status") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except (FileNotFoundError, ProcessLookupError):
        return ""
    if name not in ("", status["Name"]):
        return ""
    return " ".join(status[key] for key in ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"))
