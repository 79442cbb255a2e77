"""A SequenceParallel holds threads, sockets and groups: they go with it, or when it is closed."""

import contextlib
import gc
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ds_seqpar.core.compiler.sharding.masks import CAUSAL
from ds_seqpar.core.runtime.admit import AttentionOptions
from ds_seqpar.guards import waits
from tests import oracle
from tests.dist.ranks import assert_exact, attention_error, lacking, leaves, make, refusal
from tests.launch import on_each_of

REGISTRIES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")
PATIENCE = 20  # seconds after which nothing more goes


def held():
    """How much this process holds of each kind: threads by name, file handles, groups by registry."""
    count = Counter({name: len(getattr(distributed_c10d._world, name)) for name in REGISTRIES})
    count["tags"] = sum(len(found) for found in distributed_c10d._world.tags_to_pg.values())
    count["file handles"] = len(os.listdir("/proc/self/fd"))
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends now
            count[f"threads {(thread / 'comm').read_text().strip()}"] += 1
    return count


def assert_none_more_than(before):
    """Nothing more is held than before. What goes is waited for: threads of gloo's close sockets."""
    more = held() - before
    until = time.monotonic() + PATIENCE
    while more and time.monotonic() < until:
        time.sleep(0.05)
        if (now := held() - before) != more:
            more, until = now, time.monotonic() + PATIENCE
    assert not more, f"{more} more than {before}"


def at_rest():
    """What is held once a first one has come and gone: torch keeps an entry for groups that a rank is not in. From then
    on the thread that reports long waits sees short ones too, as where ranks are slow."""
    waits.CHECKS = 20_000  # one every 3 ms
    attention_error(make(ulysses=2))
    dist.barrier()
    before = None
    while before != held():
        before = held()
        time.sleep(0.3)
    return before


MESH = {"ulysses": 1, "schedule": "attention2d", "rows": 2, "cols": 2}


@pytest.mark.parametrize(
    ("ranks", "count", "config"),
    [
        (2, 6, {"ulysses": 2}),
        (4, 2, MESH),
        pytest.param(2, 48, {"ulysses": 2}, marks=pytest.mark.slow),
        pytest.param(4, 16, MESH, marks=pytest.mark.slow),
    ],
)
@on_each_of("ranks", keep=None)
def test_many_that_were_dropped_leave_nothing(ranks, count, config):
    before = at_rest()
    gc.disable()  # freed with the last reference, without a collector's help
    for _ in range(count):
        assert attention_error(make(**config)) < 1e-10
    assert_none_more_than(before)


@on_each_of(4, keep=None)
def test_a_dropped_one_lives_until_its_backward_is_done():
    """What autograd has kept works to the end, and is let go of then."""
    before = at_rest()
    sp = make(ulysses=2)
    whole = oracle.tensors(1, 16, (4, 2))
    local, do = leaves(sp, *whole[:3]), sp.shard(whole[3], 1)
    out = sp.attention(*local)
    expected = [sp.shard(x, 1) for x in oracle.dense(*whole)]
    del sp
    assert held() - before
    out.backward(do)
    oracle.assert_exact([out.detach(), *(x.grad for x in local)], expected)
    del out
    assert_none_more_than(before)


@on_each_of(4, keep=None)
def test_a_closed_one_says_so():
    before = at_rest()
    with make(ulysses=2) as sp:
        whole = oracle.tensors(1, 16, (4, 2))
        assert_exact(sp, whole)
    sp.close()  # a second time
    local = leaves(sp, *whole[:3])
    for call in (
        lambda: sp.attention(*local),
        lambda: sp.attention_agreed(*local, AttentionOptions(CAUSAL, None, None)),
        lambda: sp.gather(local[0].detach(), 1),
        lambda: sp.mean_loss(local[0].sum()),
        lambda: sp.shard_batch({"labels": whole[0][0, :, 0, :1].long().T}),
        lambda: setattr(sp, "accumulation_steps", None) or sp.groups.sp,
    ):
        assert lacking(refusal(call), "ConfigError", "SequenceParallel", "closed") == []
    try:
        with make(ulysses=2) as failed:
            raise ArithmeticError("of the user's own")
    except ArithmeticError:
        assert refusal(lambda: failed.groups.sp) == (None, None)  # noqa: F821 - other ranks may be using it
    del failed
    assert_none_more_than(before)
