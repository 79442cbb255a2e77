"""Every schedule over real gloo processes: equal to dense attention, receiving what its plan says."""

import pytest
import torch

from ds_seqpar.compiler import schedules
from tests import oracle
from tests.dist.ranks import assert_exact, attend, make, planned
from tests.grids import each_then_rest
from tests.launch import on_each_of
from tests.launch import on_warm_ranks as on_ranks
from tests.unit import toy_schedule

HEADS = (8, 4)
CASES = {
    3: [{"schedule": "triangle"}, {"schedule": "triangle", "overlap": True}],
    4: [
        {"schedule": "double_ring", "ring_size": 2, "rotate_backward": "q"},
        {"schedule": "distflash"},
        {"schedule": "distflash", "overlap": True},
        {"schedule": "attention2d", "rows": 2, "layout": "striped"},
        {"schedule": "attention2d", "rows": 2, "overlap": True, "layout": "contiguous"},
        {"schedule": "wallfacer", "team": 2, "rotate_backward": "q"},
        {"schedule": "mesh", "mesh": [2, 1, 2], "rotate_forward": "q", "rotate_backward": "q"},
        {"schedule": "mesh", "mesh": [2, 1, 2], "overlap": True, "rank_order": "collectives_intra"},
        {"schedule": "ring", "rotate_forward": "q", "rotate_backward": "q", "layout": "contiguous"},
        {"schedule": "ring", "ulysses": 2, "rotate_backward": "auto", "rank_order": "ring_intra"},
        {"schedule": "attention2d", "ulysses": 2, "cols": 2, "rank_order": "collectives_intra"},
        {"schedule": "distflash", "ulysses": 2},
        {"schedule": "mesh", "mesh": [2, 1, 1], "ulysses": 2, "rank_order": ["x", "ulysses", "z", "y"]},
    ],
    6: [
        {"schedule": "triangle"},
        {"schedule": "triangle", "overlap": True},
        {"schedule": "triangle", "ulysses": 2, "rank_order": "ring_intra"},
    ],
    8: [
        {"schedule": "mesh", "mesh": [2, 2, 2], "rotate_backward": "q"},
        {"schedule": "mesh", "mesh": [2, 2, 2], "overlap": True, "rank_order": ["z", "ulysses", "y", "x"]},
        {"schedule": "wallfacer", "team": 2, "rank_order": "ring_intra"},
        {"schedule": "wallfacer", "team": 2, "ulysses": 2, "rank_order": ["data", "y", "ulysses", "z", "x"]},
        {"schedule": "double_ring", "ring_size": 4},
        {"schedule": "distflash"},
    ],
    9: [{"schedule": "attention2d", "rows": 3}, {"schedule": "distflash"}],
    10: [{"schedule": "triangle"}, {"schedule": "triangle", "overlap": True}],
    15: [{"schedule": "triangle"}, {"schedule": "triangle", "overlap": True}],
    16: [
        {"schedule": "attention2d", "rows": 4},
        {"schedule": "wallfacer", "team": 2, "overlap": True, "rotate_backward": "q"},
        {"schedule": "double_ring", "ring_size": 4, "ulysses": 2},
    ],
}


def expected(sp, seq):
    """Elements that this rank's plans let it receive, and the Ulysses row of the table."""
    ulysses_size = sp.config.ulysses
    tokens, dim = seq * ulysses_size // sp.size, 8
    q, kv = tokens * HEADS[0] // ulysses_size * dim, 2 * tokens * HEADS[1] // ulysses_size * dim
    lse = q // dim
    units = {
        "forward": {"q": q, "kv": kv, "out": q + lse},
        "backward": {"q": 2 * q + 2 * lse, "kv": kv, "dq": q, "dkv": kv},
    }
    parts = sp.runtime.compiler.recipe.schedule.blocks_per_rank  # blocks of a rank
    units = {way: {kind: n // parts for kind, n in sizes.items()} for way, sizes in units.items()}
    return sum(planned(sp, seq, HEADS, units)) + 2 * (ulysses_size - 1) * (2 * q + kv) // ulysses_size


@pytest.mark.parametrize("ranks", each_then_rest([3, 4], [ranks for ranks in CASES if ranks > 4]))
@on_each_of("ranks", timeout=300)
def test_every_schedule_is_exact_and_receives_what_its_plan_says(ranks):
    for case in CASES[ranks]:
        sp = make(**{"size": ranks, "ulysses": 1, **case})
        assert_exact(sp, oracle.tensors(1, 4 * ranks, HEADS))
        assert sum(sp.comm.received.values()) == expected(sp, 4 * ranks), (case, sp.comm.received)


@on_each_of(4, keep=None)
def test_a_schedule_from_a_file_of_its_own_has_its_groups_and_is_exact():
    schedules.register(toy_schedule.SCHEDULE)
    with make(size=4, ulysses=1, schedule="carousel", seats=2, rotate_backward="q") as sp:
        assert sorted(sp.groups.collectives) == [(0, 1) if sp.rank < 2 else (2, 3)]
        assert_exact(sp, oracle.tensors(1, 16, HEADS))
        assert sum(sp.comm.received.values()) == expected(sp, 16)


def travel(dtype):
    """The error of bf16 attention whose partial results travel in this dtype, and the bytes that this rank received."""
    whole = oracle.tensors(1, 256, HEADS, 32, dtype=torch.bfloat16)
    sp = make(size=4, ulysses=1, schedule="mesh", mesh=[2, 1, 2], comm_dtype=dtype)
    return max(oracle.errors(attend(sp, *whole), oracle.dense(*whole))), sp.comm.received_bytes


def test_travel_dtype_saves_bytes_and_costs_rounding_only():
    wide, narrow = ([max(x) for x in zip(*on_ranks(4, travel, dtype), strict=True)] for dtype in ("fp32", "bf16"))
    assert narrow[1] < 0.85 * wide[1]
    assert narrow[0] < 2 * wide[0] + 0.004  # one more rounding to 8 bits for each partial result
