"""What users bring to `sp.attention` beside tidy tensors: right to 1e-10, or one sentence on every rank."""

import pytest
import torch
import torch.distributed as dist
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
    leaves,
    make,
    only_one,
    refusal,
    try_all,
)
from tests.grids import each_then_rest
from tests.launch import on_warm_ranks as on_ranks

# name -> a local (B, s, H, D) tensor with the same values, otherwise laid out in memory
LAYOUTS = {
    "unbound last": lambda x: torch.stack([x, -x, x], dim=-1).unbind(-1)[0],
    "heads before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dims before all": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "every other row": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "every other element": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "inside a larger one": lambda x: torch.nn.functional.pad(x, (3, 1, 1, 2, 2, 1))[:, 2:-1, 1:-2, 3:-1],
    "negative bit": lambda x: torch.complex(x, -x).conj().imag,
}


def laid_out(settings):
    """The greatest error by layout, with q, k, v and the output's gradient each laid out so."""
    found, sp = {}, make(**settings)
    whole = oracle.tensors(2, 24, (4, 2))
    for name, lay in LAYOUTS.items():
        local = leaves(sp, *whole[:3])
        out = sp.attention(*map(lay, local))
        out.backward(lay(sp.shard(whole[3], 1)))
        mine = gather_all(sp, out, *(x.grad for x in local))
        found[name] = max(oracle.errors(mine, oracle.dense(*whole)))
    return found


@pytest.mark.parametrize(
    "settings",
    [{"size": 1}, {}, {"backward": "q"}, {"ulysses": 2}, {"schedule": "attention2d", "rows": 2, "kernel": "reference"}],
    ids=["one rank", "ring", "q travels", "ulysses", "attention2d"],
)
def test_strided_inputs(settings):
    for found in on_ranks(1 if settings.get("size") == 1 else 4 if "rows" in settings else 2, laid_out, settings):
        assert {name: error for name, error in found.items() if error > 1e-10} == {}


def one_token():
    """Of one sequence and of two, on each rank one token."""
    errors = []
    for batch in (1, 2):
        sp = make(layout="contiguous")
        whole = oracle.tensors(batch, 2, (4, 2))
        errors += oracle.errors(attend(sp, *whole), oracle.dense(*whole))
    return max(errors)


def test_one_token_a_rank():
    assert max(on_ranks(2, one_token)) < 1e-10


def under_autocast(kernel):
    """Against the kernel alone outside autocast, on the bf16 inputs that autocast makes; in fp64, which it leaves."""
    errors = []
    for dtype in (torch.float32, torch.float64):
        for degree in (1, 2):
            sp = make(ulysses=degree, kernel=kernel)
            whole = oracle.tensors(1, 96, (4, 2), dim=16, dtype=dtype)
            local = leaves(sp, *whole[:3])
            with torch.autocast("cpu", torch.bfloat16):
                out = sp.attention(*local)
                out.backward(sp.shard(whole[3], 1).to(out.dtype))
            same = torch.bfloat16 if dtype == torch.float32 else dtype
            alone = virtual.attention(sp.config, *(x.to(same) for x in whole))
            mine = gather_all(sp, out, *(x.grad for x in local))
            errors.append(max(oracle.errors(mine, (alone.out, alone.dq, alone.dk, alone.dv))))
            assert out.dtype == same
    return max(errors)


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
def test_autocast_chooses_the_dtype_and_nothing_inside(kernel):
    assert max(on_ranks(2, under_autocast, kernel)) < 1e-10


def lse_of_all():
    errors = []
    for degree, causal in ((1, True), (2, True), (4, False)):
        sp = make(ulysses=degree)
        whole = oracle.tensors(2, 24, (8, 2))
        local = leaves(sp, *whole[:3])
        out, lse = sp.attention(*local, causal=causal, return_lse=True)
        q, k = whole[0], whole[1].repeat_interleave(4, dim=2)
        scores = torch.einsum("bqhd,bkhd->bqhk", q, k) * q.shape[3] ** -0.5
        if causal:
            scores = scores.masked_fill(~torch.ones(24, 24, dtype=torch.bool).tril()[:, None], float("-inf"))
        errors.append(oracle.error(sp.gather(lse.detach(), 1), scores.logsumexp(-1)))
        out.backward(sp.shard(whole[3], 1), retain_graph=True)
        grads = [sp.gather(x.grad, 1) for x in local]
        errors += oracle.errors(grads, oracle.dense(*whole, causal=causal)[1:])
    return max(errors), refusal((out.sum() + lse.sum()).backward)


def test_lse_where_asked():
    for error, (kind, message) in on_ranks(4, lse_of_all):
        assert error < 1e-10
        assert (kind, "lse.detach()" in message) == ("InputError", True)


def lse_in_a_checkpoint():
    """Of a reentrant one, which gives zeros as the gradient of what no loss depends on."""
    sp, whole = make(ulysses=2), oracle.tensors(1, 24, (4, 2))
    local = leaves(sp, *whole[:3])
    out, _ = sp.checkpoint(lambda *given: sp.attention(*given, return_lse=True), *local, use_reentrant=True)
    out.backward(sp.shard(whole[3], 1))
    return max(oracle.errors(gather_all(sp, out, *(x.grad for x in local)), oracle.dense(*whole)))


def test_the_lse_may_come_out_of_a_reentrant_checkpoint():
    assert max(on_ranks(2, lse_in_a_checkpoint)) < 1e-10


def second_derivatives():
    """By kernel and degree: a gradient that could be differentiated is right, and doing so is refused."""
    found = []
    for kernel in ("cpu_flash", "reference"):
        for degree in (1, 2):
            sp = make(ulysses=degree, kernel=kernel)
            q, k, v, do = oracle.tensors(1, 24, (4, 2))
            local = leaves(sp, q, k, v)
            out = sp.attention(*local)
            (dq,) = torch.autograd.grad(out, local[0], sp.shard(do, 1), create_graph=True)
            error = oracle.error(sp.gather(dq.detach(), 1), oracle.dense(q, k, v, do)[1])
            penalty = dq.square().sum()
            found.append((error, refusal(torch.autograd.grad, penalty, local[0])))
    return found


def test_a_gradient_penalty_is_refused_and_not_silently_zero():
    for found in on_ranks(2, second_derivatives):
        for error, (kind, message) in found:
            assert error < 1e-10
            assert kind == "InputError"
            assert "no second derivative" in message


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
    return asked(scale=scale), everywhere("InputError", "scale", "head_dim ** -0.5", f"got {got}")


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
    "causal None": (asked(causal=None), everywhere("InputError", "causal", "Mask", "got None")),
    "causal a word": (asked(causal="yes"), everywhere("InputError", "causal", "Mask", "got 'yes'")),
    "causal 1": (asked(causal=1), everywhere("InputError", "causal", "Mask", "got 1")),
    "no sequence": (
        asked(change=lambda q, k, v: (q[:0], k[:0], v[:0])),
        everywhere("InputError", "one sequence", "(0, 4, 4, 8)"),
    ),
    "no heads": (
        asked(change=lambda q, k, v: (q[:, :, :0], k[:, :, :0], v[:, :, :0])),
        everywhere("InputError", "one sequence", "(1, 4, 0, 8)"),
    ),
    "no kv heads": (
        asked(change=lambda q, k, v: (q, k[:, :, :0], v[:, :, :0])),
        everywhere("InputError", "one sequence", "(1, 4, 0, 8)"),
    ),
    "no head_dim": (
        asked(change=lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0])),
        everywhere("InputError", "one sequence", "(1, 4, 4, 0)"),
    ),
    "integers": (
        asked(change=lambda q, k, v: (q.long(), k.long(), v.long())),
        everywhere("KernelError", "int64 on cpu"),
    ),
    "complex": (
        asked(change=lambda q, k, v: (q + 0j, k + 0j, v + 0j)),
        everywhere("KernelError", "complex128 on cpu"),
    ),
    "sparse": (
        asked(change=lambda q, k, v: (q.to_sparse(), k, v)),
        everywhere("InputError", "dense tensors", "layout sparse_coo", "to_dense()"),
    ),
    "nested": (
        asked(change=lambda q, k, v: (torch.nested.as_nested_tensor([q[0], q[0, :2]], layout=torch.jagged), k, v)),
        everywhere("InputError", "a nested tensor", "to_padded_tensor()"),
    ),
    "distributed by torch": (distributed, everywhere("InputError", "a DTensor", "to_local()")),
    "meta": (
        asked(change=lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta"))),
        everywhere("KernelError", "on meta"),
    ),
    "no shape": (
        asked(change=unshaped),
        everywhere("InputError", "q, k, v", "uninitialized parameter"),
    ),
    "one rank's no shape": (
        lambda sp, rank: attention(sp, change=unshaped if rank == WRONG else None),
        only_one("InputError", "q, k, v", "uninitialized parameter"),
    ),
    "one rank's scale": (
        lambda sp, rank: attention(sp, scale=float("nan") if rank == WRONG else None),
        only_one("InputError", "scale", "got nan"),
    ),
    "forward-mode derivatives": (dual, everywhere("InputError", "forward-mode")),
    "one rank's forward-mode derivatives": (on_one_rank(dual), only_one("InputError", "forward-mode")),
    "torch.func.grad": (transformed(lambda f, q: torch.func.grad(f)(q)), everywhere("InputError", "no torch.func")),
    "torch.func.jvp": (
        transformed(lambda f, q: torch.func.jvp(f, (q,), (torch.ones_like(q),))),
        everywhere("InputError", "no torch.func"),
    ),
    "torch.func.vmap": (
        on_one_rank(transformed(lambda f, q: torch.func.vmap(f)(q[None]))),
        only_one("InputError", "no torch.func"),
    ),
}


META = asked(change=lambda *tensors: tuple(x.to("meta") for x in tensors)), everywhere("KernelError", "not meta")


def refuse_all(degree):
    reference = try_all({"meta": META}, make(ulysses=degree, kernel="reference"))
    return try_all(REFUSED, make(ulysses=degree)), reference


@pytest.mark.parametrize("degree", each_then_rest([2], [1]))
def test_what_attention_cannot_take(degree):
    found, of_reference = zip(*on_ranks(4, refuse_all, degree), strict=True)
    assert_all_refused(REFUSED, found)
    assert_all_refused({"meta": META}, of_reference)


def mean_loss_gradients(tokens):
    """Gradients of a mean loss over `tokens` times as many tokens as are here: as small as those of a long one."""
    sp = make(travel_dtype="bf16", backward="q")
    q, k, v, do = oracle.tensors(1, 32, (4, 4), dtype=torch.float32)
    local, small = leaves(sp, q, k, v), do / 2.0**tokens
    sp.attention(*local).backward(sp.shard(small, 1))
    found = [sp.gather(x.grad, 1) for x in local]
    return max(oracle.errors(found, oracle.dense(q, k, v, small)[1:])), dist.get_rank()


@pytest.mark.parametrize("tokens", [14, 24])
def test_gradients_of_a_mean_loss_survive_narrow_travel(tokens):
    for error, _ in on_ranks(4, mean_loss_gradients, tokens):
        assert error < 2e-2
