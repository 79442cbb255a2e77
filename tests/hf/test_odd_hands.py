"""What users do with a patched model beside training it: copies, saves, changes, other forwards; and that it is the
plain model again once it is unpatched."""

import copy
import gc
import io
import itertools
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, pipeline

import ds_seqpar
from hf_integration import patch_attention, whole_sequences
from tests.dist.ranks import lacking, make, refusal
from tests.hf.families import gradients, model_of
from tests.hf.llama import gap, small, with_lora
from tests.launch import on_each_of

pytestmark = pytest.mark.usefixtures("compiled")
TILES = {"mlp_tiles": 3, "loss_tiles": 3}
IDS = torch.arange(24).view(2, 12)
HOW = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


def shard(sp):
    return sp.shard_batch({"input_ids": IDS, "labels": IDS.clone()})


def state(model):
    """What tells a patched model from a plain one."""
    modules = [sorted(vars(module)) for module in model.modules()]
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    configs = [module.config is model.config for module in model.modules() if hasattr(module, "num_key_value_groups")]
    functions = [type(vars(m).get("_gradient_checkpointing_func")).__name__ for m in model.modules()]
    return modules, hooks, configs, functions, model.config._attn_implementation


# --- one rank: the plain model


def words():
    known = WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0")
    tokenizer = Tokenizer(known)
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", unk_token="w0")


def forwards(model):
    """What a plain model can be asked for, by name."""
    padded = torch.ones_like(IDS)
    padded[0, :5] = 0
    with torch.no_grad():
        model.eval()
        given = {
            "logits": model(IDS).logits,
            "padded": model(IDS, attention_mask=padded).logits,
            "loss": model(IDS, labels=IDS).loss,
            "embeddings": model(inputs_embeds=model.get_input_embeddings()(IDS)).logits,
            "generated": model.generate(IDS, **HOW),
            "generated without a cache": model.generate(IDS, attention_mask=padded, use_cache=False, **HOW),
        }
        text = pipeline("text-generation", model=model, tokenizer=words())("w3 w4 w5", **HOW)
        features = pipeline("feature-extraction", model=model.base_model, tokenizer=words(), return_tensors=True)
        given["text"], given["features"] = text[0]["generated_text"], features("w3 w4 w5")
    model.train()(IDS, labels=IDS).loss.backward()
    given["gradient"] = model.lm_head.weight.grad
    return given


@on_each_of(1, keep="deepspeed")
def test_on_one_rank_a_patched_model_is_the_plain_one():
    plain = forwards(small())
    for tiles in ({}, TILES):
        mine = forwards(small().patch_attention(make(size=1, **tiles)))
        for name, x in plain.items():
            assert x == mine[name] if name == "text" else torch.equal(x, mine[name]), (name, tiles)


# --- copies and what is made of it


@on_each_of(1)
def test_what_is_made_of_a_patched_model_is_not_patched():
    sp = make(size=1)
    model, plain = small().patch_attention(sp).eval(), small().eval()
    with torch.no_grad():
        logits, loss = plain(IDS).logits, plain(IDS, labels=IDS).loss.item()
    configs = [copy.deepcopy(model.config), type(model.config)(**model.config.to_dict())]
    configs.append(pickle.loads(pickled := pickle.dumps(model.config)))
    assert b"ds_seqpar" not in pickled
    assert "ds_seqpar" not in f"{model.config} {model.config.to_dict()}"
    made = [*map(type(model), configs)]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        assert "sequence_parallel" not in Path(folder, "config.json").read_text()
        made.append(AutoModelForCausalLM.from_pretrained(folder))
    for number, other in enumerate(made):
        other.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.equal(other.eval()(IDS).logits, logits), number
        assert other.config._attn_implementation == "sdpa", number
    for config in (model.config, copy.copy(model.config)):  # which have our name, and layers that are not patched
        other = AutoModelForCausalLM.from_config(config).eval()
        other.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.equal(other(IDS).logits, logits)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert model(**shard(sp)).loss.item() == pytest.approx(loss, rel=1e-5)
    assert model.unpatch_attention().config._attn_implementation == "eager"
    patched = small().patch_attention(sp)
    for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        assert lacking(refusal(save, patched), "ConfigError", "state_dict") == []
    assert lacking(refusal(patch_attention, small(), None), "ConfigError") == []
    pickle.dumps(patched.unpatch_attention())


@on_each_of(1)
def test_copies_are_patched_and_unpatched_by_themselves():
    """Of a model with experts, checkpointing and tiles."""
    sp, model = make(size=1, mlp_tiles="auto", loss_tiles=3), model_of("qwen3_moe").train()
    model.gradient_checkpointing_enable()
    model(IDS)  # in which transformers leaves hooks of its own
    plain = state(model)
    model.patch_attention(sp)
    expected = model(**shard(sp)).loss
    expected.backward()
    with whole_sequences(model):
        copies = [copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))]
    for other in copies:
        other.zero_grad()
        loss = other(**shard(sp)).loss
        loss.backward()
        assert torch.equal(loss, expected)
        assert gap(gradients(other), gradients(model)) == 0
        with pytest.raises(ds_seqpar.SeqParError, match="position_ids"):  # sharded, though made in whole_sequences
            other(**shard(sp) | {"position_ids": IDS + 1})
    for other in (*copies, model):
        assert sp.sharding.keeps_masks
        other.unpatch_attention()
        assert state(other) == plain
    gc.collect()  # the copy of which the second is a copy
    assert not sp.sharding.keeps_masks


# --- another head


def new_head(model):
    model.lm_head = torch.nn.Linear(64, 64, bias=False)
    return model


def merged_after(model):
    """Adapters that were there when the model was patched."""
    sp = model.unpatch_attention() and make(size=1, **TILES)
    model = patch_attention(with_lora(model, "lm_head", "q_proj"), sp)
    model(**shard(sp)).loss.backward()
    return model.merge_and_unload().requires_grad_()


HEADS = {
    "smaller": lambda model: model.resize_token_embeddings(30) and model,
    "new": new_head,
    "lora": lambda model: with_lora(model, "lm_head", "gate_proj"),
    "merged": merged_after,
}


@on_each_of(1)
def test_tiles_take_the_head_that_the_model_has():
    for name, change in HEADS.items():
        sp = make(size=1, **TILES)
        torch.manual_seed(5)
        model = change(small().patch_attention(sp))
        loss = model(**shard(sp)).loss
        loss.backward()
        mine, inner = gradients(model), model.get_base_model() if name == "lora" else model
        inner.unpatch_attention()
        model.zero_grad()
        expected = model(IDS, labels=IDS).loss
        expected.backward()
        assert gap(mine, gradients(model)) < 1e-5, name
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5), name
        assert not any(vars(m).keys() & {"forward", "_z3_leaf", "_sequence_parallel"} for m in model.modules())


# --- backward


def checkpointed(model, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()  # torch's reentrant checkpoint has no gradients otherwise
    return model.train()


@on_each_of(1)
def test_backward_is_of_the_forward_that_was():
    """Whatever the context of backward; and what is said where the model was unpatched between them."""
    plain = small().train()
    plain(IDS, labels=IDS).loss.backward()
    for tiles, reentrant in itertools.product(({}, TILES), (False, True)):
        sp = make(size=1, **tiles)
        model = checkpointed(small().patch_attention(sp), reentrant)
        with whole_sequences(model):
            loss = model(IDS, labels=IDS).loss
        (1 * loss).backward()
        assert gap(gradients(model), gradients(plain)) < 1e-5
        model.zero_grad()
        loss = model(**shard(sp)).loss
        with whole_sequences(model):
            model.generate(IDS, **HOW)
            loss.backward()
        assert gap(gradients(model), gradients(plain)) < 1e-5
        loss = model(**shard(sp)).loss
        model.unpatch_attention()
        assert lacking(refusal(loss.backward), "ConfigError", "unpatch_attention after backward") == []


# --- inputs that are none, on the second of two ranks

INPUTS = {
    "a list": ("input_ids", torch.Tensor.tolist, "list"),
    "numpy": ("input_ids", lambda x: x.numpy(), "ndarray"),
    "floats": ("input_ids", lambda x: x.float(), "float32"),
    "one dim": ("input_ids", lambda x: x[0], "(24,)"),
    "no rows": ("input_ids", lambda x: x[:0], "(0, 24)"),
    "no ids": ("input_ids", lambda x: None, "neither"),
    "both": ("inputs_embeds", lambda x: torch.zeros(2, 24, 64), "both"),
    "positions": ("position_ids", lambda x: x.tolist(), "list"),
    "a mask": ("attention_mask", lambda x: [[1] * 24], "list"),
    "labels": ("shift_labels", lambda x: x[:, 1:], "(2, 23)"),
}


@on_each_of(2)
def test_inputs_that_are_none_are_refused_on_all_ranks():
    sp = make(size=2)
    model, ids = small().patch_attention(sp), torch.arange(48).repeat(2, 1)
    good = sp.shard_batch({"input_ids": ids, "labels": ids.clone()})
    for name, (key, change, word) in INPUTS.items():
        wrong = {**good, key: change(good.get(key))} if sp.rank == 1 else good
        kind = "InputError" if sp.rank == 1 else "DisagreementError"
        assert lacking(refusal(model, **wrong), kind, word) == [], name
    assert model(**good).loss.item() > 0


# --- torch's own checkpoint inside of ours


@on_each_of(2)
def test_a_checkpoint_of_torchs_inside_of_ours():
    for more in ({}, {"head_chunks": 2, "offload_checkpoints": True}):
        sp = make(size=2, ulysses=2, **more)
        torch.manual_seed(sp.rank)
        given = [torch.randn(1, 8, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        expected = None
        for ours, theirs in ((None, None), *itertools.product((False, True), repeat=2)):
            layers_of(sp, ours, theirs)(*given).square().sum().backward()
            found = torch.stack([x.grad for x in given])
            expected = found if expected is None else expected
            assert (found - expected).abs().max() < 1e-12, (more, ours, theirs)
            for x in given:
                x.grad = None


def layers_of(sp, ours, theirs):
    def inner(q, k, v):
        return sp.attention(2 * q, k, v).sin()

    def outer(q, k, v):
        if theirs is None:
            return inner(inner(q, k, v).cos(), k, v)
        first = checkpoint(inner, q, k, v, use_reentrant=theirs)
        return checkpoint(inner, first.cos(), k, v, use_reentrant=theirs)

    return outer if ours is None else lambda *given: sp.checkpoint(outer, *given, use_reentrant=ours)
