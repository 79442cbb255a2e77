"""Models whose layers have a state or a convolution, over shared sequences: copies, calls, and what
is refused. Their numbers: test_conformance.py."""

import copy
import functools

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from transformers import DynamicCache
from transformers.models.qwen3_next import modeling_qwen3_next

from hf_integration import gathered_past, mixers, patch_attention, unpatch_attention, whole_sequences
from hf_integration.look.facts import Facts
from hf_integration.look.look import look
from tests.dist.ranks import make, refusal
from tests.hf import conformance
from tests.hf.conformance import Case, assert_cases
from tests.hf.every_type import tiny
from tests.launch import on_each_of

pytestmark = pytest.mark.usefixtures("compiled")
STATES = ("qwen3_next", "nemotron_h", "minimax", "lfm2")  # a delta rule, Mamba-2, lightning attention, a convolution


def outcome(model, shared, sp, kind="packed", call="sharded"):
    """Whether the logits, loss and gradients of a shared model are "exact"."""
    return conformance.compared(conformance.CALL[call](shared, sp, kind), conformance.plain(model, kind), model, kind)


@on_each_of(2)
def test_copies_local_forwards_and_unpatched_models_are_as_they_were():
    sp = make(prove="never")
    for name in STATES:
        model, shared = tiny(name), tiny(name)
        attributes = {name: sorted(vars(module)) for name, module in shared.named_modules()}
        patch_attention(shared, sp)
        copied = copy.deepcopy(shared)
        unpatch_attention(shared)
        assert {name: sorted(vars(module)) for name, module in shared.named_modules()} == attributes
        assert outcome(model, copied, sp, call="whole") == conformance.EXACT, name
        ids = torch.arange(3, 20)[None]
        with torch.no_grad():
            logits = model(ids).logits
            assert torch.equal(shared(ids).logits, logits)
            with whole_sequences(copied):
                assert torch.equal(copied(ids).logits, logits)


@on_each_of(2)
def test_they_generate_without_a_cache_and_refuse_one():
    sp = make()
    for name in ("olmo_hybrid", "mamba2"):
        model = tiny(name).eval()
        shared = copy.deepcopy(model)
        patch_attention(shared, sp)
        ids, mask = torch.arange(3, 29).view(2, 13), torch.ones(2, 13, dtype=torch.int64)
        mask[1, :4] = 0
        given = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
        assert torch.equal(shared.generate(ids, use_cache=False, **given), model.generate(ids, **given))
        with whole_sequences(shared):
            assert torch.equal(shared.generate(ids, use_cache=True, **given), model.generate(ids, **given))
        kind, sentence = refusal(shared.generate, ids, use_cache=True, **given)
        assert (kind, "use_cache=False" in sentence) == ("ConfigError", True)
        kind, sentence = refusal(shared, ids, use_cache=True)
        assert (kind, "use_cache=False" in sentence) == ("InputError", True)
    kind, sentence = refusal(shared, ids, cache_params=DynamicCache(config=model.config))
    assert (kind, "use_cache=False" in sentence) == ("InputError", True)
    kind, sentence = refusal(shared.train(), ids, cache_params=DynamicCache(config=model.config))
    assert (kind, "no kv cache" in sentence) == ("InputError", True)


@on_each_of(2)
def test_what_cannot_be_shared_is_refused():
    kind, sentence = refusal(patch_attention, tiny("lfm2"), make(layout="striped"))
    assert (kind, "hold consecutive tokens" in sentence) == ("ConfigError", True)
    sp = make()
    for name, module in (("mamba", "a module MambaMixer"), ("zaya", "a convolution")):
        kind, sentence = refusal(patch_attention, tiny(name), sp)
        assert (kind, module in sentence) == ("ConfigError", True), sentence
    model = tiny("lfm2")
    mixer = model.model.layers[0].conv
    plain = mixer.forward
    mixer.forward = lambda *args, **kwargs: plain(*args, **kwargs)  # a user's own: nobody knows what it calls
    kind, sentence = refusal(patch_attention, model, sp)
    assert (kind, "a Lfm2ShortConv with another forward" in sentence) == ("ConfigError", True), sentence
    hooked = tiny("lfm2")
    add_hook_to_module(hooked.model.layers[0].conv, ModelHook())
    kind, sentence = refusal(patch_attention, hooked, sp)
    assert (kind, "a Lfm2ShortConv with another forward" in sentence) == ("ConfigError", True), sentence


class Wrapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@on_each_of(2)
def test_a_layer_that_took_a_patched_ones_place_is_refused():
    sp, ids = make(), torch.arange(3, 20)[None]
    for index, name in ((0, "linear_attn"), (-1, "self_attn")):
        shared, other = tiny("qwen3_next"), tiny("qwen3_next")
        patch_attention(shared, sp)
        loss = shared(ids, labels=ids).loss.item()
        layer = shared.model.layers[index]
        setattr(layer, name, Wrapped(getattr(layer, name)))
        assert shared(ids, labels=ids).loss.item() == loss
        setattr(layer, name, getattr(other.model.layers[index], name))
        kind, sentence = refusal(shared, ids, labels=ids)
        assert (kind, f"{name} since" in sentence) == ("InputError", True), sentence
        unpatch_attention(shared)
        if name == "self_attn":
            kind, sentence = refusal(patch_attention, shared, sp)
            assert (kind, "give it the config of the model" in sentence) == ("ConfigError", True), sentence
            layer.self_attn.config = shared.config
        patch_attention(shared, sp)
        assert shared(ids, labels=ids).loss.item() == loss


class ChannelLast(torch.autograd.Function):
    """What causal-conv1d asks of strides, by causal_conv1d_fwd and _bwd of its csrc/causal_conv1d.cpp."""

    @staticmethod
    def check(x):
        assert x.stride(1) == 1
        assert x.stride(2) > 1
        assert x.shape[1] % 8 == x.stride(2) % 8 == x.stride(0) % 8 == 0

    @staticmethod
    def forward(ctx, x, weight):
        ChannelLast.check(x)
        ctx.weight = weight
        return torch.empty_like(x).copy_(x * weight)

    @staticmethod
    def backward(ctx, grad):
        ChannelLast.check(grad if grad.stride(1) == 1 else grad.mT.contiguous().mT)
        return grad * ctx.weight, None


@pytest.mark.parametrize("heads", [3, 8])
@on_each_of(2)
def test_a_convolution_has_strides_that_causal_conv1d_takes(heads):
    """Mamba-2 gives it a view of its projection, in which a token's row ends with a number of each head."""
    sp = make()
    engine, weight = mixers._Shared(sp.runtime, None), torch.full((16, 1), 2.0)
    for tokens in (1, 5):
        projected = torch.randn(1, tokens, 32 + heads, requires_grad=True)
        x = projected[..., 16:32].mT
        out = mixers._conv(engine, lambda x, weight, bias, activation: ChannelLast.apply(x, weight), x, weight)
        out.mT.split([8, 8], -1)[0].sum().backward()
        assert torch.equal(out, 2 * x)
        assert projected.grad.sum() == 2 * 8 * tokens


def test_a_look_finds_mixers():
    assert look(tiny("falcon_h1")).mixers == ("layers.*.mamba",)
    found = look(tiny("nemotron_h"))
    assert found.attention == ("layers.*.mixer:NemotronHAttention",)
    assert found.mixers == ("layers.*.mixer:NemotronHMamba2Mixer",)
    assert look(tiny("mamba2")) == Facts(
        attention=(), mixers=("layers.*.mixer",), heads=((8, 8),), keywords=False, shift_labels=True
    )


def test_a_look_does_without_installed_kernels(monkeypatch):
    model, function = tiny("qwen3_next"), modeling_qwen3_next.torch_chunk_gated_delta_rule

    @functools.wraps(function)
    def kernel(*args, **kwargs):
        raise ValueError("not on CPUs")

    monkeypatch.setattr(modeling_qwen3_next, function.__name__, kernel)
    assert look(model).mixers == ("layers.*.linear_attn",)


@pytest.mark.parametrize("name", ["nemotron_h", pytest.param("deepseek_v4", marks=pytest.mark.slow)])
@on_each_of(2, keep="deepspeed")
def test_zero_3_gathers_what_a_layer_reads_of_modules_inside(name):
    gathered_past.ROWS, rows = 4, gathered_past.ROWS  # pieces, of which ranks have other numbers
    batch = {"input_ids": torch.arange(3, 22)[None], "labels": torch.arange(3, 22)[None]}
    case = Case(functools.partial(tiny, name), {"size": 2}, lambda _: batch, ["its loss, sharded"], wrapper="ZeRO-3")
    assert_cases({name: case})
    gathered_past.ROWS = rows
