"""Models with latent attention, whose latents are sent, give what the plain models do."""

import copy

import pytest
import torch
from torch import nn

from hf_integration import patch_attention, unpatch_attention, whole_sequences
from hf_integration.look.sizes import model_sizes
from hf_integration.trainer.callback import FlopCounter
from tests.dist.ranks import lacking, make, refusal
from tests.hf.every_type import tiny
from tests.hf.llama import averaged, gap, with_lora
from tests.launch import on_each_of

DENSE = "minicpm3"
TOKENS = 24  # of a rank
WIDTH, LAYERS = 16 + 8, 2  # of the tiny models
LIMIT = 1e-5


def patched(model, ulysses=1, sent="latent", **given):
    sp = make(size=2, ulysses=ulysses, latent_attention=sent, prove="never", **given)
    return patch_attention(model, sp), sp


def batch():
    ids = torch.randint(3, 64, (1, 2 * TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def gradients(model):
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def trained(model, sp):
    """(gradients, loss, elements of keys or latents that arrived) of a sharded batch."""
    before = sp.comm.received["kv"]
    out = model(**sp.shard_batch(batch()))
    out.loss.backward()
    return averaged(model), sp.mean_loss(out.loss), sp.comm.received["kv"] - before


@on_each_of(2)
def test_latents_with_adapters_and_checkpoints():
    plain, sent = with_lora(tiny(DENSE), "kv_b_proj", "o_proj"), 2 * LAYERS * TOKENS * WIDTH  # in forward and backward
    model, sp = patched(copy.deepcopy(plain))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = plain(**batch()).loss
    loss.backward()
    found, mean, received = trained(model, sp)
    assert gap(found, gradients(plain)) < LIMIT
    assert mean == pytest.approx(loss.item(), rel=LIMIT)
    assert received == sent
    with whole_sequences(model):
        assert torch.equal(model(**batch()).logits, plain(**batch()).logits)


@on_each_of(2)
def test_a_projection_that_is_not_linear_is_expanded_or_refused():
    """It has a bias, or adapters that drop inputs."""
    for spoil, words in ((biased, ["without a bias", "got Linear with a bias"]), (dropping, ["LoRA without dropout"])):
        plain = spoil(with_lora(tiny(DENSE), "q_b_proj"))
        model, sp = patched(copy.deepcopy(plain))
        assert lacking(refusal(trained, model, sp), "ConfigError", "latent_attention", *words) == []
    model, sp = patched(biased(with_lora(tiny(DENSE), "q_b_proj")), sent="auto")
    assert trained(model, sp)[2] > 2 * LAYERS * TOKENS * WIDTH
    unpatch_attention(model)
    assert not any("expand_kv" in vars(module) for module in model.modules())


def biased(model):
    for layer in layers_of(model):
        layer.self_attn.kv_b_proj.bias = nn.Parameter(torch.ones(layer.self_attn.kv_b_proj.out_features))
    return model


def dropping(model):
    return with_lora(model.unload(), "kv_b_proj", lora_dropout=0.5)


def layers_of(model):
    return model.get_base_model().model.layers


def test_sizes_and_flops_are_those_of_the_expanded_heads():
    model = tiny(DENSE)
    sizes, attention = model_sizes(model), model.model.layers[0].self_attn
    assert (sizes.heads, sizes.kv_heads, sizes.head_dim) == (8, 8, 16)
    assert sizes.projections == sum(x.numel() for x in attention.parameters())
    assert any("latent" in sentence for sentence in sizes.not_counted)
    assert FlopCounter(model).flops_of_pair == [6 * 8 * (16 + 8)] * LAYERS  # 2 in forward, 4 in backward, for both


@pytest.mark.slow
@on_each_of(2, timeout=300, keep=None)
def test_compiled_models_expand_keys():
    """A graph does not know whether its forward is local, so one that must send latents is refused."""
    model, sp = patched(tiny(DENSE), sent="auto")
    _, _, received = trained(torch.compile(model, backend="aot_eager", fullgraph=True), sp)
    assert received > 2 * LAYERS * TOKENS * WIDTH
    model, sp = patched(tiny(DENSE))
    refused = refusal(trained, torch.compile(model, backend="aot_eager"), sp)
    assert lacking(refused, "ConfigError", "latent_attention", "not compiled") == []
