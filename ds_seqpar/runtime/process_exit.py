"""What happens when a rank ends: which rank prints an error that many raise, which line is the last, and what the
interpreter waits for.

If every rank printed it, the sentence would be lost among its copies and frames of libraries. So one rank prints it,
with the frames of the user's own files, and the sentence last. Where ranks write to one file, the others print nothing.
The error is whole on every rank, for callers that catch it; only what Python prints of an uncaught one is changed. An
excepthook does that. It is set where communication begins, or when the first such error is raised, and calls the hook
that was there before. DS_SEQPAR_TRACEBACK=full leaves all frames.

A rank that ends by an error of any kind writes it into the store, before it closes its connections. So ranks that lose
these know why. They say nothing of their own where they write to the same place.

Launchers print after their ranks have ended. So the rank that prints leaves a process behind, which waits for the end
of the launcher and repeats the sentence as the last line. torchrun's summary quotes it too, from a file.

Gloo's threads drop the tensors of finished operations, for which they need the interpreter's lock. If a thread waits
for that lock when the interpreter ends, the process aborts, whatever its exit code was to be: "terminate called without
an active exception", with torch 2.13. Destroying groups would not help: a group's threads are joined when nothing
refers to it any more, and DeepSpeed keeps groups of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist

from .. import compat
from ..errors import CommunicationError, SeqParError, ranks_in_words
from . import waits
from .log import log_once
from .out_of_memory import explain

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
# how long other ranks wait for the one that prints; a launcher ends all ranks after the first
PRINT_TIMEOUT = timedelta(seconds=5)
EXIT_TIMEOUT = 0.2  # seconds from the end of a process's connections to its own
LOST = re.compile(
    r"(closed|reset) by peer|connection refused|broken pipe|remote process|remoteError|another rank ended",
    re.IGNORECASE,
)
NO_MEMORY = re.compile(r"out of memory|can.?t allocate memory|cannot allocate memory|ALLOC_FAILED", re.IGNORECASE)
# folders of files that are not the user's: Python's, installed packages', and, by `printed_once`, ours
STDLIB, PLATSTDLIB, *PACKAGES = (
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
LIBRARIES = {STDLIB, PLATSTDLIB, *PACKAGES}


@dataclasses.dataclass(frozen=True)
class Printer:
    """Which rank prints an error. `key` and `store` are missing where ranks have not agreed on the error."""

    rank: int  # global
    key: str = ""  # what that rank sets in `store` once it has printed
    store: Any = None  # a dist.Store


def printed_by(error: SeqParError, rank: int, key: str) -> SeqParError:
    """Return an error that every rank of a group is about to raise, set to be printed by one of them if it is uncaught.

    Args:
        error: this rank's error.
        rank: the global rank that prints it.
        key: identifies the error: the same on all ranks of the group, and different for every other error.
    """
    store = compat.default_store()  # read here, since torch may drop it before the error is printed
    return with_printer(error, Printer(rank=rank, key=f"ds_seqpar/told/{key}", store=store))


def printed_once(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Decorate a function that users call on every rank, so that one rank prints the error that all raise.

    While ranks cannot communicate yet, that is rank 0, and every other prints a line with its sentence. Files in the
    function's folder do not count as the user's.
    """
    LIBRARIES.add(os.path.dirname(inspect.getfile(function)) + os.sep)

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        try:
            return function(*args, **kwargs)
        except SeqParError as error:
            if not hasattr(error, "printer"):
                with_printer(error, Printer(rank=0))
            raise

    return call


def with_printer(error: SeqParError, printer: Printer) -> SeqParError:
    """Return an error, set to be printed as `printer` says if it is uncaught."""
    vars(error)["printer"] = printer
    _set_hook()
    return error


def _set_hook() -> None:
    if not hasattr(sys.excepthook, "before"):
        hook: Any = functools.partial(_print, sys.excepthook)
        hook.before = sys.excepthook
        sys.excepthook = hook


def _print(before: Callable, error_type: type, error: BaseException, trace: TracebackType | None) -> None:
    ours, rank = isinstance(error, SeqParError) or is_lost(error), _rank()
    if not isinstance(error, Exception) or not (ours or dist.is_initialized()):
        return before(error_type, error, trace)
    if waits.ended is not None and threading.current_thread() is threading.main_thread():
        return None  # the watchdog's thread prints why
    if not ours:
        if is_out_of_memory(error):
            trace = _shortened(explain(error, rank))
        return _print_first(before, error, trace, rank)
    if is_lost(error) and (cause := ended()) is not None:
        return _print_pointer(error, rank, cause.rank, cause.place)
    printer = getattr(error, "printer", None)
    if (printer is None or not printer.key) and dist.is_initialized():
        printer = _first_to_print(error, rank)
    if printer is None or printer.rank == rank:
        _print_first(before, error, _shortened(error), rank)
        if printer is not None and printer.key:
            _mark_printed(printer)
    elif not printer.key:
        where = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}: " if trace else ""
        print(f"[rank{rank}]: {where}{error_type.__name__}: {error}", file=sys.stderr)
    elif (place := _was_printed(printer)) == "":
        _print_first(before, error, _shortened(error), rank)
    else:
        _print_pointer(error, rank, printer.rank, place)
    return None


def _print_first(before: Callable, error: Exception, trace: TracebackType | None, rank: int) -> None:
    """Print an error, and tell the ranks that have not ended of it. The launcher may end this rank at any time.

    A lost connection that torch has met, as in DDP's broadcast or a collective of the user's, is said in our words.
    """
    is_torchs = isinstance(error, dist.DistError) or "gloo" in str(error)  # else a connection of the user's
    if is_torchs and is_lost(error) and not isinstance(error, SeqParError):
        error = CommunicationError(f"a call of torch.distributed failed because another rank ended: {_who_is_gone()}")
    sentence = f"{type(error).__name__}: {error}".splitlines()[0]
    _write_error_file(sentence, late=is_lost(error))
    if not _leave_last_line(sentence) and is_lost(error):
        return  # another rank here has said why, whose store is gone
    before(type(error), error, trace)
    sys.stderr.flush()
    value = f"{rank}\n{_place_of_stderr()}\n{sentence}"
    _ask_store(lambda store: store.compare_set(ENDED, "", value))


def _print_pointer(error: Exception, rank: int, printed_by: int, place: str) -> None:
    """Name the rank that prints an error, where nobody can see that it does."""
    _write_error_file(f"see rank {printed_by}", late=True)
    if place != _place_of_stderr():
        print(f"[rank{rank}]: {type(error).__name__}, see rank {printed_by}", file=sys.stderr)


WHERE = "ds_seqpar/watchdog/where/"  # in the store, before a rank's number: its host and process


def _who_is_gone() -> str:
    """Return a clause that names the ranks whose processes have ended, as far as this host sees it."""

    def ask(store: Any) -> list[int]:
        known = [rank for rank in range(dist.get_world_size()) if store.check([f"{WHERE}{rank}"])]
        processes = {rank: json.loads(store.get(f"{WHERE}{rank}")) for rank in known}
        until = time.monotonic() + EXIT_TIMEOUT
        while not (gone := [rank for rank in known if has_ended(*processes[rank])]) and time.monotonic() < until:
            time.sleep(EXIT_TIMEOUT / 10)
        return gone

    if gone := _ask_store(ask):
        return f"the process of {ranks_in_words(gone)} is gone, see its exit code, and dmesg where it was killed"
    return "which one cannot be seen from here, see the exit codes of all"


def _ask_store(ask: Callable[[Any], Returned]) -> Returned | None:
    """Return what `ask` returns of the store; None where the store has ended with its rank, or never was.

    For each call to such a store torch prints a stack of C++, which would hide our sentence.
    """
    sys.stderr.flush()
    before, silent = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    try:
        return ask(compat.default_store())
    except (RuntimeError, ValueError):
        return None
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(silent)


class Ended(NamedTuple):
    """The first error that ended a rank."""

    rank: int  # global
    place: str  # where it was printed
    sentence: str


ENDED = "ds_seqpar/ended"  # in the store


def ended() -> Ended | None:
    """Return the first error that ended a rank; None where there was none, or the store has ended too."""
    text = _ask_store(lambda store: store.get(ENDED).decode() if store.check([ENDED]) else "")
    if not text:
        return None
    rank, place, sentence = text.split("\n", 2)
    return Ended(int(rank), place, sentence)


def _first_to_print(error: BaseException, rank: int) -> Printer | None:
    """Return which rank prints an error that ranks raise without having agreed on it: the first that calls this.

    Lost connections are one error, whatever each rank was doing. Returns None where the store's rank has ended.
    """
    identity = "lost" if is_lost(error) else f"{type(error).__name__}: {error}"
    digest = hashlib.blake2b(identity.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()
    key = f"ds_seqpar/told/{digest}"

    def first(store: Any) -> Printer:
        if store.add(f"{key}/ranks", 1) == 1:
            store.set(f"{key}/first", str(rank))
        store.wait([f"{key}/first"], PRINT_TIMEOUT)
        return Printer(rank=int(store.get(f"{key}/first")), key=key, store=store)

    return _ask_store(first)


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another rank has closed its connection: ours, or the backend's in other calls."""
    return isinstance(error, RuntimeError) and bool(LOST.search(str(error)))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory could not be allocated, on a device or on the host."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error))))


def _shortened(error: BaseException) -> TracebackType | None:
    """Return the error's traceback with the frames of the user's files only; those of its causes are cut alike.

    What the backend said of a lost connection is in our sentence.
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
    next_trace, file = _own_frames(trace.tb_next), trace.tb_frame.f_code.co_filename
    if file.startswith((*LIBRARIES, "<frozen")):
        return next_trace
    return TracebackType(next_trace, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _place_of_stderr() -> str:
    """Return an identifier of stderr's file, pipe or terminal: the same for ranks whose launcher gives them one."""
    status = os.fstat(2)
    return f"{socket.gethostname()} {status.st_dev} {status.st_ino}"


def _mark_printed(printer: Printer) -> None:
    try:
        printer.store.set(printer.key, _place_of_stderr())
    except dist.DistNetworkError as lost:
        print(f"ds_seqpar: other ranks may print this too: {lost}", file=sys.stderr)


def _was_printed(printer: Printer) -> str:
    """Return where the printer's rank has printed the error; "" if it has not."""
    try:
        printer.store.wait([printer.key], PRINT_TIMEOUT)
        return printer.store.get(printer.key).decode()
    except dist.DistNetworkError:
        return "a rank that has ended"  # the rank of the store, which has printed before, or seen it printed
    except dist.DistStoreError:
        return ""  # that rank caught its error


# ---- the last line

# environment variables of launchers that print after their ranks: torchrun's, which accelerate runs, and DeepSpeed's
LAUNCHERS = {"TORCHELASTIC_RUN_ID", "CROSS_SIZE"}
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# a process of its own, which has no rank for a parent: launchers end the children of ranks
LAST_LINE = """
import os, select, sys
launcher, sentence = sys.argv[1:]
if not os.fork() and select.select([int(launcher)], [], [], 60)[0]:
    print(sentence, file=sys.stderr)
"""


def _warn_of_restarts() -> None:
    """Say that torchrun cannot start ranks again, if it cannot: it keeps the store, with addresses of ended ranks."""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and os.environ.get(AGENT_STORE) == "True":
        log_once(
            "torchrun --max-restarts hangs or fails when it starts ranks again, for they find addresses of the ended "
            "ones; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and say --rdzv-backend c10d"
        )


def _leave_last_line(sentence: str) -> bool:
    """Start a process that prints a line as soon as the launcher has ended. Return False if one of this launcher's
    ranks has done so.

    Where the launcher starts ranks again, it does not end, and nothing is started. It has the pipe of stderr open as
    long as the process does.
    """
    restarts, restarted = (
        int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT")
    )
    launched = os.environ.keys() & LAUNCHERS and restarted >= restarts
    if not (launched and hasattr(os, "pidfd_open") and os.environ.get("WORLD_SIZE") != "1"):
        return True
    with socket.socket(socket.AF_UNIX) as claim:  # a name without a file, which is free when the last owner ends
        try:
            claim.bind(f"\0ds_seqpar last line {os.getuid()} {os.getppid()} {os.environ.get('MASTER_PORT')}")
        except OSError:
            return False
        with contextlib.suppress(OSError, ValueError):  # a kernel without pidfd_open; a sentence that is no argument
            launcher = os.pidfd_open(os.getppid())
            command = [sys.executable, "-I", "-S", "-c", LAST_LINE, str(launcher), sentence]
            none, inherited = subprocess.DEVNULL, [launcher, claim.fileno()]
            subprocess.run(command, stdin=none, stdout=none, pass_fds=inherited, start_new_session=True, check=False)
            os.close(launcher)
    return True


def _write_error_file(sentence: str, late: bool) -> None:
    """Write what torchrun's summary says of this rank. late: whether other ranks' errors count as earlier."""
    message = {"py_callstack": sentence, "timestamp": str(int(time.time()) + late)}
    with contextlib.suppress(KeyError, OSError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "x") as file:
        json.dump({"message": {"message": sentence, "extraInfo": message}}, file)


# ---- the end of the interpreter

TASKS = "/proc/self/task"
IDLE_TIMEOUT = 5.0  # seconds, after which a thread that never gets the processor is not waited for


def wait_at_exit() -> None:
    """Let the process end only once gloo's threads are idle, and set the excepthook. Call it before communication."""
    _set_hook()
    _warn_of_restarts()
    atexit.unregister(wait_until_idle)  # once is enough, however many SequenceParallel there are
    atexit.register(wait_until_idle)


def wait_until_idle() -> None:
    """Return once no thread of gloo's has run, or waited for the interpreter's lock, for a while.

    It returns after `IDLE_TIMEOUT` at the latest. A thread that waits for the lock wakes up every switch interval,
    which its counters show. It gets the lock while this function sleeps.
    """
    if not os.path.isdir(TASKS):  # not Linux
        return time.sleep(0.2)
    deadline, previous = time.monotonic() + IDLE_TIMEOUT, None
    while (states := _gloo_threads()) != previous or not all(state.startswith("S") for state in states.values()):
        if time.monotonic() > deadline:
            return None
        previous = states
        time.sleep(max(0.01, 2 * min(sys.getswitchinterval(), 1.0)))
    return None


def _gloo_threads() -> dict[str, str]:
    """Return for each of gloo's threads its state and how often it has left the processor, by thread id."""
    states = {}
    for thread in os.listdir(TASKS):
        if (state := state_of_thread(thread, name="pt_gloo_runloop")) != "":
            states[thread] = state
    return states


def has_ended(host: str, process: int) -> bool:
    """Return whether a process has ended; False where it is on another host, or the system is not Linux."""
    here = host == socket.gethostname() and os.path.isdir(TASKS)
    return here and state_of_thread(process, process)[:1] in ("", "Z")


def state_of_thread(thread: object, process: object = "self", name: str = "") -> str:
    """Return a thread's state, whose first letter is S where it sleeps, and how often it has left the processor.

    Returns "" where it has ended, has another name than is asked for, or the system is not Linux.
    """
    try:
        with open(f"/proc/{process}/task/{thread}/status") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except (FileNotFoundError, ProcessLookupError):
        return ""
    if name not in ("", status["Name"]):
        return ""
    return " ".join(status[key] for key in ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"))
