"""What is about the device itself: nobody waits for it inside a layer, and what left it comes back."""

import pytest
import torch

from ds_seqpar.engine import start
from ds_seqpar.errors import SeqParError
from ds_seqpar.runtime.offload import store_of
from hf_integration import patch_attention
from hf_integration.sharded import Later
from tests.dist.ranks import make
from tests.gpu import NEEDS_TWO, both
from tests.hf.llama import SEQ, small
from tests.launch import on_ranks

pytestmark = pytest.mark.usefixtures("compiled")
EVERYTHING = {"mlp_tiles": 2, "loss_tiles": 2, "head_stages": 2, "offload_checkpoints": True}


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


def two_steps(device, packed):
    """Gradients of a second step, in which no layer may wait for the device."""
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
    return all(bool(p.grad.isfinite().all()) for p in model.parameters())


@both()
@pytest.mark.parametrize("packed", [False, True])
def test_no_layer_waits_for_the_device(packed, device):
    assert on_ranks(1, two_steps, device, packed, patience=None) == [True]


def looked_at(device):
    """What is said of positions that are another rank's, in the forwards after the one that had them."""
    start()
    sp, later = make(size=1), Later()
    later.look(sp, SEQ, (sp.position_ids(SEQ) + 1)[None].to(device), None)
    return [str(error) if (error := later.error()) else None for _ in range(2)]


@both()
def test_what_was_found_on_the_device_is_said_in_the_next_forward(device):
    ((first, second),) = on_ranks(1, looked_at, device, patience=None)
    assert "earlier forward" in first
    assert second is None


def disagreeing(device):
    """What each of two ranks is told where one has another length, and whether they go on together afterwards."""
    start()
    sp, told = make(heads=(2, 2), size=2, ulysses=1), None
    try:
        q = torch.zeros(1, 8 + 8 * sp.rank, 2, 64, dtype=torch.bfloat16, device=device)
        sp.attention(q, q, q)
    except SeqParError as error:
        told = str(error)
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16, device=device)
    return told, float(sp.attention(q, q, q).sum())


@both(NEEDS_TWO)
def test_ranks_that_disagree_are_told_and_go_on(device):
    first, second = on_ranks(2, disagreeing, device, patience=None)
    assert first == second
    assert "(1, 16, 2, 64)" in first[0]
    assert first[1] == 0.0
