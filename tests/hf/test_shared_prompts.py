"""Patched models on a placement whose documents have parents: the plain model's numbers of rows that repeat prompts."""

import pytest
import torch

from ds_seqpar.base.errors import InputError
from hf_integration.mixers import _Shared
from tests import oracle
from tests.dist.ranks import lacking, make, refusal
from tests.hf.every_type import tiny
from tests.hf.families import model_of
from tests.launch import on_each_of

LENGTHS, PARENTS = (17, 6, 5, 9, 4, 8), (-1, 0, 0, 2, -1, 4)


def batch_of(sp, ids):
    placement = sp.place(sum(LENGTHS), LENGTHS, parents=PARENTS)
    positions = sp.position_ids(0, placement)[None]
    return {"input_ids": sp.shard(ids, 1, placement), "position_ids": positions, "placement": placement}


def rows(ids):
    """Of each document the tokens that it sees, and its own behind them."""
    pieces, found = ids.split(LENGTHS, dim=1), []
    for piece, parent in zip(pieces, PARENTS, strict=True):
        found.append(torch.cat([found[parent], piece], 1) if parent >= 0 else piece)
    return found


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


@on_each_of(2)
def test_logits_and_gradients_are_those_of_rows_that_repeat_the_prompts():
    ids = torch.randint(3, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    for family, settings, ulysses in (
        ("llama", {}, 1),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}, 2),
    ):
        sp, plain, model = make(ulysses=ulysses), *(model_of(family, **settings) for _ in range(2))
        model.patch_attention(sp)
        batch = batch_of(sp, ids)
        whole = torch.cat([plain(row).logits[:, -length:] for row, length in zip(rows(ids), LENGTHS, strict=True)], 1)
        grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1))
        whole.backward(grad)
        logits = model(**batch).logits
        logits.backward(sp.shard(grad, 1, batch["placement"]))
        found = [sp.gather(logits.detach(), 1, batch["placement"]), *map(sp.sum_over_ranks, gradients(model))]
        oracle.assert_exact(found, [whole.detach(), *gradients(plain)], family, limit=1e-5, least=1.0)


@on_each_of(2)
def test_layers_that_cannot_have_parents_refuse_them():
    ids = torch.full((1, sum(LENGTHS)), 5)
    sp = make(ulysses=1)
    for model, words in (
        (model_of("mistral"), ("without a window", "window 20")),
        (tiny("llama4_text"), ("in chunks", "6 documents with parents")),
    ):
        model.patch_attention(sp)
        assert lacking(refusal(model, **batch_of(sp, ids)), "InputError", *words) == [], words
    with pytest.raises(InputError, match=r"with a state.*6 documents with parents"):
        _ = _Shared(sp.runtime, batch_of(sp, ids)["placement"]).tokens
