"""Make ranks agree on the order of their backward passes before any backward pass sends anything.

Each communicating call has a number that is the same on all ranks. Autograd numbers nodes in the order of creation. A
node is therefore identified by the first call made after the node was created, which is usually the node's own call.
Some functions run attention again in the backward pass, such as reentrant checkpoints, head chunks and compiled graphs.
A node of such a function is identified by the first call in the function's forward pass. Ranks compare the calls that
identify the nodes that they run. On CPUs, ranks compare calls before a node's first message. On accelerators, ranks
compare calls at the latest before `backward` returns. A backward pass that runs inside a node's own backward pass is
not compared, because ranks have already agreed on the node.
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

MOST_CALLS = 1 << 14  # maximum number of remembered calls, more than are waiting for their backward pass at any time
BACKWARD_CALL = f"backward of attention ({LEFT_OUT})"  # shown in errors if a rank does not run the backward pass
WHY = (
    "losses come in another order, as those of a set of names do (go through a list, the same on every rank), or one "
    f"leaves a call out ({LEFT_OUT})"
)


class _Call(NamedTuple):
    """A call that communicates."""

    made: int  # number that autograd would have given to a node created at the time of the call
    number: int  # number of the call within its SequenceParallel
    what: str  # name in errors
    layer: int | None  # layer in a patched model

    @property
    def place(self) -> str:
        """The description of the call in reports."""
        return f"call {self.number}" if self.layer is None else f"layer {self.layer}"


class Calls(Guard):
    """Guard that counts the communicating calls of one SequenceParallel and checks the order of their backward passes.

    All ranks must run the calls' backward passes in the same order.

    Args:
        checker: Compares values across ranks.

    Attributes:
        current: The call that is communicating or about to communicate. In a backward pass, this is the call to which
            the backward pass belongs.
    """

    def __init__(self, checker: ConsistencyChecker) -> None:
        self.checker, self.count, self.of = checker, 0, (0, tuple[int, ...]())
        self.current: _Call | None = None
        self._calls: list[_Call] = []  # calls made outside backward passes, in order
        self._outermost = -1  # outermost running graph task; other graph tasks may run inside it
        self._entered = -1, -1  # graph task and node that were entered last
        self._order: list[_Call] = []  # calls of entered nodes that have not been compared yet
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
        """Count a call. Call `follow` in the forward pass of an autograd function, before anything is sent.

        Args:
            name: Name of the call in errors.
            layer: Number of the layer, if a patched model makes the call.
            sends: Whether the forward pass sends anything. The forward pass of a replay sends nothing.
        """
        if not self.of[1]:
            return
        self.enter(sends)
        self.count += 1
        self.current = call = _Call(compat.next_node(), self.count, name, layer)
        if compat.graph_task() < 0:
            self._outermost = -1  # also reset after a backward pass that raised an error
            if self._calls and self._calls[-1].made > call.made:
                self._calls.clear()  # calls of another thread, whose nodes are numbered separately
            self._calls.append(call)
            if len(self._calls) > 2 * MOST_CALLS:
                del self._calls[:MOST_CALLS]

    def enter(self, sends: bool = True) -> None:
        """Raise an error on all ranks unless all ranks run the backward pass of the same call.

        The error is raised immediately or at the end of `backward`. Call `enter` before anything is sent, in each
        backward pass and in each forward pass that a backward pass runs again. Outside backward passes, `enter` has no
        effect.

        Args:
            sends: Whether anything is sent next.

        Raises:
            DisagreementError: Raised on all ranks if ranks run the backward passes of different calls.
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
            outermost, self._outermost = self._outermost, -1  # stays reset if the check raises an error
            calls = {str(place): self._named(call) for place, call in enumerate(order)}
            self.checker.check_deferred(BACKWARD, calls, call=BACKWARD_CALL, advice=lambda by_rank: WHY)
            self._outermost = outermost

    def name_of_current(self) -> str:
        """Return the name, for errors, of the call whose backward pass is running."""
        call = self._current() if compat.graph_task() == self._outermost else None
        return "backward of attention" if call is None else f"backward of {call.what} (call {call.number})"

    def _current(self) -> _Call | None:
        """Return the call that identifies autograd's current node, or None if the node was created after all calls."""
        at = bisect.bisect_right(self._calls, compat.number_of(compat.autograd_node()), key=lambda call: call.made)
        return self._calls[at] if at < len(self._calls) else None

    def _named(self, call: _Call) -> str:
        """Return the name under which ranks compare a call.

        The name counts back from the last call. Ranks may have made different numbers of calls after a failure, but
        equal steps must still have equal names.
        """
        # most user programs have a single SequenceParallel
        of = f" of SequenceParallel {self.of[0]}" if self.of[0] > 1 else ""
        last = "the last call" if call.number == self.count else f"the last call but {self.count - call.number}"
        return f"{call.what}{of}, {last}"

    def _leave(self) -> None:
        """End the outermost graph task before `backward` returns."""
        self._outermost, self._order = -1, []
        if self.checker.defers_on is not None:
            self.checker.flush()
