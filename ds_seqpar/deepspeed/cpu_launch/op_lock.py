"""DeepSpeed's collective in shared memory, an op in C++, and the lock file that guards its compilation.

The processes of a machine without GPUs use this op for all-reduce. DeepSpeed compiles it when it first starts there. If
several processes start at once, one compiles, and the others wait until its lock file is gone. If that process is
interrupted, the file remains, and every later start would wait forever without a message. So the lock file is checked
before DeepSpeed starts.

Compiled ops stay with the environment for which they were compiled, regardless of how ranks are launched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from . import shared_memory

OP = "deepspeed_shm_comm"
NEW_LOCK = 2.0  # seconds: the owner of a younger lock file may not have it open yet


def _use_environment() -> None:
    """Make torch compile into the environment, if that is writable.

    torch's own folder is in the user's home, where other environments put their ops and rebuild these.
    """
    folder = Path(sys.prefix, "torch_extensions")
    if os.access(folder if folder.exists() else sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder))


_use_environment()  # at import: TrainingArguments and Accelerators start DeepSpeed before a model is at hand


def compile_op() -> bool:
    """Compile the op, or find it compiled. Returns whether DeepSpeed uses it on this machine."""
    prepare_start()
    from ...base import compat

    with telling_time("compiling"):
        return compat.shm_op() is not None


@contextlib.contextmanager
def telling_time(what: str, every: float = 10.0) -> Iterator[None]:
    """Context manager in which a line on stdout regularly says how much time has passed."""
    start, done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(every):
            print(f"{what}: {time.monotonic() - start:.0f} s", flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def prepare_start() -> None:
    """Prepare a rank for the start of DeepSpeed: wait while another process compiles the op.

    The first rank of a machine also removes the shared memory files that earlier runs left behind, and prints a message
    if the op must be compiled next.
    """
    wait_for_compiler()
    if (lock := lock_file()) is not None and _is_first_of_machine():
        shared_memory.remove_left_behind(_say)
        if not lock.with_name(f"{OP}.so").exists():
            _say(
                f"DeepSpeed's {OP} is not compiled yet, which takes minutes, once for this environment, and goes to "
                f"{lock.parent}; python -m ds_seqpar prepare does it before ranks start"
            )


def wait_for_compiler(patience: float = 10.0, say: Callable[[str], None] | None = None) -> None:
    """Return once no other process compiles the op; at once if DeepSpeed has started and so loaded it.

    A lock whose owner is gone, i.e. which nobody has open, is removed. That can be determined only on Linux, and not on
    every shared file system. Otherwise the message says what to remove, and waiting continues.

    Args:
        patience: seconds after which a message, printed once, says what is waited for.
        say: takes a message; default: logs it once per node.
    """
    from deepspeed import comm

    lock = None if comm.is_initialized() else lock_file()
    say, start, has_said = say or _say, time.monotonic(), False
    while lock is not None and lock.exists():
        if _remove_orphan(lock):
            say(f"removed {lock}, the lock of a process that ended while it compiled DeepSpeed's {OP}")
        elif not has_said and time.monotonic() - start > patience:
            has_said = True
            say(
                f"waiting for another process to compile DeepSpeed's {OP}, which may take minutes; if there is none, "
                f"remove {lock}"
            )
        time.sleep(0.1)


def lock_file() -> Path | None:
    """Return the path of the lock while the op is being compiled; None if DeepSpeed does not compile one."""
    from deepspeed.accelerator import get_accelerator

    from ...base import compat

    if get_accelerator().device_name() != "cpu":
        return None
    return Path(compat.build_folder(OP), "lock")


def _remove_orphan(lock: Path) -> bool:
    """Remove a lock whose owner is gone, and return whether it did."""
    with contextlib.suppress(FileNotFoundError):  # gone by itself
        is_new = time.time() - lock.stat().st_mtime < NEW_LOCK
        return not is_new and shared_memory.remove_unheld(lock) is not None
    return False


def _is_first_of_machine() -> bool:
    from ...base.hosts import local_rank

    return not local_rank()


def _say(message: str) -> None:
    if _is_first_of_machine():
        logging.getLogger("ds_seqpar").warning(f"ds_seqpar: {message}")
