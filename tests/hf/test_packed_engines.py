"""DeepSpeed engines on packs and odd lengths: checkpointed, compiled, under ZeRO; and what a patched model refuses."""

import pytest
import torch

import ds_seqpar
from tests.dist.ranks import is_one_sentence, make
from tests.hf.families import model_of
from tests.hf.llama import gap, settings, step
from tests.hf.test_families import batch_of, plain
from tests.launch import on_engine_ranks as on_ranks
from tests.words import missing

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


def refused():
    """What a patched model says of batches that are not this rank's, or leave a rank without tokens."""
    sp, said = make(size=4, ulysses=2), []
    model = model_of("llama").patch_attention(sp)
    packed = sp.shard_batch(batch_of("packed"))
    odd = sp.shard_batch(batch_of("odd"))
    short = sp.shard_batch({name: x[:, :3] for name, x in batch_of("odd").items()})
    tries = [
        short,
        {**packed, "placement": None},
        {**packed, "placement": odd["placement"]},
        {**packed, "placement": "packed"},
        {**packed, "position_ids": packed["position_ids"] + 1},
        {**packed, "placement": packed["placement"] if sp.rank else odd["placement"]},
    ]
    for batch in tries:
        try:
            model(**batch)
            said.append(("nothing", ""))
        except ValueError as error:
            said.append((type(error).__name__, str(error)))
    return said, sum(sp.comm.received.values())


WORDS = [
    ("4 ranks", "got 3 tokens"),
    ("tokens", "sp.shard_batches"),
    ("tokens", "placement", "got (1, "),
    ("Placement", "got str"),
    ("position_ids", "placement", "other tokens"),
    (),
]


def test_what_is_not_this_ranks_is_refused_before_anything_is_sent():
    for said, received in on_ranks(4, refused):
        assert received == 0
        for (kind, sentence), words in zip(said, WORDS, strict=True):
            assert kind in ("InputError", "DisagreementError"), words
            assert missing(sentence, *words) == []
            assert is_one_sentence(sentence)
