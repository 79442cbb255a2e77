"""DeepSpeed engines on packs and odd lengths: checkpointed, compiled, under ZeRO; and what a patched model refuses."""

import pytest
import torch

import ds_seqpar
from tests.dist.ranks import WRONG, assert_all_refused, everywhere, make, only_one
from tests.hf.families import model_of
from tests.hf.llama import gap, settings, step
from tests.hf.test_families import batch_of, plain
from tests.launch import on_engine_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
FEW = [("packed", "gemma2", 2, "checkpointed", "3"), ("odd", "gpt_oss", 1, "checkpointed", "2")]
COMPILED = [
    ("packed", "gpt_oss", 1, "compiled", "2"),
    ("packed", "llama", 2, "compiled", "1"),
    ("odd", "gemma2", 1, "compiled", "2"),
]


def one_step(cases):
    found = []
    for kind, family, ulysses, how, stage in cases:
        batch, model = batch_of(kind), model_of(family, 5)
        _, loss, gradients = plain(model_of(family, 5), batch)
        if how == "checkpointed":
            model.gradient_checkpointing_enable()
        if how == "compiled":
            model = torch.compile(model, backend="aot_eager")
        config = settings({"size": 4, "ulysses": ulysses}, stage, 1, 2)
        engine, *_ = ds_seqpar.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        made = step(engine, engine.sequence_parallel.shard_batches([batch]))
        names = {name.replace("_orig_mod.", ""): x for name, x in made["gradients"].items()}
        found.append((abs(made["loss"] - loss) / loss, gap(names, gradients)))
    return found


@pytest.mark.parametrize("cases", [FEW, pytest.param(COMPILED, marks=pytest.mark.whole)], ids=["few", "compiled"])
def test_engines_on_packs_and_odd_lengths(cases):
    for found in on_ranks(4, one_step, cases, timeout=400):
        for case, errors in zip(cases, found, strict=True):
            assert max(errors) < 1e-5, case


def compiled_for_many(count):
    """A compiled model on packs that are all different: it must not be compiled for one and used for another."""
    sp, model = make(size=2, ulysses=1), model_of("llama", num_hidden_layers=1)
    eager = model_of("llama", num_hidden_layers=1)
    for one in (model, eager):
        one.patch_attention(sp)
    compiled, errors = torch.compile(model, backend="aot_eager"), []
    for seed in range(count):
        dice = torch.Generator().manual_seed(seed)
        cut = int(torch.randint(1, 23, (1,), generator=dice))
        ids = torch.randint(3, 64, (1, 24 + seed % 3), generator=dice)
        positions = torch.cat([torch.arange(cut), torch.arange(ids.shape[1] - cut)])[None]
        shard = sp.shard_batch({"input_ids": ids, "labels": ids.clone(), "position_ids": positions})
        with torch.no_grad():
            a, b = compiled(**shard).logits, eager(**shard).logits
        errors.append(((a - b).abs().max() / b.abs().max()).item())
    return max(errors)


@pytest.mark.whole
def test_a_compiled_model_takes_pack_after_pack():
    assert max(on_ranks(2, compiled_for_many, 5, timeout=300)) < 1e-5


def packed(sp):
    return sp.shard_batch(batch_of("packed"))


def mixed(sp):
    return {**packed(sp), "placement": sp.shard_batch(batch_of("odd"))["placement"]}


def call(batch):
    """A forward of a patched model on what `batch(sp)` makes."""
    return lambda sp, rank: model_of("llama").patch_attention(sp)(**batch(sp))


# what is not this rank's, or leaves a rank without tokens
CALLS = {
    "short": (
        call(lambda sp: sp.shard_batch({name: x[:, :3] for name, x in batch_of("odd").items()})),
        everywhere("4 ranks", "got 3 tokens"),
    ),
    "no placement": (
        call(lambda sp: {**packed(sp), "placement": None}),
        everywhere("tokens", "sp.shard_batches"),
    ),
    "another placement": (
        call(mixed),
        everywhere("tokens", "placement", "got (1, "),
    ),
    "a text": (
        call(lambda sp: {**packed(sp), "placement": "packed"}),
        everywhere("BatchLayout", "got str"),
    ),
    "positions": (
        call(lambda sp: {**packed(sp), "position_ids": packed(sp)["position_ids"] + 1}),
        everywhere("position_ids", "placement", "other tokens"),
    ),
    "another placement on one rank": (
        call(lambda sp: (packed(sp), mixed(sp))[sp.rank == WRONG]),  # all ranks deal the same batches
        only_one("placement"),
    ),
}


def refused():
    assert_all_refused(CALLS, make(size=4, ulysses=2))


def test_what_is_not_this_ranks_is_refused_before_anything_is_sent():
    on_ranks(4, refused)
