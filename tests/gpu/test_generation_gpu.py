"""Attention to kept keys, and generation, on one device and on two."""

import pytest
import torch

from ds_seqpar.core.compiler.sharding.layout import Run
from ds_seqpar.core.compiler.sharding.masks import FULL
from ds_seqpar.core.compiler.sharding.shards import UnevenShards
from ds_seqpar.engine import start
from hf_integration import patch_attention
from tests.dist.ranks import make
from tests.gpu import NEEDS_TWO, both
from tests.hf.llama import small
from tests.launch import on_each_of
from tests.oracle import assert_exact

KEPT, NEW = 300, 5
SHARDS = UnevenShards([(Run(KEPT, 1, NEW),)], [(Run(0, 1, KEPT),)], q_start=KEPT)
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def dense_attention(q, k, v):
    q, k, v = (x.cpu().double().transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


@both()
@on_each_of(1, patience=None)
@torch.no_grad()
def test_attention_to_kept_keys(device):
    start()
    with make(size=1, ulysses=1) as sp:
        for dtype, limit in DTYPES.items():
            k, v = (torch.randn(2, 2, KEPT, 64).to(device, dtype).transpose(1, 2) for _ in range(2))
            step, prompt = (torch.randn(2, tokens, 8, 64).to(device, dtype) for tokens in (1, NEW))
            found = sp.decode_attention(step, k, v), sp.cache_attention(prompt, k, v, mask=FULL, shards=SHARDS)[0]
            assert {x.device.type for x in found} == {device}
            assert_exact([x.cpu() for x in found], [dense_attention(q, k, v) for q in (step, prompt)], limit=limit)


@both(NEEDS_TWO)
@pytest.mark.usefixtures("compiled")
@on_each_of(2, patience=None)
def test_two_ranks_generate_the_plain_models_tokens(device):
    start()
    with make(size=2, ulysses=1) as sp:
        model = small(pad_token_id=0).eval().to(sp.device)
        ids = torch.randint(3, 64, (2, 70), generator=torch.Generator().manual_seed(0)).to(sp.device)
        mask = (torch.arange(70) >= torch.tensor([[0], [30]])).long().to(sp.device)
        how = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False, "prefill_chunk_size": 33}
        wanted = model.generate(ids, attention_mask=mask, **{**how, "prefill_chunk_size": None})
        found = patch_attention(model, sp).generate(ids, attention_mask=mask, **how)
        assert torch.equal(found, wanted)
