"""A rank that waits long says for whom, and in which call."""

import contextlib
import io
import time

import torch
import torch.distributed as dist

from ds_seqpar.guards import waits
from tests.dist.ranks import make, refusal
from tests.launch import on_each_of
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
