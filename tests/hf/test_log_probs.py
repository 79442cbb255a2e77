"""Numbers a token of a patched model, by trl's head and by `sp.log_probs`: the plain model's, without its logits."""

import contextlib

import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

import ds_seqpar
from ds_seqpar.errors import ConfigError
from hf_integration import share_sequences, whole_sequences
from tests import grids
from tests.dist.ranks import lacking, refusal
from tests.hf.families import SIZE, model_of
from tests.hf.llama import IGNORE, array, averaged, gap, settings, small, with_lora
from tests.launch import on_each_of
from tests.launch import on_engine_ranks as on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
ROWS, TOKENS, HEAT = 2, 51, 0.7
FAMILIES = {
    "llama": {"num_hidden_layers": 1},
    "qwen3": {"num_hidden_layers": 1, "use_sliding_window": False, "layer_types": ["full_attention"]},
    "gemma2": {"final_logit_softcapping": 3.0},
    "gpt_oss": {},
}
# padding -> (tokens before, after) each row's own
PADDINGS = {
    "none": [(0, 0), (0, 0)],
    "left": [(0, 0), (13, 0)],
    "right": [(0, 22), (0, 0)],
    "both": [(7, 9), (3, 0)],
    "ragged": [(0, 1), (0, 30)],
}
AXES = {"size": (1, 2, 4), "stage": ("0", "2", "3"), "family": tuple(FAMILIES), "padding": tuple(PADDINGS)}
ENGINE = ("size", "stage", "family")  # cases that have these in common share an engine


def model_for(family, **changes):
    from trl.trainer.utils import add_fused_lm_head

    model = model_of(family, **{**FAMILIES[family], **changes})
    add_fused_lm_head(model, HEAT, outputs=("log_probs", "entropy"))
    return model


def batch_of(padding, seed=0):
    draw = torch.Generator().manual_seed(seed)
    ids, mask = torch.randint(3, 64, (ROWS, TOKENS), generator=draw), torch.ones(ROWS, TOKENS, dtype=torch.int64)
    labels = ids.clone()
    for row, (before, after) in enumerate(PADDINGS[padding]):
        mask[row, :before] = mask[row, TOKENS - after :] = 0
        labels[row, : before + (9 if padding == "ragged" else 1)] = IGNORE
    labels[mask == 0] = IGNORE
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def by_logits(model, input_ids, attention_mask, labels):
    """(log-probabilities, entropies) from the logits of a plain model."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
    labels, likely = labels[:, 1:], (logits.float() / HEAT).log_softmax(-1)
    chosen = likely.gather(2, labels.clamp(min=0)[..., None]).squeeze(2)
    return [x.masked_fill(labels == IGNORE, 0) for x in (chosen, -(likely.exp() * likely).sum(-1))]


def by_trl(sp, model, **batch):
    output = model(**batch, fused_lm_head=True)
    return output.log_probs, output.entropy


def by_us(sp, model, **batch):
    return sp.log_probs(model, **batch, temperature=HEAT, return_entropy=True)


WAYS = (by_trl, by_us)


def loss_of(numbers):
    """That weighs each number of its own, so that each has a gradient of its own."""
    draw = torch.Generator().manual_seed(9)
    return sum((x * torch.randn(x.shape, generator=draw)).sum() for x in numbers)


def plain(model, batch):
    """(numbers, gradients by name averaged over ranks) of the plain model."""
    model.zero_grad()
    numbers = by_logits(model, **batch)
    loss_of(numbers).backward()
    return [x.detach() for x in numbers], averaged(model)


def check(found, expected, case):
    for number, wanted in zip(found, expected, strict=True):
        assert number.dtype == wanted.dtype, case
        assert (number - wanted).abs().max() <= 1e-5 * wanted.abs().max(), case


def on_engines(size, stage, family, paddings):
    """On a rank: an engine's numbers and gradients are the plain model's, for each padding and way."""
    section = {"size": size, "ulysses": min(size, 2)}
    config = settings(section, stage, 1, ROWS, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    engine, *_ = ds_seqpar.initialize(model=model_for(family), config=config)
    sp, alone = engine.sequence_parallel, model_for(family)
    for padding in paddings:
        batch = batch_of(padding)
        expected, gradients = plain(alone, batch)
        for way in WAYS:
            case, numbers = (padding, way.__name__), way(sp, engine, **batch)
            engine.backward(loss_of(numbers))
            check([x.detach() for x in numbers], expected, case)
            named = engine.module.named_parameters()
            full = {name: deepspeed.utils.safe_get_full_grad(p) for name, p in named}
            its = {name: array(full[name]) for name in gradients}
            assert gap(its, gradients) < 1e-5, (case, gap(its, gradients))
            engine.step()  # by a rate of 0


def grouped():
    """pytest parameters: for each size [(size, stage, family, paddings)], of a cover, and marked `whole` of the rest."""
    engines = grids.cover(**{axis: AXES[axis] for axis in ENGINE})
    few = grids.cover(lambda case: {axis: case[axis] for axis in ENGINE} in engines, **AXES)
    for cases, marks in ((few, ()), ([case for case in grids.whole(**AXES) if case not in few], pytest.mark.whole)):
        groups = {}
        for case in cases:
            groups.setdefault(tuple(case[axis] for axis in ENGINE), []).append(case["padding"])
        for size in AXES["size"]:
            members = [(*key, paddings) for key, paddings in groups.items() if key[0] == size]
            yield pytest.param(members, id=f"{'rest' if marks else 'few'} {size}", marks=marks)


@pytest.mark.parametrize("cases", [*grouped()])
def test_an_engines_numbers_and_gradients_are_the_plain_models(cases):
    on_ranks(cases[0][0], engines, cases, timeout=300)


def engines(cases):
    for case in cases:
        on_engines(*case)
