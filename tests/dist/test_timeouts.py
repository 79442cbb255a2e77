"""A rank that stays away: the timeout given to init_process_group holds for all that waits for it, and the sentence
says what timed out."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ds_seqpar.base import compat
from ds_seqpar.base.errors import CommunicationError
from ds_seqpar.core.runtime import groups
from ds_seqpar.core.runtime.kernels import KERNELS
from tests import oracle
from tests.dist.ranks import attend, is_one_sentence, make
from tests.grids import each_then_rest
from tests.launch import on_ranks

PATIENCE, WORLD, AWAY = 3, 2, 1
STAYED = f"timed out after {PATIENCE} s"


def out_of_memory(*args):
    raise torch.OutOfMemoryError("not enough memory for this product")


def attention(sp, away):
    """The rank runs out of memory in the middle, catches it and goes on."""
    if not away:
        return attend(sp, *oracle.tensors(1, 8 * WORLD, (4, 2)))
    real, kernel = KERNELS["cpu_flash"].forward, KERNELS["cpu_flash"]
    kernel.forward = out_of_memory
    with pytest.raises(torch.OutOfMemoryError):
        attend(sp, *oracle.tensors(1, 8 * WORLD, (4, 2)))
    kernel.forward = real
    return None


def only_rank_0(call):
    return lambda sp, away: None if away else call(sp)


BACKWARD = "backward of attention"  # where a rank has all it needs in forward, it waits there
# what is called -> (settings, call, beginnings of the sentence). The group of all ranks is of no use after it timed out
CALLS = {
    "ring": ({}, attention, ("a transfer", BACKWARD)),
    "Ulysses": ({"ulysses": WORLD}, attention, ("the Ulysses all-to-all", BACKWARD)),
    "agreement": ({}, only_rank_0(lambda sp: sp.attention(*oracle.tensors(1, 8, (4, 2))[:3])), ("attention",)),
    "gather": ({}, only_rank_0(lambda sp: sp.gather(torch.zeros(8), 0)), ("gather",)),
    "mean_loss": ({}, only_rank_0(lambda sp: sp.mean_loss(torch.ones(()))), ("mean_loss",)),
    "shard_batches": (
        {},
        only_rank_0(lambda sp: sp.shard_batch({"labels": torch.arange(8)[None]})),
        ("shard_batches",),
    ),
}


def stay_away(name):
    config, call, _ = CALLS[name]
    sp = make(kernel="cpu_flash", **config)
    timeouts = {groups.timeout(group).total_seconds() for group in (*sp.groups.made, sp.control_world)}
    began, told = time.monotonic(), ("", 0.0)
    try:
        call(sp, dist.get_rank() == AWAY)
    except CommunicationError as error:
        told = str(error), time.monotonic() - began
    store = compat.default_store()
    if dist.get_rank() == AWAY:
        store.wait(["told"], timedelta(seconds=PATIENCE + 60))  # its groups are there meanwhile
    else:
        store.set("told", "")
    return told, timeouts


@pytest.mark.parametrize("name", each_then_rest(["ring", "gather"], [*CALLS.keys() - {"ring", "gather"}]))
def test_a_rank_that_goes_on_without_the_others_makes_them_wait_no_longer_than_was_asked_for(name):
    ((message, seconds), timeouts), _ = on_ranks(WORLD, stay_away, name, patience=PATIENCE)
    assert timeouts == {PATIENCE}
    first = message.splitlines()[0].removeprefix("CP rank 0, ")
    assert first.startswith(CALLS[name][2])
    assert STAYED in first
    assert is_one_sentence(first)
    assert PATIENCE - 0.5 < seconds < PATIENCE + 30, (name, seconds)
