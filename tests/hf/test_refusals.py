"""What would train wrongly is refused: one sentence on every rank, before attention sends anything, and no hang."""

import torch
from torch import nn
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaModel,
    LlamaPreTrainedModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

from hf_integration import patch_attention
from tests.dist.ranks import assert_all_refused, differ, everywhere, make, only_one
from tests.hf.llama import MODES, SEQ, held, ragged, small
from tests.launch import on_each_of

WORLD = 2
SECTION = MODES["u2"]
TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


class Backbone(LlamaPreTrainedModel):
    """Its base model has another name than the family's."""

    def __init__(self, config):
        super().__init__(config)
        self.backbone = LlamaModel(config)


def patch(model):
    """A call that patches what `model` makes."""
    return lambda sp, rank: patch_attention(model(), sp)


def forward(spoil, training=True, ranks=(0, 1)):
    """A call that makes a forward of a patched model on a good batch, but for what `spoil` changes on these ranks."""

    def call(sp, rank):
        model = patch_attention(small(), sp).train(training)
        (batch,) = sp.shard_batches(ragged(SECTION, 1, 1))
        given = {**batch, **(spoil(sp, batch) if rank in ranks else {})}
        with torch.set_grad_enabled(training):
            model(**{name: x for name, x in given.items() if x is not None})

    return call


def on_a_ring(call, **changes):
    """The call with a SequenceParallel of its own, that has received nothing afterwards either."""

    def run(sp, rank):
        ring = make(**MODES["r2"], **changes)
        try:
            call(ring, rank)
        finally:
            assert not ring.comm.received

    return run


def eleven_tokens(sp, rank):
    """Where zigzag over a ring needs them in twos."""
    model = patch_attention(small(), sp)
    ids = torch.zeros(1, 11, dtype=torch.int64)
    model(input_ids=ids, position_ids=torch.arange(5, 16)[None], shift_labels=ids)


def from_zero(sp, rank):
    """A forward where every rank was given positions 0, 1, 2, ...: in the contiguous layout those of rank 0."""
    model = patch_attention(small(), sp)
    (batch,) = sp.shard_batches(ragged({**MODES["r2"], "layout": "contiguous"}, 1, 1))
    model(**{**batch, "position_ids": torch.arange(SEQ // WORLD)[None]})


def unequal(change):
    """A forward whose inputs differ between ranks, each right by itself; change makes those of rank 1."""

    def call(sp, rank):
        model = patch_attention(small(), sp)
        (batch,) = sp.shard_batches(ragged(SECTION, 1, 1))
        model(**(change(model, batch) if rank == 1 else batch))

    return call


def past_the_model(sp, rank):
    """A decoder layer of a patched model, called by itself."""
    model = patch_attention(small(), sp)
    x, places = torch.randn(1, SEQ // WORLD, 64), sp.position_ids(SEQ)[None]
    model.model.layers[0](x, position_embeddings=model.model.rotary_emb(x, places))


def dropout_set_later(sp, rank):
    model = patch_attention(small(), sp).train()
    model.model.layers[0].self_attn.attention_dropout = 0.1
    model(**sp.shard_batches(ragged(SECTION, 1, 1))[0])


# accelerate#4177, ms-swift#9356: a family that nobody checked is trained wrongly, or without effect.
# deepspeed#8291: 6 heads on 4 ranks became [4, 4, 4, 0] and hung; here a Ulysses rank without a head
GPT = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 4, "attn_pdrop": 0.0}
MODELS = {
    "dropout": (lambda: small(attention_dropout=0.1), "got 0.1"),
    "full attention": (lambda: small(is_causal=False), "got is_causal=False"),
    "both": (lambda: small(attention_dropout=0.1, is_causal=False), "got 0.1", "got is_causal=False"),
    "one head": (lambda: small(num_attention_heads=1, num_key_value_heads=1), "1 query"),
    "no cache": (lambda: OpenAIGPTLMHeadModel(OpenAIGPTConfig(**GPT)), "transformer.h.0.attn"),
    "no base model": (lambda: Backbone(LlamaConfig(**TINY, num_attention_heads=4)), "got Backbone"),
    "module": (lambda: nn.Linear(2, 2), "got Linear"),
}
# deepspeed#5419, #7473: every shard rotated as if it began at 0; axolotl#3498. In evaluation too (transformers#48167,
# axolotl#3026), where a cache must not make a forward on shards local
SPOILT = {
    "no positions": (lambda sp, batch: {"position_ids": None}, "got none"),
    "another rank's positions": (
        lambda sp, batch: {"position_ids": torch.tensor([held(SECTION)[1 - sp.rank]])}, "global position_ids"
    ),
    "labels that nobody shifted": (lambda sp, batch: {"shift_labels": None}, "got no shift_labels"),
    "padding": (
        lambda sp, batch: {"attention_mask": (torch.arange(SEQ // WORLD) < 21).expand_as(batch["input_ids"])},
        "with zeros",
    ),
    "a cache": (lambda sp, batch: {"use_cache": True}, "use_cache"),
    "a past": (lambda sp, batch: {"past_key_values": DynamicCache(config=small().config)}, "past_key_values"),
    "full attention": (lambda sp, batch: {"is_causal": False}, "got is_causal=False"),
    "no tokens": (lambda sp, batch: {"input_ids": None}, "got neither"),
}  # fmt: skip
# EasyContext#47, axolotl#3920: peers of a sequence with other shapes; a rank that would not run backward; one whose
# checkpoints would send what others' layers do not
UNEQUAL = {
    "batch": lambda model, batch: {n: x[:2] if isinstance(x, torch.Tensor) else x for n, x in batch.items()},
    "mode": lambda model, batch: model.eval() and batch,
    "checkpointing": lambda model, batch: model.gradient_checkpointing_enable() or batch,
}
CALLS = {
    **{
        f"model: {name}": (patch(model), everywhere(*words, kind="ConfigError"))
        for name, (model, *words) in MODELS.items()
    },
    **{
        f"{name}, training {training}": (forward(spoil, training), everywhere(*words))
        for name, (spoil, *words) in SPOILT.items()
        for training in (True, False)
    },
    # ring-flash-attention#39: one rank goes another way and the others wait for it
    **{
        f"{name} on one rank": (forward(spoil, ranks=(1,)), only_one(*words))
        for name, (spoil, *words) in SPOILT.items()
    },
    **{name: (unequal(change), differ("model inputs", "rank 0: ")) for name, change in UNEQUAL.items()},
    # deepspeed#7384, #7842: a length that the ranks do not divide corrupts attention
    "a length": (on_a_ring(eleven_tokens), everywhere("2 tokens", "placement", "got 11 tokens")),
    "right on rank 0 alone": (
        on_a_ring(from_zero, layout="contiguous"),
        only_one("global position_ids", "other tokens"),
    ),
    "past the model": (past_the_model, everywhere("patched attention", "past its model's forward")),
    "dropout set later": (dropout_set_later, everywhere("attention_dropout 0", "got 0.1", kind="ConfigError")),
}


@on_each_of(WORLD)
def test_what_would_train_wrongly_is_refused_on_all_ranks():
    assert_all_refused(CALLS, make(**SECTION))
