"""A rank that ends or fails in the middle of a step: the others are told soon, and where; nobody hangs."""

import os
import re

import pytest
import torch
import torch.distributed as dist

from ds_seqpar.running.kernels import KERNELS
from tests import oracle
from tests.dist.ranks import SECONDS, attend, make
from tests.launch import on_ranks

WORLD, GONE = 4, 2  # the rank that ends or fails
ENDED = "failed because another rank ended or gave up: see what that one says"


def step(degree, direction, call, ends):
    """A training step; the kernel of one rank ends it, or raises, at its given call (from 1) of a direction."""
    sp = make(ulysses=degree, forward="kv", backward="kv", kernel="cpu_flash")
    kernel, calls = KERNELS["cpu_flash"], []
    real = getattr(kernel, direction)

    def failing(*args):
        calls.append(args)
        if len(calls) == call and ends:
            os._exit(1)
        if len(calls) == call:
            raise ArithmeticError("the kernel cannot do this")
        return real(*args)

    if dist.get_rank() == GONE:
        setattr(kernel, direction, failing)
    attend(sp, *oracle.tensors(1, 48, (4, 2)))


def run(*args):
    """(outcome of the rank that ends or fails, outcomes of the others); an outcome is (kind, message, traceback)."""
    outcomes = on_ranks(WORLD, *args, timeout=SECONDS, check=False)
    return outcomes.pop(GONE), outcomes


def assert_told_where(outcome):
    """The message names inner rank and step, and holds the plan as a table."""
    kind, message, _ = outcome
    assert kind == "CommunicationError"
    assert re.match(rf"inner rank \d, step \d: a transfer {ENDED}\n", message)
    assert re.search(rf"^ring (forward|backward), {WORLD} ranks$", message, re.MULTILINE)
    assert re.search(r"^0 +q\(0\)\*kv\(0\) kv\(0\)>1", message, re.MULTILINE)


# after one rank's end the others used to see only "connection closed by peer"
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_killed_rank_is_noticed_by_all(direction):
    gone, others = run(step, 1, direction, 2, True)
    assert gone[:2] == ("Died", "exit code 1")
    for outcome in others:
        assert_told_where(outcome)
    # its right neighbour waits for the next block, so it knows the direction too
    assert f"ring {direction}, {WORLD} ranks" in others[GONE][1]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_killed_rank_is_noticed_by_its_ulysses_peers(direction):
    gone, others = run(step, WORLD, direction, 1, True)
    assert gone[:2] == ("Died", "exit code 1")
    for kind, message, _ in others:
        assert kind == "CommunicationError"
        assert re.fullmatch(rf"(inner rank 0, step 0: )?the Ulysses all-to-all {ENDED}", message)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_kernels_error_carries_the_plan(direction):
    (kind, message, trace), others = run(step, 1, direction, 2, False)
    assert (kind, message) == ("ArithmeticError", "the kernel cannot do this")
    assert f"inner rank {GONE}, step 1 of this plan:\nring {direction}, {WORLD} ranks" in trace
    assert re.search(r"^1 +q\(0\)\*kv\(3\) kv\(2\)<3 kv\(3\)>1", trace, re.MULTILINE)
    for outcome in others:
        assert_told_where(outcome)


def gone_before(what):
    sp = make()
    if dist.get_rank() == GONE:
        os._exit(1)
    if what == "attention inputs":
        sp.attention(*oracle.tensors(1, 4, (4, 2))[:3])
    elif what == "batches":
        sp.shard_batch({"labels": torch.arange(16)[None]})
    else:
        sp.gather(torch.zeros(8), 0)


CALLS = {"attention inputs": "attention", "batches": "shard_batches", "tensor to gather": "gather"}


@pytest.mark.parametrize("what", CALLS)
def test_a_rank_that_is_gone_before_the_others_begin(what):
    gone, others = run(gone_before, what)
    assert gone[:2] == ("Died", "exit code 1")
    for kind, message, _ in others:
        assert kind == "CommunicationError"
        assert message == f"{CALLS[what]} {ENDED}"
