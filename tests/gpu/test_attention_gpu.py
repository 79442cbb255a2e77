"""Attention in bf16 beside dense attention in fp64: every schedule on one device, and two ranks with a device each."""

import pytest
import torch

from ds_seqpar import SequenceParallelConfig
from ds_seqpar.compiler.masks import CAUSAL, FULL, Mask
from ds_seqpar.compiler.schedules import SCHEDULES
from ds_seqpar.engine import start
from ds_seqpar.testing import attention
from tests.dist.ranks import attend, make
from tests.gpu import NEEDS_TWO, both
from tests.launch import on_ranks
from tests.oracle import dense, errors, tensors
from tests.unit.plans import SHAPES

TOLERANCE = 2e-2  # of bf16, whose numbers are 2**-8 apart
MASKS = {"full": FULL, "window": Mask(window=100), "documents": Mask(documents=(0, 50, 290))}


def inputs(device, seq=480, heads=(4, 2), dim=64):
    return [x.to(device, torch.bfloat16) for x in tensors(2, seq, heads, dim)]


def check(device, mask=CAUSAL, **settings):
    given = inputs(device)
    found = attention(SequenceParallelConfig(**{"size": 4, "ulysses": 1, **settings}), *given, mask=mask)
    found = [x.cpu() for x in (found.out, found.dq, found.dk, found.dv)]
    assert max(errors(found, dense(*(x.cpu() for x in given), mask=mask))) < TOLERANCE


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
    check(device, ulysses=2, travel_dtype="bf16")


def on_two(device):
    """The greatest error of Ulysses and of a ring on two ranks, their device, and that of what they computed."""
    start()
    given, found = inputs(device), {}
    wanted = dense(*(x.cpu() for x in given))
    for ulysses in (1, 2):
        sp = make(heads=(4, 2), size=2, ulysses=ulysses)
        ours = attend(sp, *given)
        found[ulysses] = max(errors([x.cpu() for x in ours], wanted)), ours[0].device.type, str(sp.device)
        sp.close()
    return found


@both(NEEDS_TWO)
def test_two_ranks(device):
    for rank, found in enumerate(on_ranks(2, on_two, device, patience=None)):
        for error, kind, own in found.values():
            assert error < TOLERANCE
            assert kind == device
            assert own == ("cpu" if device == "cpu" else f"cuda:{rank}")
