"""Says for whom a rank waits, where it waits long: a line on stderr, once for each kind of wait.

One thread looks at the waits that go on now, every few seconds. Without long waits that is all it does. A wait is known
by an entry of a dict. Each of its steps says in an attribute whose message comes next.
"""

from __future__ import annotations

import functools
import sys
import threading
import time

import torch.distributed as dist

PATIENCE = 60.0  # seconds, after which a wait is long


class Wait:
    """A wait for other ranks. what: for what, the subject of a sentence. group: of the ranks that must come; None: this
    one alone. awaited: (group rank, count): the message that this rank waits for now needs the `count` ranks up to that
    one to come. None: that is not known."""

    def __init__(self, what: str, group: dist.ProcessGroup | None) -> None:
        self.what, self.group = what, group
        self.awaited: tuple[int, int] | None = None
        self.since = 0.0

    def begin(self) -> None:
        """To be called before the first message is waited for."""
        self.since = time.monotonic()
        _now[id(self)] = self
        _start_thread()

    def end(self) -> None:
        """To be called after the last message, or after an error."""
        _now.pop(id(self), None)

    def whom(self) -> str:
        """`rank 3`, `one of the 4 ranks up to rank 7`, or `another rank`: global ranks."""
        if self.awaited is None or self.group is None:
            return "another rank"
        members, (last, count) = dist.get_process_group_ranks(self.group), self.awaited
        name = f"rank {members[last % len(members)]}"
        return name if count == 1 else f"one of the {count} ranks up to {name}"


_now: dict[int, Wait] = {}  # the waits that go on, by id
_said: set[str] = set()


@functools.cache
def _start_thread() -> None:
    threading.Thread(target=_watch, name="ds_seqpar waits", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(PATIENCE / 8)
        for wait in list(_now.values()):
            if time.monotonic() - wait.since >= PATIENCE and wait.what not in _said:
                _said.add(wait.what)
                print(line_of(wait), file=sys.stderr, flush=True)


def line_of(wait: Wait) -> str:
    """What is said of a long wait."""
    return (
        f"ds_seqpar: rank {dist.get_rank()} has waited {PATIENCE:g} s in {wait.what} for {wait.whom()}, which did not "
        "take part in it so far, as all ranks must; it waits on"
    )
