"""Ranks run backward of the same calls in the same order, in one thread, or all of them say why not."""

import threading

import pytest
import torch
from torch.autograd import Function

from tests import oracle
from tests.dist.ranks import WRONG, is_one_sentence, leaves, make, on_devices, refusal
from tests.launch import on_each_of
from tests.words import missing

HEADS = (4, 2)


def assert_refused(function, *words, kind="DisagreementError"):
    found, message = refusal(function)
    assert found == kind, message
    assert missing(message, *words) == []
    assert is_one_sentence(message)


def given_to(sp, seq=16):
    return leaves(sp, *oracle.tensors(1, seq, HEADS, seed=seq)[:3])


def loss_of(sp, seq=16):
    return sp.attention(*given_to(sp, seq)).square().sum()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("made", [make, on_devices])
@on_each_of(2)
def test_losses_in_another_order_on_a_rank(made, known):
    """By a set of names, say; of one shape and of others, where gloo would end the process. On devices the order may be
    one that ranks had before; they are told before `backward` returns."""
    for settings in ({}, {"ulysses": 2}):
        sp = made(size=2, **settings)
        for seq in (16, 32):
            losses = [loss_of(sp, 16), loss_of(sp, seq)]
            if known:
                for loss in (*losses, *losses[::-1]):
                    loss.backward(retain_graph=True)
            words = "another order", "the same on every rank", "the last call but 1'; rank 1: ", "the last call'"
            assert_refused((losses[1] if sp.rank == WRONG else losses[0]).backward, *words)
        losses = [loss_of(sp) for _ in range(2)]
        (losses[sp.rank] + losses[1 - sp.rank]).backward()  # these are the same calls in one order


@on_each_of(2)
def test_a_rank_that_leaves_attention_out_of_its_loss():
    """The others are told as soon as it comes to its next call, whatever that is: none times out."""
    sp = make(size=2)
    q, k, v = given_to(sp)
    nexts = {
        "attention inputs": lambda: sp.attention(q, k, v),
        "losses": lambda: sp.mean_loss(torch.ones(())),
        "tensor to gather": lambda: sp.gather(torch.ones(8), 0),
        "batches": lambda: sp.shard_batch({"input_ids": torch.arange(16)[None], "labels": torch.arange(16)[None]}),
    }
    for name, call in nexts.items():
        out, words = sp.attention(q, k, v), ("0 * out.sum()", f"rank {WRONG}: {name}")
        if sp.rank == WRONG:
            torch.zeros((), requires_grad=True).backward()
            assert_refused(call, *words)
        else:
            assert_refused(out.sum().backward, *words)
    (0 * sp.attention(q, k, v).sum() if sp.rank == WRONG else sp.attention(q, k, v).sum()).backward()
    torch.zeros((), requires_grad=True).backward()  # all of them may


@on_each_of(2)
def test_two_objects_in_another_order():
    one, other = make(size=2), make(size=2)
    mine, others = (one, other) if one.rank == WRONG else (other, one)
    assert_refused(lambda: loss_of(mine), "SequenceParallel")
    losses = {sp: loss_of(sp) for sp in (one, other)}
    assert_refused(losses[mine].backward, "the same backward")
    assert_refused(losses[others].backward, "the same backward")


class NoneOnOneRank(Function):
    @staticmethod
    def forward(ctx, x, rank):
        ctx.rank = rank
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return (None if ctx.rank == WRONG else grad), None


@on_each_of(2)
def test_a_rank_whose_out_has_no_gradient():
    sp, whole = make(size=2), oracle.tensors(1, 16, HEADS)
    given = leaves(sp, *whole[:3])
    NoneOnOneRank.apply(sp.attention(*given), sp.rank).backward(sp.shard(whole[3], 1))
    do = whole[3].clone()
    do[:, sp.sharding.held(16, None, WRONG)] = 0
    for x, grad in zip(given, oracle.dense(*whole[:3], do)[1:], strict=True):
        torch.testing.assert_close(x.grad, sp.shard(grad, 1), rtol=0, atol=1e-10)


def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@on_each_of(2)
def test_a_second_thread_is_refused_wherever_it_would_communicate():
    sp, x = make(size=2), torch.ones(8)
    given, ids = given_to(sp), torch.arange(16)[None]
    loss = sp.attention(*given).sum()
    loader = sp.loader(torch.utils.data.DataLoader(torch.arange(4)))
    calls = {
        "attention": lambda: sp.attention(*given),
        "backward": lambda: loss.backward(),
        "checkpoint": lambda: sp.checkpoint(sp.attention, *given),
        "gather": lambda: sp.gather(x, 0),
        "sum_over_ranks": lambda: sp.sum_over_ranks(x),
        "mean_loss": lambda: sp.mean_loss(torch.ones(())),
        "shard_batches": lambda: sp.shard_batches([{"input_ids": ids, "labels": ids}]),
        "loader": lambda: sp.loader(torch.utils.data.DataLoader(torch.arange(4))),
        "a batch": lambda: next(iter(loader)),
    }
    for name, call in calls.items():
        found, message = in_a_thread(lambda call=call: refusal(call))
        assert (found, missing(message or "", "in one thread", "sp.bind_to_thread()")) == ("ConfigError", []), name
        assert is_one_sentence(message)
    assert in_a_thread(lambda: sp.shard(ids, 1).shape[1]) == 8  # which sends nothing
    in_a_thread(lambda: (sp.bind_to_thread(), sp.attention(*given).sum().backward()))
    assert_refused(loss.backward, "in one thread", kind="ConfigError")
    other = in_a_thread(lambda: make(size=2))  # the thread that made the last one has all of them
    assert_refused(loss.backward, "in one thread", kind="ConfigError")
    other.bind_to_thread()
    loss.backward()
    loss_of(other).backward()
