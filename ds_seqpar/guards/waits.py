"""Report long waits for other ranks: a line on stderr, once for each kind of wait.

A thread checks the current waits every second, and does nothing else while none is long. A wait costs an entry in
a dict, and at each of its steps an attribute that says whose message it needs next.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

PATIENCE = 60.0  # seconds, within which a long wait is reported
CHECKS = 60  # of the current waits in that time
# (group rank, count): the message that is waited for needs the `count` ranks up to that one. None: unknown
Awaited = tuple[int, int] | None


class Wait:
    """A wait for other ranks.

    Args:
        what: the operation, the subject of a sentence.
        group: the ranks that must take part; None for this rank alone.
    """

    def __init__(self, what: str, group: dist.ProcessGroup | None) -> None:
        self.what, self.group = what, group
        self.awaited: Awaited = None
        self.since = 0.0

    def begin(self) -> None:
        """Register the wait. Call it before the first message is waited for."""
        self.since = time.monotonic()
        _now[id(self)] = self
        _start_thread()

    def end(self) -> None:
        """Unregister the wait. Call it after the last message, or after an error."""
        _now.pop(id(self), None)

    def whom(self) -> str:
        """Return `rank 3`, `one of the 4 ranks up to rank 7`, or `another rank`, by global ranks."""
        if self.awaited is None or self.group is None:
            return "another rank"
        members, (last, count) = dist.get_process_group_ranks(self.group), self.awaited
        return f"rank {members[last]}" if count == 1 else f"one of the {count} ranks up to rank {members[last]}"


call: Any = None  # the call that waits, or is about to


def innermost() -> Wait | None:
    """Return the current wait."""
    return next(reversed([*_now.values()]), None)


_now: dict[int, Wait] = {}  # the current waits, by id
_reported: set[str] = set()


@functools.cache
def _start_thread() -> None:
    threading.Thread(target=_watch, name="ds_seqpar waits", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(PATIENCE / CHECKS)
        _report_long()


def _report_long() -> None:  # in `_watch` its frame would refer to the last wait, and the wait's group, for ever
    for wait in list(_now.values()):
        if time.monotonic() - wait.since >= PATIENCE * (1 - 1 / CHECKS) and wait.what not in _reported:
            _reported.add(wait.what)
            line = (
                f"ds_seqpar: rank {dist.get_rank()} has waited {PATIENCE:g} s in {wait.what} for {wait.whom()}, which "
                "did not take part in it so far, as all ranks must; it waits on"
            )
            print(line, file=sys.stderr, flush=True)
