"""Ranks that are about to do different things, in the first, a middle or the last call of a step: all of them raise the
sentence that says so, compared now or at the step's end, and the same groups go on."""

import gc
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_seqpar.base.errors import ConfigError, InputError
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.runtime.admit import COMPARED
from ds_seqpar.core.runtime.kernels import KERNELS
from ds_seqpar.guards import consistency
from ds_seqpar.guards.agreement import assert_ranks_agree, together
from ds_seqpar.guards.consistency import ConsistencyChecker
from tests import oracle
from tests.dist.ranks import SECONDS, WRONG, attention_error, lacking, make, on_devices, refusal
from tests.launch import on_each_of
from tests.words import missing

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
    # EasyContext#47: backward shapes differed where the chunks of ranks were unequal
    "shape": (lambda sp: attend(sp, tokens=16), (COMPARED, "(1, 16, 4, 8)")),
    "dtype": (lambda sp: attend(sp, dtype=torch.float32), (COMPARED, "float32")),
    "mask": (lambda sp: attend(sp, mask=Mask(window=3)), (COMPARED, "mask", "window 3")),
    "batch": (lambda sp: attend(sp, batch=2), (COMPARED, "(2, 8, 4, 8)")),
    "heads": (lambda sp: attend(sp, heads=(8, 2)), (COMPARED, "(1, 8, 8, 8)")),
    "layout": (uneven, (COMPARED, "a placement was left out")),
    "no gradients": (torch.no_grad()(attend), (COMPARED, "backward False")),
    "checkpoint": (lambda sp: sp.checkpoint(attend, sp), (COMPARED, "checkpoint 'first run'")),
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
            told = "DisagreementError", *words, *(words_of(place + 1) if words[0] == COMPARED else ())
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
    """Every rank is told of every disagreement, and a right call follows."""
    wrong = {}
    for name, plant, told in plants(words_of):
        if told == "an error":
            told = ("InputError", *ERROR) if sp.rank == WRONG else ("DisagreementError", "rank 1 cannot go on", *ERROR)
        refused = refusal(plant, sp)
        if lacking(refused, *told):
            wrong[name] = refused
        attend(sp)
        sp.checker.flush(last=True)
    step(sp)
    assert wrong == {}, wrong


@pytest.mark.parametrize("ulysses", [1, pytest.param(2, marks=pytest.mark.slow)])
@on_each_of(2, timeout=SECONDS)
def test_every_rank_is_told_before_anything_is_computed_of_it(ulysses):
    sp = make(ulysses=ulysses)
    assert_told(sp)
    counts = sp.comm.parts_of_all(torch.tensor([sp.calls.count]), "the counts")  # by which errors name calls
    assert len(counts.unique()) == 1
    assert attention_error(sp) < 1e-10


@pytest.mark.parametrize("known", [False, True])
@on_each_of(2, timeout=SECONDS)
def test_every_rank_is_told_by_the_end_of_the_step(known):
    """Of calls unlike all before in that call, and of those that were known at the end of backward."""
    sp = on_devices()
    step(sp)
    for instead, _ in INSTEAD.values() if known else ():
        for _ in range(2):
            instead(sp)
    sp.checker.flush()
    assert_told(sp, lambda number: [f"(call {number} of the step)"])


def compared(of):
    """Of what a ConsistencyChecker does from now on, a list of how many calls each comparison of ranks had."""
    compare, found = of._compare, []

    def counted(*args):
        found.append(len(of._entries) + 1)
        compare(*args)

    of._compare = counted
    return found


@on_each_of(2, timeout=SECONDS)
def test_hosts_wait_for_one_another_once_a_step():
    """In which layers are of two kinds, with checkpoints that attend again; without a backward after many calls."""
    sp = on_devices(recompute_attention=True)

    def loss():
        layers = [{"causal": True}, {"mask": Mask(window=3)}] * 2
        outs = [attend(sp, **options) for options in layers]
        outs += [sp.checkpoint(attend, sp, **options) for options in layers[:2]]
        x = torch.zeros(1, requires_grad=True)
        outs.append(sp.checkpoint(lambda x: attend(sp) + x, x, use_reentrant=True))
        return sum(out.sum() for out in outs)

    loss().backward()
    found = compared(sp.checker)
    for _ in range(3):
        loss().backward()
        sp.mean_loss(torch.ones(()))
    assert found == [found[0]] * 3, found
    found.clear()
    with torch.no_grad(), mock.patch.object(consistency, "MOST_DEFERRED", 8):
        for _ in range(9):
            attend(sp)
    assert found == [1, 9]
    sp.checker.flush()
    assert len(found) == 2


@on_each_of(2, timeout=SECONDS)
def test_what_is_noted_is_what_all_ranks_know():
    """However many values there were since."""
    sp = on_devices()
    found = compared(sp.checker)
    with mock.patch.object(consistency, "MOST_KNOWN", 8):
        for number in (*range(9), 1, 0):
            sp.checker.check_deferred("number", number)
    assert len(found) == 10  # of 1 all knew
    for value in (0, 1, 0, 1):  # beside 0, 0, 0, 0
        sp.checker.check_now("rounded", value * (sp.rank == WRONG), advice=lambda by_rank: None)
    assert len(found) == 14


@on_each_of(4, timeout=SECONDS)
def test_what_one_group_noted_is_compared_before_all_ranks_compare_anything():
    """Else some of its ranks would wait there, and the others here."""
    sp = on_devices(size=2)
    for causal in (True, False):
        attend(sp, causal=causal)
    sp.checker.flush()
    attend(sp, causal=sp.data_rank == 0 or sp.rank == WRONG)
    if sp.data_rank:
        found = refusal(assert_ranks_agree, sp.control_world, "number", 0)
        assert lacking(found, "DisagreementError", "the same attention inputs", "rank 2: causal False") == []


def reads(sp, value, wrong=None):
    """The greatest number of any rank, if all read the value and none of them raises."""
    with together(sp.control_world, "reading", "what is read", passing=(KeyError,)) as agreed:
        if wrong is not None and sp.rank == WRONG:
            raise wrong
        agreed.value, agreed.number = value, sp.rank
    return agreed.number


@on_each_of(2, timeout=SECONDS)
def test_what_one_rank_raises_in_a_block_all_raise_at_its_end():
    sp = make()
    assert reads(sp, 1) == 1
    found = refusal(reads, sp, 1, ValueError("no such file. And more"))
    words = "reading failed, ValueError: no such file"
    assert (
        lacking(found, *(("InputError", words) if sp.rank == WRONG else ("DisagreementError", "cannot", words))) == []
    )
    found = refusal(reads, sp, 1, ConfigError("needs a file; got none"))
    assert found[0] == ("ConfigError" if sp.rank == WRONG else "DisagreementError")
    assert "needs a file; got none" in found[1]
    assert lacking(refusal(reads, sp, sp.rank), "DisagreementError", "the same what is read", "rank 1: ") == []
    if sp.rank == WRONG:  # it does not wait for the others, nor they for it
        with pytest.raises(KeyError):
            reads(sp, 1, KeyError())
    assert reads(sp, 1) == 1


def look(sp, again):
    if again:
        sp.checker.check_deferred("batch", 1)
    sp.checker.flush(last=True)


@on_each_of(2, timeout=SECONDS)
def test_what_a_tensor_holds_is_judged_in_the_next_call_of_its_kind_and_at_last_at_the_end():
    for notes in (None, "cpu"):
        sp = make()
        its, is_wrong = sp.checker, sp.rank == WRONG
        its.defers_on = notes
        judges = {
            "its own error": (lambda x: InputError(f"needs 0; got {int(x)}") if int(x) else {}, "needs 0; got 1"),
            "what all must have": (lambda x: {"token": int(x)}, f"rank 0: token 0; rank {WRONG}: token 1"),
        }
        for judge, words in judges.values():
            for again in (True, False):
                its.check_deferred("batch", 1)
                its.check_values(torch.tensor(int(is_wrong)), judge)
                its.check_deferred(COMPARED, 2)
                kind, sentence = refusal(look, sp, again)
                assert words in sentence, kind
                its.check_deferred("batch", 1)
                its.check_values(torch.tensor(0), judge)
                its.check_deferred("batch", 1)
                its.flush(last=True)


def test_what_nobody_looked_at_is_printed_at_the_end(capsys):
    """Which is that of the ConsistencyChecker, or of the interpreter."""
    one = ConsistencyChecker(None)
    one.check_values(torch.tensor(1), lambda x: InputError(f"needs 0; got {int(x)}"))
    one.check_values(torch.tensor(0), lambda x: {"token": int(x)})
    del one
    gc.collect()
    assert missing(capsys.readouterr().err, "needs 0; got 1") == []


@on_each_of(2)
def test_ranks_that_would_choose_other_kernels_are_told_unless_one_is_named():
    chunked = KERNELS["chunked"]
    if dist.get_rank():
        chunked.reasons = lambda spec: ["is not installed here"]
    try:
        kind, sentence = refusal(make)
        make(kernel="cpu_flash").close()
    finally:
        vars(chunked).pop("reasons", None)
    assert kind == "DisagreementError"
    assert missing(sentence, "kernels here", "rank 0: ", "chunked", "same packages") == []
