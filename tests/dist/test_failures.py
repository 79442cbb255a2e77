"""A rank that ends, fails, stays away or is late: the others are told soon, and where; nobody hangs.

One that stays away makes others wait for the timeout that was given to init_process_group. To add a call in which a
rank may be missing, add it to CALLS.
"""

import contextlib
import io
import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ds_seqpar.base import compat
from ds_seqpar.base.errors import CommunicationError
from ds_seqpar.core.runtime import groups
from ds_seqpar.core.runtime.kernels import KERNELS
from ds_seqpar.core.runtime.transport import Communication
from ds_seqpar.guards import waits
from tests import oracle
from tests.dist.ranks import SECONDS, attend, is_one_sentence, make, refusal
from tests.grids import each_then_rest
from tests.launch import on_each_of, on_ranks
from tests.words import missing

WORLD, GONE = 4, 2  # the rank that ends or fails
OTHERS = [rank for rank in range(WORLD) if rank != GONE]
ENDED, PATIENCE = "another rank ended", 3
SOON, LATE = 1.0, 2  # after so many seconds a rank says for whom it waits
# what the others call -> as errors name it
CALLS = {
    "attention": lambda sp: sp.attention(*oracle.tensors(1, 4, (4, 2))[:3]),
    "shard_batches": lambda sp: sp.shard_batch({"labels": torch.arange(16)[None]}),
    "gather": lambda sp: sp.gather(torch.zeros(8), 0),
    "mean_loss": lambda sp: sp.mean_loss(torch.ones(())),
}


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


def gone_before(call):
    sp = make()
    if dist.get_rank() == GONE:
        os._exit(1)
    CALLS[call](sp)


@pytest.mark.parametrize("call", each_then_rest([name for name in CALLS if name != "mean_loss"], ["mean_loss"]))
def test_a_rank_that_is_gone_before_the_others_begin(call):
    gone, others = run(gone_before, call)
    assert gone[:2] == ("Died", "exit code 1")
    for kind, message, _ in others:
        assert kind == "CommunicationError"
        assert message.startswith(f"{call} ")
        assert ENDED in message
        assert is_one_sentence(message)


def gone_before_anything():
    if dist.get_rank():
        os._exit(0)
    return refusal(make)


def test_a_rank_that_ended_before_anything_was_made_is_named():
    """So that nothing of ours ran on it."""
    kind, message = on_ranks(2, gone_before_anything, timeout=SECONDS, check=False)[0]
    assert kind == "CommunicationError"
    assert is_one_sentence(message)
    assert missing(message, "share_sequences", ENDED, "rank 1 did not take part") == []


def without_guards():
    """What rank 0 raises of attention in the core alone, where rank 1 refuses its own inputs and ends."""
    sp = make(size=2, ulysses=1, schedule="ring")
    sp.runtime.guards.clear()
    sp.comm.communication = Communication
    q = torch.zeros(1, 8, 4, 16)
    if sp.rank:
        assert refusal(sp.attention, q, q, q[..., 0])[0] == "InputError"
        os._exit(0)
    return refusal(sp.attention, q, q, q)


def test_without_guards_a_rank_raises_alone_and_a_failure_has_the_backends_reason():
    kind, message = on_ranks(2, without_guards, timeout=SECONDS, check=False)[0]
    assert kind == "CommunicationError"
    assert "the sum of keys over ranks failed: " in message  # what is sent first, in fp32
    assert "did not take part" not in message


# ---- a rank that stays away


def out_of_memory(*args):
    raise torch.OutOfMemoryError("not enough memory for this product")


def interrupted(sp):
    """Rank 1 runs out of memory in the middle, catches it and goes on."""
    kernel, real = KERNELS["cpu_flash"], KERNELS["cpu_flash"].forward
    if sp.rank == 0:
        attend(sp, *oracle.tensors(1, 16, (4, 2)))
        return
    kernel.forward = out_of_memory
    with pytest.raises(torch.OutOfMemoryError):
        attend(sp, *oracle.tensors(1, 16, (4, 2)))
    kernel.forward = real


BACKWARD = "backward of attention"  # where a rank has all it needs in forward, it waits there
# name -> (settings, call, beginnings of the sentence). The group of all ranks is of no use after it timed out
AWAY = {
    "ring": ({}, interrupted, ("a transfer", BACKWARD)),
    "Ulysses": ({"ulysses": 2}, interrupted, ("the Ulysses all-to-all", BACKWARD)),
    **{name: ({}, call, (name,)) for name, call in CALLS.items()},
}


def stay_away(name):
    config, call, _ = AWAY[name]
    sp = make(kernel="cpu_flash", **config)
    timeouts = {groups.timeout(group).total_seconds() for group in (*sp.groups.made, sp.control_world)}
    began, told = time.monotonic(), ("", 0.0)
    try:
        if sp.rank == 0 or call is interrupted:
            call(sp)
    except CommunicationError as error:
        told = str(error), time.monotonic() - began
    store = compat.default_store()
    if sp.rank:
        store.wait(["told"], timedelta(seconds=PATIENCE + 60))  # its groups are there meanwhile
    else:
        store.set("told", "")
    return told, timeouts


@pytest.mark.parametrize(
    "name", each_then_rest(["ring", "gather"], [name for name in AWAY if name not in ("ring", "gather")])
)
def test_a_rank_that_goes_on_without_the_others_makes_them_wait_no_longer_than_was_asked_for(name):
    ((message, seconds), timeouts), _ = on_ranks(2, stay_away, name, patience=PATIENCE)
    assert timeouts == {PATIENCE}
    first = message.splitlines()[0].removeprefix("CP rank 0, ")
    assert first.startswith(AWAY[name][2])
    assert f"timed out after {PATIENCE} s" in first
    assert is_one_sentence(first)
    assert PATIENCE - 0.5 < seconds < PATIENCE + 30, (name, seconds)


# ---- a rank that is late


def said_while(call):
    """What is printed to stderr meanwhile, by line."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        call()
    return said.getvalue().splitlines()


@on_each_of(4, keep=None)
def test_who_waits_long_says_for_whom_once_and_goes_on():
    waits.PATIENCE = SOON
    sp, late, found = make(), dist.get_rank() == LATE, []
    for call in (lambda: sp.gather(torch.ones(8), 0), lambda: sp.gather(torch.ones(8), 0), lambda: sp.loader(range(2))):
        dist.barrier()  # so that a rank of a busy machine is not late too
        if late:
            time.sleep(2 * SOON)
        found.append(said_while(lambda call=call: refusal(call)))
    if late:
        assert found == [[], [], []]
        return
    [first], again, [other] = found
    assert missing(first, f"rank {sp.rank} has waited 1 s in gather for rank {LATE},", "it waits on") == []
    assert again == []  # once for each kind of call
    assert missing(other, "in sp.loader for rank") == []
    assert not waits._now
    wait = waits.explaining_failure("a call", sp.groups.control)
    assert wait.whom() == "another rank"
    wait.awaited = 1, 3  # of ranks that lie up to rank 1, round the end: 3, 0, 1
    assert wait.whom() == "one of the 3 ranks up to rank 1"
