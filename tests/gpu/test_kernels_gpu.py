"""The conformance suite of block kernels on a GPU."""

import pytest
import torch

from ds_seqpar.running.kernels import KERNELS
from tests.kernel_suite import KernelSuite, cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="waits for a CUDA device"),
]


@pytest.mark.parametrize(("kernel", "dtype"), cases(KERNELS.values()))
class TestKernelsOnAGpu(KernelSuite):
    device = "cuda"
