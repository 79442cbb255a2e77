"""Attention on virtual ranks equals dense attention, in out and gradients, over all that a call can have.

The program, the walker, kernels and packing are those of real ranks; only the transport is a mailbox. `make test` takes
few of many drawn cases that still hold every pair of values, `make test-all` more draws.
"""

import functools
import random

import pytest
import torch

from ds_seqpar.base.errors import SeqParError
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.runtime.kernels import KERNELS, accumulate
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.data.balance import shards_of
from ds_seqpar.testing import attention
from tests import oracle
from tests.attention_cases import LAYOUTS, MINOR, check, cuts, draws, results, wrong_call, wrong_draws
from tests.dist.ranks import is_one_sentence
from tests.grids import pairwise


@functools.cache
def few():
    """A cover of all schedules' draws, and some more draws of each."""
    pool, more = ([x for schedule in SCHEDULES for x in draws(schedule, 9, n, n)] for n in (400, 4))
    return pairwise(pool, without=MINOR) + more


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_attention_is_dense_attention(schedule, more, monkeypatch):
    """Of the faults that others had: wrong without a causal mask where work is balanced (pytorch#141429), fewer heads
    of k and v than ranks (verl#850), packed documents that see one another (axolotl#3608), lengths that ranks do not
    divide (deepspeed#7384), NaN where a rank sees nothing (Megatron#1764)."""
    cases = draws(schedule, 24, 300, 0) if more else [case for case in few() if case["schedule"] == schedule]
    for case in cases:
        check(case, monkeypatch)


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_what_no_rank_can_take_is_refused_in_one_sentence(count):
    for case in wrong_draws(count, 0):
        with pytest.raises(SeqParError) as caught:
            wrong_call(case)
        assert is_one_sentence(str(caught.value)), case


def test_a_document_full_of_nan_reaches_no_other():
    """Neither in out nor in gradients: what is not visible is not computed, and so not added as a nothing."""
    dice = random.Random(0)
    for number in range(12):
        lengths, layout, cp_size = cuts(dice, dice.randint(2, 40)), dice.choice(LAYOUTS), dice.randint(1, 4)
        mask, spoilt = Mask(causal=number % 2 == 0, documents=Mask.documents_of(lengths)), dice.randrange(len(lengths))
        bad = torch.zeros(sum(lengths), dtype=torch.bool)
        bad[sum(lengths[:spoilt]) : sum(lengths[: spoilt + 1])] = True
        clean = oracle.tensors(1, sum(lengths), (3, 1), 4)
        poisoned = [x.masked_fill(bad[None, :, None, None], float("nan")) for x in clean]
        config = SequenceParallelConfig(size=2 * cp_size, ulysses=2)
        found = attention(config, *poisoned, mask=mask, shards=shards_of(layout, lengths, cp_size))
        for mine, wanted in zip(results(found), oracle.dense(*clean, mask=mask), strict=True):
            torch.testing.assert_close(mine[:, ~bad], wanted[:, ~bad], rtol=1e-10, atol=1e-10)


def test_long_sequences_are_exact():
    """Tiles of the triangle grow with its chunks, and documents may be hundreds."""
    for size, seq in ((3, 30), (6, 132)):
        inputs = oracle.tensors(1, seq, (4, 2), 8)
        found = attention(SequenceParallelConfig(size=size, ulysses=1, schedule="triangle", strips=1), *inputs)
        oracle.assert_exact(results(found), oracle.dense(*inputs))
    lengths = (*(1,) * 100, 97, *(1, 2, 3) * 30)
    mask, inputs = Mask(documents=Mask.documents_of(lengths)), oracle.tensors(1, sum(lengths), (14, 2), 4)
    for layout, settings in zip(LAYOUTS, ({"ulysses": 4}, {"overlap": True}, {"rotate_forward": "q"}, {}), strict=True):
        config = SequenceParallelConfig(**{"size": 12, "ulysses": 1, **settings})
        found = attention(config, *inputs, mask=mask, shards=shards_of(layout, lengths, 12 // config.ulysses))
        oracle.assert_exact(results(found), oracle.dense(*inputs, mask=mask), least=1.0)


# ---- bf16 on many ranks, to its rounding

# name -> (settings, how often one partial result is rounded on its way where it is sent in bf16): once where it goes
# straight to its owner or is reduce-scattered, and at every hop of a ring
PRECISE = {
    "ring": ({"schedule": "ring"}, 15),
    "ring, q travels": ({"schedule": "ring", "rotate_forward": "q", "rotate_backward": "q"}, 15),
    "mesh": ({"schedule": "mesh", "mesh": (2, 2, 4)}, 4),
    "mesh, q travels": ({"schedule": "mesh", "mesh": (2, 2, 4), "rotate_forward": "q", "rotate_backward": "q"}, 4),
    "attention2d, overlapped": ({"schedule": "attention2d", "rows": 4, "overlap": True}, 1),
    "distflash": ({"schedule": "distflash"}, 1),
    "triangle": ({"schedule": "triangle", "size": 6, "strips": 1}, 3),
    "ulysses": ({"ulysses": 8}, 1),
}


def precise(name, causal, inputs, comm_dtype="fp32"):
    settings = {"size": 16, "ulysses": 1, "comm_dtype": comm_dtype, **PRECISE[name][0]}
    return results(attention(SequenceParallelConfig(**settings), *inputs, causal=causal))


@functools.cache
def alone(heads, causal):
    """bf16 inputs, dense fp64, and how far from it one kernel call on the whole sequence is."""
    inputs = q, k, v, do = oracle.tensors(1, 192, heads, 64, torch.bfloat16)
    kernel, scale = KERNELS["cpu_flash"], 64**-0.5
    out, lse = kernel.forward(q, k, v, causal, scale)
    wanted = oracle.dense(*inputs, causal=causal)
    return inputs, wanted, oracle.spreads((out, *kernel.backward(do, q, k, v, out, lse, causal, scale)), wanted)


# ring-flash-attention#42, #67, OpenRLHF#564: in bf16 the error grew with the number of ranks
@pytest.mark.parametrize("name", PRECISE)
def test_bf16_is_as_exact_as_one_kernel_call_over_the_whole_sequence(name):
    """And partial results that are sent in bf16 cost their rounding only. In root mean squares: the greatest single
    error is chance."""
    causal = name not in ("mesh", "ring")
    inputs, wanted, single = alone((8, 1) if name == "ulysses" else (4, 2), causal)
    wide, narrow = (oracle.spreads(precise(name, causal, inputs, dtype), wanted) for dtype in ("fp32", "bf16"))
    assert all(mine <= 1.5 * one for mine, one in zip(wide, single, strict=True)), (wide, single)
    # one call's result was rounded once, so its error is one rounding at least; further ones add up in squares
    limit = (1.5**2 + PRECISE[name][1]) ** 0.5
    assert all(mine <= limit * one for mine, one in zip(narrow, single, strict=True)), (narrow, single)
    assert (narrow != wide) == (name not in ("ulysses", "distflash"))


def test_accumulating_in_bf16_would_be_noticed(monkeypatch):
    merge = accumulate.merge_

    def narrow(out, lse, new_out, new_lse):
        merge(out, lse, new_out, new_lse)
        out.copy_(out.bfloat16())

    monkeypatch.setattr(accumulate, "merge_", narrow)
    inputs, wanted, single = alone((4, 2), False)
    assert oracle.spreads(precise("ring", False, inputs), wanted)[0] > 1.5 * single[0]
