"""What would train wrongly is refused: one sentence on every rank, before attention sends anything, and no hang."""

import argparse
import contextlib
import json
import os
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
from tests.hf.llama import MODES, SEQ, held, ragged, settings, small
from tests.launch import on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
WORLD = 4
SECTION = MODES["u2r2"]


def sentence(message):
    """Whether a message is one sentence that names what was got, or what to do."""
    return "\n" not in message and len(message) < 400 and re.search(r"got |;|, ", message)


def attempt(sp, function, *args):
    """(error type, message, elements that attention received) of what the function raises on this rank. A refusal must
    not leave a rank out of step: all ranks meet once more afterwards."""
    sp.comm.received.clear()
    try:
        function(sp, *args)
        outcome = None, "", 0
    except SeqParError as error:
        outcome = type(error), str(error), sum(sp.comm.received.values())
    assert sp.gather(torch.tensor([sp.rank]), 0).sum() == 6
    return outcome


def attempts(calls):
    sp = SequenceParallel(SequenceParallelConfig(**SECTION))
    return [attempt(sp, *call) for call in calls]


def refusals(*calls):
    """For each call (function, its arguments after sp), made one after another on the same ranks: what each rank
    raised. All of them raised an error of ours, in one sentence, before anything was sent."""
    by_rank = on_ranks(WORLD, attempts, calls, timeout=60)
    for call, outcomes in zip(calls, zip(*by_rank, strict=True), strict=True):
        for kind, message, received in outcomes:
            assert kind is not None, f"a rank went on: {call}"
            assert sentence(message), message
            assert received == 0
    return [[(kind, message) for kind, message, _ in outcomes] for outcomes in zip(*by_rank, strict=True)]


def refused(*call):
    """The same for one call."""
    return refusals(call)[0]


# --- models that cannot be patched


def patch_llama(sp, changes):
    patch_attention(small(**changes), sp)


UNFIT = [
    ({"attention_dropout": 0.1}, "attention_dropout 0 (ranks would drop different weights); got 0.1"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type that does not depend"),
    ({"is_causal": False}, "a causal model; got is_causal=False"),
    ({"attention_dropout": 0.1, "is_causal": False}, "got 0.1 and a causal model"),
    # deepspeed#8291: 6 heads on 4 ranks became [4, 4, 4, 0] and hung; here a Ulysses rank without a head
    (
        {"num_attention_heads": 1, "num_key_value_heads": 1},
        "got ulysses 2 for 1 query and 1 key/value heads, use one of [1]",
    ),
]


def test_a_llama_that_cannot_be_shared():
    found = refusals(*((patch_llama, changes) for changes, _ in UNFIT))
    for (_, words), outcomes in zip(UNFIT, found, strict=True):
        for kind, message in outcomes:
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


OTHERS = {
    "gpt2": "olmo3, phi3, qwen2, qwen3, qwen3_moe, smollm3; got a model of family 'gpt2', call sp.attention from",
    "classifier": "got LlamaForSequenceClassification, whose head would see this rank's tokens only",
    "module": "needs a transformers model; got Linear, call sp.attention in a model of your own",
}


def test_other_models():
    """accelerate#4177, ms-swift#9356: a family nobody checked is trained wrongly, or without effect."""
    found = refusals(*((patch_other, name) for name in OTHERS))
    for words, outcomes in zip(OTHERS.values(), found, strict=True):
        for kind, message in outcomes:
            assert kind is ConfigError
            assert words in message


# --- inputs that are not this rank's


def forward(sp, spoil, training=True):
    """A forward of a patched model on a good batch that `spoil(sp, batch)` has made bad."""
    model = small()
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
    batch["position_ids"] = torch.tensor([held(SECTION)[(sp.rank + 1) % 4]])


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
    batch["past_key_values"] = DynamicCache(config=small().config)


def not_causal(sp, batch):
    batch["is_causal"] = False


def no_tokens(sp, batch):
    del batch["input_ids"]


SPOILT = {
    whole_sequence: "its placement included, or run it on whole sequences: with hf_integration.whole_sequences(model)",
    whole_sequence_with_labels: "labels must be shifted before sharding; got no shift_labels, give the model what",
    whole_sequence_with_positions: "global position_ids; got those of other tokens",
    no_positions: "global position_ids; got none",
    another_ranks_positions: "global position_ids; got those of other tokens",
    labels_alone: "labels must be shifted before sharding; got no shift_labels",
    padding: "a sharded forward takes no padding mask; got one with zeros",
    with_cache: "no kv cache; got one, leave out use_cache and past_key_values",
    with_past: "no kv cache; got one, leave out use_cache and past_key_values",
    not_causal: "attention of this model is causal; got is_causal=False",
    no_tokens: "needs input_ids or inputs_embeds; got neither",
}


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_that_is_not_sharded_as_it_should_be(training):
    """deepspeed#5419, #7473, axolotl#3498. In evaluation too (transformers#48167, axolotl#3026), where a cache must not
    make a forward on shards local."""
    found = refusals(*((forward, spoil, training) for spoil in SPOILT))
    for words, outcomes in zip(SPOILT.values(), found, strict=True):
        assert InputError in [kind for kind, _ in outcomes]
        assert all(words in message for _, message in outcomes)  # a rank with nothing wrong quotes one that has


def length_that_does_not_fit(sp):
    """A forward on 11 tokens a rank, where zigzag over a ring of 4 needs them in twos."""
    ring = SequenceParallel(SequenceParallelConfig(**MODES["r4"]))
    model = small()
    patch_attention(model, ring)
    try:
        model(input_ids=torch.zeros(1, 11, dtype=torch.int64), position_ids=torch.arange(11)[None])
    finally:
        assert not ring.comm.received


def test_a_length_that_does_not_fit():
    """deepspeed#7384, #7842: a length that the ranks do not divide corrupts attention."""
    for kind, message in refused(length_that_does_not_fit):
        assert kind is InputError
        assert "needs 2 tokens on each rank, or a multiple of it, or a placement; got 11 tokens and none" in message


def only_on(ranks, spoil):
    def some(sp, batch):
        return spoil(sp, batch) if sp.rank in ranks else None

    return some


def forward_one(sp, spoil, rank):
    forward(sp, only_on((rank,), spoil))


def test_wrong_on_one_rank_is_refused_on_all():
    """ring-flash-attention#39: one rank goes another way and the others wait for it."""
    spoils = positions_from_zero, no_positions, labels_alone, padding, with_cache
    for outcomes in refusals(*((forward_one, spoil, 2) for spoil in spoils)):
        assert outcomes[2][0] is InputError
        for rank in (0, 1, 3):
            assert outcomes[rank] == (DisagreementError, f"rank 2 cannot go on: {outcomes[2][1]}")


def test_right_on_rank_0_only():
    """Contiguous positions that begin at 0 are those of rank 0, so that rank 0 sees nothing wrong."""
    outcomes = refused(contiguous_from_zero)
    assert [kind for kind, _ in outcomes] == [DisagreementError, InputError, InputError, InputError]
    assert outcomes[0][1] == f"rank 1 cannot go on: {outcomes[1][1]}"


def contiguous_from_zero(sp):
    """A forward where every rank was given positions 0, 1, 2, ... in the contiguous layout."""
    straight = SequenceParallel(SequenceParallelConfig(size=4, ulysses=2, layout="contiguous"))
    model = small()
    patch_attention(model, straight)
    (batch,) = straight.shard_batches(ragged({**SECTION, "layout": "contiguous"}, 1, 1))
    positions_from_zero(straight, batch)
    try:
        model(**batch)
    finally:
        assert not straight.comm.received


def unequal(sp, what):
    """A forward whose inputs differ between ranks, each right by itself."""
    model = small()
    patch_attention(model, sp)
    (batch,) = sp.shard_batches(ragged(SECTION, 1, 1))
    if sp.rank == 1 and what == "batch":
        batch = {name: x[:2] if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    if sp.rank == 1 and what == "mode":
        model.eval()
    if sp.rank == 1 and what == "checkpointing":
        model.gradient_checkpointing_enable()
    model(**batch)


def test_ranks_that_do_not_do_the_same():
    """EasyContext#47, axolotl#3920: peers of a sequence with other shapes; a rank that would not run backward; one
    whose checkpoints would send what others' layers do not."""
    for outcomes in refusals((unequal, "batch"), (unequal, "mode"), (unequal, "checkpointing")):
        for kind, message in outcomes:
            assert kind is DisagreementError
            assert "must be given the same model inputs; got ranks 0, 2-3: " in message


def past_the_model(sp):
    """A decoder layer of a patched model, called by itself."""
    model = small()
    patch_attention(model, sp)
    x, places = torch.randn(1, SEQ // 4, 64), sp.position_ids(SEQ)[None]
    model.model.layers[0](x, position_embeddings=model.model.rotary_emb(x, places))


def test_an_attention_reached_past_its_model():
    for kind, message in refused(past_the_model):
        assert kind is InputError
        assert message == "patched attention was reached past its model's forward; call the model that was patched"


def dropout_set_later(sp):
    """Dropout switched on in the layers of a model that was patched without."""
    model = small()
    patch_attention(model, sp)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.train()(**sp.shard_batches(ragged(SECTION, 1, 1))[0])


def test_dropout_that_comes_later():
    for kind, message in refused(dropout_set_later):
        assert kind is ConfigError
        assert message == "sequence parallel attention needs attention_dropout 0; got 0.1"


# --- ds_seqpar.initialize


def good(**changes):
    return settings(SECTION, "2", 1, 4, **changes)


def initialize(model=None, config=None, **kwargs):
    """What initialize raises on this rank: (type, message)."""
    try:
        ds_seqpar.initialize(model=model or small(), config=config, **kwargs)
    except SeqParError as error:
        return type(error), str(error)
    return None, ""


def refused_by_initialize(function, arguments):
    """For each argument, one after another on the same ranks: the one message that function(argument) raised on all."""
    by_rank = on_ranks(WORLD, each, function, arguments, timeout=60)
    messages = []
    for argument, outcomes in zip(arguments, zip(*by_rank, strict=True), strict=True):
        assert {kind for kind, _ in outcomes} == {ConfigError}, argument
        (message,) = {message for _, message in outcomes}
        assert sentence(message), message
        messages.append(message)
    return messages


def each(function, arguments):
    return [function(argument) for argument in arguments]


def initialize_with(changes):
    return initialize(config=good(**changes))


JSON = [
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
]


def test_json_that_breaks_the_contract():
    """deepspeed#6841 and what else the JSON can say to change the scale of gradients."""
    messages = refused_by_initialize(initialize_with, [changes for changes, _ in JSON])
    for (_, words), message in zip(JSON, messages, strict=True):
        assert words in message


def initialize_from(path):
    return initialize(config=path)


def test_json_that_cannot_be_read(tmp_path):
    """The file, and the line where there is one."""
    paths = [tmp_path / f"{name}.json" for name in ("missing", "comma", "list", "bytes")]
    paths[1].write_text('{\n  "train_batch_size": 4,\n  "gradient_clipping" 0\n}\n')
    paths[2].write_text("[1, 2]")
    paths[3].write_bytes(b"\xff{}")
    messages = refused_by_initialize(initialize_from, [str(paths[0]), *paths[1:]])
    assert messages[0].endswith(f"{paths[0]}: No such file or directory")
    assert f"{paths[1]}, line 3 column 23: Expecting ':' delimiter" in messages[1]
    assert messages[2].endswith(f"{paths[2]} holds a list")
    assert f"must be UTF-8 text; {paths[3]}" in messages[3]


def initialize_by_args(path):
    """An args namespace as DeepSpeed's scripts have it; it is left as it was."""
    args = argparse.Namespace(deepspeed_config=path, local_rank=int(os.environ["LOCAL_RANK"]))
    engine, *_ = ds_seqpar.initialize(model=small(), args=args)
    return engine.sequence_parallel.size, args.deepspeed_config


def test_the_configuration_may_come_with_args(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(good()))
    assert on_ranks(WORLD, initialize_by_args, str(path)) == [(4, str(path))] * WORLD


def without(what):
    """initialize without a configuration, or with a model of one's own and nothing else."""
    return initialize() if what == "config" else initialize(model=nn.Linear(2, 2), config=good())


def test_what_is_missing():
    config, own = refused_by_initialize(without, ["config", "sequence_parallel"])
    assert "got none, pass config= (a path or dict) or args with --deepspeed_config" in config
    assert own.endswith("got Linear alone, pass sequence_parallel=sp")


def with_argument(name):
    """initialize with an argument that changes groups or batches."""
    deepspeed.init_distributed()
    if name == "pipeline":
        return initialize(model=PipelineModule(layers=[nn.Linear(2, 2)] * 4, num_stages=2), config=good())
    value = object() if name == "mpu" else torch.utils.data.TensorDataset(torch.zeros(4))
    return initialize(config=good(), **{name: value})


def test_arguments_that_break_the_contract():
    """deepspeed#5248; axolotl#3920: peers of a sequence got different batches."""
    mpu, data, pipeline = refused_by_initialize(with_argument, ["mpu", "training_data", "pipeline"])
    assert "takes no mpu, whose groups change the gradient scale" in mpu
    assert "takes no training_data, whose loader gives ranks of one sequence different samples" in data
    assert "takes no PipelineModule; give it the plain model" in pipeline


def with_another_sp(how):
    """initialize with a SequenceParallel that is not what the JSON says, given or in the model."""
    sp = SequenceParallel(SequenceParallelConfig(size=2, ulysses=2))
    model = small() if how != "own" else nn.Linear(2, 2)
    if how == "patched":
        patch_attention(model, sp)
        return initialize(model=model, config=good())
    return initialize(model=model, config=good(), sequence_parallel=sp)


def test_a_sequence_parallel_that_is_not_the_jsons():
    for message in refused_by_initialize(with_another_sp, ["given", "patched", "own"]):
        assert 'the same settings as the JSON\'s "sequence_parallel" section' in message
        assert "got size 2 there and 4 in the JSON" in message


def two_sps(_):
    """initialize with a SequenceParallel for a model that is patched with another."""
    sps = [SequenceParallel(SequenceParallelConfig(**SECTION)) for _ in range(2)]
    model = small()
    patch_attention(model, sps[0])
    return initialize(model=model, config=good(), sequence_parallel=sps[1])


def test_a_model_that_is_patched_with_another():
    (message,) = refused_by_initialize(two_sps, [None])
    assert "patched with another SequenceParallel" in message


def warned(clipping):
    """Warnings of initialize about clipping: (text, file). clipping: as in the JSON, where None is nothing."""
    config = {key: value for key, value in good().items() if key != "gradient_clipping"}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ds_seqpar.initialize(model=small(), config=config if clipping is None else good(gradient_clipping=clipping))
    return [(str(w.message), w.filename) for w in seen if "gradient_clipping" in str(w.message)]


def test_clipping_that_is_not_set_is_warned_of():
    """DeepSpeed clips at 1.0 where the JSON says nothing, which hides a wrong scale. The warning names the caller."""
    for unset, zero in on_ranks(WORLD, each, warned, [None, 0]):
        ((message, file),) = unset
        assert message.endswith("DeepSpeed then clips at 1.0; set it (0 for none)")
        assert file == __file__
        assert zero == []
