"""Ranks agree on the order in which they run backward, before they send anything for it.

Each call that communicates has a number, the same on all ranks. Autograd also numbers nodes in the order in which they
are made. So a node is identified by the first call that was made after it: its own call or, for a function whose
backward runs attention again, the first call in the forward. Reentrant checkpoints, head chunks and compiled graphs are
such functions. Ranks compare the calls that identify the nodes that they run: on CPUs before a node's first message, on
accelerators at the latest before `backward` returns. A backward that a node runs inside its own is not compared, since
ranks have agreed on the node.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch.distributed as dist

from ..base import compat
from ..base.errors import SeqParError
from ..core.runtime.seams import Guard, GuardedCall, Inputs
from .agreement import BACKWARD, LEFT_OUT
from .consistency import ConsistencyChecker
from .one_thread import check_thread

MOST_CALLS = 1 << 14  # that are remembered: more than wait for their backward at a time
BACKWARD_CALL = f"backward of attention ({LEFT_OUT})"  # named where a rank does not run it
WHY = (
    "losses come in another order, as those of a set of names do (go through a list, the same on every rank), or one "
    f"leaves a call out ({LEFT_OUT})"
)


class _Call(NamedTuple):
    """A call that communicates."""

    made: int  # the number of autograd's next node when it was made
    number: int  # among the calls of its SequenceParallel
    what: str  # for errors
    layer: int | None  # of a patched model

    @property
    def place(self) -> str:
        """The description of this call in reports."""
        return f"call {self.number}" if self.layer is None else f"layer {self.layer}"


class Calls(Guard):
    """Counts the communicating calls of one SequenceParallel, and orders their backward in the same way on all ranks.

    Args:
        checker: compares values between its ranks.

    Attributes:
        current: the call that communicates or is about to; in a backward, the call whose backward runs.
    """

    def __init__(self, checker: ConsistencyChecker) -> None:
        self.checker, self.count, self.of = checker, 0, (0, tuple[int, ...]())
        self.current: _Call | None = None
        self._calls: list[_Call] = []  # those made outside of a backward, in order
        self._outermost = -1  # the graph task that runs, in which others may run
        self._entered = -1, -1  # graph task and node that were entered last
        self._order: list[_Call] = []  # the calls of nodes that were entered and not compared yet
        groups = checker.groups
        if groups is not None and groups.control is not None:
            self.of = groups.number, tuple(dist.get_process_group_ranks(groups.control))

    def admit(self, inputs: Inputs, error: SeqParError | None) -> SeqParError | None:
        if self.of[1]:
            check_thread()
            self.enter()
        return error

    @contextlib.contextmanager
    def around(self, call: GuardedCall) -> Iterator[None]:
        if call.direction == "forward":
            self.follow(call.title, call.layer, call.sends)
        else:
            self.enter()
        try:
            yield
        finally:
            self.current = None

    def follow(self, name: str, layer: int | None = None, sends: bool = True) -> None:
        """Count a call. Use it in the forward of an autograd function, before anything is sent.

        Args:
            name: name of the call, for errors.
            layer: the layer, if a patched model makes the call.
            sends: whether the forward sends anything; a replay does not.
        """
        if not self.of[1]:
            return
        self.enter(sends)
        self.count += 1
        self.current = call = _Call(compat.next_node(), self.count, name, layer)
        if compat.graph_task() < 0:
            self._outermost = -1  # also where a backward has raised
            if self._calls and self._calls[-1].made > call.made:
                self._calls.clear()  # of another thread, which has nodes of its own
            self._calls.append(call)
            if len(self._calls) > 2 * MOST_CALLS:
                del self._calls[:MOST_CALLS]

    def enter(self, sends: bool = True) -> None:
        """Raise on all ranks, now or at the end of `backward`, unless all run the backward of the same call. Use it in
        each backward, and in each forward that a backward runs again, before anything is sent. Outside a backward it
        does nothing.

        Args:
            sends: whether anything is sent next.

        Raises:
            DisagreementError: on all ranks.
        """
        task = compat.graph_task()
        if task < 0 or not self.of[1]:
            return
        check_thread()
        if self._outermost < 0:
            self._outermost, self._order = task, []
            compat.after_backward(self._leave)
        if task == self._outermost:
            self.current, node = self._current(), compat.number_of(compat.autograd_node())
            if self._entered != (task, node):
                self._entered = task, node
                self._order += [self.current] if self.current else []
        if sends and self._order:
            order, self._order = self._order, []
            outermost, self._outermost = self._outermost, -1  # which it stays where this raises
            calls = {str(place): self._named(call) for place, call in enumerate(order)}
            self.checker.check_deferred(BACKWARD, calls, call=BACKWARD_CALL, advice=lambda by_rank: WHY)
            self._outermost = outermost

    def name_of_current(self) -> str:
        """Return the name of the call whose backward runs, for errors."""
        call = self._current() if compat.graph_task() == self._outermost else None
        return "backward of attention" if call is None else f"backward of {call.what} (call {call.number})"

    def _current(self) -> _Call | None:
        """Return the call that identifies autograd's current node; None if the node was made after all calls."""
        at = bisect.bisect_right(self._calls, compat.number_of(compat.autograd_node()), key=lambda call: call.made)
        return self._calls[at] if at < len(self._calls) else None

    def _named(self, call: _Call) -> str:
        """Return the name by which ranks compare a call. The name counts back from the last call. After a failure,
        ranks may have made different numbers of calls, and equal steps then still have equal names.
        """
        of = f" of SequenceParallel {self.of[0]}" if self.of[0] > 1 else ""  # most programs have one
        last = "the last call" if call.number == self.count else f"the last call but {self.count - call.number}"
        return f"{call.what}{of}, {last}"

    def _leave(self) -> None:
        """End the outermost graph task, before `backward` returns."""
        self._outermost, self._order = -1, []
        if self.checker.defers_on is not None:
            self.checker.flush()
