"""A guard is one class: an observer of walks that is told of every instruction, and may end a call."""

import torch

from ds_seqpar.base.errors import InputError
from ds_seqpar.core.compiler.program import instructions as op
from ds_seqpar.core.runtime.walk import Observer
from tests.dist.ranks import lacking, make, refusal
from tests.launch import on_each_of


class Traffic(Observer):
    """Counts what a rank sends, and refuses more messages than it may send in a call."""

    def __init__(self, most):
        self.most, self.calls = most, []

    def begin(self, walk):
        self.sent = 0
        return walk.program.direction == "forward"

    def before(self, walk, instruction):
        if isinstance(instruction, op.Post):
            self.sent += len(instruction.sends)
            if self.sent > self.most:
                raise InputError(f"a call may send {self.most} messages; got one more")

    def end(self, walk, results):
        self.calls.append((self.sent, None if results is None else len(results)))


@on_each_of(2)
def test_an_observer_is_told_of_a_walk_and_may_end_it():
    sp, traffic = make(size=2, ulysses=1, schedule="ring"), Traffic(1)
    sp.runtime.observers.append(traffic)
    q = torch.randn(1, 8, 4, 16, requires_grad=True)
    sp.attention(q, q, q).sum().backward()  # backward is not looked at
    ((sent, results),) = traffic.calls
    assert sent == 1
    assert results > 1
    traffic.most = 0
    assert lacking(refusal(sp.attention, q, q, q), "InputError", "may send 0 messages") == []
    assert traffic.calls[1:] == [(1, None)]
    sp.runtime.observers.remove(traffic)
    sp.attention(q, q, q)
    assert len(traffic.calls) == 2
