"""What DeepSpeed compiles when it first starts lies with this environment and is compiled before any test needs it."""

import os
import sys

import pytest

from ds_seqpar import cpu_op

# not the user's cache, which other environments share and rebuild with their own paths, each at its turn
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))


@pytest.fixture(scope="session")
def compiled():
    """For tests that start DeepSpeed. It compiles a small op, for half a minute and more on a busy machine: here, where
    no rank's time limit can end that half way. The lock of a run that was ended so is removed."""
    cpu_op.prepare()
