"""What DeepSpeed compiles when it first starts lies with this environment and is compiled before any test needs it."""

import os
import sys

import pytest

# not the user's cache, which other environments share and rebuild with their own paths, each at its turn
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))


@pytest.fixture(scope="session")
def compiled():
    """For tests that start DeepSpeed. It compiles a small op, for half a minute and more on a busy machine: here, where
    no rank's time limit can end that half way and leave a lock behind, at which all later starts would wait forever."""
    from deepspeed.comm.torch import build_shm_op

    build_shm_op()
