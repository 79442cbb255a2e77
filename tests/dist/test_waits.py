"""A rank that waits long says for whom, and in which call; where a rank ended, the others name it."""

import contextlib
import io
import os
import time

import torch
import torch.distributed as dist

from ds_seqpar.base.errors import CommunicationError
from ds_seqpar.core.runtime.transport import Communication
from ds_seqpar.guards import waits
from tests.dist.ranks import SECONDS, is_one_sentence, make, refusal
from tests.launch import on_each_of, on_ranks
from tests.words import missing

PATIENCE, LATE = 1.0, 2


def said_while(call):
    """What is printed to stderr meanwhile, by line."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        call()
    return said.getvalue().splitlines()


@on_each_of(4, keep=None)
def test_who_waits_long_says_for_whom_once_and_goes_on():
    waits.PATIENCE = PATIENCE
    sp, late, found = make(), dist.get_rank() == LATE, []
    for call in (lambda: sp.gather(torch.ones(8), 0), lambda: sp.gather(torch.ones(8), 0), lambda: sp.loader(range(2))):
        dist.barrier()  # so that a rank of a busy machine is not late too
        if late:
            time.sleep(2 * PATIENCE)
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


def ended(rank, call):
    if dist.get_rank() == rank:
        os._exit(0)
    return refusal(call)


def making():
    make()


def test_a_rank_that_ended_without_a_word_is_named():
    """Before anything was made, so that nothing of ours ran on it."""
    kind, message = on_ranks(2, ended, 1, making, timeout=SECONDS, check=False)[0]
    assert kind == CommunicationError.__name__
    assert is_one_sentence(message)
    assert (
        missing(message, "share_sequences", "another rank ended", "rank 1 did not take part", "not only rank 0") == []
    )


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
    assert kind == CommunicationError.__name__
    assert missing(message, "the sum of keys over ranks failed: ") == []  # what is sent first, in fp32
    assert "did not take part" not in message
