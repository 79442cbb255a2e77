"""On real ranks, fp32 attention takes the keys' common part off: gradients, lse, checkpoints and a compiled graph."""

import functools

import torch

from ds_seqpar import Mask
from tests import oracle
from tests.dist.ranks import make
from tests.launch import on_each_of
from tests.unit.test_common_part import TIMES, dense, given

SETTINGS = (
    ({}, Mask()),
    ({"layout": "striped", "head_chunks": 2}, Mask()),
    ({"ulysses": 2, "kernel": "reference"}, Mask(window=50)),
)


@on_each_of(2)
def test_ranks_agree_on_the_common_part_of_their_keys():
    *whole, do = given(1_000)
    for settings, mask in SETTINGS:
        sp = make(**{"ulysses": 1, **settings})
        attend = functools.partial(sp.attention, mask=mask)
        wanted, usual = dense(1_000, mask)
        ways = {
            "plain": attend,
            "kept": lambda *x, sp=sp, attend=attend: sp.checkpoint(attend, *x),
            "lse": lambda *x, attend=attend: attend(*x, return_lse=True)[0],
        }
        for name, way in ways.items():
            leaves = [sp.shard(x, 1).requires_grad_() for x in whole]
            out = way(*leaves)
            found = [sp.gather(x, 1) for x in (out.detach(), *torch.autograd.grad(out, leaves, sp.shard(do, 1)))]
            for error, least in zip(oracle.errors(found, wanted), usual, strict=True):
                assert error <= TIMES * least, (settings, name)
        with torch.no_grad():
            lse = sp.gather(attend(*(sp.shard(x, 1) for x in whole), return_lse=True)[1], 1)
        true = oracle.lse(*(x.double() for x in whole[:2]), mask)
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), true, rtol=1e-6, atol=0)  # of 1,000: with q . c in it


@on_each_of(2, timeout=200, keep=None)
def test_a_compiled_graph_takes_it_off_too():
    sp = make(ulysses=1)
    *whole, do = given(1_000)
    wanted, usual = dense(1_000, Mask())
    function = torch.compile(lambda *x: sp.attention(*x) * 1.0, backend="aot_eager", fullgraph=True)
    leaves = [sp.shard(x, 1).requires_grad_() for x in whole]
    out = function(*leaves)
    found = [sp.gather(x, 1) for x in (out.detach(), *torch.autograd.grad(out, leaves, sp.shard(do, 1)))]
    assert all(error <= TIMES * least for error, least in zip(oracle.errors(found, wanted), usual, strict=True))
