"""How a rank ends: who prints an error that many ranks share, and what the interpreter waits for.

Of an error that ends many ranks one rank prints it, or its sentence drowns in copies of itself. Errors carry their
whole text on every rank for those who catch them. Only what Python prints of an uncaught one is changed. A hook does
that: it is set when the first such error is raised, and calls the hook that was there before.

Gloo's threads drop the tensors of finished operations, for which they need the interpreter's lock. A thread that waits
for that lock when the end begins aborts the process, whatever its exit code was to be: "terminate called without an
active exception", with torch 2.13. Destroying groups would not do: threads are joined when nobody refers to their group
any more, and DeepSpeed keeps its own.
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
PATIENCE = timedelta(seconds=5)  # for the rank that prints to have printed: a launcher ends all ranks after the first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Telling:
    """rank: the global rank that prints the error. key: what it then sets in `store`, a `dist.Store`. Both are missing
    where ranks have not agreed."""

    rank: int
    key: str = ""
    store: Any = None


def told_by(error: SeqParError, rank: int, key: str) -> SeqParError:
    """The error, which every rank of a group is about to raise, and global rank `rank` to print if nobody catches it.

    key: the same on all of them, and no other error's."""
    store = dist.distributed_c10d._get_default_store()  # here: it may be let go of before the error is printed
    return _with(error, Telling(rank=rank, key=f"ds_seqpar/told/{key}", store=store))


def told_once(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """For what users call on every rank. Of an error that ranks raise alike, only rank 0 prints the traceback; every
    other one prints a line with the sentence."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        try:
            return function(*args, **kwargs)
        except SeqParError as error:
            if not hasattr(error, "telling"):
                _with(error, Telling(rank=0))
            raise

    return call


def _with(error: SeqParError, telling: Telling) -> SeqParError:
    vars(error)["telling"] = telling
    if not hasattr(sys.excepthook, "before"):
        hook: Any = functools.partial(_print, sys.excepthook)
        hook.before = sys.excepthook
        sys.excepthook = hook
    return error


def _print(before: Callable, kind: type, error: BaseException, trace: TracebackType | None) -> None:
    telling, me = getattr(error, "telling", None), _rank()
    if telling is None or telling.rank == me:
        before(kind, error, trace)
        if telling is not None and telling.key:
            sys.stderr.flush()
            _say_so(telling)
    elif not telling.key:
        where = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}: " if trace else ""
        print(f"[rank{me}]: {where}{kind.__name__}: {error}", file=sys.stderr)
    elif _was_said(telling):
        print(f"[rank{me}]: {kind.__name__}, see rank {telling.rank}", file=sys.stderr)
    else:
        before(kind, error, trace)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _say_so(telling: Telling) -> None:
    try:
        telling.store.set(telling.key, "1")
    except dist.DistNetworkError as lost:
        print(f"ds_seqpar: other ranks may print this too: {lost}", file=sys.stderr)


def _was_said(telling: Telling) -> bool:
    try:
        telling.store.wait([telling.key], PATIENCE)
    except dist.DistNetworkError:
        return True  # the rank that keeps the store does not end before it has printed, or seen it printed
    except dist.DistStoreError:
        return False  # that rank caught its error
    return True


# ---- the end of the interpreter

TASKS = "/proc/self/task"
IDLE_PATIENCE = 5.0  # seconds; a thread that never gets the processor is not waited for any longer


def wait_at_exit() -> None:
    """From now on the process ends only once gloo's threads are idle. Called wherever communication begins."""
    atexit.unregister(wait_until_idle)  # once is enough, however many SequenceParallel there are
    atexit.register(wait_until_idle)


def wait_until_idle() -> None:
    """Returns once no thread of gloo's has run, or waited for the interpreter's lock, for a while; or after so long.

    One that waits for the lock wakes up every switch interval, which its counters show, and gets it while this sleeps.
    """
    if not os.path.isdir(TASKS):  # not Linux
        return time.sleep(0.2)
    until, before = time.monotonic() + IDLE_PATIENCE, None
    while (now := _gloo_threads()) != before or not all(state.startswith("S") for state in now.values()):
        if time.monotonic() > until:
            return None
        before = now
        time.sleep(max(0.01, 2 * min(sys.getswitchinterval(), 1.0)))
    return None


def _gloo_threads() -> dict[str, str]:
    """Thread -> its state, and how often it has left the processor."""
    found = {}
    for thread in os.listdir(TASKS):
        try:
            with open(f"{TASKS}/{thread}/status") as file:
                status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if status["Name"] == "pt_gloo_runloop":
            switches = status["voluntary_ctxt_switches"], status["nonvoluntary_ctxt_switches"]
            found[thread] = " ".join((status["State"], *switches))
    return found
