"""A guard is one class: it is told of every call, before and around it, and may refuse one on all ranks."""

import contextlib
from collections import Counter

import torch

from ds_seqpar.base.errors import InputError
from ds_seqpar.core.compiler.sharding.masks import CAUSAL
from ds_seqpar.core.runtime.admit import AttentionOptions
from ds_seqpar.core.runtime.seams import Guard
from tests.dist.ranks import WRONG, lacking, make, refusal
from tests.launch import on_each_of


class Traffic(Guard):
    """Counts calls and the bytes that arrive in them, by direction and layer, and refuses a length."""

    def __init__(self, comm, forbidden):
        self.comm, self.forbidden = comm, forbidden
        self.calls, self.received = Counter(), Counter()

    def admit(self, inputs, error):
        length = inputs.operands["q"].shape[1]
        return InputError(f"a call needs other than {length} tokens") if length == self.forbidden else error

    @contextlib.contextmanager
    def around(self, call):
        before = self.comm.received_bytes
        yield
        self.calls[call.direction, call.layer] += 1
        self.received[call.direction, call.layer] += self.comm.received_bytes - before


@on_each_of(2)
def test_a_guard_is_told_of_calls_by_layer_and_refuses_one_on_all_ranks():
    sp = make(size=2, ulysses=1, schedule="ring")
    traffic = Traffic(sp.comm, forbidden=16 if sp.rank == WRONG else None)
    sp.runtime.guards.insert(0, traffic)  # before the guard by which ranks agree
    q = torch.randn(1, 8, 4, 16, requires_grad=True)
    for layer in (0, 1, 1):
        sp.attention_agreed(q, q, q, AttentionOptions(CAUSAL, None, None, layer=layer))
    sp.attention(q, q, q).sum().backward()
    assert traffic.calls == {("forward", 0): 1, ("forward", 1): 2, ("forward", None): 1, ("backward", None): 1}
    assert traffic.received["forward", 1] == 2 * traffic.received["forward", 0] > 0
    assert traffic.received["backward", None] > traffic.received["forward", None]
    longer = torch.randn(1, 16, 4, 16)
    kind = "InputError" if sp.rank == WRONG else "DisagreementError"
    assert lacking(refusal(sp.attention, longer, longer, longer), kind, "other than 16 tokens") == []
    assert sum(traffic.calls.values()) == 5
    sp.runtime.guards.remove(traffic)
    sp.attention(longer, longer, longer)
    assert sum(traffic.calls.values()) == 5
