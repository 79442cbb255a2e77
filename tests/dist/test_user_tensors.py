"""What users bring to `sp.attention` beside tidy tensors: right to 1e-10, or one sentence on every rank.

Strided tensors, one token a rank, lse and checkpoints are axes of tests/attention_cases.py.
"""

import itertools

import pytest
import torch
from torch.autograd import forward_ad
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from ds_seqpar import testing as virtual
from tests import oracle
from tests.dist.ranks import (
    WRONG,
    assert_all_refused,
    attend,
    everywhere,
    gather_all,
    lacking,
    leaves,
    make,
    only_one,
    refusal,
)
from tests.launch import on_each_of


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
@on_each_of(2)
def test_autocast_chooses_the_dtype_and_nothing_inside(kernel):
    """Against the kernel alone outside autocast, on the bf16 inputs that autocast makes; in fp64, which it leaves."""
    for dtype, ulysses_size in itertools.product((torch.float32, torch.float64), (1, 2)):
        sp = make(ulysses=ulysses_size, kernel=kernel)
        whole = oracle.tensors(1, 96, (4, 2), dim=16, dtype=dtype)
        local = leaves(sp, *whole[:3])
        with torch.autocast("cpu", torch.bfloat16):
            out = sp.attention(*local)
            out.backward(sp.shard(whole[3], 1).to(out.dtype))
        same = torch.bfloat16 if dtype == torch.float32 else dtype
        assert out.dtype == same
        alone = virtual.attention(sp.config, *(x.to(same) for x in whole))
        mine = gather_all(sp, out, *(x.grad for x in local))
        oracle.assert_exact(mine, (alone.out, alone.dq, alone.dk, alone.dv), (dtype, ulysses_size))


@on_each_of(2)
def test_a_loss_of_the_lse_is_refused():
    sp = make(ulysses=2)
    out, lse = sp.attention(*leaves(sp, *oracle.tensors(2, 24, (8, 2))[:3]), return_lse=True)
    assert lacking(refusal((out.sum() + lse.sum()).backward), "InputError", "lse.detach()") == []


@on_each_of(2)
def test_a_gradient_penalty_is_refused_and_not_silently_zero():
    """A gradient that could be differentiated is right."""
    for kernel, ulysses_size in itertools.product(("cpu_flash", "reference"), (1, 2)):
        sp = make(ulysses=ulysses_size, kernel=kernel)
        q, k, v, do = whole = oracle.tensors(1, 24, (4, 2))
        local = leaves(sp, q, k, v)
        (dq,) = torch.autograd.grad(sp.attention(*local), local[0], sp.shard(do, 1), create_graph=True)
        oracle.assert_exact([sp.gather(dq.detach(), 1)], oracle.dense(*whole)[1:2])
        refused = refusal(torch.autograd.grad, dq.square().sum(), local[0])
        assert lacking(refused, "InputError", "no second derivative") == []


def attention(sp, tokens=4, heads=(4, 2), dim=8, change=None, **options):
    q, k, v = oracle.tensors(1, tokens, heads, dim=dim)[:3]
    return sp.attention(*(change(q, k, v) if change else (q, k, v)), **options)


def dual(sp, rank):
    with forward_ad.dual_level():
        attention(sp, change=lambda q, k, v: (forward_ad.make_dual(q, torch.ones_like(q)), k, v))


def distributed(sp, rank):
    mesh = DeviceMesh("cpu", list(range(4)))
    attention(sp, change=lambda q, k, v: [DTensor.from_local(x, mesh, [Shard(1)]) for x in (q, k, v)])


def transformed(transform):
    def call(sp, rank):
        q, k, v = oracle.tensors(1, 4, (4, 2))[:3]
        transform(lambda x: sp.attention(x, k, v).sum(), q)

    return call


def on_one_rank(call):
    return lambda sp, rank: call(sp, rank) if rank == WRONG else attention(sp)


def asked(**options):
    return lambda sp, rank: attention(sp, **options)


def unshaped(q, k, v):
    return q, torch.nn.UninitializedParameter(), v


def scaled(scale):
    got = "a tensor" if isinstance(scale, torch.Tensor) else repr(scale)
    return asked(scale=scale), everywhere("scale", f"got {got}")


def changed(change):
    return asked(change=change)


def nested(q, k, v):
    return torch.nested.as_nested_tensor([q[0], q[0, :2]], layout=torch.jagged), k, v


def on_meta(*tensors):
    return tuple(x.to("meta") for x in tensors)


def jvp(f, q):
    return torch.func.jvp(f, (q,), (torch.ones_like(q),))


KERNEL = {"kind": "KernelError"}


# name -> (what a rank calls, what it is to be told). 4 ranks; what is refused is refused before anything is sent
REFUSED = {
    "scale zero": scaled(0.0),
    "scale negative": scaled(-0.5),
    "scale NaN": scaled(float("nan")),
    "scale infinite": scaled(float("inf")),
    "scale that is zero in fp32": scaled(1e-40),
    "scale that is infinite in fp32": scaled(1e300),
    "scale that no float holds": scaled(10**400),
    "scale a word": scaled("0.5"),
    "scale a tensor": scaled(torch.tensor(0.5)),
    "scale True": scaled(True),
    "causal None": (asked(causal=None), everywhere("got None")),
    "causal a word": (asked(causal="yes"), everywhere("got 'yes'")),
    "causal 1": (asked(causal=1), everywhere("got 1")),
    "no sequence": (changed(lambda q, k, v: (q[:0], k[:0], v[:0])), everywhere("(0, 4, 4, 8)")),
    "no heads": (changed(lambda q, k, v: (q[:, :, :0], k[:, :, :0], v[:, :, :0])), everywhere("(1, 4, 0, 8)")),
    "no kv heads": (changed(lambda q, k, v: (q, k[:, :, :0], v[:, :, :0])), everywhere("(1, 4, 0, 8)")),
    "no head_dim": (changed(lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0])), everywhere("(1, 4, 4, 0)")),
    "integers": (changed(lambda q, k, v: (q.long(), k.long(), v.long())), everywhere("int64 on cpu", **KERNEL)),
    "complex": (changed(lambda q, k, v: (q + 0j, k + 0j, v + 0j)), everywhere("complex128 on cpu", **KERNEL)),
    "sparse": (changed(lambda q, k, v: (q.to_sparse(), k, v)), everywhere("layout sparse_coo")),
    "nested": (changed(nested), everywhere("a nested tensor")),
    "distributed by torch": (distributed, everywhere("a DTensor")),
    "meta": (changed(on_meta), everywhere("on meta", **KERNEL)),
    "no shape": (changed(unshaped), everywhere("uninitialized parameter")),
    "one rank's no shape": (on_one_rank(changed(unshaped)), only_one("uninitialized parameter")),
    "one rank's scale": (on_one_rank(asked(scale=float("nan"))), only_one("got nan")),
    "forward-mode derivatives": (dual, everywhere("forward-mode")),
    "one rank's forward-mode derivatives": (on_one_rank(dual), only_one("forward-mode")),
    "torch.func.grad": (transformed(lambda f, q: torch.func.grad(f)(q)), everywhere("no torch.func")),
    "torch.func.jvp": (transformed(jvp), everywhere("no torch.func")),
    "torch.func.vmap": (on_one_rank(transformed(lambda f, q: torch.func.vmap(f)(q[None]))), only_one("no torch.func")),
}


@on_each_of(4)
def test_what_attention_cannot_take():
    meta = changed(on_meta), everywhere("not meta", **KERNEL)
    assert_all_refused({"meta": meta}, make(ulysses=2, kernel="reference"))
    assert_all_refused(REFUSED, make(ulysses=2))


@pytest.mark.parametrize("tokens", [14, 24])
@on_each_of(4)
def test_gradients_of_a_mean_loss_survive_narrow_travel(tokens):
    """Gradients of a mean loss over `2 ** tokens` times as many tokens as are here: as small as those of a long one."""
    q, k, v, do = oracle.tensors(1, 32, (4, 4), dtype=torch.float32)
    whole = q, k, v, do / 2.0**tokens
    found = attend(make(comm_dtype="bf16", rotate_backward="q"), *whole)
    oracle.assert_exact(found[1:], oracle.dense(*whole)[1:], limit=2e-2)
