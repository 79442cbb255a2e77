"""Models whose loss is more than token losses: terms of their own, other heads, adapters with a penalty. Whole batches
give the plain model's numbers. A sentence refuses sharded ones whose loss would be another number, at any size."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    LlamaPreTrainedModel,
)

import ds_seqpar
from ds_seqpar.data.batches import counted_labels
from ds_seqpar.whole import WholeTensor
from hf_integration import patch_attention
from tests import scripts
from tests.dist.ranks import lacking, make, refusal
from tests.grids import each_then_rest
from tests.hf.conformance import Case, assert_cases
from tests.hf.llama import IGNORE, MODES, llama, settings, small, with_lora
from tests.launch import on_each_of
from tests.words import missing

pytestmark = pytest.mark.usefixtures("compiled")
ROOT = Path(__file__).parents[2]
ROWS, TOKENS = 2, 37


def with_z_term(output, weight):
    if output.loss is not None:
        output.loss = output.loss + weight * output.logits.float().logsumexp(-1).pow(2).mean()
    return output


class ZLossForCausalLM(LlamaForCausalLM):
    """Adds a z-loss, of any weight."""

    weight = 1e-3

    def forward(self, *args, **kwargs):
        return with_z_term(super().forward(*args, **kwargs), self.weight)


class PenaltyOf(LlamaForCausalLM):
    """Adds a penalty on parameters. Its name says nothing."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.loss = output.loss + 1e-3 * sum(p.pow(2).sum() for p in self.lm_head.parameters())
        return output


class TwoHeadsForCausalLM(LlamaForCausalLM):
    """Predicts the token after the next one too, and weights rows."""

    def __init__(self, config):
        super().__init__(config)
        self.norm, self.second = nn.LayerNorm(config.hidden_size), nn.Linear(config.hidden_size, config.vocab_size)
        self.drop = nn.Dropout(config.attention_dropout)
        self.post_init()

    def forward(self, *args, labels=None, weights=None, **kwargs):
        output = super().forward(*args, labels=labels, output_hidden_states=True, **kwargs)
        logits = self.second(self.drop(self.norm(output.hidden_states[-1])))[:, :-2].float()
        losses = F.cross_entropy(logits.flatten(0, 1), labels[:, 2:].flatten(), reduction="none", ignore_index=IGNORE)
        output.loss = output.loss + 0.3 * (losses.view(ROWS, -1).mean(1) * weights).sum()
        return output


class Value(LlamaPreTrainedModel):
    """A model of a user's own around a base model."""

    def __init__(self, config):
        super().__init__(config)
        self.model, self.value = LlamaModel(config), nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids, returns, **kwargs):
        values = self.value(self.model(input_ids, **kwargs).last_hidden_state).squeeze(-1)
        return {"loss": (values - returns).square().mean().sqrt(), "values": values}


def of(kind, **changes):
    torch.manual_seed(0)
    given = {"num_hidden_layers": 1, "pad_token_id": 0, "num_labels": 3, "classifier_dropout": 0.0, **changes}
    return kind(llama(**given).config).double()


def with_adalora(weight=0.05):
    import peft

    torch.manual_seed(1)
    config = peft.AdaLoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], orth_reg_weight=weight, total_step=9, init_r=4
    )
    model = peft.get_peft_model(small(), config)
    for name, p in model.named_parameters():
        if "lora_" in name and p.requires_grad:
            nn.init.normal_(p, std=0.3)
    return model.double()


def adapted(kind, task):
    return with_lora(of(kind), "q_proj", "v_proj", task_type=task).double()


def drawn(*shape):
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(5))


def labeled():
    ids = drawn(ROWS, TOKENS)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(TOKENS) < 11 * torch.tensor([[1], [0]]), IGNORE)}


def padded():
    ids = drawn(ROWS, TOKENS)
    ids[1, 30:] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([1, 2])}


def packed():
    positions = torch.cat([torch.arange(23), torch.arange(14)])[None]
    return {**labeled(), "position_ids": positions, "use_cache": False}


# name -> (the model, its whole batch)
LOCAL = {
    "a z-loss": (lambda: of(ZLossForCausalLM), labeled),
    "a z-loss of packs": (lambda: of(ZLossForCausalLM), packed),
    "a penalty on parameters": (lambda: of(PenaltyOf), labeled),
    "AdaLoRA": (with_adalora, labeled),
    "a head more, and a column of rows": (
        lambda: of(TwoHeadsForCausalLM),
        lambda: labeled() | {"weights": torch.tensor([0.5, 2.0])},
    ),
    "a class of rows": (lambda: of(LlamaForSequenceClassification), padded),
    "a class of rows, in adapters": (lambda: adapted(LlamaForSequenceClassification, "SEQ_CLS"), padded),
    "a z-loss, in adapters": (lambda: adapted(ZLossForCausalLM, "CAUSAL_LM"), labeled),
    "a class of tokens": (
        lambda: of(LlamaForTokenClassification),
        lambda: labeled() | {"labels": drawn(ROWS, TOKENS) % 3},
    ),
    "values": (
        lambda: of(Value),
        lambda: {"input_ids": drawn(ROWS, TOKENS), "returns": drawn(ROWS, TOKENS) / 64},
    ),
}


def cases(names, section, ways):
    """Of models of LOCAL, by name."""
    return {x: Case(LOCAL[x][0], section, lambda number, x=x: LOCAL[x][1](), ways) for x in names}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_each_of("ranks")
def test_whole_batches_give_the_plain_models_numbers(ranks):
    assert_cases(cases(LOCAL, MODES["r2" if ranks == 2 else "u2r2"], ["its loss"]))


@on_each_of(2)
def test_a_label_at_a_documents_start_counts_where_a_forward_sees_whole_outputs_alone():
    """What docs/masks.md says of labels. In a plain model it counts."""
    sp, batch, causal = make(**MODES["r2"]), packed(), of(LlamaForCausalLM)
    labels = batch["labels"].masked_fill(batch["position_ids"] == 0, IGNORE)
    without = {**batch, "labels": labels}
    plain, wanted = (causal(**x).loss.item() for x in (batch, without))
    patch_attention(causal, sp)
    assert abs(plain / wanted - 1) > 1e-5
    found = [causal(**batch).loss.item(), sp.mean_loss([causal(**sp.shard_batch(batch)).loss])]
    assert found == pytest.approx([wanted] * 2, rel=1e-6)
    assert counted_labels(sp.sharding, batch).equal(labels)  # as the Trainer leaves them for the model's own loss
    own = patch_attention(of(ZLossForCausalLM), sp)
    assert own(**batch).loss.item() - own(**without).loss.item() == pytest.approx(plain - wanted, rel=1e-6)


@on_each_of(2)
def test_outputs_stay_in_parts_and_inputs_are_compared():
    sp = make(**MODES["r2"])
    model = patch_attention(of(TwoHeadsForCausalLM, attention_dropout=0.0), sp)
    batch = labeled() | {"weights": torch.tensor([0.5, 2.0])}
    sp.comm.received.clear()
    output = model(**batch)
    assert isinstance(output.logits, WholeTensor)
    assert output.logits._gathered is None
    other = {**batch, "weights": torch.tensor([0.5, 2.0 + sp.rank])}
    told = refusal(model, **other)
    assert lacking(told, "DisagreementError", "same whole batch", "rank 1: weights") == []
    told = refusal(torch.compile(model, backend="eager"), **batch)
    assert lacking(told, "InputError", "torch.compile", "layer.compile()") == []
    told = refusal(patch_attention(of(LlamaForSequenceClassification), sp), **sp.shard_batch(labeled()))
    assert lacking(told, "InputError", "LlamaForSequenceClassification needs whole batches", "give it the whole") == []


# --- a rank's local tokens


def weighted(weight):
    model = of(ZLossForCausalLM)
    model.weight = weight
    return model


@on_each_of(2)
def test_a_loss_that_is_more_is_refused_on_sharded_batches_each_time():
    """4.175507 for 4.158130 passed, and what was refused trained on in the next call."""
    sp, tiled = make(**MODES["r2"]), make(size=2, loss_tiles=3)
    model, (part,) = patch_attention(weighted(1e-3), sp), sp.shard_batches([labeled()])
    in_tiles = patch_attention(weighted(1e-6), tiled)
    for call, batch in ((model, part), (in_tiles, labeled())) * 2:
        told = refusal(call, **batch)
        assert lacking(told, "ConfigError", "nothing more", "z-loss", "where that is", "whole batches") == []
    right = patch_attention(small(), sp)
    assert right(**part).loss.isfinite()


@on_each_of(2)
def test_a_penalty_that_all_ranks_share_counts_once_on_sharded_batches():
    assert_cases(cases(["a penalty on parameters", "AdaLoRA"], MODES["r2"], ["its loss, sharded"]))


@on_each_of(2, keep="deepspeed")
def test_an_engine_gives_the_plain_models_numbers():
    """peft's penalty itself fails under ZeRO-3."""
    for name, stage in (("a z-loss", "3"), ("AdaLoRA", "2")):
        model, batch = (lambda name=name: LOCAL[name][0]().float()), LOCAL[name][1]
        case = Case(model, MODES["r2"], lambda number, batch=batch: batch(), ["its loss"], wrapper=f"ZeRO-{stage}")
        assert_cases({name: case})
        engine, *_ = ds_seqpar.initialize(model=model(), config=settings(MODES["r2"], stage, 1, ROWS))
        told = refusal(engine, **engine.sequence_parallel.shard_batch(batch()))
        if name == "AdaLoRA":
            assert told == (None, None)
        else:
            assert missing(told[1], "initialize check_loss=False", "whole batches", "z-loss") == []


# --- the examples


@pytest.mark.parametrize("name", each_then_rest(["reward_loop"], ["dpo_loop", "grpo_loop"]))
def test_an_example_prints_the_same_on_one_rank_and_on_two(name, tmp_path):
    printed = []
    for size in (1, 2):
        ran = scripts.run(size, tmp_path, ROOT / f"examples/{name}.py", "--size", size, "--steps", 2)
        assert not ran.failed, ran.stderr[-3000:]
        printed.append([float(word) for word in ran.stdout.split() if "." in word])
    assert len(printed[0]) >= 4
    assert printed[1] == pytest.approx(printed[0], abs=2e-5)
    assert not any(map(math.isnan, printed[0]))
