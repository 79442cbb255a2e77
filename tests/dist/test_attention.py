"""What calls of attention may look like on real ranks, beside what tests/attention_cases.py draws."""

import functools
import gc
import itertools

import pytest
import torch
import torch.distributed as dist

from ds_seqpar import testing as virtual
from tests import oracle
from tests.dist.ranks import assert_exact, attend, gather_all, lacking, leaves, make, refusal
from tests.grids import cover
from tests.launch import on_each_of

LAYOUTS = ("contiguous", "striped", "zigzag")


# deepspeed#7672: backward failed where fewer ranks shared a sequence than there were
@pytest.mark.parametrize("ulysses_size", [1, 2])
@on_each_of(4)
def test_groups_work_on_different_data_at_once(ulysses_size):
    """Every group has its own data, and its own sequence length."""
    sp, rank = make(size=2, ulysses=ulysses_size), dist.get_rank()
    assert (sp.data_rank, sp.data_size, sp.rank, sp.size) == (rank // 2, 2, rank % 2, 2)
    assert_exact(sp, oracle.tensors(2, 12 * (sp.data_rank + 1), (6, 2), seed=sp.data_rank))


@on_each_of(2, keep=None)
def test_a_rank_alone_communicates_with_nobody():
    """There is no process group left to communicate over."""
    sp = make(size=1)
    dist.destroy_process_group()
    for causal in (True, False):
        assert_exact(sp, oracle.tensors(2, 24, (4, 2)), causal=causal)
    assert sp.comm.received.total() == 0


# deepspeed#8291: head counts kept for the whole process gave a second model a split like [4, 4, 4, 0], and a hang
@on_each_of(4)
def test_two_models_in_one_process_do_not_meet():
    """Forwards of two models interleaved, then both backwards."""
    first, second = make(ulysses=2, layout="zigzag"), make(ulysses=4, layout="striped")
    a, b = oracle.tensors(1, 48, (8, 2), seed=1), oracle.tensors(2, 24, (12, 4), dim=4, seed=2)
    locals_ = leaves(first, *a[:3]), leaves(second, *b[:3])
    outs = first.attention(*locals_[0]), second.attention(*locals_[1], causal=False)
    outs[0].backward(first.shard(a[3], 1))
    outs[1].backward(second.shard(b[3], 1))
    for sp, out, local, expected in zip(
        (first, second), outs, locals_, (oracle.dense(*a), oracle.dense(*b, causal=False)), strict=True
    ):
        oracle.assert_exact(gather_all(sp, out, *(x.grad for x in local)), expected)


@on_each_of(2)
def test_backward_does_not_need_the_caller_to_keep_sequence_parallel():
    sp = make(ulysses=2)
    whole = oracle.tensors(1, 24, (4, 2))
    local, do = leaves(sp, *whole[:3]), sp.shard(whole[3], 1)
    out = sp.attention(*local)
    del sp
    gc.collect()
    out.backward(do)
    oracle.assert_exact(gather_all(make(ulysses=2), *(x.grad for x in local)), oracle.dense(*whole)[1:])


@on_each_of(4)
def test_two_layers_share_one_sequence_parallel():
    sp = make(ulysses=2)
    q, k, v, do = oracle.tensors(2, 24, (4, 2))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]

    def layers(attention, q, k, v):
        return attention(q + attention(q, k, v), 2 * k, v.tanh())

    expected = layers(oracle.attention, *whole)
    expected.backward(do)
    found = attend(sp, q, k, v, do, way=functools.partial(layers, sp.attention))
    oracle.assert_exact(found, [expected.detach(), *(x.grad for x in whole)])


@on_each_of(4)
def test_values_may_have_another_head_dim():
    """Plain, checkpointed and compiled."""
    sp = make(ulysses=2)
    q, k, v, do = whole = [oracle.tensors(1, 16, (4, 2), dim)[at] for at, dim in enumerate((8, 8, 4, 4))]
    for way in (sp.attention, lambda *x: sp.checkpoint(sp.attention, *x), torch.compile(sp.attention, backend="eager")):
        local = leaves(sp, q, k, v)
        out = way(*local)
        out.backward(sp.shard(do, 1))
        found = [sp.gather(x.detach(), 1) for x in (out, *(x.grad for x in local))]
        oracle.assert_exact(found, oracle.dense(*whole))


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
TRIPS = {"layout": LAYOUTS, "ulysses_size": (1, 2, 4), "dim": (0, 1, 2, -1), "dtype": DTYPES}


@on_each_of(4)
def test_gather_is_the_inverse_of_shard():
    """For several dims, dtypes and layouts; and what shard takes is where position_ids says."""
    made = {}
    for layout, ulysses_size, dim, dtype in (case.values() for case in cover(**TRIPS)):
        if (layout, ulysses_size) not in made:
            made[layout, ulysses_size] = make(ulysses=ulysses_size, layout=layout)
        sp, shape = made[layout, ulysses_size], [2, 3, 5]
        shape[dim] = 16
        x = torch.randn(shape, generator=torch.Generator().manual_seed(dim + 7)).mul(9).to(dtype)
        local, places = sp.shard(x, dim), sp.position_ids(16)
        assert torch.equal(sp.gather(local, dim), x), (layout, ulysses_size, dim, dtype)
        assert torch.equal(local, x.movedim(dim, 0)[places].movedim(0, dim)), (layout, ulysses_size, dim, dtype)


@on_each_of(2)
def test_positions_that_are_handed_out_belong_to_the_caller():
    sp = make()
    sp.position_ids(16).zero_()
    sp.shard_batch({"labels": torch.arange(16)[None]})["position_ids"].zero_()
    assert sp.gather(sp.shard(torch.arange(16), 0), 0).tolist() == list(range(16))
    assert sp.shard(torch.arange(16), 0).tolist() == sp.position_ids(16).tolist()


# yunchang#149 and transformers#46775: gradients of a gather_all loss were summed once too often
@on_each_of(2)
def test_gather_refuses_what_autograd_follows():
    sp = make()
    x = sp.shard(torch.arange(8.0), 0).requires_grad_()
    kind, message = refusal(sp.gather, x, 0)
    assert (kind, "requires_grad" in message) == ("InputError", True)
    with torch.no_grad():
        assert sp.gather(x, 0).tolist() == list(range(8))


@on_each_of(4)
def test_head_chunks_that_hide_exchanges_send_what_one_chunk_sends():
    """And those that send q, k and v again send them twice."""
    whole, found = oracle.tensors(1, 64, (16, 16)), []
    for settings in ({}, {"head_chunks": 4}, {"head_chunks": 4, "save_qkv_after_all_to_all": False}):
        sp = make(size=4, ulysses=2, overlap=True, **settings)
        sp.attention(*leaves(sp, *whole[:3])).sum().backward()
        found.append(dict(sp.comm.received))
    plain, hidden, again = found
    assert hidden == plain
    assert again["qkv"] == 2 * plain["qkv"]


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


@pytest.mark.parametrize("tokens", [14, 24])
@on_each_of(4)
def test_gradients_of_a_mean_loss_survive_narrow_travel(tokens):
    """Gradients of a mean loss over `2 ** tokens` times as many tokens as are here: as small as those of a long one."""
    q, k, v, do = oracle.tensors(1, 32, (4, 4), dtype=torch.float32)
    whole = q, k, v, do / 2.0**tokens
    found = attend(make(comm_dtype="bf16", rotate_backward="q"), *whole)
    oracle.assert_exact(found[1:], oracle.dense(*whole)[1:], limit=2e-2)
