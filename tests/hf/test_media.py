"""Inputs with images and audio for small copies of all types: the plain model learns from them."""

import pytest
import torch

from hf_integration.look.media import media_batch
from hf_integration.look.small import call, layers_of, small_copy
from tests.grids import each_then_rest
from tests.hf.media_types import NO_BATCH, TYPES, model_of

# one of each class of input: patches of all images in one dimension, of each in a row with their places or their
# grid; whole images of one size, and of several; tiles; blocks that are bidirectional; audio
KINDS = ["qwen3_vl", "gemma4", "lfm2_vl", "llava", "mistral3", "idefics3", "gemma3", "voxtral"]
SIZED = {"qwen3_vl", "lfm2_vl", "mistral3", "idefics3"}  # of which images can have two sizes
VALUES = ("pixel_values", "input_features", "input_values")


def batch_of(model_type, **given):
    """Return a small copy of a type, and a batch for it."""
    model, kept = small_copy(model_of(model_type))
    assert kept == ()
    batch, reason = media_batch(model.train(), **given)
    assert batch is not None, reason
    return model, batch


def values_of(batch):
    return next(name for name in VALUES if name in batch)


@pytest.mark.parametrize("model_type", each_then_rest(KINDS, [name for name in TYPES if name not in KINDS]))
def test_a_small_copy_learns_from_images_or_sounds(model_type):
    model, batch = batch_of(model_type)
    name = values_of(batch)
    batch[name].requires_grad_()
    loss = call(model, **batch).loss
    loss.backward()
    assert loss.isfinite()
    assert batch[name].grad.flatten(1).any(1).all()  # through the whole tower, of each image
    for parameters in (_towers(model), *(layer.parameters() for layer in layers_of(model))):
        assert any(p.grad is not None and p.grad.any() for p in parameters)
    with torch.no_grad():
        other = call(model, **batch | {name: batch[name].flip(-1)}).loss
    assert other.isfinite()
    assert other != loss


def _towers(model):
    """Parameters outside the layers, the embedding of tokens and the head."""
    known = [*layers_of(model), model.get_input_embeddings(), model.get_output_embeddings()]
    text = {id(p) for module in known if module is not None for p in module.parameters()}
    return [p for p in model.parameters() if id(p) not in text and p.dim() > 1]


@pytest.mark.parametrize("model_type", KINDS)
def test_rows_have_as_many_images_as_was_asked_for(model_type):
    _, batch = batch_of(model_type, rows=((), (0,), (1, 0), (0, 0)))
    # one for each feature, and none that predicts itself
    none, one, sizes, two = (batch["labels"] == -100).sum(1).tolist()
    assert none == 0 < one
    assert two == 2 * one
    assert (sizes != two) == (model_type in SIZED)
    assert len(batch["input_ids"]) == 4


def test_a_batch_is_the_same_on_all_ranks():
    model, first = batch_of("qwen3_vl")
    torch.manual_seed(1)
    second, _ = media_batch(model)
    assert all(torch.equal(x, second[name]) for name, x in first.items())


@pytest.mark.parametrize("model_type", each_then_rest(["mllama"], [name for name in NO_BATCH if name != "mllama"]))
def test_models_without_a_batch_say_why(model_type):
    batch, reason = media_batch(small_copy(model_of(model_type))[0])
    assert batch is None
    assert reason
