"""What is about the device itself: nobody waits for it inside a layer, and what left it comes back."""

import pytest
import torch

from ds_seqpar.data.shard_checks import check_shard
from ds_seqpar.data.value_checks import ValueChecks
from ds_seqpar.engine import start
from ds_seqpar.memory.offload import store_of
from hf_integration import patch_attention
from tests.dist.ranks import make, refusal
from tests.gpu import NEEDS_TWO, both
from tests.hf.llama import SEQ, small
from tests.launch import on_each_of

pytestmark = pytest.mark.usefixtures("compiled")
EVERYTHING = {"mlp_tiles": 2, "loss_tiles": 2, "head_chunks": 2, "offload_checkpoints": True}


@both()
def test_what_left_for_host_memory_comes_back(device):
    """More than its ring holds, twice, so that host memory is used again, while the device computes on."""
    store = store_of(torch.device(device))
    for _ in range(2):
        given = [torch.randn(1 << 18, device=device) for _ in range(6)]
        packed, sums = [store.pack(x * 2) for x in given], [x.sum() for x in given]
        for x, whole in zip(reversed(given), reversed(sums), strict=True):
            back = store.unpack(packed.pop())
            assert torch.equal(back, x * 2)
            assert torch.equal(x.sum(), whole)


@both()
@pytest.mark.parametrize("packed", [False, True])
@on_each_of(1, patience=None)
def test_no_layer_waits_for_the_device(packed, device):
    """In a second step."""
    start()
    sp = make(size=1, **EVERYTHING)
    ids = torch.arange(SEQ)[None]
    batch = {"input_ids": ids, "labels": ids.clone()}
    if packed:
        batch["position_ids"] = torch.arange(SEQ // 2).repeat(1, 2)
    model = patch_attention(small().to(device, torch.bfloat16), sp)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for waits in ("default", "error"):
        model.zero_grad()
        given = sp.shard_batch(batch, training=False, device=device)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode(waits)
        model(**given).loss.backward()
        torch.cuda.set_sync_debug_mode("default") if device == "cuda" else None
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


@both()
@on_each_of(1, patience=None)
def test_what_was_found_on_the_device_is_said_in_the_next_forward(device):
    """Of positions that are another rank's."""
    start()
    sp, checks, tokens = make(size=1), ValueChecks(at_once=()), torch.zeros(1, SEQ, device=device)
    check_shard(sp, tokens, (sp.position_ids(SEQ) + 1)[None].to(device), None, None, checks)
    checks.post(sp.checker)
    assert "earlier forward" in refusal(sp.checker.check_deferred, "model inputs", None)[1]
    assert refusal(sp.checker.check_deferred, "model inputs", None) == (None, None)


@both(NEEDS_TWO)
@on_each_of(2, patience=None)
def test_ranks_that_disagree_are_told_and_go_on(device):
    """Where one has another length."""
    start()
    sp = make(heads=(2, 2), size=2, ulysses=1)
    q, other = (torch.zeros(1, n, 2, 64, dtype=torch.bfloat16, device=device) for n in (8, 8 + 8 * sp.rank))
    assert "(1, 16, 2, 64)" in refusal(sp.attention, other, other, other)[1]
    assert float(sp.attention(q, q, q).sum()) == 0.0
