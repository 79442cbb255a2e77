"""Attention in bf16 beside dense attention in fp64: every schedule on one device, and two ranks with a device each."""

import pytest
import torch

from ds_seqpar import SequenceParallelConfig
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, FULL, Mask
from ds_seqpar.engine import start
from ds_seqpar.testing import attention
from tests.dist.ranks import attend, make
from tests.gpu import NEEDS_TWO, both
from tests.launch import on_each_of
from tests.oracle import assert_exact, dense, tensors
from tests.unit.plans import SHAPES

TOLERANCE = 2e-2  # of bf16, whose numbers are 2**-8 apart
MASKS = {"full": FULL, "window": Mask(window=100), "documents": Mask(documents=(0, 50, 290)),
         "tree": Mask(documents=(0, 50, 290), parents=(-1, 0, 0))}  # fmt: skip


def inputs(device, seq=480, heads=(4, 2), dim=64):
    return [x.to(device, torch.bfloat16) for x in tensors(2, seq, heads, dim)]


def check(device, mask=CAUSAL, **settings):
    given = inputs(device)
    found = attention(SequenceParallelConfig(**{"size": 4, "ulysses": 1, **settings}), *given, mask=mask)
    found = [x.cpu() for x in (found.out, found.dq, found.dk, found.dv)]
    assert_exact(found, dense(*(x.cpu() for x in given), mask=mask), limit=TOLERANCE)


@both()
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule(name, device):
    check(device, schedule=name, **SHAPES[name])


@both()
@pytest.mark.parametrize("name", MASKS)
def test_every_kind_of_mask(name, device):
    check(device, MASKS[name], schedule="mesh", mesh=(2, 1, 2))


@both()
def test_ulysses_around_a_ring(device):
    check(device, ulysses=2, comm_dtype="bf16")


@both(NEEDS_TWO)
@on_each_of(2, patience=None)
def test_two_ranks(device):
    """Ulysses and a ring: each rank computes on its device."""
    start()
    given = inputs(device)
    wanted = dense(*(x.cpu() for x in given))
    for ulysses in (1, 2):
        with make(heads=(4, 2), size=2, ulysses=ulysses) as sp:
            ours = attend(sp, *given)
            assert_exact([x.cpu() for x in ours], wanted, ulysses, TOLERANCE)
            assert ours[0].device.type == device
            assert str(sp.device) == ("cpu" if device == "cpu" else f"cuda:{sp.rank}")
