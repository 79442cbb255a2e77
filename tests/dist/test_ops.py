"""The custom ops say truly what they do: schema, and shapes and dtypes of their fake implementations."""

import copy

import pytest
import torch

from tests import oracle
from tests.dist.ranks import leaves, make
from tests.launch import on_ranks


def check(heads, dtype):
    """opcheck of every op on two Ulysses members, and whether a copied SequenceParallel is the same."""
    sp = make(size=2, ulysses=2, layout="contiguous")
    q, k, v = leaves(sp, *oracle.tensors(1, 8, heads, dtype=dtype)[:3])
    handle, ops = sp.runtime.handle, torch.ops.ds_seqpar
    inner, kv = ops.scatter_heads(q, k, v, handle)
    tests = ("test_schema", "test_faketensor")
    found = [
        torch.library.opcheck(ops.scatter_heads.default, (q, k, v, handle), test_utils=tests),
        torch.library.opcheck(ops.attention.default, (inner, kv, handle, True, 0.5), test_utils=tests),
        torch.library.opcheck(ops.gather_heads.default, (inner, handle), test_utils=tests),
    ]
    return {result for results in found for result in results.values()}, copy.deepcopy(sp) is sp


@pytest.mark.parametrize(("heads", "dtype"), [((4, 2), torch.float64), ((4, 1), torch.bfloat16)])
def test_ops_are_what_they_declare(heads, dtype):
    assert on_ranks(2, check, heads, dtype) == [({"SUCCESS"}, True)] * 2
