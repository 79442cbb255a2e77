"""Tests see no GPU unless they are for one, and what DeepSpeed compiles is compiled before any test needs it.

GPUs are hidden before torch is imported, from this process and all that it starts. GPU_TESTS=1 leaves them in sight:
`make test-gpu` sets it and runs nothing but what is marked "gpu".
"""

import contextlib
import fcntl
import gc
import os

import pytest

from examples.demo import HIDDEN

if not (ON_GPU := bool(os.environ.get("GPU_TESTS"))):
    os.environ.update(HIDDEN)
# torch's other way to look for GPUs begins to use them, and ranks that are forked afterwards cannot
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

from ds_seqpar.deepspeed.cpu_launch import op_lock
from tests import grids

# a rank compiles by itself: inductor's own workers would each import torch first
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_configure(config):
    grids.quick = "not slow" in config.getoption("markexpr")


@pytest.hookimpl(trylast=True)  # after those that -m leaves out are gone
def pytest_collection_modifyitems(items):
    """With GPUs in sight, a test for CPUs would train on them."""
    if ON_GPU and (others := [item.nodeid for item in items if "gpu" not in item.keywords]):
        raise pytest.UsageError(f"GPU_TESTS=1 is for tests that are marked gpu; got {others[0]}, select by -m gpu")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """No collector looks through all that tests import: not while they do, and not afterwards."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """A worker: there are as many as cores, and threads that wait for one another beyond that keep cores busy."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def compiled():
    """For tests that start DeepSpeed. It compiles a small op, for half a minute and more on a busy machine: here, where
    no rank's time limit can end that half way. The lock of a run that was ended so is removed."""
    os.makedirs(os.environ["TORCH_EXTENSIONS_DIR"], exist_ok=True)
    with open(os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "tests.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers one after another
        op_lock.compile_op()


@pytest.fixture(scope="session")
def compiled_adam(compiled):
    """The same for DeepSpeed's optimizer in host memory, which takes minutes."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    folder = os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "cpu_adam")
    with open(os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "tests.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, "lock"))
        CPUAdamBuilder().load(verbose=False)


def pytest_terminal_summary(terminalreporter):
    """What tests recorded of themselves, also where workers ran them."""
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{report.nodeid}, {name}: {value}")
