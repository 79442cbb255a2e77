"""Attention modules that project the heads of one head chunk at a time: no tensor of all heads, nothing sent twice, and
numbers as without head chunks. Of every family: test_families.py; under ZeRO: test_tiles.py."""

import types

import pytest
import torch

from tests.dist.ranks import make
from tests.hf import test_tiles as tiles
from tests.hf.families import batch_of, model_of
from tests.hf.llama import averaged, gap, llama, small, with_lora
from tests.hf.test_checkpointing import CHECKPOINTING, enable
from tests.launch import on_engine_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
STAGES = {"head_chunks": 2}
SECTIONS = {"r2": {"size": 2, "ulysses": 1}, "u2": {"size": 2, "ulysses": 2}}


def counted(sp):
    """A list that grows with every call of attention: (query heads, key/value heads)."""
    calls, forward = [], type(sp.runtime).forward

    def call(q, k, *args):
        calls.append((q.shape[2], k.shape[2]))
        return forward(sp.runtime, q, k, *args)

    sp.runtime.forward = call
    return calls


def sent(head_chunks):
    """By section and way to checkpoint: heads of each attention, and what arrived, by kind."""
    found = {}
    for name, section in SECTIONS.items():
        for how, given in CHECKPOINTING.items():
            sp, model = make(**section, **head_chunks), small(num_key_value_heads=4)
            calls = counted(sp)
            model.patch_attention(sp)
            enable(model, given)
            model.train()(**sp.shard_batch(batch_of("odd"))).loss.backward()
            found[name, how] = calls, dict(sp.comm.received)
    return found


def test_attention_runs_once_and_sends_once():
    for whole, mine in zip(on_ranks(2, sent, {}), on_ranks(2, sent, STAGES), strict=True):
        for case, (calls, arrived) in mine.items():
            expected = whole[case][1]
            assert whole[case][0] == [(8, 4)]
            assert calls == [(4, 2), (4, 2)]
            if case == ("u2", "none"):  # without a checkpoint head chunks keep nothing that they have sent
                expected["qkv"] *= 2
                expected["delta_heads"] = arrived["delta_heads"]
            assert arrived == expected, case


HEADS, LENGTH = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 32}, 96


def largest():
    """By way to checkpoint: the most elements that a tensor has in a step, without head chunks and with four."""
    return {how: [largest_of(head_chunks, how) for head_chunks in ({}, {"head_chunks": 4})] for how in CHECKPOINTING}


def largest_of(head_chunks, how):
    sp, model = make(size=1, **head_chunks), llama(**HEADS)
    model.patch_attention(sp)
    enable(model, CHECKPOINTING[how])
    ids = torch.arange(LENGTH)[None] % 64
    batch = sp.shard_batch({"input_ids": ids, "labels": ids.clone()})
    with tiles.Sizes() as sizes:
        model.train()(**batch).loss.backward()
    return sizes.most


def test_no_query_of_all_heads_stands():
    (found,) = on_ranks(1, largest)
    for how, (whole, mine) in found.items():
        assert whole == LENGTH * 8 * 32, how
        assert mine <= LENGTH * 96, how  # an intermediate of the MLP


def one_adapted(name, head_chunks):
    """Gradients of a first layer of which one projection alone has LoRA."""
    sp, model = make(size=1, **head_chunks), with_lora(small(num_key_value_heads=4), name)
    model.patch_attention(sp)
    model.train()(**sp.shard_batch(batch_of("odd"))).loss.backward()
    return averaged(model)


def adapted(names):
    return {name: gap(one_adapted(name, STAGES), one_adapted(name, {})) for name in names}


def test_lora_may_be_on_one_projection_of_a_first_layer():
    """Its input wants no gradient, and the other projections have none."""
    (errors,) = on_ranks(1, adapted, ["q_proj", "v_proj", "o_proj"])
    assert len(errors) == 3
    assert max(errors.values()) < 1e-5


def with_other_norms():
    """Gradients without head chunks and with them, where norms of q and k have forwards of their own, as Liger
    gives."""
    found = []
    for head_chunks in ({}, STAGES):
        sp, model = make(size=1, **head_chunks), model_of("qwen3", num_hidden_layers=1, layer_types=["full_attention"])
        for norm in (model.model.layers[0].self_attn.q_norm, model.model.layers[0].self_attn.k_norm):
            norm.forward = types.MethodType(type(norm).forward, norm)
        model.patch_attention(sp)
        model.train()(**sp.shard_batch(batch_of("odd"))).loss.backward()
        found.append(averaged(model))
    return found


def test_norms_with_other_forwards_keep_their_gradients():
    ((whole, mine),) = on_ranks(1, with_other_norms)
    assert gap(mine, whole) < 1e-5


def under_autocast():
    """The gap of gradients, in bf16 by autocast, to those without head chunks."""
    found = []
    for head_chunks in ({}, STAGES):
        sp, model = make(size=1, **head_chunks), model_of("qwen3")
        model.patch_attention(sp)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.train()(**sp.shard_batch(batch_of("odd"))).loss
        loss.backward()
        found.append(averaged(model))
    return gap(found[1], found[0])


def test_autocast_is_that_of_forward():
    """With its cache a weight that was cast where nothing asks for gradients would lose its own."""
    assert max(on_ranks(1, under_autocast)) < 0.05
