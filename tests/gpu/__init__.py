"""What needs a GPU: `make test-gpu`. Bodies that CPUs can run too are run there by `make test`, as `both` has it."""

import pytest
import torch

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="waits for a CUDA device"),
]
NEEDS_TWO = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="waits for two CUDA devices"),
]


def both(needs=NEEDS_GPU):
    """A test of each kind of device; its argument `device` is "cpu" or "cuda"."""
    return pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs)])


TILES = {"mlp_tiles": 2, "loss_tiles": 2}
# what a training step may have beside attention: "sequence_parallel" section, then how the model keeps checkpoints
STEPS = {
    "plain": ({}, None),
    "tiles": (TILES, None),
    "head_chunks": ({"head_chunks": 2}, None),
    "checkpoints": ({}, {"use_reentrant": False}),
    "checkpoints in host memory": ({"offload_checkpoints": True}, {"use_reentrant": False}),
    "reentrant checkpoints": ({}, {"use_reentrant": True}),
    "checkpoints without attention": ({"recompute_attention": True}, {"use_reentrant": False}),
    "all": ({**TILES, "head_chunks": 2, "offload_checkpoints": True}, {"use_reentrant": False}),
}
