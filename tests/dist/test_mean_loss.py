"""mean_loss: one sentence on all ranks for what is no loss, and a tensor to call backward on where it is asked for."""

import copy

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.dist.ranks import SECONDS, WRONG, assert_all_refused, everywhere, make, only_one
from tests.launch import on_each_of

pytestmark = pytest.mark.usefixtures("compiled")


def loss(rank=0):
    return torch.tensor(float(rank))


BAD = {
    "none": (lambda sp, rank: sp.mean_loss([]), everywhere("mean_loss", "got none")),
    "a number": (lambda sp, rank: sp.mean_loss([3]), everywhere("mean_loss", "got int")),
    "nothing": (lambda sp, rank: sp.mean_loss(None), everywhere("mean_loss", "got NoneType")),
    "one of many": (
        lambda sp, rank: sp.mean_loss([loss(), torch.zeros(3, 2)]),
        everywhere("mean_loss", "got torch.float32 (3, 2)"),
    ),
    "whole numbers": (lambda sp, rank: sp.mean_loss(torch.tensor(3)), everywhere("mean_loss", "got torch.int64 ()")),
    "one rank's": (
        lambda sp, rank: sp.mean_loss("loss" if rank == WRONG else loss()),
        only_one("mean_loss", "got str"),
    ),
    "as many on all ranks": (
        lambda sp, rank: sp.mean_loss([loss()] * (2 if rank == WRONG else 3)),
        everywhere("rank 0: number of losses 3", "rank 1: number of losses 2", kind="DisagreementError"),
    ),
}


@on_each_of(2, timeout=SECONDS)
def test_what_is_no_loss_is_told_to_all_ranks():
    sp = make()
    assert sp.mean_loss(loss(dist.get_rank())) == sp.mean_loss([loss(), torch.ones(1)]) == 0.5
    assert sp.mean_loss(torch.arange(4.0)) == 1.5
    assert_all_refused(BAD, sp)


def own_losses(model):
    """Two micro-steps' losses of this rank."""
    torch.manual_seed(dist.get_rank())
    return [model(torch.randn(3, 4)).square().mean() for _ in range(2)]


def under_ddp(sp, model, differentiable):
    """Gradients of a step, as DDP averages them."""
    ddp = DistributedDataParallel(copy.deepcopy(model))
    with ddp.no_sync():
        first = own_losses(ddp)[0]
    second = own_losses(ddp)[1]
    (sp.mean_loss([first, second], differentiable=True) if differentiable else (first + second) / 2).backward()
    return [p.grad for p in ddp.parameters()]


def under_deepspeed(sp, model, differentiable):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    engine, *_ = deepspeed.initialize(model=copy.deepcopy(model), config=config)
    own = own_losses(engine)[1]
    engine.backward(sp.mean_loss(own, differentiable=True) if differentiable else own)
    return [deepspeed.utils.safe_get_full_grad(p) for p in engine.module.parameters()]


@on_each_of(2, keep=None)
def test_backward_on_the_mean_gives_the_gradients_of_backward_on_ones_own_loss():
    sp = make()
    torch.manual_seed(5)
    model = nn.Linear(4, 2)
    losses = own_losses(model)
    mean, plain = sp.mean_loss(losses, differentiable=True), sp.mean_loss(losses)
    assert (mean.shape, mean.dtype, mean.item()) == ((), torch.float32, pytest.approx(plain, rel=1e-6))
    assert sp.mean_loss([x.bfloat16() for x in losses], differentiable=True).dtype == torch.bfloat16
    assert not sp.mean_loss([x.detach() for x in losses], differentiable=True).requires_grad
    for run in (under_ddp, under_deepspeed):
        expected, found = ([g.clone() for g in run(sp, model, asked)] for asked in (False, True))
        assert any(abs(g).max() > 0.01 for g in expected)
        assert all(abs(a - b).max() < 1e-6 for a, b in zip(expected, found, strict=True))
