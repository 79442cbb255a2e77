"""How a rank ends: which rank prints an error that many raise, how much of it, and what the interpreter waits for.

If every rank printed it, the sentence would drown in its copies and in frames of libraries. So one rank prints it, with
the frames of the user's own files, and the sentence last. Where ranks write to one place, the others print nothing. The
error is whole on every rank, for callers that catch it; only what Python prints of an uncaught one is changed. An
excepthook does that. It is set where communication begins, or when the first such error is raised, and calls the hook
that was there before. DS_SEQPAR_TRACEBACK=full leaves all frames.

Gloo's threads drop the tensors of finished operations, for which they need the interpreter's lock. If a thread waits
for that lock when the interpreter ends, the process aborts, whatever its exit code was to be: "terminate called without
an active exception", with torch 2.13. Destroying groups would not help: a group's threads are joined when nothing
refers to it any more, and DeepSpeed keeps groups of its own.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import inspect
import os
import re
import socket
import sys
import sysconfig
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from ..errors import CommunicationError, SeqParError

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
# how long other ranks wait for the one that prints: a launcher ends all ranks after the first
PRINT_TIMEOUT = timedelta(seconds=5)
LOST = re.compile(
    r"(closed|reset) by peer|connection refused|broken pipe|remote process|remoteError|another rank ended",
    re.IGNORECASE,
)
# where files are that are not the user's: Python's, installed packages', and, by `printed_once`, ours
LIBRARIES = {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Printer:
    """Who prints an error. rank: the global rank. key: what this rank sets in `store`, a `dist.Store`, once it has
    printed; both are missing where ranks have not agreed on the error."""

    rank: int
    key: str = ""
    store: Any = None


def printed_by(error: SeqParError, rank: int, key: str) -> SeqParError:
    """The error, which every rank of a group is about to raise. If nobody catches it, global rank `rank` prints it.

    key: the same on all of them, and no other error's."""
    store = dist.distributed_c10d._get_default_store()  # now: torch may drop it before the error is printed
    return _with(error, Printer(rank=rank, key=f"ds_seqpar/told/{key}", store=store))


def printed_once(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """A decorator for functions that users call on every rank. One rank prints the error that all raise; while they
    cannot talk yet that is rank 0, and every other prints a line with its sentence. Files in the function's folder are
    no user's."""
    LIBRARIES.add(os.path.dirname(inspect.getfile(function)) + os.sep)

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        try:
            return function(*args, **kwargs)
        except SeqParError as error:
            if not hasattr(error, "printer"):
                _with(error, Printer(rank=0))
            raise

    return call


def _with(error: SeqParError, printer: Printer) -> SeqParError:
    vars(error)["printer"] = printer
    _set_hook()
    return error


def _set_hook() -> None:
    if not hasattr(sys.excepthook, "before"):
        hook: Any = functools.partial(_print, sys.excepthook)
        hook.before = sys.excepthook
        sys.excepthook = hook


def _print(before: Callable, kind: type, error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, SeqParError) and not is_lost(error):
        return before(kind, error, trace)
    printer, me = getattr(error, "printer", None), _rank()
    if (printer is None or not printer.key) and dist.is_initialized():
        printer = _first_to_print(error, me)
    if printer is None or printer.rank == me:
        before(kind, error, _shortened(error))
        if printer is not None and printer.key:
            sys.stderr.flush()
            _mark_printed(printer)
    elif not printer.key:
        where = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}: " if trace else ""
        print(f"[rank{me}]: {where}{kind.__name__}: {error}", file=sys.stderr)
    elif (place := _was_printed(printer)) == "":
        before(kind, error, _shortened(error))
    elif place != _place_of_stderr():
        print(f"[rank{me}]: {kind.__name__}, see rank {printer.rank}", file=sys.stderr)
    return None


def _first_to_print(error: BaseException, me: int) -> Printer | None:
    """Of the ranks that raise this error without having agreed on it, the first to come here. Lost connections are one
    error, whatever each rank was doing. None: nobody knows, for the store's rank has ended."""
    what = "lost" if is_lost(error) else f"{type(error).__name__}: {error}"
    digest = hashlib.blake2b(what.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()
    key = f"ds_seqpar/told/{digest}"
    try:
        store = dist.distributed_c10d._get_default_store()
        if store.add(f"{key}/ranks", 1) == 1:
            store.set(f"{key}/first", str(me))
        store.wait([f"{key}/first"], PRINT_TIMEOUT)
        return Printer(rank=int(store.get(f"{key}/first")), key=key, store=store)
    except (dist.DistNetworkError, dist.DistStoreError):
        return None


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another rank has closed its connection: ours, or the backend's in other calls."""
    return isinstance(error, RuntimeError) and bool(LOST.search(str(error)))


def _shortened(error: BaseException) -> TracebackType | None:
    """The error's traceback with the frames of the user's files alone; those of its causes are cut alike. What the
    backend said of a lost connection is in our sentence."""
    if os.environ.get("DS_SEQPAR_TRACEBACK") == "full":
        return error.__traceback__
    if isinstance(error, CommunicationError):
        error.__cause__, error.__suppress_context__ = None, True
    whole: BaseException | None = error
    while whole is not None:
        whole.__traceback__ = _own_frames(whole.__traceback__)
        whole = whole.__cause__ or (None if whole.__suppress_context__ else whole.__context__)
    return error.__traceback__


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    if trace is None:
        return None
    rest, file = _own_frames(trace.tb_next), trace.tb_frame.f_code.co_filename
    if file.startswith((*LIBRARIES, "<frozen")):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _place_of_stderr() -> str:
    """The file, pipe or terminal that errors go to: the same for ranks whose launcher leaves them one."""
    status = os.fstat(2)
    return f"{socket.gethostname()} {status.st_dev} {status.st_ino}"


def _mark_printed(printer: Printer) -> None:
    try:
        printer.store.set(printer.key, _place_of_stderr())
    except dist.DistNetworkError as lost:
        print(f"ds_seqpar: other ranks may print this too: {lost}", file=sys.stderr)


def _was_printed(printer: Printer) -> str:
    """Where that rank has printed the error; "": it has not."""
    try:
        printer.store.wait([printer.key], PRINT_TIMEOUT)
        return printer.store.get(printer.key).decode()
    except dist.DistNetworkError:
        return "a rank that has ended"  # the one with the store, which has printed before, or seen it printed
    except dist.DistStoreError:
        return ""  # that rank caught its error


# ---- the end of the interpreter

TASKS = "/proc/self/task"
IDLE_TIMEOUT = 5.0  # seconds, after which a thread that never gets the processor is not waited for


def wait_at_exit() -> None:
    """Has the process end only once gloo's threads are idle, and print errors as above. To be called wherever
    communication begins."""
    _set_hook()
    atexit.unregister(wait_until_idle)  # once is enough, however many SequenceParallel there are
    atexit.register(wait_until_idle)


def wait_until_idle() -> None:
    """Returns once no thread of gloo's has run, or waited for the interpreter's lock, for a while; at the latest after
    `IDLE_TIMEOUT`.

    A thread that waits for the lock wakes up every switch interval, which its counters show. It gets the lock while
    this function sleeps."""
    if not os.path.isdir(TASKS):  # not Linux
        return time.sleep(0.2)
    deadline, before = time.monotonic() + IDLE_TIMEOUT, None
    while (now := _gloo_threads()) != before or not all(state.startswith("S") for state in now.values()):
        if time.monotonic() > deadline:
            return None
        before = now
        time.sleep(max(0.01, 2 * min(sys.getswitchinterval(), 1.0)))
    return None


def _gloo_threads() -> dict[str, str]:
    """Thread -> its state, and how often it has left the processor."""
    states = {}
    for thread in os.listdir(TASKS):
        try:
            with open(f"{TASKS}/{thread}/status") as file:
                status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if status["Name"] == "pt_gloo_runloop":
            switches = status["voluntary_ctxt_switches"], status["nonvoluntary_ctxt_switches"]
            states[thread] = " ".join((status["State"], *switches))
    return states
