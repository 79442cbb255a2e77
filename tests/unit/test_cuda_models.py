"""The wrappers of CUDA's attention operators, exact through a model of each: every mask, schedule, dtype and shape."""

import dataclasses

import pytest
import torch

from ds_seqpar import Mask, SequenceParallelConfig, UnevenShards
from ds_seqpar.runtime.kernels import KERNELS, BlockSpec, flash
from ds_seqpar.testing import attention
from tests import cuda_models, oracle
from tests.cuda_models import MODELS, launches, models
from tests.grids import grouped
from tests.kernel_suite import KernelSuite, cases
from tests.oracle import dense, errors, tensors


@pytest.fixture(autouse=True, scope="module")
def _models():
    with models():
        yield


@pytest.mark.parametrize(("kernel", "dtype"), cases([model() for model in MODELS], (torch.float64, torch.bfloat16)))
class TestModels(KernelSuite):
    device = "cpu"


SCHEDULES = {
    "ring": {},
    "striped": {"layout": "striped"},
    "contiguous": {"layout": "contiguous"},
    "double ring": {"schedule": "double_ring", "ring_size": 2},
    "distflash": {"schedule": "distflash"},
    "attention2d": {"schedule": "attention2d", "rows": 2},
    "wallfacer": {"schedule": "wallfacer", "team": 2, "rotate_forward": "q"},
    "mesh": {"schedule": "mesh", "mesh": (2, 1, 2), "overlap": True},
    "triangle": {"schedule": "triangle", "size": 3},
    "ulysses": {"ulysses": 2},
    "alone": {"size": 1},
    "uneven": {"schedule": "mesh", "mesh": (1, 2, 2)},
}
MASKS = {
    "causal": Mask(),
    "full": Mask(causal=False),
    "window": Mask(window=7),
    "long window": Mask(window=40),
    "no right edge": Mask(window=9, causal=False),
    "both sides": Mask(window=9, causal=False, window_right=5),
    "prefix": Mask(prefix=31),
    "documents": Mask(documents=(0, 1, 2, 13, 29, 31, 60)),
    "tree": Mask(documents=(0, 9, 10, 29, 31, 60), parents=(-1, 0, 1, 0, -1, 4)),
    "full documents": Mask(documents=(0, 5, 29, 41), causal=False),
    "windowed documents": Mask(documents=(0, 5, 29, 41, 70), window=6),
}
SHAPES = {  # batch, tokens, heads, head_dim
    "plain": (1, 72, (4, 2), 8),
    "odd heads": (2, 72, (6, 2), 5),
    "odd length": (3, 96, (2, 2), 20),
}
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def _legal(case):
    mask = MASKS[case["mask"]]
    return case["schedule"] not in ("distflash", "triangle") or (mask.causal and not mask.prefix)


AXES = {
    "kernel": tuple(model.name for model in MODELS),
    "schedule": tuple(SCHEDULES),
    "mask": tuple(MASKS),
    "shape": tuple(SHAPES),
    "dtype": tuple(BOUNDS),
}


@pytest.mark.parametrize("ulysses_size", grouped(("kernel", "schedule"), _legal, large=lambda case: True, **AXES))
def test_out_and_gradients_are_those_of_dense_attention(ulysses_size):
    for case in ulysses_size:
        batch, seq, heads, dim = SHAPES[case["shape"]]
        q, k, v, do = tensors(batch, seq, heads, dim, case["dtype"])
        uneven = case["schedule"] == "uneven"
        shards = UnevenShards([[(0, 1, 31)], [(31, 1, 3)], [], [(34, 1, seq - 34)]]) if uneven else None
        config = {"size": 4, "ulysses": 1, **SCHEDULES[case["schedule"]], "kernel": case["kernel"]}
        mask = MASKS[case["mask"]]
        found = attention(SequenceParallelConfig(**config), q, k, v, do, mask=mask, shards=shards, scale=0.3)
        wanted = dense(q, k, v, do, scale=0.3, mask=mask)
        assert max(errors((found.out, found.dq, found.dk, found.dv), wanted)) < BOUNDS[case["dtype"]], case


@pytest.mark.parametrize("name", ["ring", "striped", "ulysses"])
def test_flash_attn_caps_scores_under_windows_and_documents(name):
    q, k, v, do = tensors(2, 72, (4, 2), 8)
    for mask in (MASKS["causal"], MASKS["windowed documents"]):
        config = SequenceParallelConfig(**{"size": 4, "ulysses": 1, **SCHEDULES[name]}, kernel="flash_attn_model")
        found = attention(config, q, k, v, do, mask=mask, softcap=1.5)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        wanted = oracle.attention(*leaves, mask=mask, softcap=1.5)
        wanted = wanted.detach(), *torch.autograd.grad(wanted, leaves, do)
        assert max(errors((found.out, found.dq, found.dk, found.dv), wanted)) < 1e-10


@pytest.mark.parametrize("trailing", [False, True])
def test_cudnns_backward_is_given_the_lse_in_its_forwards_shape(trailing, monkeypatch):
    monkeypatch.setattr(cuda_models, "TRAILING", trailing)
    assert _error("cudnn_model", MASKS["documents"]) < 1e-10


@pytest.mark.parametrize(("rows", "columns", "calls"), [(1, 6, 0), (6, 1, 0), (1, 1, 0), (2, 6, 1), (6, 2, 1)])
def test_cudnn_is_not_given_blocks_of_one_row_or_one_key(rows, columns, calls):
    """The reference computes those."""
    q, do = (x[:, :rows] for x in tensors(2, 6, (4, 2), 8)[::3])
    k, v = (x[:, :columns] for x in tensors(2, 6, (4, 2), 8)[1:3])
    launches.clear()
    (cudnn, plain), given = (KERNELS["cudnn_model"], KERNELS["reference"]), (False, 8**-0.5)
    found, wanted = (kernel.forward(q, k, v, *given) for kernel in (cudnn, plain))
    found += cudnn.backward(do, q, k, v, *found, *given)
    wanted += plain.backward(do, q, k, v, *wanted, *given)
    assert max(errors(found, wanted)) < 1e-12
    assert (launches["forward"], launches["backward"]) == (calls, calls)


def test_cudnn_is_not_for_runs_that_must_repeat_exactly():
    spec = BlockSpec("cuda", torch.bfloat16, 4, 2, 64)
    assert KERNELS["cudnn"].reasons(spec) == []
    torch.use_deterministic_algorithms(True)
    try:
        (reason,) = KERNELS["cudnn"].reasons(spec)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "deterministic" in reason


@pytest.mark.parametrize("asked", [False, True])
def test_flash_attn_repeats_exactly_where_torch_is_asked_to(asked):
    q, k, v, do = tensors(1, 72, (4, 2), 8)
    torch.use_deterministic_algorithms(asked)
    try:
        for mask in (MASKS["causal"], MASKS["documents"]):
            launches.clear()
            attention(SequenceParallelConfig(size=1, kernel="flash_attn_model"), q, k, v, do, mask=mask)
            assert launches["deterministic"] == asked * launches["backward"]
            assert launches["backward"]
    finally:
        torch.use_deterministic_algorithms(False)


# ---- so that the tests above can fail


def _error(kernel, mask):
    q, k, v, do = tensors(1, 72, (4, 2), 8)
    config = SequenceParallelConfig(size=2, ulysses=1, layout="striped", kernel=kernel)
    found = attention(config, q, k, v, do, mask=mask)
    return max(errors((found.out, found.dq, found.dk, found.dv), dense(q, k, v, do, mask=mask)))


@pytest.mark.parametrize(("name", "wrong"), [
    ("left", lambda call: call.left + 1),
    ("right", lambda call: call.right + 1),
    ("scale", lambda call: call.scale * 1.01),
])  # fmt: skip
def test_a_wrong_argument_is_seen(name, wrong, monkeypatch):
    made, mask = flash.OperatorCall.of, MASKS["windowed documents"]
    assert _error("cuda_flash_model", mask) < 1e-10

    def of(*given):
        found = made(*given)
        return dataclasses.replace(found, **{name: wrong(found)})

    monkeypatch.setattr(flash.OperatorCall, "of", of)
    assert _error("cuda_flash_model", mask) > 1e-3


def test_rows_without_a_key_have_a_log_sum_exp_that_must_be_turned(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "isposinf", lambda x: torch.zeros_like(x, dtype=torch.bool))
    assert _error("cuda_flash_model", MASKS["documents"]) > 1e-3
