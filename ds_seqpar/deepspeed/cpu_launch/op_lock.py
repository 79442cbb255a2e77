"""Compile DeepSpeed's shared-memory collective, a C++ op, and handle the lock file that guards the compilation.

On a machine without GPUs, DeepSpeed's processes use the op for all-reduce. DeepSpeed compiles the op on first use. If
several processes start together, one process compiles, and all other processes wait until the lock file is removed. If
the compiling process is interrupted, the lock file remains, and every later start would hang without a message. To
prevent such a hang, the lock file is checked before DeepSpeed starts.

Compiled ops are stored in the Python environment for which they were compiled, regardless of the launcher.
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
NEW_LOCK = 2.0  # seconds; the owner of a newer lock file may not have opened it yet


def _use_environment() -> None:
    """Make torch store compiled ops in the Python environment's folder if the folder is writable.

    torch's default folder is in the user's home directory, where other environments would overwrite the compiled ops.
    """
    folder = Path(sys.prefix, "torch_extensions")
    if os.access(folder if folder.exists() else sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder))


_use_environment()  # called on import, since TrainingArguments and Accelerators start DeepSpeed before a model exists


def compile_op() -> bool:
    """Compile the op unless it is already compiled. Return whether DeepSpeed uses the op on this machine."""
    prepare_start()
    from ...base import compat

    with telling_time("compiling"):
        return compat.shm_op() is not None


@contextlib.contextmanager
def telling_time(what: str, every: float = 10.0) -> Iterator[None]:
    """Context manager that regularly prints the elapsed time."""
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
    """Prepare a rank for DeepSpeed's start by waiting while another process compiles the op.

    The first rank on a machine also removes shared memory files from earlier runs, and prints a message if the op must
    be compiled.
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
    """Wait until no other process compiles the op. Return at once if DeepSpeed has already started and loaded the op.

    A lock file that no process has open is removed. Open files can be detected only on Linux, and not on every shared
    file system. If open files cannot be detected, a message names the file to remove, and the function keeps waiting.

    Args:
        patience: Seconds after which one message explains the reason for waiting.
        say: A function that receives messages. By default, messages are logged once per node.
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
    """Return the path of the lock file that exists during compilation, or None if DeepSpeed does not compile the op."""
    from deepspeed.accelerator import get_accelerator

    from ...base import compat

    if get_accelerator().device_name() != "cpu":
        return None
    return Path(compat.build_folder(OP), "lock")


def _remove_orphan(lock: Path) -> bool:
    """Remove a lock file that no process has open. Return whether the file was removed."""
    with contextlib.suppress(FileNotFoundError):  # already removed
        is_new = time.time() - lock.stat().st_mtime < NEW_LOCK
        return not is_new and shared_memory.remove_unheld(lock) is not None
    return False


def _is_first_of_machine() -> bool:
    from ...base.hosts import local_rank

    return not local_rank()


def _say(message: str) -> None:
    if _is_first_of_machine():
        logging.getLogger("ds_seqpar").warning(f"ds_seqpar: {message}")
