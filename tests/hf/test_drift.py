"""Weights that drift apart, because nothing averages gradients, are told in a forward after."""

import pytest
import torch
import torch.distributed as dist

from hf_integration import share_sequences
from hf_integration.model.weights import compares_weights
from tests.dist.ranks import lacking, refusal
from tests.hf.llama import small, with_lora
from tests.launch import on_each_of

pytestmark = pytest.mark.usefixtures("compiled")
TOLD = "drifted apart in training", "DistributedDataParallel", "average its gradients", "rank 0: mean size of "


def trained(model, steps, averages=True, noise=0.0, optimizer=torch.optim.SGD, lr=0.05):
    """(the refusal of a loop of `steps` training forwards, with as many evaluations between; how many came through)."""
    its = [p for p in model.parameters() if p.requires_grad]
    optimizer, done = optimizer(its, lr=lr), []

    def loop():
        for step in range(steps):
            ids = torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(step))
            model.train()(input_ids=ids, labels=ids).loss.backward()
            for p in its if averages else ():
                dist.all_reduce(p.grad.div_(dist.get_world_size()))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for p in its:
                    p.mul_(1 + noise * dist.get_rank())
                model.eval()(input_ids=ids)
            done.append(step)

    return refusal(loop), len(done)


@on_each_of(2, keep="deepspeed")
def test_a_loop_that_averages_nothing_is_told_and_one_that_does_is_not():
    """Also one whose devices round otherwise."""
    for changes, forwards in (
        ({"averages": False}, 1),
        ({"averages": False, "optimizer": torch.optim.AdamW, "lr": 1e-5}, 1),
        ({"averages": False, "lr": 0.0}, 5),
        ({}, 5),
        ({"noise": 1e-6}, 5),
        ({"noise": 1e-2}, 1),
    ):
        model = small()
        share_sequences(model, size=2)
        refused, done = trained(model, 5, **changes)
        assert done == forwards, changes
        assert refused == (None, None) if forwards == 5 else lacking(refused, "DisagreementError", *TOLD) == []


@on_each_of(2, keep="deepspeed")
def test_adapters_drift_though_the_frozen_weights_do_not():
    model = with_lora(small(), "q_proj", "v_proj")
    share_sequences(model, size=2)
    refused, done = trained(model, 5, averages=False)
    assert (lacking(refused, "DisagreementError", *TOLD, "lora"), done) == ([], 1)


def test_weights_are_compared_often_at_first():
    compared = [step for step in range(200) if compares_weights(step)]
    assert compared == [2, 4, 8, 16, 32, 64, 128, 192]
