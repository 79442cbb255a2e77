"""The conformance suite of block kernels on a GPU."""

import pytest

from ds_seqpar.core.runtime.kernels import KERNELS
from ds_seqpar.kernels import fused
from tests.gpu import NEEDS_GPU
from tests.kernel_suite import KernelSuite, cases

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(("kernel", "dtype"), cases(KERNELS.values()))
class TestKernelsOnAGpu(KernelSuite):
    device = "cuda"


def test_tritons_kernels_compute_what_torchs_operations_do(monkeypatch):
    from tests import triton_runs

    assert fused.missing() == ""
    monkeypatch.setattr(triton_runs, "device", "cuda")
    worst = triton_runs.worst_of(200, (triton_runs.triton_ops.ELEMENTS,))
    assert worst.pop("out_with_rowsum, rounded") <= 2**-7  # where one rounds up what the other rounds down
    assert max(worst.values()) <= 1e-5
