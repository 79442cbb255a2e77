"""Ranks that are about to do different things, in the first, a middle or the last call of a step: all of them raise the
sentence that says so, in every mode of agreement, and the same groups go on."""

import gc

import pytest
import torch

from ds_seqpar.compiler.sharding.masks import Mask
from ds_seqpar.errors import InputError
from ds_seqpar.runtime.comm import TorchComm
from ds_seqpar.runtime.journal import MOST_KNOWN, MOST_NOTED, Journal
from tests import oracle
from tests.dist.ranks import SECONDS, WRONG, attention_error, lacking, make, refusal
from tests.launch import on_each_of

CALLS = 3  # of a step


def attend(sp, tokens=8, heads=(4, 2), batch=1, dtype=torch.float64, grad=True, change=None, **options):
    q, k, v = (x.requires_grad_(grad) for x in oracle.tensors(batch, tokens, heads, dtype=dtype)[:3])
    return sp.attention(change(q) if change else q, k, v, **options)


def uneven(sp):
    placement = sp.place(15, (7, 8))
    tokens = len(placement.positions(sp.config.ulysses, sp.rank))
    return attend(sp, tokens, mask=placement.mask, shards=placement.shards)


# name -> (what the wrong rank does in place of a call, words of the sentence)
INSTEAD = {
    "shape": (lambda sp: attend(sp, tokens=16), ("attention inputs", "(1, 16, 4, 8)")),
    "dtype": (lambda sp: attend(sp, dtype=torch.float32), ("attention inputs", "float32")),
    "mask": (lambda sp: attend(sp, mask=Mask(window=3)), ("attention inputs", "mask", "window 3")),
    "batch": (lambda sp: attend(sp, batch=2), ("attention inputs", "(2, 8, 4, 8)")),
    "heads": (lambda sp: attend(sp, heads=(8, 2)), ("attention inputs", "(1, 8, 8, 8)")),
    "layout": (uneven, ("attention inputs", "a placement was left out")),
    "no gradients": (torch.no_grad()(attend), ("attention inputs", "backward False")),
    "checkpoint": (lambda sp: sp.checkpoint(attend, sp), ("attention inputs", "checkpoint 'first run'")),
    "another call": (lambda sp: sp.gather(torch.zeros(8), 0), ("calls", "tensor to gather")),
}
# and those that let the wrong rank go on; the others find it in another call or at the end of the step
SHIFTED = {
    "a missing call": (lambda sp: None, CALLS),
    "a call too many": (lambda sp: attend(sp) + attend(sp), CALLS + 1),
}


def step(sp, place=None, instead=None):
    """A step of a model, in which the wrong rank does something else in place of a call."""
    outs = [(instead if number == place and sp.rank == WRONG else attend)(sp) for number in range(CALLS)]
    loss = sum(out.sum() for out in outs if out is not None and out.requires_grad)
    loss.backward()
    sp.mean_loss(loss.detach())


def another_order(sp):
    losses = [attend(sp).sum() for _ in range(CALLS)]
    for loss in losses[:: -1 if sp.rank == WRONG else 1]:
        loss.backward()


def left_out(sp):
    loss = attend(sp).sum()
    (torch.zeros((), requires_grad=True) if sp.rank == WRONG else loss).backward()
    sp.mean_loss(loss.detach())


def another_batch_after_backward(sp):
    attend(sp).sum().backward()
    attend(sp, tokens=8 + 8 * (sp.rank == WRONG)).sum().backward()


def plants(words_of):
    """(name, what every rank does, what it is told) of each disagreement. words_of: of the number of a call."""
    for place in range(CALLS):
        for name, (instead, words) in INSTEAD.items():
            told = "DisagreementError", *words, *words_of(place + 1)
            yield f"{name} in call {place}", lambda sp, x=instead, at=place: step(sp, at, x), told
        for name, (instead, number) in SHIFTED.items():
            told = "DisagreementError", "calls", "backward", *words_of(number)
            yield f"{name} in call {place}", lambda sp, x=instead, at=place: step(sp, at, x), told
        error = lambda sp: attend(sp, change=lambda q: q[0])  # noqa: E731
        yield f"an error in call {place}", lambda sp, x=error, at=place: step(sp, at, x), "an error"
    yield "losses in another order", another_order, ("DisagreementError", "backward", "another order")
    yield "a loss without attention", left_out, ("DisagreementError", "calls", "0 * out.sum()")
    yield "another shape after backward", another_batch_after_backward, ("DisagreementError", "(1, 16, 4, 8)")


ERROR = "attention needs q, k and v of shape", "q (8, 4, 8)"


def assert_told(sp, words_of=lambda number: ()):
    """Every rank is told of every disagreement, and a right step follows."""
    wrong = {}
    for name, plant, told in plants(words_of):
        if told == "an error":
            told = ("InputError", *ERROR) if sp.rank == WRONG else ("DisagreementError", "rank 1 cannot go on", *ERROR)
        refused = refusal(plant, sp)
        if lacking(refused, *told):
            wrong[name] = refused
        step(sp)
        sp.journal.settle(last=True)
    assert wrong == {}


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("agreement", ["auto", "deferred", "always"])
@on_each_of(2, timeout=SECONDS)
def test_every_rank_is_told_before_anything_is_computed_of_it(agreement, ulysses):
    sp = make(agreement=agreement, ulysses=ulysses)
    assert_told(sp)
    assert attention_error(sp) < 1e-10
