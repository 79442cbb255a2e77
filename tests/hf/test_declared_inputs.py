"""Inputs of a model type's own: ranks share what is declared, exactly, and refuse anything else by its name."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from ds_seqpar.data.inputs import own, row, tokens
from hf_integration import patch_attention, unpatch_attention
from tests.dist.ranks import is_one_sentence, make, refusal
from tests.grids import each_then_rest
from tests.hf.in_fp64 import throughout
from tests.hf.llama import averaged, gap
from tests.launch import on_each_of
from tests.words import missing

ROWS, TOKENS, DIM, PATCH, IMAGE, IGNORE = 3, 26, 32, 5, 3, -100


class ToyConfig(LlamaConfig):
    model_type = "toy_of_inputs"


class ToyModel(LlamaModel):
    """Weighs tokens, styles rows, and puts crops where IMAGE is."""

    config_class = ToyConfig

    def __init__(self, config):
        super().__init__(config)
        self.styles = nn.Embedding(7, config.hidden_size)
        self.tower = nn.Sequential(nn.Linear(PATCH, DIM), nn.GELU(), nn.Linear(DIM, config.hidden_size))
        self.post_init()

    def forward(self, input_ids=None, inputs_embeds=None, weights=None, style=None, crops=None, scale=None, **kwargs):
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if crops is not None:
            at = (input_ids == IMAGE)[..., None].expand_as(hidden)
            hidden = hidden.masked_scatter(at, self.tower(crops))
        if weights is not None:
            hidden = hidden * weights[..., None]
        if style is not None:  # (rows,), or an index for each token
            hidden = hidden + self.styles(style).view(len(hidden), -1, hidden.shape[-1])
        if scale is not None:
            hidden = hidden * scale
        return super().forward(inputs_embeds=hidden, **kwargs)


class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = ToyModel(config)
        self.post_init()


class ToyWithTerm(ToyForCausalLM):
    """Its own forward gets whole outputs."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            counted = kwargs["labels"][:, 1:] != -100
            terms = output.logits.logsumexp(-1)[:, :-1].pow(2) * counted
            output.loss = output.loss + 0.1 * terms.sum() / counted.sum()
        return output


def toy(kind=ToyForCausalLM):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": DIM, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
    return kind(ToyConfig(**sizes, **heads)).double().train()


def own_crops(crops, batch, held):
    """The crops of the tokens that this rank has."""
    at = batch["input_ids"].flatten() == IMAGE
    numbers = at.cumsum(0) - 1
    return crops[numbers[held[at[held]]]]


INPUTS = {"weights": tokens(), "style": row(), "crops": own(own_crops)}
PADDING = {"none": (0, 0, 0), "right": (0, 4, 9), "left": (0, 4, 9)}


def batch_of(padding):
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 64, (ROWS, TOKENS), generator=draw)
    ids[:, [10, 11, 17]] = IMAGE
    batch = {"input_ids": ids, "weights": torch.rand(ROWS, TOKENS, generator=draw, dtype=torch.float64) + 0.5}
    batch |= {"style": torch.tensor([4, 0, 6]), "scale": torch.tensor(1.5)}
    batch["crops"] = torch.rand(3 * ROWS, PATCH, generator=draw, dtype=torch.float64)
    mask = torch.stack([torch.arange(TOKENS) < TOKENS - count for count in PADDING[padding]]).long()
    mask = mask.flip(1) if padding == "left" else mask
    labels = ids.masked_fill(mask == 0, IGNORE)
    if padding == "left":
        labels[range(ROWS), mask.argmax(1)] = IGNORE  # only padding predicts it
    return {**batch, "labels": labels, **({} if padding == "none" else {"attention_mask": mask})}


@throughout
def trained(model, batch, sp=None):
    """(loss, gradients), of a sharded batch averaged over ranks."""
    output = model(**batch, use_cache=False)
    output.loss.backward()
    return output.loss.item() if sp is None else sp.mean_loss(output.loss), averaged(model)


def assert_shared(sp, kind, calls, paddings=tuple(PADDING)):
    for padding in paddings:
        batch = batch_of(padding)
        loss, gradients = trained(toy(kind), batch)
        for call in calls:
            model = patch_attention(toy(kind), sp, INPUTS)
            given, of = (batch, None) if call == "whole" else (sp.shard_batch(batch), sp)
            found_loss, found = trained(model, given, of)
            assert abs(found_loss - loss) < 1e-10, (padding, call)
            assert gap(found, gradients) < 1e-10, (padding, call)


@pytest.mark.parametrize("ulysses", each_then_rest([1], [2]))
@on_each_of(2)
def test_three_declared_lines_on_2_ranks(ulysses):
    sp = make(size=2, ulysses=ulysses)
    assert_shared(sp, ToyForCausalLM, ["whole", "sharded"])
    assert_shared(sp, ToyWithTerm, ["whole"])


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["left", "none", "right"])
@on_each_of(4)
def test_three_declared_lines_on_4_ranks(padding):
    assert_shared(make(size=4, ulysses=2), ToyForCausalLM, ["whole", "sharded"], [padding])


EVERYWHERE = {
    "weights": ["got weights float64 (3, 26)", "'weights': tokens()"],
    "style": ["got style int64 (3,)", "'style': tokens()", "row"],
    "crops": ["got crops float64 (9, 5)", "own"],
}


@on_each_of(2)
def test_an_input_that_is_not_declared_is_named_on_every_rank():
    sp, batch = make(size=2, ulysses=1), batch_of("none")
    for name, words in EVERYWHERE.items():
        model = patch_attention(toy(), sp, {other: spec for other, spec in INPUTS.items() if other != name})
        for kind, message in (refusal(model, **batch), refusal(sp.shard_batch, batch)):
            assert kind == "InputError"
            assert is_one_sentence(message)
            assert missing(message, *words) == []
        patch_attention(model, sp, {name: INPUTS[name]})  # declared later
        assert torch.isfinite(model(**batch).loss)
        unpatch_attention(model)
