"""Every schedule on tensors of a GPU that is not there: they have shapes, dtypes and a device, and no values.

So an operation between devices raises, and so does a look at a value, for which the host would wait for the device.
The kernels are PyTorch's, called through their schemas, and a model of the flash-attn package. What an operator wants
of its operands is what `tests/cuda_models.py` says.
"""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.layout import Run
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, FULL, Mask
from ds_seqpar.core.compiler.sharding.shards import UnevenShards
from ds_seqpar.core.runtime.kernels import BlockSpec, select
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.testing import attention
from tests.cuda_models import flash_attn, launches
from tests.fake_cuda import no_device
from tests.unit.plans import SHAPES

SEQ, DIM = 64, 64
DTYPES = {"cuda_flash": torch.bfloat16, "flash_attn": torch.bfloat16, "cuda_efficient": torch.float32,
          "cudnn": torch.bfloat16, "flash_attn_3": torch.bfloat16}  # fmt: skip
CUDA_KERNELS = tuple(DTYPES)
UNEVEN = UnevenShards([[Run(0, 1, 30)], [Run(30, 1, 4)], [], [Run(34, 1, 30)]])


@pytest.fixture(autouse=True)
def _flash_attn():
    """A model of the package, found as an installed one is."""
    with flash_attn():
        yield


def walk(kernel, mask=CAUSAL, shards=None, size=4, ulysses=1, seq=SEQ, batch=1, dim=DIM, **settings):
    """All ranks' forward and backward; how often a kernel was launched in each."""
    config = SequenceParallelConfig(size=size, ulysses=ulysses, kernel=kernel, **settings)
    launches.clear()
    with no_device():
        like = {"dtype": DTYPES[kernel], "device": "cuda"}
        q, k, v, do = (torch.empty(batch, seq, heads, dim, **like) for heads in (2, 1, 1, 2))
        found = attention(config, q, k, v, do, mask=mask, shards=shards)
        for x, like in ((found.out, q), (found.dq, q), (found.dk, k), (found.dv, v)):
            assert (x.shape, x.dtype, x.device) == (like.shape, like.dtype, like.device)
    return launches["forward"], launches["backward"]


ALIKE = ("double_ring", "wallfacer", "attention2d")  # of the same instructions as a ring and a mesh


def _with_one_kernel(names, rest=()):
    """pytest parameters (name, kernel): each name with one kernel in turn, and marked `slow` with the others, and
    those of the rest with all."""
    few = [(name, CUDA_KERNELS[n % 5]) for n, name in enumerate(name for name in names if name not in rest)]
    pairs = [(name, kernel) for name in names for kernel in CUDA_KERNELS]
    return [*few, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs if pair not in few)]


@pytest.mark.parametrize(("name", "kernel"), _with_one_kernel(SCHEDULES, ALIKE))
def test_every_schedule_stays_on_the_device(name, kernel):
    travels = SCHEDULES[name].moving_sides[CUDA_KERNELS.index(kernel) % len(SCHEDULES[name].moving_sides)]
    seq = 60 if name == "triangle" else SEQ  # which its ranks divide
    calls = walk(kernel, schedule=name, rotate_forward=travels, rotate_backward=travels, seq=seq, **SHAPES[name])
    assert min(calls) > 4  # every rank has more than its own block


OTHERS = {
    "full": {"mask": FULL},
    "window": {"mask": Mask(window=11)},
    "documents": {"mask": Mask(documents=(0, 5, 29), window=20), "schedule": "mesh", "mesh": (2, 2, 1)},
    "tree": {"mask": Mask(documents=(0, 5, 29), parents=(-1, 0, 0)), "layout": "zigzag"},
    "uneven": {"shards": UNEVEN, "schedule": "mesh", "mesh": (1, 2, 2)},
    "odd heads": {"mask": FULL, "dim": 35, "batch": 2},
    "ulysses": {"size": 8, "ulysses": 2, "comm_dtype": "bf16"},
    "overlap": {"schedule": "mesh", "mesh": (2, 1, 2), "overlap": True, "layout": "contiguous"},
}


@pytest.mark.parametrize(("name", "kernel"), _with_one_kernel(OTHERS, ("full", "window")))
def test_so_do_masks_uneven_shards_ulysses_and_overlap(name, kernel):
    assert min(walk(kernel, **OTHERS[name])) > 0


PACK = Mask(documents=Mask.documents_of([1 + 37 * n % 61 for n in range(63)] + [4096 - 1953]))


@pytest.mark.parametrize("kernel", [x for x in CUDA_KERNELS if x != "cudnn"])
def test_windows_packs_and_striped_blocks_are_one_launch_each(kernel):
    """cuDNN takes none of them. Memory-efficient attention has a log-sum-exp for each document in rows of its own, so
    it takes one at a time."""
    window = Mask(window=100)
    assert walk(kernel, window, size=1, seq=4096) == (1, 1)
    for mask in (CAUSAL, window):  # 2 ranks, each with the keys of 2
        assert walk(kernel, mask, seq=512, size=2, layout="striped") == (4, 4)
    if kernel != "cuda_efficient":
        assert len(PACK.documents) == 64
        assert walk(kernel, PACK, size=1, seq=4096, batch=2) == (1, 1)
        assert walk(kernel, dataclasses.replace(PACK, window=50), size=2, seq=4096, layout="striped") == (4, 4)


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
def test_operands_that_a_kernel_does_not_take_raise(kernel):
    spec = BlockSpec("cuda", DTYPES[kernel], 2, 2, DIM)
    with no_device():
        q, k = (torch.empty(1, tokens, 2, DIM, dtype=DTYPES[kernel], device="cuda") for tokens in (8, 16))
        select(kernel, spec).forward(q, k, k, False, 1.0)
        for wrong in (q.transpose(1, 3), k.to(torch.float64), k[:, :0]):
            with pytest.raises(AssertionError):
                select(kernel, spec).forward(q, wrong, wrong, False, 1.0)
