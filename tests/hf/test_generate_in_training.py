"""Generation inside of a training loop: the tokens are those of the trained weights, and training goes on unchanged."""

import functools

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import TrainerCallback

import ds_seqpar
from hf_integration import patch_attention
from hf_integration.compat import is_missing
from hf_integration.generation import generate, zero
from tests.dist.ranks import lacking, make, refusal
from tests.hf import llama as helpers
from tests.hf import trainers
from tests.hf.llama import MODES, ragged, settings, small
from tests.launch import on_each_of, on_trainer_ranks
from tests.launch import on_engine_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
CASE = MODES["r2"]
MOMENTS = ("before", "between forward and backward", "between micro-batches", "after")


def prompt_of(group):
    """Each group's own, as long as no other's."""
    ids = torch.arange(2, 16 + 7 * group)[None] * 5 % 64
    return ids, {"max_new_tokens": 3 + 2 * group, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def trained(stage, moments=MOMENTS, steps=2, share=zero.SHARE, most=generate.MOST, checkpointed=False):
    """(losses of the steps; whether what was generated at these moments, in train() and eval(), is what an unpatched
    model with these weights generates; how many parameters were missing then). share: 0, and they do not fit."""
    config = settings(CASE, stage, 2, 2, **helpers.adam(1e-2))
    config["zero_optimization"] = {**config["zero_optimization"], "stage3_param_persistence_threshold": 0}
    engine, *_ = ds_seqpar.initialize(model=small(), config=config)
    sp, model, losses, same, missing = engine.sequence_parallel, engine.module, [], [], []
    zero.SHARE, generate.MOST = share, most
    if checkpointed:
        model.gradient_checkpointing_enable()
    ids, how = prompt_of(sp.data_rank)

    def at(moment):
        if moment not in moments:
            return
        twin = small().eval()
        twin.load_state_dict({name: torch.from_numpy(x) for name, x in helpers.weights(model).items()})
        expected = twin.generate(ids, **how)
        for training in (True, False):
            missing.append(sum(map(is_missing, model.parameters())))
            same.append(torch.equal(model.train(training).generate(ids, **how), expected))
        model.train()

    at("before")
    for seed in range(steps):
        given = []
        window = ragged(CASE, sp.data_size, 2, 2 * sp.data_size, seed=seed)
        for batch in sp.shard_batches([helpers.part(batch, sp.data_rank, sp.data_size) for batch in window]):
            given.append(engine(**batch).loss)
            at("between forward and backward")
            engine.backward(given[-1])
            at("between micro-batches")
            engine.step()
        losses.append(sp.mean_loss(given))
    at("after")
    return losses, same, missing


CASES = [
    (2, "3", {"moments": MOMENTS[1:2], "steps": 1}),
    (2, "0", {"checkpointed": True}),
    (2, "2", {}),
    (2, "3", {"share": 0, "checkpointed": True}),
    (4, "2", {}),
    (4, "3", {}),
    (4, "3", {"share": 0}),
    (4, "3", {"share": 0, "most": 4}),
]


@pytest.mark.parametrize(
    ("ranks", "stage", "how"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_training_goes_on_as_if_nothing_had_been_generated(ranks, stage, how):
    expected = on_ranks(ranks, functools.partial(trained, **{**how, "moments": ()}), stage)
    found = on_ranks(ranks, functools.partial(trained, **how), stage)
    for (losses, same, missing), (plain, *_) in zip(found, expected, strict=True):
        assert losses == plain
        assert same == [True] * (4 if "steps" in how else 20)
        assert (max(missing) > 0) == (stage == "3")


@pytest.mark.slow
@on_each_of(4)
def test_groups_under_fsdp_generate_in_step():
    """Each group its own prompt, of as many tokens as no other, in as many forwards."""
    sp, model, plain = make(**CASE), small().eval(), small().eval()
    patch_attention(model, sp)
    generate.MOST = 4
    for module in (*model.model.layers, model):
        fully_shard(module)
    ids, how = prompt_of(sp.data_rank)
    assert torch.equal(model.generate(ids, **how), plain.generate(ids, **how))
    refused = refusal(model.generate, ids[:, : 2 + 99 * sp.data_rank], **how)
    assert lacking(refused, "DisagreementError" if sp.data_rank else "InputError", "3 forwards", "got 2 tokens") == []


class Samples(TrainerCallback):
    """Samples after each step and in each evaluation, on every rank."""

    def __init__(self):
        self.found = []

    def on_step_end(self, args, state, control, model, **kwargs):
        ids = model.generate(torch.arange(1, 9)[None], do_sample=True, max_new_tokens=3, pad_token_id=0)
        self.found.append(ids.tolist())

    on_evaluate = on_step_end


def with_callback(folder, stage, callbacks):
    """(what a Trainer with gradient checkpointing logs; what was sampled)"""
    given = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 2, "gradient_checkpointing": True}
    parts = {"eval_dataset": trainers.documents(4, seed=9), "callbacks": callbacks}
    trainer = trainers.make(folder, 2, {"size": 2}, stage, parts=parts, **given)
    return trainers.trained(trainer).logs, [callback.found for callback in callbacks]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_callbacks_generate(stage, tmp_path):
    plain, *_ = on_trainer_ranks(2, with_callback, tmp_path, stage, [])
    (logs, found), (other_logs, other_found) = on_trainer_ranks(2, with_callback, tmp_path, stage, [Samples()])
    assert logs == other_logs == plain[0]
    assert found == other_found
    assert len(found[0]) == 5
