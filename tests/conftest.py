"""Hide GPUs from tests that do not need one, and compile DeepSpeed's ops before any test needs them.

GPUs are hidden before torch is imported, from this process and all processes that it starts. GPU_TESTS=1 leaves them
visible: `make test-gpu` sets it and runs only tests marked "gpu".
"""

import contextlib
import fcntl
import gc
import os

import pytest

from examples.demo import HIDDEN

if not (ON_GPU := bool(os.environ.get("GPU_TESTS"))):
    os.environ.update(HIDDEN)
# torch's other way of detecting GPUs initializes CUDA, after which forked ranks cannot use it
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

from ds_seqpar.deepspeed.cpu_launch import op_lock
from tests import grids

# a rank compiles by itself: inductor's own workers would each import torch first
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_configure(config):
    grids.quick = "not slow" in config.getoption("markexpr")


@pytest.hookimpl(trylast=True)  # after -m has deselected tests
def pytest_collection_modifyitems(items):
    """Refuse tests for CPUs if GPUs are visible, since they would train on them."""
    if ON_GPU and (others := [item.nodeid for item in items if "gpu" not in item.keywords]):
        raise pytest.UsageError(f"GPU_TESTS=1 is for tests that are marked gpu; got {others[0]}, select by -m gpu")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the garbage collector from scanning everything that tests import, both during and after the imports."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Give a worker one thread. There are as many workers as cores, and further threads would keep cores busy
    waiting."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def compiled():
    """For tests that start DeepSpeed. It compiles a small op, which takes half a minute or more on a busy machine. This
    happens here, where no rank's time limit can interrupt it. The lock of an interrupted run is removed."""
    os.makedirs(os.environ["TORCH_EXTENSIONS_DIR"], exist_ok=True)
    with open(os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "tests.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one test worker at a time
        op_lock.compile_op()


@pytest.fixture(scope="session")
def compiled_adam(compiled):
    """As `compiled`, for DeepSpeed's optimizer in host memory, which takes minutes."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    folder = os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "cpu_adam")
    with open(os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "tests.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, "lock"))
        CPUAdamBuilder().load(verbose=False)


def pytest_terminal_summary(terminalreporter):
    """Print what tests recorded about themselves, including tests that workers ran."""
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{report.nodeid}, {name}: {value}")
