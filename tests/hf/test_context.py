"""A forward's context is there while the forward runs, and where backward computes its layers again; nowhere else."""

import pytest
import torch

from hf_integration import whole_sequences
from hf_integration.context import current
from tests.dist.ranks import make
from tests.hf.llama import small
from tests.launch import on_each_of

MODES = ("local", "sharded", "whole")


def batch_of(sp, mode):
    ids = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    whole = {"input_ids": ids, "labels": ids}
    return sp.shard_batch(whole) if mode == "sharded" else whole


def called(model, sp, mode):
    if mode == "local":
        with whole_sequences(model):
            return model(**batch_of(sp, mode))
    return model(**batch_of(sp, mode))


@on_each_of(2)
def test_layers_find_the_context_of_their_forward():
    """Backward, of the first forward last, computes each layer in its own forward's context."""
    sp, found, given = make(size=2), [], []
    model = small().patch_attention(sp).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layer = model.model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda *_: found.append(current()) and None)
    layer.self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: given.append(kwargs["sequence_parallel"]), with_kwargs=True
    )
    losses = []
    for mode in MODES:
        losses.append(called(model, sp, mode).loss)
        assert current() is None
    for loss in reversed(losses):
        loss.backward()
        assert current() is None
    assert [context.mode for context in found] == [context.mode for context in given] == [*MODES, *reversed(MODES)]
    for first, again in zip(given, reversed(given), strict=True):
        assert first is again  # what layers are given is kept by their checkpoints
    assert [context.positions is None for context in given[:3]] == [True, False, False]
    assert given[2].spec.lead == (2, 8)


@on_each_of(2)
def test_an_exception_ends_the_context():
    sp = make(size=2)
    model = small().patch_attention(sp)
    for place in (model.model.layers[0], model.model, model):
        for mode in MODES:
            for register in (place.register_forward_pre_hook, place.register_forward_hook):
                handle = register(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    called(model, sp, mode)
                handle.remove()
                assert current() is None
    assert called(model, sp, "whole").loss.isfinite()
