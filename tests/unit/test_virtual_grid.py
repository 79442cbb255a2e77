"""Attention and its three gradients on virtual ranks equal dense attention, over sizes, heads, layouts and lengths.

The walker, kernels and packing are those of the real ranks; only the transport is a mailbox.
"""

import itertools

import pytest
import torch

from ds_seqpar import testing as virtual
from ds_seqpar.compiler.compile import block_mask_of
from ds_seqpar.compiler.program.shape import shape_of
from ds_seqpar.compiler.sharding.layout import multiple
from ds_seqpar.compiler.sharding.masks import CAUSAL, FULL, Mask
from ds_seqpar.compiler.sharding.shards import EvenShards, UnevenShards
from ds_seqpar.config.settings import LAYOUTS, SequenceParallelConfig
from ds_seqpar.errors import ConfigError, InputError, KernelError
from ds_seqpar.runtime.kernels import KERNELS, accumulate
from ds_seqpar.testing import attention
from tests.grids import cover, grouped
from tests.oracle import dense, error, errors, tensors
from tests.unit.plans import SINGLE

SIZES = (1, 2, 3, 4, 6, 8)
HEADS = ((24, 24), (24, 6), (24, 2), (24, 1), (96, 24))
# (ranks, heads) that Ulysses ranks deal unevenly, alone and around a ring
UNEVEN = {
    "ranks": ((2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8), (6, 3)),
    "heads": ((33, 33), (14, 2), (25, 5), (40, 10), (7, 1), (7, 7)),
    "layout": LAYOUTS,
    "causal": (True, False),
    "batch": (1, 2),
    "head_dim": (8, 20),
    "times": (1, 3),
}
# (size, ulysses)
RANKS = tuple((size, u) for size in SIZES for u in range(1, size + 1) if size % u == 0)


def _divided(u, q_heads, kv_heads):
    return q_heads % u == 0 and (kv_heads % u == 0 or u % kv_heads == 0)


def _legal(case):
    # batches and lengths have nothing to do with each other, and change together
    return (case["batch"] == 1) == (case["times"] == 1) and _divided(case["ranks"][1], *case["heads"])


def _has_many_ranks(case):
    return case["ranks"][0] > 4


def _enough(case):
    """A query head for every Ulysses rank, and Ulysses ranks that do not divide the heads."""
    (_, u), (q_heads, kv_heads) = case["ranks"], case["heads"]
    return u <= q_heads and not _divided(u, q_heads, kv_heads)


GRID = {
    "ranks": RANKS,
    "heads": HEADS,
    "layout": LAYOUTS,
    "causal": (True, False),
    "batch": (1, 2),
    "head_dim": (32, 80, 128),
    "times": (1, 3),  # the shortest sequence that can be shared (for zigzag a token a chunk), and a longer one
}


SMALLER = {**GRID, "heads": HEADS[:-1], "head_dim": (32, 80)}


def _config(case):
    size, ulysses = case["ranks"]
    return SequenceParallelConfig(size=size, ulysses=ulysses, layout=case["layout"])


def _check(case, dtype, tolerance, compilers=None):
    config = _config(case)
    # of one token alone the gradients of q and k are 0, and no measure of error
    seq = max(2, case["times"] * multiple(config.layout, config.size, config.ulysses))
    inputs = tensors(case["batch"], seq, case["heads"], case["head_dim"], dtype)
    found = attention(config, *inputs, causal=case["causal"], compilers=compilers)
    found = (found.out, found.dq, found.dk, found.dv)
    assert {x.dtype for x in found} == {dtype}
    wrong = errors(found, dense(*inputs, causal=case["causal"]))
    assert max(wrong) <= tolerance, (case, dict(zip(("out", "dq", "dk", "dv"), wrong, strict=True)))


# pytorch#141429: non-causal attention wrong under load balancing; EasyContext#47: shapes differ in backward
@pytest.mark.parametrize("cases", grouped(("ranks",), _legal, cover(_legal, **SMALLER), _has_many_ranks, **GRID))
def test_virtual_ranks_equal_dense_attention(cases):
    compilers = {}
    for case in cases:
        _check(case, torch.float64, 1e-10, compilers)


@pytest.mark.parametrize(
    "ranks", [pytest.param(x, id=str(x), marks=[] if x[0] == 4 else pytest.mark.whole) for x in RANKS]
)
def test_virtual_ranks_equal_dense_attention_in_fp32(ranks):
    for case in cover(_legal, **GRID):
        if case["ranks"] == ranks:
            _check(case, torch.float32, 1e-5)


# deepspeed#8291, verl#850: heads that ranks cannot share equally
@pytest.mark.parametrize("cases", grouped(("ranks",), _enough, large=_has_many_ranks, **UNEVEN))
def test_heads_that_members_do_not_divide_are_exact_too(cases):
    for case in cases:
        _check(case, torch.float64, 1e-10)


ODD_HEADS = ((14, 2), (33, 33), (25, 5), (7, 1))
# every schedule with two kinds of heads, and every kind with every other schedule
TAKEN = [
    pytest.param(heads, schedule, id=f"{heads}-{schedule}", marks=pytest.mark.whole if (n + m) % 2 else [])
    for n, heads in enumerate(ODD_HEADS)
    for m, schedule in enumerate(sorted(SINGLE))
]


@pytest.mark.parametrize(("heads", "schedule"), TAKEN)
def test_every_schedule_takes_heads_that_members_do_not_divide(schedule, heads):
    """What travels may be k/v for one Ulysses rank and q for another, which have rings of their own."""
    for ulysses, overlap in ((2, False), (4, True)):
        config = SequenceParallelConfig(size=4 * ulysses, ulysses=ulysses, schedule=schedule, overlap=overlap)
        inputs = tensors(2, 2 * multiple("zigzag", config.size, ulysses), heads, 8)
        found = attention(config, *inputs)
        assert max(errors((found.out, found.dq, found.dk, found.dv), dense(*inputs))) <= 1e-10


@pytest.mark.parametrize("heads", [(33, 33), (14, 2), (25, 5), (40, 10), (7, 1)], ids=str)
@pytest.mark.parametrize("ulysses", [2, 4])
def test_uneven_heads_and_uneven_shards_together(heads, ulysses):
    shards = UnevenShards([[(0, 1, 5), (30, 1, 13)], [(5, 1, 25)]])
    others = UnevenShards(
        [[(0, 1, 3)], [(3, 1, 10)]], [[(0, 1, 29)], [(29, 1, 14)]]
    )  # k and v are held otherwise than q
    for held, (queries, keys), mask in ((shards, (43, 43), Mask(window=9)), (others, (13, 43), FULL)):
        q, _, _, do = tensors(1, queries, heads, 8)
        _, k, v, _ = tensors(1, keys, heads, 8, seed=1)
        config = SequenceParallelConfig(size=2 * ulysses, ulysses=ulysses)
        found = attention(config, q, k, v, do, mask=mask, shards=held)
        wanted = dense(q, k, v, do, mask=mask)
        assert max(errors((found.out, found.dq, found.dk, found.dv), wanted)) <= 1e-10


# deepspeed#8291: a Ulysses rank without a head, and a hang
def test_every_illegal_ulysses_degree_is_refused():
    for size, heads in itertools.product(SIZES, (*HEADS, (5, 5), (3, 1))):
        inputs = tensors(1, 48, heads, 8)[:3]
        for ulysses in range(1, size + 2):
            config = SequenceParallelConfig(size=size, ulysses=ulysses)
            if (size, ulysses) not in RANKS:
                with pytest.raises(ConfigError, match=f"ulysses {ulysses}, size {size}"):
                    attention(config, *inputs)
            elif ulysses > heads[0]:
                with pytest.raises(ConfigError, match=f"ulysses {ulysses} for {heads[0]} query"):
                    attention(config, *inputs)
            else:
                attention(config, *inputs)


# deepspeed#7384, #7842: a sequence length that the ranks do not divide silently corrupts the result
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sequence_that_cannot_be_shared_is_refused(layout):
    for ulysses in (1, 2, 4):
        config = SequenceParallelConfig(size=4, ulysses=ulysses, layout=layout)
        step = multiple(layout, 4, ulysses)
        for seq in range(1, 2 * step):
            if seq != step:
                with pytest.raises(InputError, match=f"multiple of {step} .*{layout}.*got {seq},"):
                    attention(config, *tensors(1, seq, (4, 4), 8)[:3])


def test_virtual_ranks_refuse_what_real_ones_do():
    q, k, v, do = tensors(1, 16, (4, 2), 8)
    two = SequenceParallelConfig(size=2)
    ring = SequenceParallelConfig(size=2, ulysses=1)
    distflash = SequenceParallelConfig(size=2, ulysses=1, schedule="distflash")
    halves = UnevenShards([[(0, 1, 4)], [(4, 1, 4)]])
    refused = [
        (InputError, "Mask.*got None", lambda: attention(two, q, k, v, causal=None)),
        (InputError, "scale.*got nan", lambda: attention(two, q, k, v, scale=float("nan"))),
        (InputError, r"one sequence.*got q \(0, 16", lambda: attention(two, q[:0], k[:0], v[:0])),
        (InputError, "got q list", lambda: attention(two, q.tolist(), k, v)),
        (InputError, "one dtype.*float64.*float32", lambda: attention(two, q, k.float(), v)),
        (InputError, "gradient.*like the output.*float32", lambda: attention(two, q, k, v, do.float())),
        (KernelError, "takes int64", lambda: attention(two, q.long(), k.long(), v.long())),
        (ConfigError, "distflash.*causal.*block", lambda: attention(distflash, q, k, v, causal=False)),
        (InputError, "shards.*16 tokens.*8 and 8", lambda: attention(ring, q, k, v, shards=halves)),
        (InputError, "documents.*16 tokens.*at 16", lambda: attention(two, q, k, v, mask=Mask(documents=(0, 16)))),
        (ConfigError, "size 'auto'", lambda: attention(SequenceParallelConfig(), q, k, v)),
    ]
    for kind, words, call in refused:
        with pytest.raises(kind, match=words):
            call()


@pytest.mark.parametrize("dims", [(16, 8), (8, 24), (20, 5)])
@pytest.mark.parametrize("settings", [{"ulysses": 1}, {"ulysses": 2, "head_chunks": 2}, {"ulysses": 4}])
def test_values_may_have_another_head_dim(dims, settings):
    q, k, v, do = (tensors(1, 16, (4, 4), dim)[n] for n, dim in enumerate((dims[0], dims[0], dims[1], dims[1])))
    config = SequenceParallelConfig(size=4, **settings)
    found = attention(config, q, k, v, do)
    assert max(errors((found.out, found.dq, found.dk, found.dv), dense(q, k, v, do))) <= 1e-10
    assert torch.equal(attention(config, q, k, v).out, found.out)


@pytest.mark.parametrize("causal", [True, False])
def test_the_scale_is_the_callers_and_a_gradient_is_optional(causal):
    config = SequenceParallelConfig(size=4, ulysses=2)
    inputs = tensors(1, 16, (4, 2), 8)
    found = attention(config, *inputs[:3], causal=causal, scale=0.7)
    assert found.dq is None
    assert error(found.out, dense(*inputs, causal, 0.7)[0]) <= 1e-10
    found = attention(config, *inputs, causal=causal, scale=0.7)
    assert max(errors((found.dq, found.dk, found.dv), dense(*inputs, causal, 0.7)[1:])) <= 1e-10


BF16 = {
    "ranks": ((2, 1), (4, 1), (4, 2), (8, 1), (8, 4), (16, 1), (16, 2)),
    "heads": ((4, 4), (8, 4)),
    "layout": LAYOUTS,
    "causal": (True, False),
    "head_dim": (64, 80),
}


def _rms(found, wanted):
    return ((found.double() - wanted).square().mean() / wanted.square().mean()).sqrt().item()


def _bf16_ratios(case):
    """Error of out, dq, dk, dv over that of one kernel call on the whole sequence, as root mean squares: the greatest
    single error is chance, and differs by a factor of 3 between results that are equally good."""
    kernel, causal = KERNELS["cpu_flash"], case["causal"]
    q, k, v, do = tensors(1, 512, case["heads"], case["head_dim"], torch.bfloat16)
    wanted, scale = dense(q, k, v, do, causal), case["head_dim"] ** -0.5
    out, lse = kernel.forward(q, k, v, causal, scale)
    single = out, *kernel.backward(do, q, k, v, out, lse, causal, scale)
    found = attention(_config(case), q, k, v, do, causal=causal)
    found = found.out, found.dq, found.dk, found.dv
    return [_rms(mine, want) / _rms(alone, want) for mine, alone, want in zip(found, single, wanted, strict=True)]


# each layout on the longest ring, which has the most partial results
FEW_BF16 = [
    {"ranks": (16, 1), "heads": (4, 4), "layout": "zigzag", "causal": True, "head_dim": 64},
    {"ranks": (16, 1), "heads": (8, 4), "layout": "striped", "causal": False, "head_dim": 80},
    {"ranks": (16, 1), "heads": (8, 4), "layout": "contiguous", "causal": True, "head_dim": 64},
]


# ring-flash-attention#42, #67, OpenRLHF#564: in bf16 the error grows with the size of the ring
@pytest.mark.parametrize("cases", grouped(("ranks",), few=FEW_BF16, **BF16))
def test_bf16_is_about_as_exact_as_one_kernel_call_over_the_whole_sequence(cases):
    for case in cases:
        assert max(_bf16_ratios(case)) <= 1.5, case


def test_accumulating_in_bf16_would_be_noticed(monkeypatch):
    merge = accumulate.merge_

    def narrow(out, lse, new_out, new_lse):
        merge(out, lse, new_out, new_lse)
        out.copy_(out.bfloat16())

    monkeypatch.setattr(accumulate, "merge_", narrow)
    case = {"ranks": (16, 1), "heads": (4, 4), "layout": "zigzag", "causal": False, "head_dim": 64}
    assert max(_bf16_ratios(case)[:2]) > 1.5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("travels", ["kv", "q"])
def test_what_ranks_receive_is_what_the_plan_says(layout, causal, travels):
    size, ulysses, heads, batch, seq, head_dim = 8, 2, (8, 4), 2, 48, 16
    config = SequenceParallelConfig(
        size=size, ulysses=ulysses, layout=layout, rotate_forward=travels, rotate_backward=travels
    )
    config = config.resolve(size)
    rows = batch * seq // (size // ulysses)
    q, kv, lse = (rows * number // ulysses for number in (heads[0] * head_dim, 2 * heads[1] * head_dim, heads[0]))
    # a query block brings q, do, lse and delta in backward
    units = {"kv": kv, "dkv": kv, "q": q, "out": q + lse, "dq": q}, {"kv": kv, "dkv": kv, "q": 2 * (q + lse), "dq": q}
    recipe = config.recipe(config.topology(size))
    block_mask = block_mask_of(CAUSAL if causal else FULL, EvenShards(layout, seq, recipe.size))
    shape = shape_of("fp32", "float64", batch, (heads[0] // ulysses, heads[1] // ulysses, head_dim))
    planned = [
        recipe.plan(direction, block_mask, shape).received(elements)
        for direction, elements in zip(("forward", "backward"), units, strict=True)
    ]
    # one fused all-to-all in and one out, each way
    exchanged = {"qkv": q + kv, "out_heads": q, "do_heads": q, "dqkv": q + kv}
    result = attention(config, *tensors(batch, seq, heads, head_dim), causal=causal)
    for rank, received in enumerate(result.received):
        inner = sum(number for kind, number in received.items() if kind not in exchanged)
        assert inner == sum(plan[rank // ulysses] for plan in planned)
        for kind, elements in exchanged.items():
            assert received[kind] == elements * (ulysses - 1) // ulysses


@pytest.mark.parametrize("schedule", sorted(SINGLE))
def test_what_is_asked_for_early_gives_the_same_bits(schedule, monkeypatch):
    config = SequenceParallelConfig(size=6, ulysses=1, schedule=schedule, overlap=True)
    q, k, v, do = tensors(1, 48, (6, 2), 16, torch.float32)
    plain = attention(config, q, k, v, do=do)

    class Early(virtual._VirtualComm):
        def __init__(self, *args):
            super().__init__(*args)
            self.early = 2

    monkeypatch.setattr(virtual, "_VirtualComm", Early)
    found = attention(config, q, k, v, do=do)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(found, name), getattr(plain, name)), name
