"""Ranks agree on what runs backward, and in which order, before anything of it is sent.

Autograd runs a graph task for each call of `backward` or `grad`. It runs the nodes of a task that are ready by their
sequence numbers, the latest first. So ranks that have the same nodes run them in the same order. They compare once for
each task: at the first node that communicates, on the numbers of all those that the task will run.

A node is known by the number of the call that was made in its forward. It may be attention's own, or that of a function
around it whose backward runs attention again, as reentrant checkpoints, head chunks and compiled graphs do. What
such a node's backward runs was agreed on with the node.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction

from .agreement import BACKWARD, LEFT_OUT, Compared, Fields, assert_ranks_agree, digest_of
from .groups import Groups, check_thread


@dataclasses.dataclass(eq=False)
class _Call:
    """A call that communicates in backward. of: the number of its SequenceParallel, and the ranks that share it.
    number: among the calls of that. what, shape: for errors. inside: whether a node that ranks agreed on made it, to
    run its backward at once. task: the graph task that runs it, or ran it last."""

    of: tuple[int, tuple[int, ...]]
    number: int
    what: str
    shape: tuple[int, ...]
    inside: bool
    task: int = -1

    def named(self, last: int) -> str:
        """Its name in errors, among `last` calls; another one for each call."""
        shape = f", of {tuple(self.shape)}" if self.shape else ""
        of = f", of SequenceParallel {self.of[0]}" if self.of[0] > 1 else ""  # most programs have one
        return f"{self.what} (call {self.number} of {last}{shape}{of})"


@dataclasses.dataclass
class _Task:
    """The graph task that ranks agreed on last. left: its calls that are still to come, in order."""

    number: int = -1
    left: deque[_Call] = dataclasses.field(default_factory=deque)


_calls: weakref.WeakKeyDictionary[BackwardCFunction, _Call] = weakref.WeakKeyDictionary()  # by the node that runs it
_agreed = _Task()


class Calls:
    """Counts the calls of one SequenceParallel that communicate, the same on all its ranks. groups: None for ranks of
    one process, which need not agree."""

    def __init__(self, groups: Groups | None) -> None:
        self.groups, self.count, self.of = groups, 0, (0, tuple[int, ...]())
        if groups is not None and groups.control is not None:
            self.of = groups.number, tuple(dist.get_process_group_ranks(groups.control))

    def follow(self, what: str, shape: tuple[int, ...] = ()) -> None:
        """Counts a call, before it sends anything, and remembers it for the nodes in whose forward this is."""
        if not self.of[1]:
            return
        inside = self.run_again()
        self.count += 1
        call = _Call(self.of, self.count, what, shape, inside)
        for node in _nodes_around(sys._getframe(1)):
            _calls.setdefault(node, call)

    def run_again(self) -> bool:
        """In a backward that makes a call again, as a checkpoint's does, `enter`. Returns whether ranks agreed on the
        node that makes it. To be called before that call sends anything."""
        if torch._C._current_graph_task_id() < 0:
            return False
        self.enter()
        return _current() is not None

    def enter(self, again: bool = False) -> None:
        """Raises DisagreementError on all ranks unless all are about to run the same calls' backward, in one order. It
        sends only where the graph task was not agreed on, or where nodes come in another order than was agreed on.

        To be called in each backward before it sends anything. again: agree even where that was done."""
        if self.groups is None or not self.of[1]:
            return
        check_thread()
        task, call = torch._C._current_graph_task_id(), _current()
        if call is not None and (call.inside or call.task == task):
            call.inside, call.task = False, task
            return
        known = task == _agreed.number and (call is None or (bool(_agreed.left) and _agreed.left[0] is call))
        if again or not known:
            calls = [one for one in self._to_run(task) if one is not call]
            order = _Order(calls if call is None else [call, *calls], self.count)
            with torch._C._DisableTorchDispatch():  # a selective checkpoint would look for this among what it saved
                assert_ranks_agree(self.groups.control, BACKWARD, order, call=BACKWARD_CALL, advice=_advice)
            _agreed.number, _agreed.left = task, deque(order.calls)
        if call is not None:
            call.task = task
            _agreed.left.popleft()

    def _to_run(self, task: int) -> list[_Call]:
        """The calls that the current graph task will run, in order. Those of other ranks are left out."""
        mine = [(node, call) for node, call in _calls.items() if call.of[1] == self.of[1] and not call.inside]
        will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
        runs = [(node._sequence_nr(), call) for node, call in mine if call.task != task and will_run(node)]
        return [call for _, call in sorted(runs, key=lambda one: one[0], reverse=True)]


BACKWARD_CALL = f"backward of attention ({LEFT_OUT})"  # where a rank does not come


class _Order(Compared):
    """Calls in the order of their backward, as ranks compare them. last: the number of the last call."""

    def __init__(self, calls: list[_Call], last: int) -> None:
        self.calls, self.last = calls, last
        self.digest = digest_of(BACKWARD, [(call.of[0], call.number) for call in calls])

    @property
    def fields(self) -> Fields:
        """The place of each call."""
        names = [call.named(self.last) for call in self.calls]
        return {name: f"as number {place}" if place > 1 else "first" for place, name in enumerate(names, 1)}


def _advice(given: Mapping[int, Fields]) -> str:
    from .mismatch_hints import of_backward  # here: few runs have ranks that differ

    return of_backward(given)


def _current() -> _Call | None:
    """The call whose backward autograd's current node runs."""
    node = torch._C._current_autograd_node()
    return _calls.get(node) if isinstance(node, BackwardCFunction) else None


def _nodes_around(frame: FrameType | None) -> list[BackwardCFunction]:
    """The nodes of all autograd functions in whose forward a frame is. Where gradients are off, the innermost ones are
    not those that will be run."""
    nodes = []
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            node = frame.f_locals["ctx"]
            nodes += [node] if isinstance(node, BackwardCFunction) else []
        frame = frame.f_back
    return nodes
