"""Free the shared memory of DeepSpeed's CPU op.

DeepSpeed creates one file of 66 MiB per rank, and never removes the files.

DeepSpeed creates the files if its launcher starts all ranks on one machine without GPUs. Each rank maps the files of
all ranks. `unname` removes the file names after every rank has mapped the files. The memory is then freed when the last
rank exits, even after a crash. `remove_left_behind` removes the files of runs that exited before `unname` or never
called it, such as DeepSpeed runs without this package.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

FOLDER = Path("/dev/shm")  # where the C library's shm_open creates files
# as in deepspeed/ops/csrc/cpu/comm/shm.cpp: user, the first rank's address and port, rank
NAME = "deepspeed_allreduce_buffer_{user}_{address}_{port}_{rank}"


def remove_left_behind(say: Callable[[str], None]) -> None:
    """Remove this user's shared memory files that no process has open, and report their number and size.

    Files with this run's names are kept, since this run's ranks may already be starting and may reuse the files.

    Args:
        say: A function that receives a message.
    """
    if not FOLDER.exists():  # not Linux
        return
    port, address = (os.environ.get(name, "") for name in ("MASTER_PORT", "MASTER_ADDR"))
    this_run = _pattern(address=re.escape(address), port=re.escape(port))
    left_behind = [file for file in _of_this_user() if not this_run.fullmatch(file.name)]
    freed = [size for file in left_behind if (size := remove_unheld(file)) is not None]
    if freed:
        say(f"removed {len(freed)} shared memory files of DeepSpeed runs that ended, {sum(freed) / 2**20:.0f} MiB")


def unname() -> None:
    """Remove the names of the files that this process has mapped.

    Call `unname` only after all ranks have mapped the files. On systems other than Linux, no file names are removed.
    """
    if sys.platform != "linux":
        return
    name = _pattern(user=str(os.getuid())).pattern
    mapped = re.findall(f" {FOLDER}/({name})$", Path("/proc/self/maps").read_text(encoding="utf-8"), re.MULTILINE)
    for file in {*mapped}:  # a file whose name is gone already has " (deleted)" after its name
        (FOLDER / file).unlink(missing_ok=True)  # another rank may be faster


def _pattern(user: str = r"\d+", address: str = ".*", port: str = r"\d*") -> re.Pattern[str]:
    return re.compile(NAME.format(user=user, address=address, port=port, rank=r"\d+"))


def _of_this_user() -> list[Path]:
    name = _pattern(user=str(os.getuid()))
    return [file for file in FOLDER.iterdir() if name.fullmatch(file.name)]


def remove_unheld(file: Path) -> int | None:
    """Remove a file of this user unless a process has the file open or mapped.

    Return the size of the removed file in bytes, or None.

    On systems other than Linux, the file is kept.

    The kernel grants a write lease only on a file that no other process has open, including processes of other users
    and containers. If another process opens the file during the lease, the other process waits. The process with the
    lease then receives a signal, which would terminate the process by default.
    """
    if sys.platform != "linux":
        return None
    import fcntl

    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # owned by another user, or gone
        return None
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            return None
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # SIGURG is ignored by default
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        if not os.path.samestat(status, os.lstat(file)):
            return None
        file.unlink()
        return status.st_blocks * 512
    except OSError:  # another process has the file open, or the file is gone
        return None
    finally:
        os.close(descriptor)
