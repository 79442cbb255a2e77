"""DeepSpeed's collective in shared memory, an op in C++, and the lock file that guards its compilation.

With this op the processes of one machine without GPUs all-reduce. DeepSpeed compiles it when it first starts there. Of
several processes that start at once, one compiles, and the others wait until its lock file is gone. If that process
is interrupted, the file remains, and every later start would wait for ever without a message. So the lock file is
checked before DeepSpeed starts.

What DeepSpeed compiles stays with the environment that it was compiled for, however ranks are launched.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from . import shared_memory

OP = "deepspeed_shm_comm"
# file systems of one machine, where a process that has a file open is one of its own
LOCAL = ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
NEW_LOCK = 2.0  # seconds: the owner of a younger lock file may not have it open yet


def _use_environment() -> None:
    """Make torch compile into the environment, where that is writable.

    torch's own folder is in the user's home, where other environments put their ops and rebuild these.
    """
    folder = Path(sys.prefix, "torch_extensions")
    if os.access(folder if folder.exists() else sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder))


_use_environment()  # at import: TrainingArguments and Accelerators start DeepSpeed before a model is at hand


def compile_op() -> bool:
    """Compile the op, or find it compiled. Returns whether DeepSpeed uses it on this machine."""
    prepare_start()
    from .. import compat

    return compat.shm_op() is not None


def prepare_start() -> None:
    """Prepare a rank for the start of DeepSpeed: wait while another process compiles the op.

    The first rank of a machine also removes the shared memory files that earlier runs left behind.
    """
    wait_for_compiler()
    if lock_file() is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        shared_memory.remove_left_behind(_say)


def wait_for_compiler(patience: float = 10.0, say: Callable[[str], None] | None = None) -> None:
    """Return once no other process compiles the op; at once where DeepSpeed has started and so loaded it.

    A lock whose owner is gone is removed. That can be determined on Linux alone, for a lock on a file system of this
    machine: its owner would have it open. Otherwise the message says what to remove, and waiting goes on.

    Args:
        patience: seconds after which a message, printed once, says what is waited for.
        say: prints a message; default: on stderr, once a node.
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
    """Return where the lock is while the op is being compiled; None where DeepSpeed compiles none."""
    from deepspeed.accelerator import get_accelerator

    from .. import compat

    if get_accelerator().device_name() != "cpu":
        return None
    return Path(compat.build_folder(OP), "lock")


def _remove_orphan(lock: Path) -> bool:
    """Remove a lock whose owner is gone, and return whether it did.

    One process at a time does this: otherwise one could remove a new owner's lock, right after another has removed the
    old one.
    """
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        with open(lock.parent / "lock_is_looked_at", "w", encoding="utf-8") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            if not _is_orphan(lock):
                return False
            lock.unlink()
            return True
    except OSError:  # gone by itself, or not ours to remove
        return False


def _is_orphan(lock: Path) -> bool:
    """Whether no process has the lock file open. False where that cannot be determined."""
    status = lock.stat()
    if status.st_uid != os.getuid() or time.time() - status.st_mtime < NEW_LOCK or _file_system(lock) not in LOCAL:
        return False
    return not any(_holds(process, str(lock.resolve())) for process in Path("/proc").glob("[0-9]*"))


def _holds(process: Path, file: str) -> bool:
    try:
        return any(os.readlink(fd) == file for fd in (process / "fd").iterdir())
    except OSError:  # another user's, or gone
        return False


def _file_system(path: Path) -> str:
    """Return the type of the file system that a path is on."""
    mounts = {}
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        mounts[before.split()[4]] = after.split()[0]
    return next(mounts[str(parent)] for parent in path.resolve().parents if str(parent) in mounts)


def _say(message: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"ds_seqpar: {message}", file=sys.stderr, flush=True)
