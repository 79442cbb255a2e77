"""Attention over real gloo processes equals dense attention, in value and in all three gradients."""

import functools
import gc

import pytest
import torch
import torch.distributed as dist

from ds_seqpar import SequenceParallelConfig
from ds_seqpar import testing as virtual
from ds_seqpar.runtime.kernels import KERNELS
from tests import oracle
from tests.dist.ranks import assert_exact, attend, gather_all, leaves, make, refusal
from tests.grids import cover, each_then_rest, grouped, whole
from tests.launch import on_each_of
from tests.launch import on_warm_ranks as on_ranks

LAYOUTS = ("contiguous", "striped", "zigzag")


def legal(case):
    """Ulysses divides the query heads; key/value heads are divided, or each is shared by U / Hkv Ulysses ranks."""
    (_, ulysses_size), (heads, kv_heads) = case["ranks"], case["heads"]
    return heads % ulysses_size == 0 and (kv_heads % ulysses_size == 0 or ulysses_size % kv_heads == 0)


AXES = {
    # (size, ulysses) as one axis, so that the cover meets each with every kind of heads
    "ranks": tuple(
        (size, ulysses_size) for size in (1, 2, 3, 4, 6, 8) for ulysses_size in range(1, 9) if size % ulysses_size == 0
    ),
    "layout": LAYOUTS,
    "heads": ((24, 24), (24, 6), (24, 4), (24, 2), (24, 1)),
    "causal": (True, False),
    "batch": (1, 2),
}


# non-causal under load balancing was silently wrong in pytorch#141429, backward in diffusers#14265 (it used the first
# step's k/v), fewer k/v heads than ranks in verl#850 and prime-rl#3042
# more processes than most machines have cores: a cover of them, and the whole grid is that of virtual ranks, in
# tests/unit/test_virtual_grid.py
MANY = {**AXES, "ranks": tuple(ranks for ranks in AXES["ranks"] if ranks[0] > 4)}
FEW = {**AXES, "ranks": tuple(ranks for ranks in AXES["ranks"] if ranks[0] <= 4)}
LARGE = [
    pytest.param(
        [case for case in cover(legal, **MANY) if case["ranks"][0] == size], id=f"{size}-ranks", marks=pytest.mark.whole
    )
    for size in (6, 8)
]


@pytest.mark.parametrize("cases", [*grouped(("ranks",), legal, **FEW), *LARGE])
def test_equals_dense(cases):
    on_ranks(cases[0]["ranks"][0], equal_dense, cases)


def equal_dense(cases):
    """One process goes through many settings, so nothing may stay behind."""
    made = {}
    for case in cases:
        (size, ulysses_size), layout = shape = case["ranks"], case["layout"]
        if shape not in made:
            made[shape] = make(size=size, ulysses=ulysses_size, layout=layout)
        assert_exact(made[shape], oracle.tensors(case["batch"], 48, case["heads"]), causal=case["causal"])


WORLDS = (2, 4, pytest.param(8, marks=pytest.mark.whole))
# size, ulysses, layout, heads, causal
NARROW = [
    (2, 1, "striped", (4, 4), True),
    (4, 1, "zigzag", (4, 2), True),
    (4, 1, "contiguous", (4, 1), False),
    (8, 1, "striped", (4, 2), False),
    (4, 2, "striped", (4, 2), True),
    (4, 4, "contiguous", (4, 1), True),
    (8, 1, "zigzag", (4, 2), True),
    (8, 2, "contiguous", (4, 1), True),
]


def narrow_deviations(cases, dtype):
    """By case, of (out, dq, dk, dv): errors and spreads, and those of the kernel alone on the whole sequence."""
    found = []
    for size, ulysses_size, layout, heads, causal in cases:
        sp = make(size=size, ulysses=ulysses_size, layout=layout)
        q, k, v, do = oracle.tensors(1, 512, heads, dim=16, dtype=dtype)
        mine = attend(sp, q, k, v, do, causal=causal)
        if sp.rank > 0:
            continue  # one rank judges
        kernel, scale = KERNELS["cpu_flash"], q.shape[3] ** -0.5
        out, lse = kernel.forward(q, k, v, causal, scale)
        alone = out, *kernel.backward(do, q, k, v, out, lse, causal, scale)
        exact = oracle.dense(q, k, v, do, causal)
        found.append([(oracle.errors(way, exact), oracle.spreads(way, exact)) for way in (mine, alone)])
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_fp32_is_exact_to_its_rounding(world):
    cases = [case for case in NARROW if case[0] == world]
    for case, ((errors, _), _) in zip(cases, on_ranks(world, narrow_deviations, cases, torch.float32)[0], strict=True):
        assert max(errors) < 1e-5, case


# ring-flash-attention#42 and #67, OpenRLHF#564: the error grew with the ring where block outputs were merged in bf16.
# The spread of a tensor shows it; its greatest error does not, and may double by one element next to a power of two, so
# that is compared over the four tensors together
@pytest.mark.parametrize("world", WORLDS)
def test_bf16_is_as_good_as_the_kernel_alone(world):
    cases = [case for case in NARROW if case[0] == world]
    for case, (mine, alone) in zip(cases, on_ranks(world, narrow_deviations, cases, torch.bfloat16)[0], strict=True):
        assert max(mine[0]) <= 2 * max(alone[0]), case
        for name, a, b in zip(("out", "dq", "dk", "dv"), mine[1], alone[1], strict=True):
            assert a <= 2 * b, (case, name)


# deepspeed#7672: backward failed where fewer ranks shared a sequence than there were
@pytest.mark.parametrize(
    ("world", "size", "ulysses_size"),
    [(4, 2, 1), (4, 2, 2), (2, 1, 1), pytest.param(6, 3, 1, marks=pytest.mark.whole)],
)
@on_each_of("world")
def test_groups_work_on_different_data_at_once(world, size, ulysses_size):
    """Every group has its own data, and its own sequence length."""
    sp, rank = make(size=size, ulysses=ulysses_size), dist.get_rank()
    assert (sp.data_rank, sp.data_size, sp.rank, sp.size) == (rank // size, world // size, rank % size, size)
    assert_exact(sp, oracle.tensors(2, 12 * (sp.data_rank + 1), (6, 2), seed=sp.data_rank))


@pytest.mark.parametrize("world", [1, 2])
@on_each_of("world", keep=None)
def test_a_rank_alone_communicates_with_nobody(world):
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


@pytest.mark.parametrize("ulysses_size", [1, 2])
@on_each_of(2)
def test_backward_does_not_need_the_caller_to_keep_sequence_parallel(ulysses_size):
    sp = make(ulysses=ulysses_size)
    whole = oracle.tensors(1, 24, (4, 2))
    local, do = leaves(sp, *whole[:3]), sp.shard(whole[3], 1)
    out = sp.attention(*local)
    del sp
    gc.collect()
    out.backward(do)
    oracle.assert_exact(gather_all(make(ulysses=ulysses_size), *(x.grad for x in local)), oracle.dense(*whole)[1:])


@pytest.mark.parametrize("ulysses_size", each_then_rest([2], [1]))
@on_each_of(4)
def test_two_layers_share_one_sequence_parallel(ulysses_size):
    sp = make(ulysses=ulysses_size)
    q, k, v, do = oracle.tensors(2, 24, (4, 2))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]

    def layers(attention, q, k, v):
        return attention(q + attention(q, k, v), 2 * k, v.tanh())

    expected = layers(oracle.attention, *whole)
    expected.backward(do)
    found = attend(sp, q, k, v, do, way=functools.partial(layers, sp.attention))
    oracle.assert_exact(found, [expected.detach(), *(x.grad for x in whole)])


@pytest.mark.parametrize("ulysses_size", each_then_rest([2], [1, 4]))
@on_each_of(4)
def test_the_same_step_gives_the_same_bits(ulysses_size):
    sp = make(ulysses=ulysses_size)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        whole = oracle.tensors(1, 48, (4, 1), dtype=dtype)
        assert all(torch.equal(a, b) for a, b in zip(attend(sp, *whole), attend(sp, *whole), strict=True)), dtype


def real_ranks(settings):
    """By setting: (out, dq, dk, dv), bits as they are, and what this rank received."""
    found = []
    for ulysses_size, layout, causal, dtype in settings:
        sp = make(ulysses=ulysses_size, layout=layout)
        real = attend(sp, *oracle.tensors(2, 48, (4, 2), dtype=dtype), causal=causal)
        counts = {kind: count for kind, count in sp.comm.received.items() if count}
        found.append(([x.double().numpy() for x in real] if sp.rank == 0 else None, counts))
    return found


ALIKE = {
    "shape": ((1, "zigzag"), (1, "contiguous"), (2, "striped"), (4, "zigzag")),
    "causal": (True, False),
    "dtype": (torch.float64, torch.bfloat16),
}


@pytest.mark.parametrize("choose", [cover, pytest.param(whole, marks=pytest.mark.whole)])
def test_virtual_ranks_give_the_same_bits_and_counts(choose):
    settings = [(*case["shape"], case["causal"], case["dtype"]) for case in choose(**ALIKE)]
    by_setting = zip(*on_ranks(4, real_ranks, settings), strict=True)
    for setting, results in zip(settings, by_setting, strict=True):
        ulysses_size, layout, causal, dtype = setting
        config = SequenceParallelConfig(size=4, ulysses=ulysses_size, layout=layout)
        imagined = virtual.attention(config, *oracle.tensors(2, 48, (4, 2), dtype=dtype), causal=causal)
        expected = imagined.out, imagined.dq, imagined.dk, imagined.dv
        for real, x in zip(results[0][0], expected, strict=True):
            assert x.dtype == dtype
            assert (real == x.double().numpy()).all(), setting
        # the virtual runner also counts as the real one does
        for (_, counts), imagined_counts in zip(results, imagined.received, strict=True):
            assert counts == {kind: count for kind, count in imagined_counts.items() if count}, setting


@pytest.mark.parametrize("ulysses_size", each_then_rest([2], [1, 4]))
@on_each_of(4)
def test_tensors_need_not_be_contiguous(ulysses_size):
    """Inputs as a transformers model has them (heads before tokens in memory), and the gradient of a plain sum."""
    sp = make(ulysses=ulysses_size)
    whole = oracle.tensors(2, 24, (4, 2))
    local = [sp.shard(x, 1).transpose(1, 2).contiguous().requires_grad_() for x in whole[:3]]
    views = [x.transpose(1, 2) for x in local]
    assert not any(x.is_contiguous() for x in views)
    out = sp.attention(*views)
    out.sum().backward()  # its gradient is one number, expanded: stride 0 on every dim
    found = gather_all(sp, out, *(x.grad.transpose(1, 2) for x in local))
    oracle.assert_exact(found, oracle.dense(*whole[:3], torch.ones_like(whole[3])))


@pytest.mark.parametrize("ulysses_size", [1, 2])
@on_each_of(2)
def test_forward_without_grad(ulysses_size):
    sp = make(ulysses=ulysses_size)
    whole = oracle.tensors(1, 24, (4, 2))
    expected = oracle.dense(*whole)[:1]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out = sp.attention(*(sp.shard(x, 1) for x in whole[:3]))
            assert not out.requires_grad
            oracle.assert_exact([sp.gather(out, 1)], expected)


@pytest.mark.parametrize("ulysses_size", each_then_rest([2], [1]))
@on_each_of(4)
def test_only_some_inputs_need_gradients(ulysses_size):
    """Frozen k/v, then frozen q: the ranks' transfers must be the same all the same."""
    sp = make(ulysses=ulysses_size)
    *inputs, do = whole = oracle.tensors(1, 24, (4, 2))
    expected = oracle.dense(*whole)[1:]
    for wanted in ((0,), (2,), (1, 2)):
        local = [sp.shard(x, 1).requires_grad_(at in wanted) for at, x in enumerate(inputs)]
        sp.attention(*local).backward(sp.shard(do, 1))
        grads = gather_all(sp, *(local[at].grad for at in wanted))
        oracle.assert_exact(grads, [expected[at] for at in wanted], wanted)


@pytest.mark.parametrize("dims", [(8, 4), (4, 12)])
@on_each_of(4)
def test_values_may_have_another_head_dim(dims):
    """Plain, checkpointed and compiled."""
    sp = make(ulysses=2)
    q, k, v, do = whole = [
        oracle.tensors(1, 16, (4, 2), dim)[n] for n, dim in enumerate((*dims[:1] * 2, *dims[1:] * 2))
    ]
    for way in (sp.attention, lambda *x: sp.checkpoint(sp.attention, *x), torch.compile(sp.attention, backend="eager")):
        local = leaves(sp, q, k, v)
        out = way(*local)
        out.backward(sp.shard(do, 1))
        found = [sp.gather(x.detach(), 1) for x in (out, *(x.grad for x in local))]
        oracle.assert_exact(found, oracle.dense(*whole))


@on_each_of(4)
def test_scale():
    assert_exact(make(ulysses=2), oracle.tensors(1, 24, (4, 2)), scale=0.7)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
TRIPS = {"layout": LAYOUTS, "ulysses_size": (1, 2, 4), "dim": (0, 1, 2, -1), "dtype": DTYPES}


@pytest.mark.parametrize("choose", [cover, pytest.param(whole, marks=pytest.mark.whole)])
@on_each_of(4)
def test_gather_is_the_inverse_of_shard(choose):
    """For several dims, dtypes and layouts; and what shard takes is where position_ids says."""
    made = {}
    for layout, ulysses_size, dim, dtype in (case.values() for case in choose(**TRIPS)):
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
