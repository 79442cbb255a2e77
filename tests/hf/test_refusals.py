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
from tests.launch import on_engine_ranks as on_ranks
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
WORLD = 2
SECTION = MODES["u2"]


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
    assert sp.gather(torch.tensor([sp.rank]), 0).sum() == 1
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
    ({"attention_dropout": 0.1}, ("attention_dropout 0", "got 0.1")),
    ({"is_causal": False}, ("causal model", "got is_causal=False")),
    ({"attention_dropout": 0.1, "is_causal": False}, ("attention_dropout 0", "got 0.1", "got is_causal=False")),
    # deepspeed#8291: 6 heads on 4 ranks became [4, 4, 4, 0] and hung; here a Ulysses rank without a head
    (
        {"num_attention_heads": 1, "num_key_value_heads": 1},
        ("ulysses 2", "1 query", "[1]"),
    ),
]


def test_a_llama_that_cannot_be_shared():
    found = refusals(*((patch_llama, changes) for changes, _ in UNFIT))
    for (_, words), outcomes in zip(UNFIT, found, strict=True):
        for kind, message in outcomes:
            assert kind is ConfigError
            assert missing(message, *words) == []


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
    "gpt2": ("qwen3, qwen3_moe, smollm3", "family 'gpt2'", "sp.attention"),
    "classifier": ("got LlamaForSequenceClassification", "head"),
    "module": ("transformers model", "got Linear", "sp.attention"),
}


def test_other_models():
    """accelerate#4177, ms-swift#9356: a family nobody checked is trained wrongly, or without effect."""
    found = refusals(*((patch_other, name) for name in OTHERS))
    for words, outcomes in zip(OTHERS.values(), found, strict=True):
        for kind, message in outcomes:
            assert kind is ConfigError
            assert missing(message, *words) == []


# --- inputs that are not this rank's


def forward(sp, spoil, training=True):
    """A forward of a patched model on a good batch that `spoil(sp, batch)` has made bad."""
    model = small()
    patch_attention(model, sp)
    model.train(training)
    (batch,) = sp.shard_batches(ragged(SECTION, 1, 1))
    with contextlib.nullcontext() if training else torch.no_grad():
        model(**(spoil(sp, batch) or batch))


def no_positions(sp, batch):
    del batch["position_ids"]


def another_ranks_positions(sp, batch):
    batch["position_ids"] = torch.tensor([held(SECTION)[1 - sp.rank]])


def positions_from_zero(sp, batch):
    """Every shard rotated as if it began at 0 (deepspeed#5419, #7473)."""
    batch["position_ids"] = torch.arange(SEQ // WORLD)[None]


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
    no_positions: ("looks sharded", "global position_ids", "got none", "or a whole batch"),
    another_ranks_positions: ("global position_ids", "other tokens"),
    labels_alone: ("looks sharded", "got no shift_labels", "sp.shard_batches", "or a whole batch"),
    padding: ("padding mask", "with zeros"),
    with_cache: ("kv cache", "use_cache"),
    with_past: ("kv cache", "past_key_values"),
    not_causal: ("got is_causal=False", "leave it out"),
    no_tokens: ("inputs_embeds", "got neither"),
}


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_that_is_not_sharded_as_it_should_be(training):
    """deepspeed#5419, #7473, axolotl#3498. In evaluation too (transformers#48167, axolotl#3026), where a cache must not
    make a forward on shards local."""
    found = refusals(*((forward, spoil, training) for spoil in SPOILT))
    for words, outcomes in zip(SPOILT.values(), found, strict=True):
        assert InputError in [kind for kind, _ in outcomes]
        for _, message in outcomes:  # a rank with nothing wrong quotes one that has
            assert missing(message, *words) == []


def length_that_does_not_fit(sp):
    """A forward on 11 tokens a rank, where zigzag over a ring needs them in twos."""
    ring = SequenceParallel(SequenceParallelConfig(**MODES["r2"]))
    model = small()
    patch_attention(model, ring)
    try:
        model(input_ids=torch.zeros(1, 11, dtype=torch.int64), position_ids=torch.arange(5, 16)[None])
    finally:
        assert not ring.comm.received


def test_a_length_that_does_not_fit():
    """deepspeed#7384, #7842: a length that the ranks do not divide corrupts attention."""
    for kind, message in refused(length_that_does_not_fit):
        assert kind is InputError
        assert missing(message, "2 tokens", "placement", "got 11 tokens") == []


def only_on(ranks, spoil):
    def some(sp, batch):
        return spoil(sp, batch) if sp.rank in ranks else None

    return some


def forward_one(sp, spoil, rank):
    forward(sp, only_on((rank,), spoil))


def test_wrong_on_one_rank_is_refused_on_all():
    """ring-flash-attention#39: one rank goes another way and the others wait for it."""
    spoils = positions_from_zero, no_positions, labels_alone, padding, with_cache
    for outcomes in refusals(*((forward_one, spoil, 1) for spoil in spoils)):
        assert outcomes[1][0] is InputError
        kind, message = outcomes[0]
        assert kind is DisagreementError
        assert missing(message, "rank 1 cannot", outcomes[1][1]) == []


def test_right_on_rank_0_only():
    """Contiguous positions that begin at 0 are those of rank 0, so that rank 0 sees nothing wrong."""
    outcomes = refused(contiguous_from_zero)
    assert [kind for kind, _ in outcomes] == [DisagreementError, InputError]
    assert missing(outcomes[0][1], "rank 1 cannot", outcomes[1][1]) == []


def contiguous_from_zero(sp):
    """A forward where every rank was given positions 0, 1, 2, ... in the contiguous layout."""
    straight = SequenceParallel(SequenceParallelConfig(size=2, ulysses=1, layout="contiguous"))
    model = small()
    patch_attention(model, straight)
    (batch,) = straight.shard_batches(ragged({**MODES["r2"], "layout": "contiguous"}, 1, 1))
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
            assert missing(message, "model inputs", "rank 0: ", "rank 1: ") == []


def past_the_model(sp):
    """A decoder layer of a patched model, called by itself."""
    model = small()
    patch_attention(model, sp)
    x, places = torch.randn(1, SEQ // WORLD, 64), sp.position_ids(SEQ)[None]
    model.model.layers[0](x, position_embeddings=model.model.rotary_emb(x, places))


def test_an_attention_reached_past_its_model():
    for kind, message in refused(past_the_model):
        assert kind is InputError
        assert missing(message, "patched attention", "past its model's forward") == []


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
        assert missing(message, "attention_dropout 0", "got 0.1") == []


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
    ({"sequence_parallel_size": 4}, ('not set "sequence_parallel_size"',)),
    ({"data_parallel_size": 1}, ('not set "data_parallel_size"',)),
    ({"tensor_parallel": {"autotp_size": 2}}, ('not set "tensor_parallel"', "AutoTP")),
    ({"curriculum_learning": {"enabled": True}}, ('not set "curriculum_learning"',)),
    ({"data_efficiency": {"enabled": True}}, ('not set "data_efficiency"',)),
    ({"gradient_allreduce_op": "sum"}, ('not set "gradient_allreduce_op"',)),
    ({"sequence_parallel": {"size": 2, "ulises": 2}}, ("got 'ulises'", "'ulysses'")),
    ({"sequence_parallel": 4}, ('"sequence_parallel"', "an object", "got 4")),
    ({"sequence_parallel": {"size": 3}}, ("size 3", "2 ranks", "[1, 2]")),
    ({"sequence_parallel": {"size": 2, "ulysses": 3}}, ("ulysses 3", "size 2", "[1, 2]")),
    ({"train_batch_size": 3}, ("train_batch_size", "must be 4", "got 3")),
]


def test_json_that_breaks_the_contract():
    """deepspeed#6841 and what else the JSON can say to change the scale of gradients."""
    messages = refused_by_initialize(initialize_with, [changes for changes, _ in JSON])
    for (_, words), message in zip(JSON, messages, strict=True):
        assert missing(message, *words) == []


def initialize_from(path):
    return initialize(config=path)


def test_json_that_cannot_be_read(tmp_path):
    """The file, and the line where there is one."""
    paths = [tmp_path / f"{name}.json" for name in ("missing", "comma", "list", "bytes")]
    paths[1].write_text('{\n  "train_batch_size": 4,\n  "gradient_clipping" 0\n}\n')
    paths[2].write_text("[1, 2]")
    paths[3].write_bytes(b"\xff{}")
    messages = refused_by_initialize(initialize_from, [str(paths[0]), *paths[1:]])
    assert f"{paths[0]}: No such file" in messages[0]
    assert f"{paths[1]}, line 3 column 23" in messages[1]
    assert f"{paths[2]} holds a list" in messages[2]
    assert missing(messages[3], "UTF-8", str(paths[3])) == []


def initialize_by_args(path):
    """An args namespace as DeepSpeed's scripts have it; it is left as it was."""
    args = argparse.Namespace(deepspeed_config=path, local_rank=int(os.environ["LOCAL_RANK"]))
    engine, *_ = ds_seqpar.initialize(model=small(), args=args)
    return engine.sequence_parallel.size, args.deepspeed_config


def test_the_configuration_may_come_with_args(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(good()))
    assert on_ranks(WORLD, initialize_by_args, str(path)) == [(2, str(path))] * WORLD


def without(what):
    """initialize without a configuration, or with a model of one's own and nothing else."""
    return initialize() if what == "config" else initialize(model=nn.Linear(2, 2), config=good())


def test_what_is_missing():
    config, own = refused_by_initialize(without, ["config", "sequence_parallel"])
    assert missing(config, "got none", "config=", "--deepspeed_config") == []
    assert missing(own, "got Linear alone", "sequence_parallel=sp") == []


def with_argument(name):
    """initialize with an argument that changes groups or batches."""
    deepspeed.init_distributed()
    if name == "pipeline":
        return initialize(model=PipelineModule(layers=[nn.Linear(2, 2)] * 4, num_stages=2), config=good())
    return initialize(config=good(), **{name: object()})


def test_arguments_that_break_the_contract():
    """deepspeed#5248."""
    mpu, pipeline = refused_by_initialize(with_argument, ["mpu", "pipeline"])
    assert "no mpu" in mpu
    assert missing(pipeline, "no PipelineModule", "plain model") == []


def with_another_sp(how):
    """initialize with a SequenceParallel that is not what the JSON says, given or in the model."""
    sp = SequenceParallel(SequenceParallelConfig(size=1))
    model = small() if how != "own" else nn.Linear(2, 2)
    if how == "patched":
        patch_attention(model, sp)
        return initialize(model=model, config=good())
    return initialize(model=model, config=good(), sequence_parallel=sp)


def test_a_sequence_parallel_that_is_not_the_jsons():
    for message in refused_by_initialize(with_another_sp, ["given", "patched", "own"]):
        assert missing(message, "the same settings", "size 1", "2 in the JSON") == []


def two_sps(_):
    """initialize with a SequenceParallel for a model that is patched with another."""
    sps = [SequenceParallel(SequenceParallelConfig(**SECTION)) for _ in range(2)]
    model = small()
    patch_attention(model, sps[0])
    return initialize(model=model, config=good(), sequence_parallel=sps[1])


def test_a_model_that_is_patched_with_another():
    (message,) = refused_by_initialize(two_sps, [None])
    assert "another SequenceParallel" in message


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
        assert missing(message, "clips at 1.0", "0 for none") == []
        assert file == __file__
        assert zero == []
