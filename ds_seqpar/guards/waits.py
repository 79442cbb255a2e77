"""Report long waits in communication, and explain communication failures.

Each kind of long wait for other ranks is reported once, in a line on stderr. A thread checks the current waits every
second, and does nothing unless a wait is long. A wait adds one dict entry, and each step of a wait sets one attribute
to the rank whose message is needed next.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from typing import Self

import torch.distributed as dist

from ..base import compat
from ..base.errors import ConfigError, SeqParError
from ..core.runtime.groups import timeout
from ..core.runtime.transport import Communication
from .process_exit import LOST, ended, is_out_of_memory

PATIENCE = 60.0  # number of seconds after which a wait is reported
CHECKS = 60  # number of checks within PATIENCE seconds
TIMED_OUT = re.compile(r"timed?[ -]?out|timeout", re.IGNORECASE)
DESTROYED = (
    "needs the process groups that its SequenceParallel was made with; they were destroyed with torch.distributed, "
    "destroy them after the last call, and make another SequenceParallel after another init_process_group"
)


def is_up(group: dist.ProcessGroup | None) -> bool:
    """Return whether a group still exists in torch. None means the group of all ranks."""
    return dist.is_initialized() and (group is None or compat.is_known(group))


class explaining_failure(Communication):  # a class, because a generator would slow down every transfer
    """Context manager that converts a communication failure to a CommunicationError.

    The message distinguishes a rank that ended from a rank that did not take part. The backend's error becomes the
    exception's cause. If the group was destroyed, ConfigError is raised. If the body takes a long time, a line on
    stderr names the rank that this rank is waiting for.

    Args:
        what: Name of the communication, used as the subject of error messages.
        group: Ranks that must take part; None for a single rank.

    Attributes:
        since: Time at which the wait began.
    """

    since = 0.0

    def __enter__(self) -> Self:
        self.since = time.monotonic()
        _now[id(self)] = self
        _start_thread()
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: object) -> None:
        _now.pop(id(self), None)
        if is_out_of_memory(error):
            return
        if isinstance(error, ValueError) and not isinstance(error, SeqParError) and not is_up(self.group):
            raise ConfigError(f"{self.what} {DESTROYED}") from error
        super().__exit__(error_type, error, trace)

    def reason(self, message: str) -> str:
        if TIMED_OUT.search(message):
            return (
                f"timed out after {timeout(self.group).total_seconds():g} s: {self.whom()} did not take part in it; "
                "all ranks must, not only rank 0, and one that caught an error of its own cannot go on without the "
                "others"
            )
        if not LOST.search(message):
            return super().reason(message)
        if (cause := ended()) is not None:
            return f"failed because another rank ended: rank {cause.rank}, by {cause.sentence}"
        if self.awaited is None:
            return "failed because another rank ended or gave up: see what that one says"
        return (
            f"failed because another rank ended or gave up: {self.whom()} did not take part in it, which all ranks "
            "must, not only rank 0; see what that one says, and if it says nothing, why it does not come here"
        )

    def whom(self) -> str:
        """Return "rank 3", "one of the 4 ranks up to rank 7", or "another rank", with global rank numbers."""
        if self.awaited is None or self.group is None:
            return "another rank"
        members, (last, count) = dist.get_process_group_ranks(self.group), self.awaited
        return f"rank {members[last]}" if count == 1 else f"one of the {count} ranks up to rank {members[last]}"


def innermost() -> explaining_failure | None:
    """Return the innermost current wait, or None if there is none."""
    return next(reversed([*_now.values()]), None)


_now: dict[int, explaining_failure] = {}  # current waits, by id
_reported: set[str] = set()


@functools.cache
def _start_thread() -> None:
    threading.Thread(target=_watch, name="ds_seqpar waits", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(PATIENCE / CHECKS)
        _report_long()


def _report_long() -> None:  # a separate function, since a frame of `_watch` would keep the last wait alive
    for wait in list(_now.values()):
        if time.monotonic() - wait.since >= PATIENCE * (1 - 1 / CHECKS) and wait.what not in _reported:
            _reported.add(wait.what)
            line = (
                f"ds_seqpar: rank {dist.get_rank()} has waited {PATIENCE:g} s in {wait.what} for {wait.whom()}, which "
                "did not take part in it so far, as all ranks must; it waits on"
            )
            print(line, file=sys.stderr, flush=True)
