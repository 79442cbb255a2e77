"""All that saves memory, alone and together: losses and gradient norms are those of a run without any of it, and long
sequences over large vocabularies train."""

import math

import pytest
import torch

import ds_seqpar
from tests.grids import cover
from tests.hf.llama import llama, ragged, settings, update, with_lora
from tests.hf.test_tiles import OPTIMIZER, Sizes
from tests.launch import on_engine_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
WORLD, STEPS = 4, 2
TILES = {"mlp_tiles": 3, "loss_tiles": 5}
# name -> (settings, whether layers are checkpointed)
FEATURES = {
    "checkpoints": ({}, True),
    "attention again": ({"recompute_attention": True}, True),
    "stages": ({"head_chunks": 2}, False),
    "stages, kept": ({"head_chunks": 2}, True),
    "mlp": ({"mlp_tiles": 3}, False),
    "loss": ({"loss_tiles": 5}, False),
    "offload": ({"offload_checkpoints": True}, True),
    "all": ({"head_chunks": 2, "offload_checkpoints": True, **TILES}, True),
    "all, attention again": (
        {"head_chunks": "auto", "recompute_attention": True, "offload_checkpoints": True, **TILES},
        True,
    ),
}
MODELS = {"plain": lambda: llama(num_key_value_heads=4), "lora": lambda: with_lora(llama(), "q_proj", "down_proj")}
GRID = [tuple(case.values()) for case in cover(model=tuple(MODELS), size=(1, 2, 4), stage=("2", "3"))]
COVER = {("plain", 2, "3"): ["all, attention again"], ("lora", 2, "2"): ["all"]}


def curve(name, size, stage, micro, section, checkpointed):
    """Losses and gradient norms of some steps of some micro-steps each, on ragged labels."""
    model = MODELS[name]()
    if checkpointed:
        model.gradient_checkpointing_enable()
    section = {"size": size, "ulysses": min(size, 2), **section}
    engine, *_ = ds_seqpar.initialize(model=model, config=settings(section, stage, micro, 2, **OPTIMIZER))
    sp, found = engine.sequence_parallel, []
    for _ in range(STEPS):
        batches = ragged({"size": size}, sp.data_size, micro, sequences=2)
        found += update(engine, sp.shard_batches(batches))
    return found


def curves(cases, micro):
    found = {}
    for case, features in cases.items():
        given = {"none": ({}, False), **{name: FEATURES[name] for name in features}}
        found[case] = {name: curve(*case, micro, *feature) for name, feature in given.items()}
    return found


def check(cases, ranks, micro):
    for found in on_ranks(ranks, curves, cases, micro, timeout=550):
        for case, runs in found.items():
            assert min(runs["none"]) > 0
            for name, run in runs.items():
                assert run == pytest.approx(runs["none"], rel=1e-5), (case, name)


def test_some_alone_and_all_together():
    check(COVER, ranks=2, micro=1)


@pytest.mark.whole
@pytest.mark.parametrize("case", GRID, ids=lambda case: "-".join(map(str, case)))
def test_each_alone_and_all_together(case):
    check({case: list(FEATURES)}, WORLD, micro=2)


VOCABULARY, HIDDEN = 2**17, 64


def large(tokens):
    """A step under ZeRO-3: the loss, and the most elements that a tensor had."""
    model = llama(vocab_size=VOCABULARY, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    model.gradient_checkpointing_enable()
    section = {"size": WORLD, "ulysses": 2, "mlp_tiles": "auto", "loss_tiles": "auto", "head_chunks": "auto"}
    changes = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 2**20, "stage3_prefetch_bucket_size": 2**20}}
    engine, *_ = ds_seqpar.initialize(model=model, config=settings(section, "3", 1, 1, **OPTIMIZER, **changes))
    sp, ids = engine.sequence_parallel, torch.arange(tokens)[None] % VOCABULARY
    with Sizes() as seen:
        loss, _ = update(engine, sp.shard_batches([{"input_ids": ids, "labels": ids.clone()}]))
    return loss, seen.most


@pytest.mark.whole
def test_no_logits_of_more_than_a_tile():
    """16K tokens, a vocabulary of 128K: no tensor is larger than a tile's logits, 256 MiB, of the 2 GiB of a rank's."""
    for loss, most in on_ranks(WORLD, large, 2**14, timeout=550):
        assert loss == pytest.approx(math.log(VOCABULARY), rel=0.01)
        assert most <= 2**28 // 4
        assert most >= VOCABULARY * HIDDEN  # it saw the weights
