"""Models with latent attention, whose latents are sent, give what the plain models do."""

import copy

import pytest
import torch
from torch import nn

import ds_seqpar
from hf_integration import patch_attention, unpatch_attention, whole_sequences
from hf_integration.look.in_fp64 import fp64
from hf_integration.look.sizes import model_sizes
from hf_integration.trainer.callback import FlopCounter
from tests.dist.ranks import lacking, make, refusal
from tests.grids import each_then_rest
from tests.hf import conformance
from tests.hf.every_type import tiny
from tests.hf.in_fp64 import limit_beside
from tests.hf.llama import averaged, gap, one_process, ragged, settings, step, with_lora
from tests.launch import on_each_of, on_engine_ranks

DENSE = "minicpm3"
TOKENS = 24  # of a rank
WIDTH, LAYERS = 16 + 8, 2  # of the tiny models
LIMIT = 1e-5


def patched(model, ulysses=1, sent="latent", **given):
    sp = make(size=2, ulysses=ulysses, latent_attention=sent, prove="never", **given)
    return patch_attention(model, sp), sp


@pytest.mark.parametrize("ulysses", each_then_rest([1], [2]))
@pytest.mark.parametrize("name", each_then_rest(["deepseek_v3"], ["glm4_moe_lite", "minicpm3"]))
@on_each_of(2)
def test_models_that_send_latents_are_the_plain_ones(name, ulysses):
    """In plain, padded and packed batches, of whole sequences and of shards."""
    model = tiny(name)
    shared, sp = patched(copy.deepcopy(model), ulysses)
    for kind in conformance.KINDS:
        truth = conformance.plain(fp64(copy.deepcopy(model)), kind)
        limits = [limit_beside(error, LIMIT) for error in errors(conformance.plain(model, kind), truth)]
        assert max(limits) < 3 * LIMIT
        for call in conformance.CALL.values():
            its = errors(call(shared, sp, kind), truth)
            assert all(error < limit for error, limit in zip(its, limits, strict=True)), (kind, its, limits)


def errors(found, expected):
    """Of (logits, loss, gradients)."""
    of_logits = gap({"logits": found[0]}, {"logits": expected[0]})
    return of_logits, abs(found[1] - expected[1]), gap(found[2], expected[2])


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
@pytest.mark.usefixtures("compiled")
def test_latents_under_zero_3():
    section = {"size": 2, "ulysses": 1, "latent_attention": "latent", "prove": "never"}
    window = ragged(section, 1, 1, sequences=2)
    expected, loss = one_process(tiny(DENSE), window)
    for found, received in on_engine_ranks(2, engine_step, section, window):
        assert gap(found["gradients"], expected) < 1e-4
        assert found["loss"] == pytest.approx(loss, rel=LIMIT)
        assert received > 0


def engine_step(section, window):
    engine, *_ = ds_seqpar.initialize(model=tiny(DENSE), config=settings(section, "3", 1, 2))
    sp = engine.sequence_parallel
    return step(engine, sp.shard_batches(window)), sp.comm.received["kv"]


@pytest.mark.slow
@on_each_of(2, timeout=300, keep=None)
def test_compiled_models_expand_keys_in_one_graph():
    """A graph does not know whether its forward is local, so one that must send latents is refused."""
    plain = tiny(DENSE)
    model, sp = patched(copy.deepcopy(plain), sent="auto")
    loss = plain(**batch()).loss
    loss.backward()
    found, mean, received = trained(torch.compile(model, backend="aot_eager", fullgraph=True), sp)
    assert gap({name.removeprefix("_orig_mod."): x for name, x in found.items()}, gradients(plain)) < LIMIT
    assert mean == pytest.approx(loss.item(), rel=LIMIT)
    assert received > 2 * LAYERS * TOKENS * WIDTH
    model, sp = patched(copy.deepcopy(plain))
    refused = refusal(trained, torch.compile(model, backend="aot_eager"), sp)
    assert lacking(refused, "ConfigError", "latent_attention", "not compiled") == []
