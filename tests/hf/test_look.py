"""What a look finds in models, on small copies that leave everything else alone; and the proof, which says where they
are wrong."""

import copy
import dataclasses
import logging
import random
import types

import deepspeed
import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
    Starcoder2ForCausalLM,
)

from ds_seqpar.base import log
from hf_integration import heads, patch_attention, unpatch_attention
from hf_integration.look.facts import TESTED, Facts
from hf_integration.look.known import facts_of
from hf_integration.look.look import look
from hf_integration.look.prove import compared, prove
from hf_integration.look.small import layers_of, small_copy
from hf_integration.model import patch
from tests.dist.ranks import lacking, make, refusal
from tests.grids import each_then_rest
from tests.hf.every_type import config_of, enlivened, tiny
from tests.hf.families import FAMILIES, model_of
from tests.hf.llama import small, with_lora
from tests.hf.media_types import model_of as type_of_media
from tests.launch import on_each_of, on_engine_ranks, on_ranks
from tests.words import missing

WINDOW = (("sliding_attention", "sliding_window"),)
# what differs from a Llama
FOUND = {
    "bert": {"attention": ("encoder.layer.*.attention.self",)},
    "deepseek_v3": {},
    "gemma3": {
        "attention": ("language_model.layers.*.self_attn",),
        "masks": WINDOW, "stack": "model.language_model", "outside": True, "no_media": "",
    },
    "jetmoe": {"attention": ("layers.*.self_attention",), "heads": ((4, 4),), "balance": True},
    "laguna": {"heads": ((4, 2), (8, 2)), "balance": True, "masks": WINDOW},
    "llama4_text": {"base": "model", "masks": (("chunked_attention", "attention_chunk_size"),)},
    "nemotron": {"keywords": False},
    "opt": {"base": "model.decoder", "counts_padding": False},
    "phimoe": {"masks": (("", "sliding_window"),), "balance": True},
    "roberta": {
        "attention": ("encoder.layer.*.attention.self",), "first_position": 2,
        "counts_padding": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_table_of_tested_families_is_what_a_look_finds(family):
    recorded = dataclasses.replace(TESTED[family], norms_heads=False)
    assert look(model_of(family, window=20)) == recorded


@pytest.mark.parametrize("name", FOUND)
def test_a_look_finds_what_differs(name):
    assert look(tiny(name)) == Facts(**FOUND[name])


def test_heads_are_those_of_a_config_where_there_is_no_model():
    config = small().config
    expected = config.num_attention_heads, config.num_key_value_heads
    assert heads(types.SimpleNamespace(config=config)) == expected
    assert heads(with_lora(small(), "q_proj")) == expected


# numbers of a config that make noise -> whether chance decides which layers run
NOISY = {
    "opt": ({"layerdrop": 0.1, "dropout": 0.1}, True),
    "mixtral": ({"router_jitter_noise": 0.1}, False),
    "starcoder2": ({"residual_dropout": 0.1}, False),
    "biogpt": ({"hidden_dropout_prob": 0.1, "layerdrop": 0.0}, False),
}


def loud(name, **numbers):
    """A model of this type on the meta device, with noise."""
    config = copy.deepcopy(config_of(name))
    vars(config).update(numbers or NOISY[name][0])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", each_then_rest(["opt", "mixtral"], ["starcoder2", "biogpt"]))
def test_a_look_finds_layers_that_are_left_out_by_chance(name):
    before, found = (random.getstate(), torch.get_rng_state().tolist()), look(loud(name)).skips
    assert found == NOISY[name][1]
    assert before == (random.getstate(), torch.get_rng_state().tolist())


def test_what_is_left_out_is_what_modules_say_whatever_the_config_says_by_now():
    model = loud("opt")
    model.config.layerdrop = 0.0
    assert look(model).skips
    model.model.decoder.layerdrop = 0.0
    assert not look(model).skips


@pytest.mark.parametrize("drawn", [lambda x: torch.randn_like(x), lambda x: random.random()], ids=["torch", "Python"])
def test_noise_that_no_number_turns_off_is_named(drawn):
    model = loud("llama", attention_dropout=0.0)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out + 0.1 * drawn(out))
    kind, sentence = refusal(look, model)
    assert kind == "ConfigError"
    assert missing(sentence, "model.layers.0.mlp, a module LlamaMLP that draws random numbers") == []


def test_a_large_model_is_looked_at_by_its_small_copy():
    config = AutoConfig.for_model("deepseek_v3")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    copied, not_small = small_copy(model)
    assert not_small == ()
    assert len(layers_of(copied)) == config.first_k_dense_replace + 1  # a dense layer and one of experts
    assert [type(layer.mlp) for layer in layers_of(copied)] == [type(layer.mlp) for layer in layers_of(model)[:4]]
    assert copied.config.num_attention_heads == config.num_attention_heads == 128
    assert copied.config.v_head_dim == config.v_head_dim
    assert sum(p.numel() for p in copied.parameters()) < 2e7


def test_a_copy_is_the_same_each_time_and_leaves_torch_as_it_was():
    model = small()
    state, first = torch.get_rng_state(), small_copy(model)[0]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            second = small_copy(model)[0]
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert torch.equal(a, b)


def inside_zero_init():
    """On each rank: whether a copy was whole, and whether a model that was made after it is partitioned."""
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = LlamaForCausalLM(small().config)
        facts = facts_of(type("Subclass", (LlamaForCausalLM,), {})(model.config))
        copied = small_copy(model)[0]
        after = nn.Linear(64, 64)
    whole = all(not hasattr(p, "ds_id") and p.numel() for p in copied.parameters())
    return whole, hasattr(after.weight, "ds_id") and not after.weight.numel(), facts


def test_a_copy_is_whole_inside_zero_init():
    for whole, partitioned, facts in on_engine_ranks(2, inside_zero_init):
        assert whole
        assert partitioned
        assert facts == TESTED["llama"]


def proofs():
    """On each rank: what the proof says of right facts, and of some that are not."""
    sp, found = make(size=2, ulysses=1), []
    for name, wrong in (("qwen2_moe", {"masks": ()}), ("gpt2", {"first_position": 1}), ("llama4_text", {"masks": ()})):
        model = tiny(name)
        facts = look(model)
        for given in (facts, dataclasses.replace(facts, **wrong)):
            patched = lambda copied, given=given: patch.patch_by(copied, copied, sp, given)  # noqa: E731
            found.append(refusal(prove, model, sp, given, patched, unpatch_attention))
    return found


def off_by(share, model, sp):
    """How a small copy differs from the plain one whose shared logits are off by this share."""
    facts, hooks = facts_of(model), []

    def patched(copied):
        patch.patch_by(copied, copied, sp, facts)
        hooks.append(copied.lm_head.register_forward_hook(lambda module, args, logits: logits * (1 + share)))

    def unpatched(copied):
        hooks.pop().remove()
        unpatch_attention(copied)

    return compared(model, sp, facts, patched, unpatched)


def beside_fp64():
    """On each rank: what is compared of a model whose fp32 is near fp64, and of one whose is not, as it is and off."""
    sp = make(size=2, ulysses=1)
    return [[off_by(share, model, sp) for share in (0.0, 3e-5)] for model in (tiny("llama"), type_of_media("gemma4"))]


def test_a_proof_finds_an_error_of_3e_5_but_none_in_what_the_plain_copy_itself_is_off_fp64():
    for near, far in on_ranks(2, beside_fp64):
        assert [outcome.wrong for outcome in (near[0], far[0])] == ["", ""]
        assert near[0].largest < 1e-5 < far[0].largest
        for _, off in (near, far):
            assert "output differs by" in off.wrong


def test_a_proof_refuses_what_is_wrong_and_says_where():
    for right, window, *others in on_ranks(2, proofs):
        assert right == (None, None) == others[0] == others[2]
        for kind, sentence in (window, others[1], others[3]):
            assert kind == "ConfigError"
            assert "from layer" in sentence
            assert "in a plain batch" in sentence


# head -> types whose model with it is proved; a token for padding; further numbers of the config
HEADS = {
    "a score": (AutoModelForSequenceClassification, ["starcoder2"], None, {"num_labels": 1}),
    "two scores for each token": (AutoModelForQuestionAnswering, ["opt"], 0, {}),
    "a score of each type": (
        AutoModelForSequenceClassification,
        ["mixtral", "qwen2_moe", "qwen3_next", "deepseek_v3", "stablelm", "gpt_neox", "opt", "glm", "gemma", "gpt2"],
        None,
        {"num_labels": 1},
    ),
    "as many classes as tokens": (AutoModelForSequenceClassification, ["llama", "electra"], 0, {"num_labels": 23}),
    "classes of tokens": (AutoModelForTokenClassification, ["mixtral", "gpt2"], None, {"output_hidden_states": True}),
    "answers": (AutoModelForQuestionAnswering, ["mixtral", "gpt2", "llama"], None, {"output_hidden_states": True}),
    "states": (AutoModel, ["mixtral", "hunyuan_v1_moe", "bert"], None, {}),
}


@pytest.mark.parametrize("name", each_then_rest([*HEADS][:2], [*HEADS][2:]))
@on_each_of(2)
def test_models_with_any_head_are_proved(name):
    sp, (kind, types, pad, numbers) = make(size=2, ulysses=1, prove="always"), HEADS[name]
    for model_type in types:
        torch.manual_seed(0)
        config = copy.deepcopy(config_of(model_type))
        config.pad_token_id = pad
        for key, number in numbers.items():
            setattr(config, key, number)
        patch_attention(enlivened(kind.from_config(config).float()).train(), sp)


@pytest.mark.slow
@on_each_of(2)
def test_a_head_that_takes_a_ranks_first_token_for_the_sequences_is_refused():
    model = AutoModelForSequenceClassification.from_config(config_of("bert")).train()
    said = refusal(patch_attention, model, make(size=2, ulysses=1))
    assert lacking(said, "ConfigError", "BertForSequenceClassification must be exact", "in a plain batch") == []


def settings():
    """On each rank: how often a patch made a proof, by the setting."""
    found, made = {}, []
    patch.prove = lambda *args: made.append(args)
    for setting in ("auto", "always", "never"):
        sp = make(size=2, ulysses=1, prove=setting)
        for model in (small(), tiny("mixtral")):
            patch_attention(model, sp)
            unpatch_attention(model)
        found[setting] = [args[0].config.model_type for args in made]
        made.clear()
    return found


def test_families_that_are_not_tested_are_proved():
    for found in on_ranks(2, settings):
        assert found == {"auto": ["mixtral"], "always": ["llama", "mixtral"], "never": []}


@pytest.mark.slow
@on_each_of(2)
def test_a_proof_is_said_as_a_check_and_no_warning():
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ds_seqpar").addHandler(handler)
    log._said.clear()  # of other tests in these processes
    patch_attention(small(), sp := make(ulysses=1, prove="always"))
    assert [missing(x, "llama", "checked against an unsplit copy") for x in said] == [[]] * (sp.rank == 0)
    logging.getLogger("ds_seqpar").removeHandler(handler)


@on_each_of(1)
def test_a_copy_of_a_patched_model_is_one_that_can_be_unpatched():
    model = tiny("opt")
    patch_attention(model, make(size=1))
    copied, ids = copy.deepcopy(model), torch.arange(3, 20)[None]
    unpatch_attention(model), unpatch_attention(copied)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, copied(ids).logits)


class Fails(Starcoder2ForCausalLM):
    """It fails on the rank that its config says."""

    def forward(self, *args, **kwargs):
        if torch.distributed.get_rank() == self.config.fails:
            raise OSError("no room")
        return super().forward(*args, **kwargs)


@on_each_of(2)
def test_what_fails_on_one_rank_is_told_on_all():
    sp = make(ulysses=1)
    for rank in range(2):
        model = Fails(tiny("starcoder2").config)
        model.config.fails = rank
        name, message = refusal(lambda model=model: patch_attention(model, sp))
        assert name == ("ConfigError" if sp.rank == rank else "DisagreementError"), (rank, name, message)
        assert "no room" in message
    model.config.fails = None
    facts_of(model)
    model.config.fails = 1  # in the proof
    name, message = refusal(lambda: patch_attention(model, sp))
    assert name == "ConfigError"
    assert ("no room" if sp.rank else "on another rank") in message, message
