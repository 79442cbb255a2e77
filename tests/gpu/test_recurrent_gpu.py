"""Layers with a state: shared by ranks of one device, and a hybrid model on two."""

import pytest
import torch

from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.data.batch_layout import positions_held
from ds_seqpar.engine import start
from ds_seqpar.operators import segments
from hf_integration import patch_attention
from tests.dist.ranks import make
from tests.gpu import NEEDS_TWO, both
from tests.hf.every_type import tiny
from tests.launch import on_each_of
from tests.oracle import assert_exact
from tests.recurrent import alone, inputs, layer
from tests.threads import on_virtual_ranks

SEQ, RANKS = 64, 4


@both()
@pytest.mark.parametrize("kind", ["delta", "decayed"])
@pytest.mark.parametrize("at_once", [2**21, 0])
def test_layers_shared_by_ranks_of_one_device(kind, at_once, device, monkeypatch):
    """In fp32, with TF32 switched on as transformers does: states keep all digits."""
    monkeypatch.setattr(segments, "AT_ONCE", at_once)
    tokens, parameters = inputs(kind, SEQ, 4, 2)
    expected = alone(kind, tokens, parameters, (), SEQ)
    tokens, parameters = ([x.float().to(device) for x in given] for given in (tokens, parameters))
    held = [positions_held(EvenShards("balanced", SEQ, RANKS), 1, rank) for rank in range(RANKS)]

    @torch.no_grad()  # of all ranks' graphs of one device one thread would run backward
    def on_rank(runtime, rank):
        return layer(kind, runtime, [x[:, held[rank].to(device)] for x in tokens], parameters, None, ())

    results, _ = on_virtual_ranks(on_rank, size=RANKS, ulysses=1, layout="balanced")
    found = torch.cat(results, 1)[:, torch.cat(held).argsort().to(device)]
    assert found.device.type == device
    assert_exact([found.cpu()], [expected], limit=1e-4)


@both(NEEDS_TWO)
@pytest.mark.usefixtures("compiled")
@on_each_of(2, patience=None)
def test_a_step_of_hybrids(device):
    start()
    ids = torch.randint(3, 60, (1, SEQ), generator=torch.Generator().manual_seed(0))
    for kind in ("qwen3_next", "nemotron_h"):
        plain = tiny(kind).float().train()
        loss = plain(input_ids=ids, labels=ids).loss
        loss.backward()
        with make(size=2, ulysses=1) as sp:
            shared = patch_attention(tiny(kind).float().to(sp.device).train(), sp)
            ours = shared(input_ids=ids.to(sp.device), labels=ids.to(sp.device)).loss
            ours.backward()
            assert float(ours) == pytest.approx(float(loss), rel=1e-4)
            for (name, x), y in zip(plain.named_parameters(), shared.parameters(), strict=True):
                if x.grad is not None and float(x.grad.norm()) > 1e-4:
                    found = sp.sum_over_ranks(y.grad).cpu() / sp.size
                    assert float((found - x.grad).norm() / x.grad.norm()) < 1e-2, (kind, name)
