"""Models with an index, or with attention of their own, over shared sequences: their layers gather keys."""

import copy
import functools
import itertools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from hf_integration import gathered_past, patch_attention, unpatch_attention, whole_sequences
from hf_integration.look import prove
from hf_integration.look.look import look
from tests.dist.ranks import WRONG, lacking, make, only_one, refusal
from tests.grids import each_then_rest
from tests.hf import conformance
from tests.hf.every_type import tiny
from tests.hf.families import gradients
from tests.hf.llama import checkpointed, frozen, gap, with_lora
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


def exact(model, shared, sp, kind, call):
    wanted, found = conformance.plain(model, kind), conformance.CALL[call](shared, sp, kind)
    assert conformance.compared(found, wanted, model, kind) == conformance.EXACT, (type(model).__name__, kind, call)


@pytest.mark.parametrize("name", each_then_rest(TYPES[::2], TYPES[1::2]))
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


def adapted(model):
    return with_lora(model, "q_b_proj", "kv_b_proj", "o_proj")


@on_each_of(2)
def test_so_they_are_with_adapters_frozen_layers_and_reentrant_checkpoints():
    gathered_past.ROWS, sp = 9, make(prove="never")
    for prepare in (adapted, frozen, functools.partial(checkpointed, reentrant=True)):
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


def breaks(*_):
    raise ValueError("it is broken")


@on_each_of(2)
def test_what_fails_on_one_rank_is_raised_on_all_and_none_waits():
    """Before keys are gathered, between latents and the index's keys, and behind them."""
    sp, ids = make(prove="never"), torch.arange(3, 29)[None]
    expected = only_one("a layer that gathers keys, failed, ValueError: it is broken")
    for name, layer, parts in (
        ("bloom", "h.1.self_attention", ("query_key_value", "dense")),
        ("deepseek_v32", "layers.1.self_attn", ("kv_a_proj_with_mqa", "indexer.wk", "o_proj")),
    ):
        model = patch_attention(tiny(name), sp)
        attention, loss = model.base_model.get_submodule(layer), model(ids, labels=ids).loss
        for part in parts:
            handle = attention.get_submodule(part).register_forward_hook(breaks) if sp.rank == WRONG else None
            kind, *words = expected.get(sp.rank, expected["others"])
            refused = refusal(model, ids, labels=ids)
            assert lacking(refused, kind, type(attention).__name__, *words) == [], (part, refused)
            if handle is not None:
                handle.remove()
            assert torch.equal(model(ids, labels=ids).loss, loss)


@on_each_of(2)
def test_a_copy_runs_as_often_as_its_model():
    """Once, and not in pieces, unless a projection of its own is no plain linear layer."""
    gathered_past.ROWS, ids, runs = 4, torch.arange(3, 29)[None], []
    model = patch_attention(tiny("glm_moe_dsa"), make(prove="never"))
    copied = copy.deepcopy(model)

    def run(each):
        projections = [layer.self_attn.q_b_proj for layer in each.base_model.layers]
        handles = [x.register_forward_hook(lambda *_: runs.append(1)) for x in projections]
        runs.clear()
        logits = each(ids).logits
        for handle in handles:
            handle.remove()
        return len(runs), logits

    (count, logits), (again, copies) = run(model), run(copied)
    assert (count, again, torch.equal(logits, copies)) == (2, 2, True)
    projection = copied.base_model.layers[1].self_attn.kv_b_proj
    projection.bias = torch.nn.Parameter(torch.zeros(projection.out_features))
    assert (run(copied)[0] > 2, run(model)[0]) == (True, 2)


@on_each_of(2)
def test_weights_of_an_index_need_under_ddp_what_those_of_the_plain_model_need():
    """They get no gradient, which DDP must be told."""
    plain, shared = tiny("deepseek_v32"), patch_attention(tiny("deepseek_v32"), make(prove="never"))
    for model in (plain, shared):
        wrapped, ids = DistributedDataParallel(model), torch.arange(3, 29)[None]
        wrapped(ids, labels=ids).loss.backward()
        with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
            wrapped(ids, labels=ids)
        model.zero_grad()
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        for _ in range(2):
            (wrapped(ids, labels=ids).loss / 2).backward()
    names = [name for name, x in plain.named_parameters() if x.grad is None]
    assert names == [name for name, x in shared.named_parameters() if x.grad is None]
    assert all("indexer" in name for name in names)
    assert gap(gradients(shared), gradients(plain)) < 1e-5


@on_each_of(2)
def test_a_layer_may_get_what_has_no_dims():
    """As the Trainer's number of labels, where a model hands all that it gets to its layers."""
    plain, shared = tiny("deepseek_v4"), patch_attention(tiny("deepseek_v4"), make(prove="never"))
    ids, number = torch.arange(3, 29)[None], torch.tensor(20)
    losses = [model(ids, labels=ids, num_items_in_batch=number).loss.item() for model in (plain, shared)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_the_proof_compares_documents_between_padding_more_than_once():
    """The second run judges what rounding changes; it could not be compared where it had another shape."""
    model, ids = tiny("bloom").train(), torch.arange(3, 15).view(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[1, -1:] = 0
    documents = prove._documents({"input_ids": ids, "attention_mask": mask, "labels": ids})
    first, second = (prove._outcome(model, documents).values for _ in range(2))
    assert first[prove.OUTPUT].shape[0] == ids.numel()
    assert prove.difference(first, second, 0.0) == ("", 0.0)
