"""How a rank ends: which rank prints an error that many ranks raise, and what the interpreter waits for.

If every rank printed it, the sentence would drown in its copies, so one rank does. The error has its whole text on
every rank, for callers that catch it; only what Python prints of an uncaught one is changed. An excepthook does that.
It is set when the first such error is raised, and calls the hook that was there before.

Gloo's threads drop the tensors of finished operations, for which they need the interpreter's lock. If a thread waits
for that lock when the interpreter ends, the process aborts, whatever its exit code was to be: "terminate called without
an active exception", with torch 2.13. Destroying groups would not help: a group's threads are joined when nothing
refers to it any more, and DeepSpeed keeps groups of its own.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from ..errors import SeqParError

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
# how long other ranks wait for the one that prints: a launcher ends all ranks after the first
PRINT_TIMEOUT = timedelta(seconds=5)


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
    """A decorator for functions that users call on every rank. Only rank 0 prints the traceback of an error that all
    ranks raise; every other rank prints a line with its sentence."""

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
    if not hasattr(sys.excepthook, "before"):
        hook: Any = functools.partial(_print, sys.excepthook)
        hook.before = sys.excepthook
        sys.excepthook = hook
    return error


def _print(before: Callable, kind: type, error: BaseException, trace: TracebackType | None) -> None:
    printer, me = getattr(error, "printer", None), _rank()
    if printer is None or printer.rank == me:
        before(kind, error, trace)
        if printer is not None and printer.key:
            sys.stderr.flush()
            _mark_printed(printer)
    elif not printer.key:
        where = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}: " if trace else ""
        print(f"[rank{me}]: {where}{kind.__name__}: {error}", file=sys.stderr)
    elif _was_printed(printer):
        print(f"[rank{me}]: {kind.__name__}, see rank {printer.rank}", file=sys.stderr)
    else:
        before(kind, error, trace)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _mark_printed(printer: Printer) -> None:
    try:
        printer.store.set(printer.key, "1")
    except dist.DistNetworkError as lost:
        print(f"ds_seqpar: other ranks may print this too: {lost}", file=sys.stderr)


def _was_printed(printer: Printer) -> bool:
    try:
        printer.store.wait([printer.key], PRINT_TIMEOUT)
    except dist.DistNetworkError:
        return True  # the rank with the store has ended, which it does not before it has printed or seen it printed
    except dist.DistStoreError:
        return False  # that rank caught its error
    return True


# ---- the end of the interpreter

TASKS = "/proc/self/task"
IDLE_TIMEOUT = 5.0  # seconds, after which a thread that never gets the processor is not waited for


def wait_at_exit() -> None:
    """Has the process end only once gloo's threads are idle. To be called wherever communication begins."""
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
