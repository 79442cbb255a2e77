"""What would train wrongly is refused: one sentence on every rank, before attention sends anything, and no hang."""

import argparse
import contextlib
import json
import re
import warnings

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule
from torch import nn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForSequenceClassification

import ds_seqpar
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.errors import ConfigError, DisagreementError, InputError, SeqParError
from hf_integration import patch_attention
from tests.hf.llama import MODES, SEQ, llama, ragged, settings
from tests.launch import on_ranks

WORLD = 4
SECTION = MODES["u2r2"]


def sentence(message):
    """Whether a message is one sentence that names what was got, or what to do."""
    return "\n" not in message and len(message) < 400 and re.search(r"got |;|, ", message)


def attempt(function, *args):
    """(error type, message, elements that attention received) of what the function raises on this rank. A model that
    was refused must not have left a rank out of step: all ranks meet once more afterwards."""
    sp = SequenceParallel(SequenceParallelConfig(**SECTION))
    try:
        function(sp, *args)
        outcome = None, "", 0
    except SeqParError as error:
        outcome = type(error), str(error), sum(sp.comm.received.values())
    assert sp.gather(torch.tensor([sp.rank]), 0).sum() == 6
    return outcome


def refusals(function, *args):
    """What each rank raised: all of them an error of ours, in one sentence, before anything was sent."""
    outcomes = on_ranks(WORLD, attempt, function, *args, timeout=60)
    for kind, message, received in outcomes:
        assert kind is not None, "a rank went on"
        assert sentence(message), message
        assert received == 0
    return [(kind, message) for kind, message, _ in outcomes]


# --- models that cannot be patched


def patch_llama(sp, changes):
    patch_attention(llama(**changes), sp)


@pytest.mark.parametrize(("changes", "words"), [
    ({"attention_dropout": 0.1}, "attention_dropout 0 (ranks would drop different weights); got 0.1"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type that does not depend"),
    ({"is_causal": False}, "a causal model; got is_causal=False"),
    ({"attention_dropout": 0.1, "is_causal": False}, "got 0.1 and a causal model"),
    # deepspeed#8291: 6 heads on 4 ranks became [4, 4, 4, 0] and hung; here 3 kv heads on 2 Ulysses ranks
    ({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
     "got ulysses 2 for 6 query and 3 key/value heads, use one of [1]"),
])  # fmt: skip
def test_a_llama_that_cannot_be_shared(changes, words):
    for kind, message in refusals(patch_llama, changes):
        assert kind is ConfigError
        assert words in message


def patch_other(sp, name):
    config = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 4}
    small = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    models = {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**config)),
        "classifier": lambda: LlamaForSequenceClassification(LlamaConfig(**small, num_attention_heads=4)),
        "module": lambda: nn.Linear(2, 2),
    }
    patch_attention(models[name](), sp)


@pytest.mark.parametrize(("name", "words"), [
    ("gpt2", "knows the attention of llama; got a model of family 'gpt2', call sp.attention in a model of your own"),
    ("classifier", "got LlamaForSequenceClassification, whose head would see this rank's tokens only"),
    ("module", "needs a transformers model; got Linear, call sp.attention in a model of your own"),
])  # fmt: skip
def test_other_models(name, words):
    """accelerate#4177, ms-swift#9356: a family nobody checked is trained wrongly, or without effect."""
    for kind, message in refusals(patch_other, name):
        assert kind is ConfigError
        assert words in message


# --- inputs that are not this rank's


def forward(sp, spoil, training=True):
    """A forward of a patched model on a good batch that `spoil(sp, batch)` has made bad."""
    model = llama()
    patch_attention(model, sp)
    model.train(training)
    (batch,) = sp.shard_batches(ragged(SECTION, 1, 1))
    with contextlib.nullcontext() if training else torch.no_grad():
        model(**(spoil(sp, batch) or batch))


def whole_sequence(sp, batch):
    ids = ragged(SECTION, 1, 1)[0]["input_ids"]
    return {"input_ids": ids}


def whole_sequence_with_labels(sp, batch):
    return ragged(SECTION, 1, 1)[0]


def whole_sequence_with_positions(sp, batch):
    return {**whole_sequence(sp, batch), "position_ids": torch.arange(SEQ)[None]}


def no_positions(sp, batch):
    del batch["position_ids"]


def another_ranks_positions(sp, batch):
    everyone = sp.gather(batch["position_ids"].clone(), 1)  # sorted: contiguous parts of it are not zigzag's
    batch["position_ids"] = everyone[:, sp.rank * SEQ // 4 : (sp.rank + 1) * SEQ // 4]


def positions_from_zero(sp, batch):
    """Every shard rotated as if it began at 0 (deepspeed#5419, #7473)."""
    batch["position_ids"] = torch.arange(SEQ // 4)[None]


def labels_alone(sp, batch):
    del batch["shift_labels"]


def padding(sp, batch):
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][:, -3:] = 0


def with_cache(sp, batch):
    batch["use_cache"] = True


def with_past(sp, batch):
    batch["past_key_values"] = DynamicCache(config=llama().config)


def not_causal(sp, batch):
    batch["is_causal"] = False


def odd_length(sp, batch):
    for name in ("input_ids", "labels", "shift_labels", "position_ids"):
        batch[name] = batch[name][:, :11]


def no_tokens(sp, batch):
    del batch["input_ids"]


@pytest.mark.parametrize(("spoil", "words"), [
    (whole_sequence, "needs this rank's tokens with their global position_ids; got none, give the model what "
                     "sp.shard_batches returns, or unpatch_attention(model) to run it on whole sequences"),
    (whole_sequence_with_labels, "labels must be shifted before sharding; got no shift_labels, give the model what"),
    (whole_sequence_with_positions, "global position_ids; got those of other tokens"),
    (no_positions, "global position_ids; got none"),
    (another_ranks_positions, "global position_ids; got those of other tokens"),
    (labels_alone, "labels must be shifted before sharding; got no shift_labels"),
    (padding, "a sharded forward takes no padding mask; got one with zeros"),
    (with_cache, "no kv cache; got one, leave out use_cache and past_key_values"),
    (with_past, "no kv cache; got one, leave out use_cache and past_key_values"),
    (not_causal, "attention of this model is causal; got is_causal=False"),
    (odd_length, "a sequence's length must be a multiple of 4 for the zigzag layout on 4 ranks"),
    (no_tokens, "needs input_ids or inputs_embeds; got neither"),
])  # fmt: skip
def test_a_batch_that_is_not_sharded_as_it_should(spoil, words):
    for kind, message in refusals(forward, spoil):
        assert kind is InputError
        assert words in message


@pytest.mark.parametrize("spoil", [whole_sequence_with_positions, labels_alone, padding, with_cache, with_past])
def test_the_same_in_evaluation(spoil):
    """transformers#48167, axolotl#3026: evaluation of shards that were given wrongly. A cache would make it local."""
    for kind, _ in refusals(forward, spoil, False):
        assert kind is InputError


def only_on(ranks, spoil):
    def some(sp, batch):
        return spoil(sp, batch) if sp.rank in ranks else None

    return some


def forward_one(sp, spoil, rank):
    forward(sp, only_on((rank,), spoil))


def forward_others(sp, spoil):
    """Right on rank 0 only."""
    forward(sp, only_on((1, 2, 3), spoil))


@pytest.mark.parametrize("spoil", [positions_from_zero, no_positions, labels_alone, padding, with_cache, odd_length])
def test_wrong_on_one_rank_is_refused_on_all(spoil):
    """ring-flash-attention#39: one rank goes another way and the others wait for it."""
    outcomes = refusals(forward_one, spoil, 2)
    assert outcomes[2][0] is InputError
    for rank in (0, 1, 3):
        assert outcomes[rank] == (DisagreementError, f"rank 2 cannot go on: {outcomes[2][1]}")


def test_right_on_rank_0_only():
    """Contiguous positions that begin at 0 are those of rank 0, so that rank 0 sees nothing wrong."""
    outcomes = refusals(contiguous_from_zero)
    assert [kind for kind, _ in outcomes] == [DisagreementError, InputError, InputError, InputError]
    assert outcomes[0][1] == f"rank 1 cannot go on: {outcomes[1][1]}"


def contiguous_from_zero(sp):
    """A forward where every rank was given positions 0, 1, 2, ... in the contiguous layout."""
    straight = SequenceParallel(SequenceParallelConfig(size=4, ulysses=2, layout="contiguous"))
    model = llama()
    patch_attention(model, straight)
    (batch,) = straight.shard_batches(ragged({**SECTION, "layout": "contiguous"}, 1, 1))
    positions_from_zero(straight, batch)
    try:
        model(**batch)
    finally:
        assert not straight.comm.received


def unequal(sp, what):
    """A forward whose inputs differ between ranks, each right by itself."""
    model = llama()
    patch_attention(model, sp)
    (batch,) = sp.shard_batches(ragged(SECTION, 1, 1))
    if sp.rank == 1 and what == "batch":
        batch = {name: x[:2] if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    if sp.rank == 1 and what == "mode":
        model.eval()
    model(**batch)


@pytest.mark.parametrize("what", ["batch", "mode"])
def test_ranks_that_do_not_do_the_same(what):
    """EasyContext#47, axolotl#3920: peers of a sequence with other shapes; a rank that would not run backward."""
    for kind, message in refusals(unequal, what):
        assert kind is DisagreementError
        assert "all ranks that share a sequence must be given the same; got rank 0: model inputs" in message


def past_the_model(sp):
    """A decoder layer of a patched model, called by itself."""
    model = llama()
    patch_attention(model, sp)
    x, places = torch.randn(1, SEQ // 4, 64), sp.position_ids(SEQ)[None]
    model.model.layers[0](x, position_embeddings=model.model.rotary_emb(x, places))


def test_an_attention_reached_past_its_model():
    for kind, message in refusals(past_the_model):
        assert kind is InputError
        assert message == "patched attention was reached past its model's forward; call the model that was patched"


def dropout_set_later(sp):
    """Dropout switched on in the layers of a model that was patched without."""
    model = llama()
    patch_attention(model, sp)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.train()(**sp.shard_batches(ragged(SECTION, 1, 1))[0])


def test_dropout_that_comes_later():
    for kind, message in refusals(dropout_set_later):
        assert kind is ConfigError
        assert message == "sequence parallel attention needs attention_dropout 0; got 0.1"


# --- ds_seqpar.initialize


def good(**changes):
    return settings(SECTION, "2", 1, 4, **changes)


def initialize(model=None, config=None, **kwargs):
    """What initialize raises on this rank: (type, message)."""
    try:
        ds_seqpar.initialize(model=model or llama(), config=config, **kwargs)
    except SeqParError as error:
        return type(error), str(error)
    return None, ""


def refused_by_initialize(function, *args):
    """The one message that every rank raises."""
    outcomes = on_ranks(WORLD, function, *args, timeout=60)
    kinds, messages = {kind for kind, _ in outcomes}, {message for _, message in outcomes}
    assert kinds == {ConfigError}
    assert len(messages) == 1
    assert sentence(*messages), messages
    return messages.pop()


def initialize_with(changes):
    return initialize(config=good(**changes))


@pytest.mark.parametrize(("changes", "words"), [
    ({"sequence_parallel_size": 4}, 'must not set "sequence_parallel_size"'),
    ({"data_parallel_size": 1}, 'must not set "data_parallel_size"'),
    ({"tensor_parallel": {"autotp_size": 2}}, 'must not set "tensor_parallel" with sequence parallelism: AutoTP'),
    ({"curriculum_learning": {"enabled": True}}, 'must not set "curriculum_learning"'),
    ({"data_efficiency": {"enabled": True}}, 'must not set "data_efficiency"'),
    ({"gradient_allreduce_op": "sum"}, 'must not set "gradient_allreduce_op"'),
    ({"sequence_parallel": {"size": 4, "ulises": 2}}, "got 'ulises' (did you mean 'ulysses'?)"),
    ({"sequence_parallel": 4}, "must be an object such as"),
    ({"sequence_parallel": {"size": 3}}, "got size 3 on 4 ranks, use one of [1, 2, 4]"),
    ({"sequence_parallel": {"size": 4, "ulysses": 3}}, "got ulysses 3, size 4, use one of [1, 2, 4]"),
    ({"train_batch_size": 3}, "train_batch_size counts sequences: it must be 4 ="),
])  # fmt: skip
def test_json_that_breaks_the_contract(changes, words):
    """deepspeed#6841 and what else the JSON can say to change the scale of gradients."""
    assert words in refused_by_initialize(initialize_with, changes)


def test_json_that_cannot_be_read(tmp_path):
    """The file, and the line where there is one."""
    path = tmp_path / "ds.json"
    assert refused_by_initialize(initialize, None, str(path)).endswith(f"{path}: No such file or directory")
    path.write_text('{\n  "train_batch_size": 4,\n  "gradient_clipping" 0\n}\n')
    assert f"{path}, line 3 column 23: Expecting ':' delimiter" in refused_by_initialize(initialize, None, path)
    path.write_text("[1, 2]")
    assert refused_by_initialize(initialize, None, path).endswith(f"{path} holds a list")
    path.write_bytes(b"\xff{}")
    assert f"must be UTF-8 text; {path}" in refused_by_initialize(initialize, None, path)


def initialize_by_args(path):
    """An args namespace as DeepSpeed's scripts have it; it is left as it was."""
    args = argparse.Namespace(deepspeed_config=path, local_rank=0)
    engine, *_ = ds_seqpar.initialize(model=llama(), args=args)
    return engine.sequence_parallel.size, args.deepspeed_config


def test_the_configuration_may_come_with_args(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(good()))
    assert on_ranks(WORLD, initialize_by_args, str(path)) == [(4, str(path))] * WORLD


def without(what):
    """initialize without a configuration, or with a model of one's own and nothing else."""
    return initialize() if what == "config" else initialize(model=nn.Linear(2, 2), config=good())


def test_what_is_missing():
    message = refused_by_initialize(without, "config")
    assert "got none, pass config= (a path or dict) or args with --deepspeed_config" in message
    message = refused_by_initialize(without, "sequence_parallel")
    assert message.endswith("got Linear alone, pass sequence_parallel=sp")


def with_argument(name):
    """initialize with an argument that changes groups or batches."""
    deepspeed.init_distributed()
    if name == "pipeline":
        return initialize(model=PipelineModule(layers=[nn.Linear(2, 2)] * 4, num_stages=2), config=good())
    value = object() if name == "mpu" else torch.utils.data.TensorDataset(torch.zeros(4))
    return initialize(config=good(), **{name: value})


@pytest.mark.parametrize(("name", "words"), [
    ("mpu", "takes no mpu, whose groups change the gradient scale"),
    ("training_data", "takes no training_data, whose loader gives ranks of one sequence different samples"),
    ("pipeline", "takes no PipelineModule; give it the plain model"),
])  # fmt: skip
def test_arguments_that_break_the_contract(name, words):
    """deepspeed#5248; axolotl#3920: peers of a sequence got different batches."""
    assert words in refused_by_initialize(with_argument, name)


def with_another_sp(how):
    """initialize with a SequenceParallel that is not what the JSON says, given or in the model."""
    sp = SequenceParallel(SequenceParallelConfig(size=2, ulysses=2))
    model = llama() if how != "own" else nn.Linear(2, 2)
    if how == "patched":
        patch_attention(model, sp)
        return initialize(model=model, config=good())
    return initialize(model=model, config=good(), sequence_parallel=sp)


@pytest.mark.parametrize("how", ["given", "patched", "own"])
def test_a_sequence_parallel_that_is_not_the_jsons(how):
    message = refused_by_initialize(with_another_sp, how)
    assert 'the same settings as the JSON\'s "sequence_parallel" section' in message
    assert "size is 2 there and 4 in the JSON" in message


def two_sps():
    """initialize with a SequenceParallel for a model that is patched with another."""
    sps = [SequenceParallel(SequenceParallelConfig(**SECTION)) for _ in range(2)]
    model = llama()
    patch_attention(model, sps[0])
    return initialize(model=model, config=good(), sequence_parallel=sps[1])


def test_a_model_that_is_patched_with_another():
    assert "patched with another SequenceParallel" in refused_by_initialize(two_sps)


def warned(clipping):
    """Warnings of initialize about clipping: (text, file)."""
    config = {key: value for key, value in good().items() if key != "gradient_clipping"}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ds_seqpar.initialize(model=llama(), config=config if clipping is None else good(gradient_clipping=clipping))
    return [(str(w.message), w.filename) for w in seen if "gradient_clipping" in str(w.message)]


def test_clipping_that_is_not_set_is_warned_of():
    """DeepSpeed clips at 1.0 where the JSON says nothing, which hides a wrong scale. The warning names the caller."""
    for seen in on_ranks(WORLD, warned, None):
        ((message, file),) = seen
        assert message.endswith("DeepSpeed then clips at 1.0; set it (0 for none)")
        assert file == __file__
    assert on_ranks(WORLD, warned, 0) == [[]] * WORLD
