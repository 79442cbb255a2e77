"""An operator is one class with what it computes of a block: here the cosines of queries with tensors that are keys and
values at once, of which one is sent."""

import dataclasses

import pytest
import torch
from torch.nn import functional

from ds_seqpar.base.errors import InputError
from ds_seqpar.core.compiler.program.shape import Shape
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.compiler.tiles.tiles import Rows
from ds_seqpar.core.runtime.admit import AttentionOptions
from ds_seqpar.core.runtime.dense import Backward, Forward
from ds_seqpar.core.runtime.kernels.accumulate import Sum
from ds_seqpar.core.runtime.operator import Operator, register, shape_of
from tests import oracle
from tests.dist.ranks import SECONDS, WRONG, lacking, make, refusal
from tests.launch import on_each_of

HEADS, KV_HEADS, DIM = 6, 3, 8


class TiedShape(Shape):
    """One tensor stands for keys and values."""

    @property
    def kv(self):
        return {"x": self.head_dim}


def unit(x):
    return functional.normalize(x, dim=-1, eps=0.0)


def through_unit(x, grad):
    """The gradient of x, given that of `unit`."""
    u = unit(x)
    return (grad - u * (u * grad).sum(-1, keepdim=True)) / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


class TiedForward(Forward):
    def product(self, q, kv, q_slot, launches, results):
        super().product((unit(q[0]),), (unit(kv[0]), kv[0]), q_slot, launches, results)


class TiedBackward(Backward):
    def product(self, q, kv, q_slot, launches, results):
        if not launches:
            return
        (q, *rest), (x,) = q, kv
        sums = [Sum(lambda n=n: tuple(y.new_empty(y.shape) for y in n)) for n in ((q,), (x, x))]
        super().product((unit(q), *rest), (unit(x), x), q_slot, launches, sums)
        (dq,), (dk, dv) = sums[0].finish(self.dtype), sums[1].finish(self.dtype, self.dtype)
        for given, grad, result in zip((q, x), (through_unit(q, dq), through_unit(x, dk) + dv), results, strict=True):
            result.add((grad,), Rows(0, given.shape[1]), given.shape[1])


class Tied(Operator):
    name, operands, dims, is_linear = "tied attention", ("q", "x"), (4, 4), False
    kind, forward, backward = TiedShape, TiedForward, TiedBackward

    def check_shapes(self, tensors, lengths_differ):
        q, x = tensors
        if any(y.dim() != 4 for y in tensors) or q.shape[3] != x.shape[3]:
            raise InputError(f"tied attention needs q and x of one head_dim; got {shape_of(q)} and {shape_of(x)}")


TIED = register(Tied())


def tensors(seq, dtype=torch.float64):
    """(q, x, do), the same on every rank."""
    generator = torch.Generator().manual_seed(seq)
    made = (torch.randn(2, seq, n, DIM, generator=generator, dtype=torch.float64) for n in (HEADS, KV_HEADS, HEADS))
    return [x.to(dtype) for x in made]


def dense(q, x, do, **asked):
    """(out, dq, dx)."""
    leaves = [y.detach().double().requires_grad_() for y in (q, x)]
    out = oracle.attention(unit(leaves[0]), unit(leaves[1]), leaves[1], **asked)
    return out.detach(), *torch.autograd.grad(out, leaves, do.double())


def attend(sp, q, x, do, mask, placement=None, way=None):
    """The same, each rank working on its own tokens."""
    local = [sp.shard(y, 1, placement).requires_grad_() for y in (q, x)]
    options = AttentionOptions(mask, None if placement is None else placement.shards, None, operator=TIED)
    out = (way or sp.operator_attention)(tuple(local), options)
    out.backward(sp.shard(do, 1, placement))
    return [sp.gather(y, 1, placement) for y in (out.detach(), *(y.grad for y in local))]


@pytest.mark.parametrize("ulysses", [1, 2, 4])
@on_each_of(4)
def test_an_operator_is_what_it_computes_of_whole_sequences(ulysses):
    """With a window, in packed documents of any length, in fp32, and in a checkpoint, which replays it."""
    sp = make(size=4, ulysses=ulysses)
    windowed, whole = Mask(window=9), tensors(48)
    oracle.assert_exact(attend(sp, *whole, windowed), dense(*whole, mask=windowed))
    single = [x.float() for x in whole]
    oracle.assert_exact(attend(sp, *single, windowed), dense(*single, mask=windowed), limit=1e-5)
    whole, placement = tensors(37), sp.place(37, (3, 1, 16, 17))
    packed = Mask(documents=(0, 3, 4, 20), window=7)
    local = dataclasses.replace(placement.mask, window=7)
    for way in (None, lambda *x: sp.checkpoint(sp.operator_attention, *x)):
        oracle.assert_exact(attend(sp, *whole, local, placement, way), dense(*whole, mask=packed), least=1.0)


@on_each_of(4)
def test_one_tensor_is_sent_for_keys_and_values():
    whole, received = tensors(48), []
    for way in ("tied", "dense"):
        sp = make(size=4, ulysses=1)
        if way == "tied":
            attend(sp, *whole, Mask())
        else:
            q, x, do = (sp.shard(y, 1).requires_grad_() for y in whole)
            sp.attention(q, x, x).backward(do)
        received.append(sp.comm.received["kv"] + sp.comm.received["dkv"])
    assert 0 < 2 * received[0] == received[1]


@on_each_of(2, timeout=SECONDS * 3, keep=None)
def test_an_operator_is_in_a_compiled_graph():
    sp, whole = make(size=2, ulysses=2), tensors(24)
    way = torch.compile(lambda *x: sp.operator_attention(*x) * 1.0, backend="aot_eager", fullgraph=True)
    oracle.assert_exact(attend(sp, *whole, Mask(), way=way), dense(*whole))


@on_each_of(2)
def test_what_an_operator_cannot_take_is_refused_everywhere():
    sp, (q, x, _) = make(size=2), tensors(8)
    options = AttentionOptions(Mask(), None, None, operator=TIED)
    refused = refusal(sp.operator_attention, (q, x[..., 1:] if sp.rank == WRONG else x), options)
    kind = "InputError" if sp.rank == WRONG else "DisagreementError"
    assert lacking(refused, kind, "tied attention needs q and x of one head_dim") == [], refused
