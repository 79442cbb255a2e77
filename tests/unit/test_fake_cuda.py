"""Every schedule on tensors of a GPU that is not there: they have shapes, dtypes and a device, and no values.

So an operation between devices raises, and so does a look at a value, for which the host would wait for the device.
The kernels are PyTorch's, and a stand-in for the flash-attn package that wants what that package's does.
"""

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from ds_seqpar.compiler.layout import Run
from ds_seqpar.compiler.masks import CAUSAL, FULL, Mask
from ds_seqpar.compiler.schedules import SCHEDULES
from ds_seqpar.compiler.shards import UnevenShards
from ds_seqpar.config import SequenceParallelConfig
from ds_seqpar.runtime.kernels import BlockSpec, select
from ds_seqpar.testing import attention
from tests.fake_cuda import no_device

SEQ, DIM = 64, 64
CUDA_KERNELS = ("cuda_flash", "flash_attn")
UNEVEN = UnevenShards([[Run(0, 1, 30)], [Run(30, 1, 4)], [], [Run(34, 1, 30)]])

FLASH_ATTN = """
import torch


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):
    _check(q, k, v, causal)
    batch, rows, heads, _ = q.shape
    lse = q.new_empty(batch, heads, rows, dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
    window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):
    _check(q, k, v, causal)
    _check(dout, k, v, causal)
    _check(out, k, v, causal)
    batch, rows, heads, _ = q.shape
    assert softmax_lse.shape == (batch, heads, rows) and softmax_lse.dtype == torch.float32
    assert softmax_lse.is_contiguous() and softmax_lse.device == q.device
    for grad, x in ((dq, q), (dk, k), (dv, v)):
        assert grad.shape == x.shape and grad.dtype == x.dtype and grad.stride(-1) == 1
        grad.zero_()
    return torch.empty_like(softmax_lse)


def _check(q, k, v, causal):
    for x in (q, k, v):
        assert x.device.type == "cuda" and x.dtype == torch.bfloat16 and x.stride(-1) == 1
    assert k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and q.shape[1] and k.shape[1]
    assert not causal or q.shape[1] == k.shape[1]
"""


@pytest.fixture(autouse=True)
def _flash_attn(tmp_path, monkeypatch):
    """A stand-in for the package, found as an installed one is."""
    package, about = tmp_path / "flash_attn", tmp_path / "flash_attn-2.8.0.dist-info"
    for folder in (package, about):
        folder.mkdir()
    (package / "__init__.py").write_text("")
    (package / "flash_attn_interface.py").write_text(FLASH_ATTN)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    select.cache_clear()
    yield
    select.cache_clear()
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]


def walk(kernel, mask=CAUSAL, shards=None, size=4, ulysses=1, seq=SEQ, **settings):
    """All ranks' forward and backward; how often PyTorch's two kernels were called."""
    config = SequenceParallelConfig(size=size, ulysses=ulysses, kernel=kernel, **settings)
    with no_device() as watch:
        q, k, v, do = (torch.empty(1, seq, heads, DIM, dtype=torch.bfloat16, device="cuda") for heads in (2, 1, 1, 2))
        found = attention(config, q, k, v, do, mask=mask, shards=shards)
        for x, like in ((found.out, q), (found.dq, q), (found.dk, k), (found.dv, v)):
            assert (x.shape, x.dtype, x.device) == (like.shape, like.dtype, like.device)
    return sorted(watch.calls.values())


# with more than one rank on every axis that 4 ranks leave room for; numbers of ranks and tokens that it takes
SHAPES = {
    "ring": {},
    "double_ring": {"window": 2},
    "distflash": {},
    "attention2d": {"rows": 2},
    "wallfacer": {"team": 2},
    "mesh": {"mesh": (2, 1, 2)},
    "triangle": {"size": 3, "seq": 60},
}
ALIKE = ("double_ring", "wallfacer")  # of the same instructions as a ring and a mesh


def _with_one_kernel(names, rest=()):
    """pytest parameters (name, kernel): each name with one kernel in turn, and marked `whole` with the other, and those
    of the rest with both."""
    few = [(name, CUDA_KERNELS[n % 2]) for n, name in enumerate(name for name in names if name not in rest)]
    pairs = [(name, kernel) for name in names for kernel in CUDA_KERNELS]
    return [*few, *(pytest.param(*pair, marks=pytest.mark.whole) for pair in pairs if pair not in few)]


@pytest.mark.parametrize(("name", "kernel"), _with_one_kernel(SCHEDULES, ALIKE))
def test_every_schedule_stays_on_the_device(name, kernel):
    travels = SCHEDULES[name].travellers[CUDA_KERNELS.index(kernel) % len(SCHEDULES[name].travellers)]
    calls = walk(kernel, schedule=name, forward=travels, backward=travels, **SHAPES[name])
    # a rank's own block is two calls and more on zigzag, and every rank has more than its own
    assert [count > 4 for count in calls] == [True] * (2 if kernel == "cuda_flash" else 0)


OTHERS = {
    "full": {"mask": FULL},
    "window": {"mask": Mask(window=11)},
    "documents": {"mask": Mask(documents=(0, 5, 29), window=20), "schedule": "mesh", "mesh": (2, 2, 1)},
    "uneven": {"shards": UNEVEN, "schedule": "mesh", "mesh": (1, 2, 2)},
    "ulysses": {"size": 8, "ulysses": 2, "travel_dtype": "bf16"},
    "overlap": {"schedule": "mesh", "mesh": (2, 1, 2), "overlap": True, "layout": "contiguous"},
}


@pytest.mark.parametrize(("name", "kernel"), _with_one_kernel(OTHERS, ("full", "window")))
def test_so_do_masks_uneven_shards_ulysses_and_overlap(name, kernel):
    assert len(walk(kernel, **OTHERS[name])) == (2 if kernel == "cuda_flash" else 0)


# ---- so that the tests above can fail


def test_a_look_at_a_value_raises():
    with no_device(), pytest.raises(DataDependentOutputException):
        bool((torch.zeros(4, device="cuda") == 0).all())


@pytest.mark.parametrize("move", [
    lambda x: x.cpu(),
    lambda x: torch.empty(4).copy_(x),
    lambda x: x + torch.zeros(4),
    lambda x: x.__setitem__(slice(0, 2), torch.zeros(2)),
])  # fmt: skip
def test_a_way_between_devices_raises(move):
    with no_device(), pytest.raises((AssertionError, RuntimeError)):
        move(torch.zeros(4, device="cuda"))


@pytest.mark.parametrize("kernel", CUDA_KERNELS)
def test_a_causal_call_that_is_not_square_raises(kernel):
    spec = BlockSpec("cuda", torch.bfloat16, 2, 1, DIM)
    with no_device():
        q, k = (torch.empty(1, tokens, 2, DIM, dtype=torch.bfloat16, device="cuda") for tokens in (8, 16))
        select(kernel, spec).forward(q, k, k, False, 1.0)
        with pytest.raises(AssertionError):
            select(kernel, spec).forward(q, k, k, True, 1.0)
