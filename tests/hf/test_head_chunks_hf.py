"""Attention modules that project the heads of one head chunk at a time: no tensor of all heads, nothing sent twice, and
numbers as without head chunks. Of every family: test_families.py; under ZeRO: test_tiles.py."""

import itertools
import types

import pytest
import torch

from tests.dist.ranks import make
from tests.hf.families import batch_of, model_of
from tests.hf.llama import averaged, gap, llama, small, with_lora
from tests.hf.test_checkpointing import CHECKPOINTING, enable
from tests.hf.test_tiles import Sizes
from tests.launch import on_each_of

pytestmark = pytest.mark.usefixtures("compiled")
STAGES = {"head_chunks": 2}
SECTIONS = {"r2": {"size": 2, "ulysses": 1}, "u2": {"size": 2, "ulysses": 2}}


def counted(sp):
    """A list that grows with every call of attention: (query heads, key/value heads)."""
    calls, forward = [], type(sp.runtime).forward

    def call(tensors, *args):
        calls.append((tensors[0].shape[2], tensors[1].shape[2]))
        return forward(sp.runtime, tensors, *args)

    sp.runtime.forward = call
    return calls


def sent(section, head_chunks, how):
    """Heads of each attention, and what arrived, by kind."""
    sp, model = make(**section, **head_chunks), small(num_key_value_heads=4)
    calls = counted(sp)
    model.patch_attention(sp)
    enable(model, CHECKPOINTING[how])
    model.train()(**sp.shard_batch(batch_of("odd"))).loss.backward()
    return calls, dict(sp.comm.received)


@on_each_of(2)
def test_attention_runs_once_and_sends_once():
    for (name, section), how in itertools.product(SECTIONS.items(), CHECKPOINTING):
        (whole, expected), (calls, arrived) = (sent(section, head_chunks, how) for head_chunks in ({}, STAGES))
        assert whole == [(8, 4)]
        assert calls == [(4, 2), (4, 2)]
        if (name, how) == ("u2", "none"):  # without a checkpoint head chunks keep nothing that they have sent
            expected["qkv"] *= 2
            expected["delta_heads"] = arrived["delta_heads"]
        assert arrived == expected, (name, how)


HEADS, LENGTH = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 32}, 96


def largest_of(head_chunks, how):
    """The most elements that a tensor has in a step."""
    sp, model = make(size=1, **head_chunks), llama(**HEADS)
    model.patch_attention(sp)
    enable(model, CHECKPOINTING[how])
    ids = torch.arange(LENGTH)[None] % 64
    batch = sp.shard_batch({"input_ids": ids, "labels": ids.clone()})
    with Sizes() as sizes:
        model.train()(**batch).loss.backward()
    return sizes.most


@on_each_of(1)
def test_no_query_of_all_heads_stands():
    for how in CHECKPOINTING:
        assert largest_of({}, how) == LENGTH * 8 * 32, how
        assert largest_of({"head_chunks": 4}, how) <= LENGTH * 96, how  # an intermediate of the MLP


def gradients_of(model, head_chunks):
    sp = make(size=1, **head_chunks)
    model.patch_attention(sp)
    model.train()(**sp.shard_batch(batch_of("odd"))).loss.backward()
    return averaged(model)


@on_each_of(1)
def test_lora_may_be_on_one_projection_of_a_first_layer():
    """Its input wants no gradient, and the other projections have none."""
    for name in ("q_proj", "v_proj", "o_proj"):
        mine, whole = (gradients_of(with_lora(small(num_key_value_heads=4), name), more) for more in (STAGES, {}))
        assert gap(mine, whole) < 1e-5, name


def with_other_norms():
    """Norms of q and k that have forwards of their own, as Liger gives."""
    model = model_of("qwen3", num_hidden_layers=1, layer_types=["full_attention"])
    for norm in (model.model.layers[0].self_attn.q_norm, model.model.layers[0].self_attn.k_norm):
        norm.forward = types.MethodType(type(norm).forward, norm)
    return model


@on_each_of(1)
def test_norms_with_other_forwards_keep_their_gradients():
    mine, whole = (gradients_of(with_other_norms(), more) for more in (STAGES, {}))
    assert gap(mine, whole) < 1e-5


@on_each_of(1)
def test_autocast_is_that_of_forward():
    """With its cache a weight that was cast where nothing asks for gradients would lose its own."""
    found = []
    for head_chunks in ({}, STAGES):
        sp, model = make(size=1, **head_chunks), model_of("qwen3")
        model.patch_attention(sp)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.train()(**sp.shard_batch(batch_of("odd"))).loss
        loss.backward()
        found.append(averaged(model))
    assert gap(found[1], found[0]) < 0.05
