"""Models with an index, or with attention of their own, over shared sequences: their layers gather keys."""

import functools
import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_integration import gathered_past, patch_attention, unpatch_attention, whole_sequences
from hf_integration.look import prove
from hf_integration.look.look import look
from tests.dist.ranks import make, refusal
from tests.hf import conformance
from tests.hf.every_type import tiny
from tests.launch import on_each_of

pytestmark = pytest.mark.usefixtures("compiled")
# an index; one whose layers share what they pick; attention of its own with positions by rotation, and by alibi
TYPES = ("deepseek_v32", "glm_moe_dsa", "gptj", "bloom")
CASES = [
    *itertools.product(("plain",), conformance.CALLS),
    ("left", "whole"),
    ("right", "sharded"),
    ("packed", "sharded"),
]


def checkpointed(model, reentrant=False):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def exact(model, shared, sp, kind, call):
    wanted, found = conformance.plain(model, kind), conformance.CALL[call](shared, sp, kind)
    assert conformance.compared(found, wanted, model, kind) == conformance.EXACT, (type(model).__name__, kind, call)


@pytest.mark.parametrize("name", TYPES)
@on_each_of(2)
def test_logits_loss_and_gradients_are_those_of_the_plain_model(name):
    for layout, rows in (("balanced", 256), ("contiguous", 7)):  # many pieces, of which ranks have other numbers
        gathered_past.ROWS = rows
        sp = make(prove="never", layout=layout)
        model, shared = tiny(name), tiny(name)
        assert look(shared).gathered
        patch_attention(shared, sp)
        for kind, call in CASES if layout == "balanced" else CASES[-2:]:
            exact(model, shared, sp, kind, call)
        exact(model, checkpointed(shared), sp, "plain", "sharded")
        unpatch_attention(shared)
        with torch.no_grad():
            ids = torch.arange(3, 20)[None]
            assert torch.equal(shared.eval()(ids).logits, model.eval()(ids).logits)
        sp.close()


def with_lora(model):
    torch.manual_seed(1)
    names = ["q_b_proj", "kv_b_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=names, init_lora_weights=False))


def frozen(model):
    """Backward ends behind the first layer."""
    model.get_input_embeddings().requires_grad_(False)
    model.base_model.layers[0].requires_grad_(False)
    return model


@on_each_of(2)
def test_so_they_are_with_adapters_frozen_layers_and_reentrant_checkpoints():
    gathered_past.ROWS, sp = 9, make(prove="never")
    for prepare in (with_lora, frozen, functools.partial(checkpointed, reentrant=True)):
        model, shared = prepare(tiny("glm_moe_dsa")), prepare(tiny("glm_moe_dsa"))
        patch_attention(shared, sp)
        exact(model, shared, sp, "packed", "sharded")


@on_each_of(2)
def test_tokens_are_generated_without_a_cache_too():
    shared = patch_attention(tiny("deepseek_v32"), make(prove="never")).eval()
    ids, given = torch.arange(3, 29).view(2, 13), {"max_new_tokens": 3, "do_sample": False}
    with whole_sequences(shared):
        expected = shared.generate(ids, use_cache=True, **given)
    assert torch.equal(shared.generate(ids, use_cache=False, **given), expected)


@on_each_of(2)
def test_what_takes_no_cache_or_cannot_be_split_is_refused_on_every_rank():
    kind, sentence = refusal(patch_attention, tiny("deepseek_v32"), make(layout="striped"))
    assert (kind, "hold consecutive tokens" in sentence) == ("ConfigError", True), sentence
    sp = make()
    for name, module in (("mamba", "a module MambaMixer"), ("openai-gpt", "a module Attention")):
        kind, sentence = refusal(patch_attention, tiny(name), sp)
        assert (kind, module in sentence) == ("ConfigError", True), sentence


def test_the_proof_compares_documents_between_padding_more_than_once():
    """The second run judges what rounding changes; it could not be compared where it had another shape."""
    model, ids = tiny("bloom").train(), torch.arange(3, 15).view(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[1, -1:] = 0
    documents = prove._documents({"input_ids": ids, "attention_mask": mask, "labels": ids})
    first, second = (prove._outcome(model, documents).values for _ in range(2))
    assert first[prove.OUTPUT].shape[0] == ids.numel()
    assert prove.difference(first, second, 0.0) == ("", 0.0)
