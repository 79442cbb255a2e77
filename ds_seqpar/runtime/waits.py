"""Report long waits for other ranks: a line on stderr, once for each kind of wait.

A thread checks the current waits every second, and does nothing else while none is long. A wait costs an entry in
a dict, and at each of its steps an attribute that says whose message it needs next.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import SeqParError

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
        ranks = self.ranks()
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"one of the {len(ranks)} ranks up to rank {ranks[0]}"

    def ranks(self) -> list[int]:
        """Return the global ranks of which any may be awaited, the last first."""
        members = [] if self.group is None else dist.get_process_group_ranks(self.group)
        if self.awaited is None:
            return [rank for rank in members if rank != dist.get_rank()]
        return [members[(self.awaited[0] - before) % len(members)] for before in range(self.awaited[1])]


walk: Any = None  # the Walk that runs
walks = 0  # how many have ended well
call: Any = None  # the call that it belongs to, or that is about to make one
ended: SeqParError | None = None  # why the watchdog ends this process


class Launched(NamedTuple):
    """A walk that has ended on the host, and may not have on the device. It refers to no tensor."""

    event: Any  # of the device, at its end
    program: Any
    call: Any  # as `call` was
    number: int  # as `walks` was
    batches: list[Any]  # of each wait, the works of its messages; None: of a collective, whose work refers to tensors
    comm: Any  # a weak reference to the transport


# those that nobody has seen to end, the oldest first; None: nobody looks
launched: deque[Launched] | None = None
MOST_LAUNCHED = 4096


def mark_end(device: torch.device, program: Any, batches: list[Any], comm: Any) -> None:
    """Let the watchdog see when a device has done a walk. The arguments: as of `Launched`."""
    if launched is not None:
        event = torch.get_device_module(device).current_stream(device).record_event()
        launched.append(Launched(event, program, call, walks, batches, weakref.ref(comm)))


def oldest_open() -> Launched | None:
    """Return the first walk that a device has not come to the end of."""
    while launched:
        try:
            if not launched[0].event.query():
                return launched[0]
        except RuntimeError:  # the device has failed, as its next user is told
            launched.clear()
            return None
        launched.popleft()
    return None


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
            print(line_of(wait), file=sys.stderr, flush=True)


def line_of(wait: Wait) -> str:
    """Return the line that reports a long wait."""
    return (
        f"ds_seqpar: rank {dist.get_rank()} has waited {PATIENCE:g} s in {wait.what} for {wait.whom()}, which did not "
        "take part in it so far, as all ranks must; it waits on"
    )
