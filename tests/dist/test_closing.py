"""A SequenceParallel holds threads, sockets and groups: they go with it, or when it is closed."""

import gc
import os
import time

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ds_seqpar.compiler.masks import CAUSAL
from ds_seqpar.runtime.inputs import Asked
from tests import oracle
from tests.dist.ranks import attend, attention_error, is_one_sentence, leaves, make, refusal
from tests.launch import on_ranks
from tests.words import missing

REGISTRIES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")


def held():
    """(threads, file handles, registered groups) of this process."""
    groups = [len(getattr(distributed_c10d._world, name)) for name in REGISTRIES]
    tagged = sum(len(found) for found in distributed_c10d._world.tags_to_pg.values())
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), [*groups, tagged]


def settled(wanted):
    """What is held once it is `wanted`, or after some seconds: sockets are closed by a thread of gloo's."""
    until = time.monotonic() + 10
    while held() != wanted and time.monotonic() < until:
        time.sleep(0.05)
    return held()


def at_rest():
    """What is held once a first one has come and gone: torch keeps an entry for groups that a rank is not in."""
    attention_error(make(ulysses=2))
    dist.barrier()
    before = None
    while before != held():
        before = held()
        time.sleep(0.3)
    return before


def drop_many(count, config):
    before, errors = at_rest(), []
    gc.disable()  # freed with the last reference, without a collector's help
    for _ in range(count):
        errors.append(attention_error(make(**config)))
    return before, settled(before), max(errors)


@pytest.mark.parametrize("times", [1, pytest.param(8, marks=pytest.mark.whole)])
def test_many_that_were_dropped_leave_nothing(times):
    mesh = {"ulysses": 1, "schedule": "attention2d", "rows": 2, "cols": 2}
    for world, count, config in ((2, 6 * times, {"ulysses": 2}), (4, 2 * times, mesh)):
        for before, after, error in on_ranks(world, drop_many, count, config):
            assert after == before
            assert error < 1e-10


def drop_before_backward():
    """What autograd has kept works to the end, and is let go of then."""
    before = at_rest()
    sp = make(ulysses=2)
    whole = oracle.tensors(1, 16, (4, 2))
    local, do, like = leaves(sp, *whole[:3]), sp.shard(whole[3], 1), sp.shard
    out = sp.attention(*local)
    expected = [like(x, 1) for x in oracle.dense(*whole)]
    del sp, like
    meanwhile = held()
    out.backward(do)
    error = max(oracle.errors([out.detach(), *(x.grad for x in local)], expected))
    del out
    return before, meanwhile, settled(before), error


def test_a_dropped_one_lives_until_its_backward_is_done():
    for before, meanwhile, after, error in on_ranks(4, drop_before_backward):
        assert meanwhile[0] > before[0]
        assert after == before
        assert error < 1e-10


def close():
    before = at_rest()
    with make(ulysses=2) as sp:
        whole = oracle.tensors(1, 16, (4, 2))
        good = max(oracle.errors(attend(sp, *whole), oracle.dense(*whole)))
    sp.close()  # a second time
    local = leaves(sp, *whole[:3])
    calls = (
        lambda: sp.attention(*local),
        lambda: sp.attention_agreed(*local, Asked(CAUSAL, None, None)),
        lambda: sp.gather(local[0].detach(), 1),
        lambda: sp.mean_loss(local[0].sum()),
        lambda: sp.shard_batch({"labels": whole[0][0, :, 0, :1].long().T}),
        lambda: setattr(sp, "accumulation_steps", None) or sp.groups.sp,
    )
    try:
        with make(ulysses=2) as failed:
            raise ArithmeticError("of the user's own")
    except ArithmeticError:
        still = refusal(lambda: failed.groups.sp)  # noqa: F821 - other ranks may be using it
    del failed
    return good, [refusal(call) for call in calls], still, (before, settled(before))


def test_a_closed_one_says_so():
    for good, told, still, (before, after) in on_ranks(4, close):
        assert good < 1e-10
        for kind, message in told:
            assert kind == "ConfigError"
            assert missing(message, "SequenceParallel", "closed") == []
            assert is_one_sentence(message)
        assert still == (None, None)
        assert after == before
