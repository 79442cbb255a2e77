"""A patched LLaMA generates as the unpatched one does, and can be given back as it was."""

import copy
import itertools
from collections import Counter

import pytest
import torch
from transformers import LlamaForCausalLM

import ds_seqpar
from ds_seqpar.data.batch_layout import EQUAL
from hf_integration import patch_attention, patched_with, unpatch_attention, whole_sequences
from tests.dist.ranks import lacking, make, refusal
from tests.grids import each_then_rest
from tests.hf.llama import MODES, SEQ, adam, llama, ragged, settings, small, update, weights
from tests.launch import on_each_of
from tests.oracle import error

pytestmark = pytest.mark.usefixtures("compiled")
WORLD = 4


def tokens(rows=2, seq=SEQ, seed=1):
    return torch.randint(3, 64, (rows, seq), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of(model):
    return model(tokens()).logits


@torch.no_grad()
def sharded_logits(model, sp, ids, **kwargs):
    """Logits of the patched model for whole sequences, in global order."""
    local = model(
        input_ids=sp.shard(ids, 1), position_ids=sp.position_ids(ids.shape[1])[None], placement=EQUAL, **kwargs
    ).logits
    return sp.gather(local, 1)


@on_each_of(WORLD)
def test_attention_under_autocast_runs_in_bf16():
    """RoPE leaves q and k in fp32 beside a bf16 v; attention runs in bf16 all the same, as sdpa does."""
    sp = make(**MODES["u2r2"])
    model, seen, forward = patch_attention(small(), sp), set(), sp.runtime.forward
    sp.runtime.forward = lambda tensors, *rest: seen.add(tensors[0].dtype) or forward(tensors, *rest)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**sp.shard_batches(ragged(MODES["u2r2"], 1, 1))[0])
    assert seen == {torch.bfloat16}


def generated(model, seed, padded):
    """Greedy tokens, of two prompts padded on the left."""
    ids = tokens(rows=3, seq=11, seed=seed)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4], mask[2, :7] = 0, 0
        ids = ids.masked_fill(mask == 0, 0)
    options = {"do_sample": False, "max_new_tokens": 3, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(input_ids=ids, attention_mask=mask, **options).tolist()


@pytest.mark.parametrize("stage", each_then_rest(["3"], ["0", "2"]))
@on_each_of(2, keep="deepspeed")
def test_generate_is_that_of_the_unpatched_model(stage):
    """Before and after training steps, in training mode and not, with and without padding on the left, together and
    each rank its own prompts, for which nothing is sent. accelerate#4177: masks discarded."""
    case = MODES["r2"]
    engine, *_ = ds_seqpar.initialize(model=llama(), config=settings(case, stage, 1, 4, **adam(1e-2)))
    sp, model = engine.sequence_parallel, engine.module
    for trained in (False, True):
        if trained:
            update(engine, sp.shard_batches(ragged(case, 1, 1, seed=0)))
        twin = llama()
        twin.load_state_dict({name: torch.from_numpy(x) for name, x in weights(model).items()})
        assert twin.config._attn_implementation == "sdpa"
        for training, padded in itertools.product((True, False), repeat=2):
            model.train(training), twin.train(training)
            assert generated(model, 0, padded) == generated(twin, 0, padded)
            before = Counter(sp.comm.received)
            with whole_sequences(model):
                assert generated(model, sp.rank, padded) == generated(twin, sp.rank, padded)
            assert sp.comm.received == before
    update(engine, sp.shard_batches(ragged(case, 1, 1, seed=3)))  # and training goes on


@on_each_of(2)
def test_a_model_is_patched_once_and_given_back():
    """axolotl#3498: partitioned twice."""
    sp, other, model = make(**MODES["r2"]), make(**MODES["r2"]), llama()

    def state():
        return [(len(m._forward_pre_hooks), sorted(vars(m))) for m in model.modules()]

    plain, before = logits_of(model), state()
    for _ in range(2):
        assert patch_attention(model, sp) is model
        assert copy.deepcopy(model.config)._attn_implementation == "sdpa"
        patched = state()
        patch_attention(model, sp)
        told = refusal(patch_attention, model, other)
        assert lacking(told, "ConfigError", "another SequenceParallel", "unpatch_attention(model)") == []
        assert state() == patched
        assert patched_with(model) is sp
        for its in (model, copy.deepcopy(model)):
            assert error(sharded_logits(its, sp, tokens()), plain) < 1e-5
        model.set_attn_implementation("eager")  # of local forwards
        assert error(sharded_logits(model, sp, tokens()), plain) < 1e-5
        model.set_attn_implementation("sdpa")
        assert unpatch_attention(model) is model
        assert patched_with(model) is None
        assert state() == before
        assert torch.equal(logits_of(model), plain)
    unpatch_attention(model)  # a model that is not patched stays as it is
    eager = llama(attn_implementation="eager").patch_attention(sp).unpatch_attention()
    assert eager.config._attn_implementation == "eager"


@on_each_of(WORLD)
def test_two_models_with_settings_of_their_own_take_turns():
    """With two SequenceParallels, and a third unpatched; all made from one config object, as users do. deepspeed#8291:
    head counts kept once a process gave the second model the first one's split, and hung."""
    sps, config = [make(size=2, ulysses=2), make(size=4, ulysses=1, layout="striped")], llama().config
    torch.manual_seed(1)
    models = [LlamaForCausalLM(config) for _ in range(3)]
    before, plain = (config.to_dict(), config._attn_implementation), [*map(logits_of, models)]
    for model, sp in zip(models, sps, strict=False):
        patch_attention(model, sp)
    for _ in range(2):
        for model, sp, logits in zip(models, sps, plain, strict=False):
            assert error(sharded_logits(model, sp, tokens()), logits) < 1e-5
        assert torch.equal(logits_of(models[2]), plain[2])
    assert torch.equal(logits_of(unpatch_attention(models[1])), plain[1])
    assert error(sharded_logits(models[0], sps[0], tokens()), plain[0]) < 1e-5
    assert models[2].config is config
    assert before == (config.to_dict(), config._attn_implementation)
