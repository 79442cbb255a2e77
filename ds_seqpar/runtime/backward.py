"""Ranks agree on what runs backward, and in which order, before anything of it is sent.

Autograd runs a graph task for each call of `backward` or `grad`. It runs those nodes of a task that are ready by their
sequence numbers, the latest first. So ranks that have the same nodes run them in the same order. They compare once for
each task: at the first node that communicates, on the numbers of all such nodes that the task will run.

A node is identified by the number of the call that was made in its forward. It may be attention's own, or that of a
function around it whose backward runs attention again, as reentrant checkpoints, head chunks and compiled graphs do.
What such a node's backward runs was agreed on with the node.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections import deque
from types import FrameType

import torch.distributed as dist
from torch.autograd.function import BackwardCFunction

from .. import compat
from . import waits
from .agreement import BACKWARD, LEFT_OUT, Compared, Fields, digest_of
from .consistency import ConsistencyChecker
from .groups import check_thread
from .mismatch_hints import of_backward


@dataclasses.dataclass(eq=False)
class _Call:
    """A call that communicates in backward."""

    of: tuple[int, tuple[int, ...]]  # number of its SequenceParallel, and the ranks that share it
    number: int  # among the calls of that SequenceParallel
    what: str  # for errors
    shape: tuple[int, ...]  # for errors
    inside: bool  # whether a node that ranks agreed on made it, to run its backward at once
    layer: int | None = None  # of a patched model
    task: int = -1  # the graph task that runs it, or ran it last

    @property
    def place(self) -> str:
        """What it is to a reader of a report."""
        return f"call {self.number}" if self.layer is None else f"layer {self.layer}"

    def named(self, last: int) -> str:
        """Return its name in errors, which is unique among the `last` calls."""
        shape = f", of {tuple(self.shape)}" if self.shape else ""
        of = f", of SequenceParallel {self.of[0]}" if self.of[0] > 1 else ""  # most programs have one
        return f"{self.what} (call {self.number} of {last}{shape}{of})"


@dataclasses.dataclass
class _Task:
    """The graph task that ranks agreed on last."""

    number: int = -1
    left: deque[_Call] = dataclasses.field(default_factory=deque)  # its calls that did not run yet, in order


_calls: weakref.WeakKeyDictionary[BackwardCFunction, _Call] = weakref.WeakKeyDictionary()  # by the node that runs it
_agreed = _Task()


class Calls:
    """Counts the calls of one SequenceParallel that communicate, the same on all its ranks.

    Args:
        checker: what its ranks compare.

    Attributes:
        layer: which layer of a patched model makes the next call, where that is known.
    """

    def __init__(self, checker: ConsistencyChecker) -> None:
        self.checker, self.count, self.of = checker, 0, (0, tuple[int, ...]())
        self.layer: int | None = None
        groups = checker.groups
        if groups is not None and groups.control is not None:
            self.of = groups.number, tuple(dist.get_process_group_ranks(groups.control))

    def follow(self, name: str, shape: tuple[int, ...] = ()) -> None:
        """Count a call, and associate it with the nodes in whose forward this is. Call it before anything is sent.

        Args:
            name: of the call, for errors.
            shape: of its tensor, for errors.
        """
        layer, self.layer = self.layer, None
        if not self.of[1]:
            return
        inside = self.run_again()
        self.count += 1
        waits.call = call = _Call(self.of, self.count, name, shape, inside, layer)
        for node in _nodes_around(sys._getframe(1)):
            _calls.setdefault(node, call)

    def run_again(self) -> bool:
        """Call `enter` if this is in a backward, which makes a call again as a checkpoint's does.

        Call it before the call sends anything.

        Returns:
            Whether ranks agreed on the node that makes the call.
        """
        if compat.graph_task() < 0:
            return False
        self.enter()
        return _current() is not None

    @staticmethod
    def name_of_current() -> str:
        """Return the name of the call whose backward runs, for errors."""
        call = _current()
        return "backward of attention" if call is None else f"backward of {call.what} (call {call.number})"

    def enter(self, again: bool = False, overlap: bool = False) -> None:
        """Raise on all ranks unless all are about to run the same calls' backward, in one order.

        It sends only where the graph task was not agreed on, or where nodes run in another order than was agreed on.
        Call it in each backward before that sends anything.

        Args:
            again: agree even where that was done.
            overlap: as for `ConsistencyChecker.note`.

        Raises:
            DisagreementError: on all ranks.
        """
        if not self.of[1]:
            return
        check_thread()
        task, call = compat.graph_task(), _current()
        waits.call = call
        if call is not None and (call.inside or call.task == task):
            call.inside, call.task = False, task
            return
        is_agreed = task == _agreed.number and (call is None or (bool(_agreed.left) and _agreed.left[0] is call))
        if again or not is_agreed:
            calls = [other for other in self._to_run(task) if other is not call]
            order = _Order(calls if call is None else [call, *calls], self.count)
            self.checker.check_deferred(BACKWARD, order, call=BACKWARD_CALL, advice=of_backward, overlap=overlap)
            self.checker.flush_after_backward()
            _agreed.number, _agreed.left = task, deque(order.calls)
        if call is not None:
            call.task = task
            _agreed.left.popleft()

    def _to_run(self, task: int) -> list[_Call]:
        """Return the calls that the current graph task will run, in order, without those of other ranks' groups."""
        candidates = [(node, call) for node, call in _calls.items() if call.of[1] == self.of[1] and not call.inside]
        numbered = [
            (compat.sequence_number(node), call)
            for node, call in candidates
            if call.task != task and compat.will_be_executed(node)
        ]
        return [call for _, call in sorted(numbered, key=lambda item: item[0], reverse=True)]


BACKWARD_CALL = f"backward of attention ({LEFT_OUT})"  # named where a rank does not run it


class _Order(Compared):
    """Calls in the order of their backward, as ranks compare them. last: the number of the last call."""

    def __init__(self, calls: list[_Call], last: int) -> None:
        self.name, self.calls, self.last = BACKWARD, calls, last
        # counted back from the last call, so that steps alike have digests alike
        self.digest = digest_of(BACKWARD, [(call.of[0], last - call.number) for call in calls])

    @property
    def fields(self) -> Fields:
        """The place of each call in the order, by its name."""
        names = [call.named(self.last) for call in self.calls]
        return {name: f"as number {place}" if place > 1 else "first" for place, name in enumerate(names, 1)}


def _current() -> _Call | None:
    """Return the call whose backward autograd's current node runs."""
    node = compat.autograd_node()
    return _calls.get(node) if isinstance(node, BackwardCFunction) else None


def _nodes_around(frame: FrameType | None) -> list[BackwardCFunction]:
    """Return the nodes of all autograd functions in whose forward a frame is.

    Where gradients are off, the innermost ones are not those that will be run.
    """
    nodes = []
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            node = frame.f_locals["ctx"]
            nodes += [node] if isinstance(node, BackwardCFunction) else []
        frame = frame.f_back
    return nodes
