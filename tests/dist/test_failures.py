"""A rank that ends or fails in the middle of a step: the others are told soon, and where; nobody hangs."""

import os
import re

import pytest
import torch
import torch.distributed as dist

from ds_seqpar.core.runtime.kernels import KERNELS
from tests import oracle
from tests.dist.ranks import SECONDS, attend, is_one_sentence, make
from tests.launch import on_ranks
from tests.words import missing

WORLD, GONE = 4, 2  # the rank that ends or fails
OTHERS = [rank for rank in range(WORLD) if rank != GONE]
ENDED = "another rank ended"


def step(ulysses_size, direction, call, ends):
    """A training step; the kernel of one rank ends it, or raises, at its given call (from 1) of a direction."""
    sp = make(ulysses=ulysses_size, rotate_forward="kv", rotate_backward="kv", kernel="cpu_flash")
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


def assert_told_where(outcome, rank, direction):
    """The message names CP rank and step, whom that step is with, and what the rank does around it. A rank
    that has all blocks of a forward already is told at its own backward."""
    kind, message, _ = outcome
    assert kind == "CommunicationError"
    first, *place = message.splitlines()
    if direction == "forward" and rank != (GONE + 1) % WORLD and first.startswith("backward of attention"):
        assert missing(first, ENDED) == []
        return
    assert missing(first, f"CP rank {rank}, ", "a transfer", ENDED) == []
    assert_place("\n".join(place), rank, r"\d")


def assert_place(text, rank, step):
    """Where a rank of the ring failed: that step is marked, and two before and after it stand with it."""
    before, after = (rank - 1) % WORLD, (rank + 1) % WORLD
    head = re.match(rf"ring (forward|backward), CP rank {rank} of {WORLD}, step ({step}), with ranks ([\d, ]+)\n", text)
    assert {str(before), str(after)} & set(head[3].split(", "))
    lines = re.findall(r"^(->|  ) step (\d): (.*)$", text, re.MULTILINE)
    at = int(head[2])
    assert [int(number) for mark, number, _ in lines if mark == "->"] == [at]
    assert {at - 1, at} & {int(number) for _, number, _ in lines} == {number for number in (at - 1, at) if number >= 0}
    assert max(int(number) for _, number, _ in lines) <= at + 2
    words = {int(number): word for _, number, word in lines}
    for number in {0, 1} & set(words):
        assert f"q({rank})*kv({(rank - number) % WORLD})" in words[number]
        assert f"kv({(rank - number) % WORLD})>{after}" in words[number]
        assert f"kv({(before - number) % WORLD})<{before}" in words[number]


# after one rank's end the others used to see only "connection closed by peer"
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_killed_rank_is_noticed_by_all(direction):
    gone, others = run(step, 1, direction, 2, True)
    assert gone[:2] == ("Died", "exit code 1")
    for rank, outcome in zip(OTHERS, others, strict=True):
        assert_told_where(outcome, rank, direction)
    # its right neighbor waits for the next block, so it knows the direction too
    assert f"ring {direction}, CP rank {GONE + 1} of {WORLD}, step " in others[GONE][1]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_killed_rank_is_noticed_by_its_ulysses_peers(direction):
    gone, others = run(step, WORLD, direction, 1, True)
    assert gone[:2] == ("Died", "exit code 1")
    for kind, message, _ in others:
        assert kind == "CommunicationError"
        sentence, *place = message.splitlines()
        assert missing(sentence, "Ulysses all-to-all", ENDED) == []
        assert is_one_sentence(sentence)
        assert any(line.startswith("->") and "exchange of heads" in line for line in place)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_kernels_error_carries_its_place(direction):
    (kind, message, trace), others = run(step, 1, direction, 2, False)
    assert (kind, message) == ("ArithmeticError", "the kernel cannot do this")
    assert_place(trace[trace.index(f"ring {direction}, ") :], GONE, 1)
    for rank, outcome in zip(OTHERS, others, strict=True):
        assert_told_where(outcome, rank, direction)


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
        assert message.startswith(f"{CALLS[what]} ")
        assert ENDED in message
        assert is_one_sentence(message)
