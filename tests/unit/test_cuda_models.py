"""The wrappers of CUDA's attention operators, exact through a model of each: every mask, schedule, dtype and shape."""

import dataclasses
import random

import pytest
import torch

from ds_seqpar import Mask, SequenceParallelConfig, UnevenShards
from ds_seqpar.base.errors import KernelError
from ds_seqpar.core.compiler.tiles.tiles import Segments
from ds_seqpar.core.runtime.kernels import KERNELS, BlockSpec
from ds_seqpar.kernels import flash
from ds_seqpar.testing import attention
from tests import cuda_models, oracle
from tests.cuda_masks import (
    BOTTOM_RIGHT,
    NONE,
    TOP_LEFT,
    EfficientBackward,
    efficient_backward,
    efficient_forward,
    flash_3_backward,
    flash_3_forward,
    flash_backward,
    flash_forward,
)
from tests.cuda_models import MODELS, launches, models
from tests.grids import grouped
from tests.kernel_suite import KernelSuite, cases, seen
from tests.oracle import dense, errors, tensors
from tests.words import missing


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


@pytest.mark.parametrize(("name", "kernel"), [
    ("ring", "flash_attn_model"),
    ("striped", "flash_attn_model"),
    ("ulysses", "flash_attn_model"),
    ("striped", "flash_attn_3_model"),
])  # fmt: skip
def test_flash_attn_caps_scores_under_windows_and_documents(name, kernel):
    q, k, v, do = tensors(2, 72, (4, 2), 8)
    for mask in (MASKS["causal"], MASKS["windowed documents"]):
        config = SequenceParallelConfig(**{"size": 4, "ulysses": 1, **SCHEDULES[name]}, kernel=kernel)
        found = attention(config, q, k, v, do, mask=mask, softcap=1.5)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        wanted = oracle.attention(*leaves, mask=mask, softcap=1.5)
        wanted = wanted.detach(), *torch.autograd.grad(wanted, leaves, do)
        assert max(errors((found.out, found.dq, found.dk, found.dv), wanted)) < 1e-10


@pytest.mark.parametrize("mask", ["causal", "long window"])
def test_an_out_of_a_few_heads_is_read_by_its_strides(mask):
    """cuda_efficient's operator would read it as if it were contiguous, in half precision."""
    q, k, v, do = tensors(1, 72, (4, 4), 8, torch.bfloat16)
    config = SequenceParallelConfig(size=2, ulysses=1, head_chunks=2, kernel="cuda_efficient_model")
    found = attention(config, q, k, v, do, mask=MASKS[mask])
    wanted = dense(q, k, v, do, mask=MASKS[mask])
    assert max(errors((found.out, found.dq, found.dk, found.dv), wanted)) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("limit", ["MAX_INT", "MAX_SHORT"])
def test_more_keys_than_an_operator_can_count_are_refused_before_anything_is_computed(limit, monkeypatch):
    q, k, v, do = tensors(1, 72, (4, 2), 8)
    config = SequenceParallelConfig(size=2, ulysses=1, kernel="cuda_efficient_model")
    monkeypatch.setattr(flash, limit, 0)
    launches.clear()
    with pytest.raises(KernelError) as caught:
        attention(config, q, k, v, do)
    assert missing(str(caught.value), "cuda_efficient_model", "keys", "4 heads of 8", "more ranks") == []
    assert launches.total() == 0


def test_the_most_keys_are_those_that_32_bits_reach():
    kernel = KERNELS["cuda_efficient"]
    kernel.check_keys(32, 128, 2**19)
    with pytest.raises(KernelError, match=str(2**19 + 1)):
        kernel.check_keys(32, 128, 2**19 + 1)
    kernel.check_keys(1, 8, 64 * (2**15 - 1))
    with pytest.raises(KernelError):
        kernel.check_keys(1, 8, 64 * 2**15)


def test_keys_of_far_rows_are_copied_where_32_bits_would_not_reach_the_last(monkeypatch):
    """As those of a projection to q, k and v; without a copy there may be fewer keys than are not refused."""
    kernel, (q, k, v, _) = KERNELS["cuda_efficient_model"], tensors(1, 24, (2, 2), 8)
    far = torch.stack([v, k], dim=2)[:, :, 1]
    assert not far.is_contiguous()
    monkeypatch.setattr(flash, "MAX_INT", 23 * 2 * 8)
    given = []
    results = q, q[..., 0].mT
    monkeypatch.setattr(flash.compat, "efficient_forward", lambda q, *kv, **_: given.append(kv[:2]) or results)
    kernel.forward(q, far, v, False, 0.3)
    assert all(x.is_contiguous() for x in given[0])
    with pytest.raises(KernelError):
        kernel.forward(q, torch.cat([k, k], 1), torch.cat([v, v], 1), False, 0.3)


def test_backward_of_too_many_keys_would_leave_gradients_out():
    """So the limit of `check_keys` is the header's: blocks of keys are counted in 16 bits."""
    most = 64 * flash.MAX_SHORT
    assert EfficientBackward(64, most, NONE, 0).writers(0) > 0
    assert EfficientBackward(64, most + 1, NONE, 0).writers(0) < 0


DICE = random.Random(0)
DRAWN = [(DICE.randint(1, 420), DICE.randint(1, 420), DICE.choice((-1, DICE.randint(0, 300))),
          DICE.choice((-1, 0, DICE.randint(0, 300)))) for _ in range(60)]  # fmt: skip


@pytest.mark.parametrize("mask", [flash_forward, flash_backward, flash_3_forward, flash_3_backward])
def test_a_window_hides_in_flash_attention_what_it_should(mask):
    for rows, columns, left, right in DRAWN:
        wanted = seen(Segments((rows,), (columns,), left, right))
        same = torch.equal(mask(rows, columns, max(2, rows), columns, False, left, right), wanted)
        assert same or (rows > columns and "3" not in mask.__name__), (rows, columns, left, right)


def test_a_window_hides_in_memory_efficient_attention_what_it_should_but_for_backward_of_a_block_that_is_not_square():
    wrong = 0
    for rows, more, left, _ in DRAWN[:20]:
        for columns, kind in ((rows, TOP_LEFT), (rows, BOTTOM_RIGHT), (rows + more, BOTTOM_RIGHT), (rows + more, NONE)):
            window = left + 1 if kind else 0
            wanted = seen(Segments((rows,), (columns,), left if kind else -1, 0 if kind else -1))
            given = rows, columns, kind, window
            assert torch.equal(efficient_forward(*given), wanted), given
            assert torch.equal(efficient_forward(*given, blocks=(32, 128)), wanted), given
            for options in ({}, {"splits": 1}, {"blocks": (128, 64)}):
                sees, written = efficient_backward(*given, **options)
                assert written.all()
                if window and rows < columns:
                    wrong += not torch.equal(sees, wanted)
                else:
                    assert torch.equal(sees, wanted), given
    assert wrong  # else its wrapper need not make squares


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


@pytest.mark.parametrize(("q_width", "v_width"), [(192, 128), (24, 40)])
def test_flash_attention_3_takes_values_of_another_width(q_width, v_width):
    """And without a copy to q's width."""
    q, k, _, _ = tensors(1, 40, (4, 2), q_width)
    v, do = tensors(1, 40, (4, 2), v_width)[2:]
    kernel = KERNELS["flash_attn_3_model"]
    out, lse = kernel.forward(q, k, v, True, 0.3)
    wanted = dense(q, k, v, do, scale=0.3)
    assert max(errors((out, *kernel.backward(do, q, k, v, out, lse, True, 0.3)), wanted)) < 1e-12


@pytest.mark.parametrize("kernel", ["flash_attn_model", "flash_attn_3_model"])
@pytest.mark.parametrize("asked", [False, True])
def test_flash_attn_repeats_exactly_where_torch_is_asked_to(asked, kernel):
    q, k, v, do = tensors(1, 72, (4, 2), 8)
    torch.use_deterministic_algorithms(asked)
    try:
        for mask in (MASKS["causal"], MASKS["documents"]):
            launches.clear()
            attention(SequenceParallelConfig(size=1, kernel=kernel), q, k, v, do, mask=mask)
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
