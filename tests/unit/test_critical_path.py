"""What `benchmarks.critical_path` predicts is what geometry says, and it leaves the walker as it was."""

import pytest
import torch

from benchmarks.critical_path import path, watched
from ds_seqpar import SequenceParallelConfig
from ds_seqpar import testing as virtual
from ds_seqpar.compiler.program import Product
from ds_seqpar.runtime.walk import EXECUTE, Walk

RANKS, TOKENS = 4, 16  # of each
PREDICTED = {
    "contiguous": TOKENS * (TOKENS + 1) // 2 + (RANKS - 1) * TOKENS**2,  # its own half square, and whole ones
    "zigzag": TOKENS * (TOKENS + 1) // 2 + (RANKS - 1) * TOKENS**2 // 2,  # half a square in each further step
    "striped": RANKS * TOKENS * (TOKENS + 1) // 2,  # some rank sees its diagonal in each
}


@pytest.mark.parametrize("layout", PREDICTED)
def test_pairs_of_the_slowest_rank_in_each_step(layout):
    q = torch.randn(1, RANKS * TOKENS, 1, 8)
    config = SequenceParallelConfig(size=RANKS, ulysses=1, schedule="ring", layout=layout)
    with watched() as (seconds, pairs):
        virtual.attention(config, q, q, q, q)
    assert [path(pairs, way) for way in ("forward", "backward")] == [PREDICTED[layout]] * 2
    assert sum(pairs.values()) == 2 * q.shape[1] * (q.shape[1] + 1) // 2  # all that the mask lets see, each way
    assert seconds.keys() == pairs.keys()
    assert EXECUTE[Product] is Walk.product
