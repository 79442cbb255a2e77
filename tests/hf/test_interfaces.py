"""A patch goes through transformers' interfaces of attention and of masks, and leaves no trace of itself in others."""

import copy

import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.utils.generic import is_flash_attention_requested

from hf_integration import patch_attention, unpatch_attention, whole_sequences
from tests.dist.ranks import lacking, make, refusal
from tests.hf.every_type import tiny
from tests.hf.llama import small
from tests.launch import on_each_of
from tests.oracle import error

pytestmark = pytest.mark.usefixtures("compiled")
IDS = torch.arange(3, 51).view(2, 24)
SHARE = {"size": 2, "ulysses": 1}


def shard(sp):
    return sp.shard_batch({"input_ids": IDS, "labels": IDS.clone()})


def names(config):
    return {key: getattr(config, key)._attn_implementation for key in ("text_config", "vision_config")}


@on_each_of(2)
def test_towers_keep_their_attention_and_the_text_part_has_ours():
    sp, model = make(**SHARE), tiny("gemma3").eval()
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    config, plain = model.config, model(IDS).logits
    patch_attention(model, sp)
    assert names(model.config) == {"text_config": "ds_seqpar", "vision_config": "sdpa"}
    assert names(config) == {"text_config": "eager", "vision_config": "sdpa"}
    with whole_sequences(model):
        assert torch.equal(model(IDS).logits, plain)
    unpatch_attention(model)
    assert names(model.config) == names(config)
    assert torch.equal(model(IDS).logits, plain)


MAKERS = {
    "llama": create_causal_mask, "mistral": create_sliding_window_causal_mask, "llama4_text": create_chunked_causal_mask
}  # fmt: skip


@on_each_of(2)
def test_makers_of_masks_make_what_the_plain_model_has_or_nothing():
    sp, made = make(**SHARE), []
    padding = torch.arange(24) >= torch.tensor([[0], [5]])
    for name, before in ((name, before) for name in MAKERS for before in ("eager", "sdpa")):
        model = tiny(name).eval()
        model.set_attn_implementation(before)
        given = {"inputs_embeds": torch.zeros(2, 24, 4), "attention_mask": padding, "past_key_values": None}
        expected = MAKERS[name](model.config, **given)
        patch_attention(model, sp)

        def within(*args, model=model, maker=MAKERS[name], given=given):
            made.append(maker(model.config, **given))

        model.get_submodule("model.layers.0").register_forward_hook(within)
        within()
        with torch.no_grad(), whole_sequences(model):
            model(IDS)
        with torch.no_grad():
            model(IDS)
            model(**shard(sp))
        outside, local, whole, sharded = made
        assert torch.equal(outside, expected)
        assert torch.equal(local, expected)
        assert whole.numel() == sharded.numel() == 0
        made.clear()


@on_each_of(2)
def test_a_class_that_does_not_switch_is_refused_and_stays_as_it_was():
    sp, model = make(**SHARE), small()
    model.model.layers[0].self_attn.config = copy.deepcopy(model.config)
    said = refusal(patch_attention, model, sp)
    assert lacking(said, "ConfigError", "layers.0.self_attn", "LlamaAttention", "'sdpa'", "get_interface") == []
    assert model.config._attn_implementation == "sdpa"
    model.model.layers[0].self_attn.config = model.config
    patch_attention(model, sp)
    model.model.layers.append(LlamaDecoderLayer(model.config, model.config.num_hidden_layers))
    model.config.num_hidden_layers += 1
    assert lacking(refusal(lambda: model(IDS)), "ConfigError", "a LlamaAttention that is new", "patch") == []


@on_each_of(1)
def test_our_name_without_a_patch_is_refused_in_a_sentence():
    model = small().patch_attention(make(size=1)).unpatch_attention()
    model.set_attn_implementation("ds_seqpar")
    assert lacking(refusal(model, IDS), "ConfigError", "patch_attention", 'attn_implementation to "sdpa"') == []


KERNEL = "planted_flash"


def planted(module, *args, **kwargs):
    assert is_flash_attention_requested(requested_attention_implementation=module.config._attn_implementation)
    assert module.config._attn_implementation == KERNEL
    module.asked = True
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **kwargs)


@on_each_of(1)
def test_flash_attention_finds_the_name_of_its_kernel_and_others_find_flash():
    AttentionInterface.register(KERNEL, planted)
    model = small().eval()
    plain = model(IDS).logits
    model.config._attn_implementation = KERNEL  # which set_attn_implementation would look for on the hub
    patch_attention(model, make(size=1))
    assert is_flash_attention_requested(model.config)
    assert torch.equal(model(IDS).logits, plain)
    assert model.model.layers[0].self_attn.asked
    assert unpatch_attention(model).config._attn_implementation == KERNEL


@pytest.mark.parametrize("before", ["sdpa", "eager"])
@on_each_of(1)
def test_a_local_forward_of_gemma4_that_keeps_some_logits_is_the_plain_one(before):
    """It cuts the queries of layers that have other layers' keys, by the name of its attention."""
    model = tiny("gemma4_text").eval()
    model.set_attn_implementation(before)
    with torch.no_grad():
        plain = model(IDS, logits_to_keep=7).logits
        patch_attention(model, make(size=1))
        assert error(model(IDS, logits_to_keep=7).logits, plain) < 1e-6
