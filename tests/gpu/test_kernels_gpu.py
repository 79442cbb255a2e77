"""The conformance suite of block kernels on a GPU."""

import pytest

from ds_seqpar.runtime.kernels import KERNELS
from tests.gpu import NEEDS_GPU
from tests.kernel_suite import KernelSuite, cases

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(("kernel", "dtype"), cases(KERNELS.values()))
class TestKernelsOnAGpu(KernelSuite):
    device = "cuda"
