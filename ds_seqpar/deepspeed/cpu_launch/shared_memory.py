"""The shared memory of DeepSpeed's CPU op: one file of 66 MiB for each rank, which DeepSpeed makes and never removes.
DeepSpeed makes the files if its launcher starts all ranks on one machine without GPUs. Each rank maps the files of all
ranks. `unname` removes their names once every rank has mapped them; the memory is then freed when the last rank ends,
in whatever way. `remove_left_behind` removes the files of runs that ended before `unname` or never call it, such as
runs of DeepSpeed without this package.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")  # where the C library's shm_open makes files
# as deepspeed/ops/csrc/cpu/comm/shm.cpp names them: user, address and port of the first rank, rank
NAME = "deepspeed_allreduce_buffer_{user}_{address}_{port}_{rank}"


def remove_left_behind(say: Callable[[str], None]) -> None:
    """Remove this user's files that no process has open, and report it.

    Files with the names of this run are kept: its ranks may already be starting, and use them again.

    Args:
        say: takes a message.
    """
    if not FOLDER.exists():  # not Linux
        return
    port, address = (os.environ.get(name, "") for name in ("MASTER_PORT", "MASTER_ADDR"))
    this_run = _pattern(address=re.escape(address), port=re.escape(port))
    left_behind = [file for file in _matching(FOLDER.iterdir()) if not this_run.fullmatch(file.name)]
    freed = [size for file in left_behind if (size := remove_unheld(file)) is not None]
    if freed:
        say(f"removed {len(freed)} shared memory files of DeepSpeed runs that ended, {sum(freed) / 2**20:.0f} MiB")


def unname() -> None:
    """Remove the names of the files that this process has mapped. Call it only when all ranks have mapped them.

    It does nothing on systems other than Linux.
    """
    if sys.platform != "linux":
        return
    with open("/proc/self/maps", encoding="utf-8") as lines:
        mapped = [Path(fields[5].rstrip("\n")) for line in lines if len(fields := line.split(maxsplit=5)) == 6]
    for file in set(_matching(mapped)):  # a file whose name is gone already has " (deleted)" there
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            file.unlink()


def _pattern(user: str = r"\d+", address: str = ".*", port: str = r"\d*") -> re.Pattern[str]:
    return re.compile(NAME.format(user=user, address=address, port=port, rank=r"\d+"))


def _matching(files: Iterable[Path]) -> list[Path]:
    name = _pattern(user=str(os.getuid()))
    return [file for file in files if file.parent == FOLDER and name.fullmatch(file.name)]


def remove_unheld(file: Path) -> int | None:
    """Remove a file of this user that no process has open or mapped. Returns its size in bytes, or None if it is kept.

    It is kept on systems other than Linux.

    The kernel grants a lease for writing only on a file that nobody else has open: no other user, no other container.
    Anyone who opens the file during the lease waits. The resulting signal would end this process by default.
    """
    if sys.platform != "linux":
        return None
    import fcntl

    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # another user's, or gone
        return None
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            return None
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # which is ignored
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        if not os.path.samestat(status, os.lstat(file)):
            return None
        file.unlink()
        return status.st_blocks * 512
    except OSError:  # another process holds it, or it is gone
        return None
    finally:
        os.close(descriptor)
