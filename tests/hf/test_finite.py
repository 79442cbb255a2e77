"""`check_finite` in a model: what comes in, what a module, the loss or an optimizer step makes, is named on all ranks."""

import math

import pytest
import torch
import torch.distributed as dist

import ds_seqpar
from ds_seqpar.errors import SeqParError
from tests.hf.llama import MODES, adam, llama, ragged, settings
from tests.launch import on_engine_ranks

pytestmark = pytest.mark.usefixtures("compiled")
WORLD, BAD = 2, 1
SECTION = {**MODES["r2"], "check_finite": True}


REDUCTIONS = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter")


def spoil(x, value=math.nan):
    with torch.no_grad():
        x.view(-1)[:1] = value


def weight(engine, number):
    if number == 1 and dist.get_rank() == BAD:
        spoil(engine.module.model.layers[1].mlp.down_proj.weight)


def embedding(engine, number):
    if number == 1 and dist.get_rank() == BAD:
        engine.module.model.embed_tokens.weight.data.fill_(math.inf)


def scale(engine, number):
    if number == 1:
        engine.module.model.layers[1].self_attn.scaling = math.inf


def module(engine, number):
    if number == 1 and dist.get_rank() == BAD:
        engine.module.model.layers[0].mlp.act_fn.register_forward_hook(lambda *args: args[-1] * math.inf)


def gradient(engine, number):
    if number == 1 and dist.get_rank() == BAD:
        engine.module.model.layers[0].mlp.register_full_backward_hook(
            lambda m, given, made: tuple(x * math.nan for x in given)
        )


def loss(engine, number):
    if number == 1 and dist.get_rank() == BAD:
        real = engine.module.loss_function
        engine.module.loss_function = lambda *args, **kwargs: real(*args, **kwargs) * math.nan


def loss_outside(engine, number):
    return (lambda x: x * math.nan) if number == 1 and dist.get_rank() == BAD else None


def state(engine, number):
    if number == 1:
        for state in engine.basic_optimizer.state.values():
            spoil(state["exp_avg"])


def rate(engine, number):
    if number == 1:
        for group in engine.basic_optimizer.param_groups:
            group["lr"] = math.inf


def norm(engine, number):
    if number == 1 and dist.get_rank() == BAD:
        real = engine.get_global_grad_norm
        engine.get_global_grad_norm = lambda: real() * 2


def wire(engine, number):
    """Gradients of one rank reach the others spoiled."""

    def send_nothing_finite(loss):
        for name in REDUCTIONS:
            real = getattr(dist, name)

            def spoiled(x, *args, real=real, **kwargs):
                spoil(next(y for y in (x, *args) if isinstance(y, torch.Tensor) and y.is_floating_point()))
                return real(x, *args, **kwargs)

            setattr(dist, name, spoiled)
        return loss

    return send_nothing_finite if number == 1 and dist.get_rank() == BAD else None


def told(plants, stage, model=llama):
    """name -> what this rank is told of training into which a number was planted after the first step."""
    found = {}
    for plant in plants:
        real = {name: getattr(dist, name) for name in REDUCTIONS}
        engine, *_ = ds_seqpar.initialize(model=model(), config=settings(SECTION, stage, 2, 2, **adam(1e-3)))
        sp, changed = engine.sequence_parallel, None
        try:
            for number in range(3):
                changed = plant(engine, number)
                for batch in sp.shard_batches(ragged(SECTION, 1, 2, sequences=1)):
                    output = engine(**batch)
                    engine.backward(changed(output.loss) if changed else output.loss)
                    engine.step()
            found[plant.__name__] = None, ""
        except SeqParError as error:
            found[plant.__name__] = type(error).__name__, str(error)
        for name, function in real.items():
            setattr(dist, name, function)
        sp.close()
    return found


def test_each_place_is_named():
    for stage in "23":
        found = on_engine_ranks(
            WORLD,
            told,
            [weight, embedding, scale, module, gradient, loss, loss_outside, state, rate, norm, wire],
            stage,
        )
        for of_rank in found:
            for name, x in of_rank.items():
                print(stage, name, x)
