"""Shapes that "auto" chooses against brute force, and what a placement does to ranks."""

import itertools
import math

import pytest

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.heads import even_ulysses
from ds_seqpar.core.compiler.sharding.layout import divisors
from ds_seqpar.core.settings import RANK_ORDERS, SequenceParallelConfig
from tests.unit.plans import build, mesh

SIZES = (*range(1, 37), 48, 64)


def test_divisors_are_all_of_them_in_order():
    for number in range(1, 200):
        assert divisors(number) == [d for d in range(1, number + 1) if number // d * d == number]


def _axes(schedule, size, heads=None, **own):
    """Of `size` CP ranks, with these settings of the schedule's own and the others "auto"."""
    own = SCHEDULES[schedule].resolve(size, own, heads)
    return SCHEDULES[schedule].axes(size, own)


# ---- what shapes there are


def test_windows_are_all_divisors_and_teams_all_whose_square_divides_the_ranks():
    for size in SIZES:
        windows = [own["ring_size"] for own in SCHEDULES["double_ring"].shapes(size)]
        assert windows == [w for w in range(1, size + 1) if size % w == 0]
        teams = [own["team"] for own in SCHEDULES["wallfacer"].shapes(size)]
        assert teams == [c for c in range(1, size + 1) if size % (c * c) == 0]


def test_grids_and_meshes_are_all_that_multiply_to_the_ranks():
    for size in range(1, 25):
        sides = range(1, size + 1)
        grids = [(own["rows"], own["cols"]) for own in SCHEDULES["attention2d"].shapes(size)]
        assert sorted(grids) == [(a, b) for a, b in itertools.product(sides, repeat=2) if a * b == size]
        meshes = [own["mesh"] for own in SCHEDULES["mesh"].shapes(size)]
        assert sorted(meshes) == [s for s in itertools.product(sides, repeat=3) if math.prod(s) == size]


# ---- "auto"


def test_a_window_is_the_divisor_nearest_to_the_square_root():
    for size in SIZES:
        (_, window), (_, windows) = _axes("double_ring", size)
        assert window * windows == size
        gaps = {divisor: abs(divisor - math.sqrt(size)) for divisor in divisors(size)}
        assert gaps[window] == min(gaps.values())


def test_a_team_is_the_largest_whose_square_divides_the_ranks():
    for size in SIZES:
        (_, a), (_, b), (_, r) = _axes("wallfacer", size)
        assert a == b
        assert a * b * r == size
        assert a == max(c for c in range(1, size + 1) if size % (c * c) == 0)


HEADS = ((8, 8), (8, 4), (8, 1), (16, 2), (32, 8), (12, 3))


def _elements(cols, rows, q_heads, kv_heads):
    """Received a token and D by (cols, rows, 1), forward and backward, log-sum-exps apart."""
    forward = (cols - 1) * 2 * q_heads + (rows - 1) * 2 * kv_heads  # q, out; k, v
    backward = (cols - 1) * 3 * q_heads + (rows - 1) * 4 * kv_heads  # q, do, dq; k, v, dk, dv
    return forward + backward


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention2d_takes_the_rows_and_columns_that_receive_least(heads):
    for size in SIZES:
        received = {cols: _elements(cols, size // cols, *heads) for cols in divisors(size)}
        (_, cols), (_, rows), (_, ring) = _axes("attention2d", size, heads)
        assert (cols * rows, ring) == (size, 1)
        assert received[cols] == min(received.values()), size
        # the formula is the plan's
        units = {"q": heads[0], "kv": 2 * heads[1], "out": heads[0], "dq": heads[0], "dkv": 2 * heads[1]}
        if size <= 16:
            forward = build("attention2d", mesh(cols, rows, 1), "forward").received(units)
            backward = build("attention2d", mesh(cols, rows, 1), "backward").received({**units, "q": 2 * heads[0]})
            assert [sum(pair) for pair in zip(forward, backward, strict=True)] == [received[cols]] * size


def test_few_kv_heads_are_gathered_widely():
    found = {heads: _axes("attention2d", 64, heads)[:2] for heads in ((8, 8), (8, 2), (8, 1))}
    assert found == {
        (8, 8): (("x", 8), ("y", 8)),
        (8, 2): (("x", 4), ("y", 16)),
        (8, 1): (("x", 4), ("y", 16)),
    }
    assert _axes("attention2d", 64) == _axes("attention2d", 64, (1, 1))


def test_one_side_gives_the_other():
    for size in SIZES:
        for cols in divisors(size):
            wanted = (("x", cols), ("y", size // cols), ("z", 1))
            assert _axes("attention2d", size, (8, 8), cols=cols) == wanted
            assert _axes("attention2d", size, (8, 8), rows=size // cols) == wanted


def test_a_mesh_is_as_attention2d_with_a_ring_for_its_rows():
    for size, heads in itertools.product(SIZES, (*HEADS, None)):
        (_, cols), (_, rows), _ = _axes("attention2d", size, heads)
        assert _axes("mesh", size, heads) == (("x", cols), ("y", 1), ("z", rows))


# with more Ulysses ranks than k/v heads each has one of these, and so a smaller share of queries than the model
@pytest.mark.parametrize("schedule", ["attention2d", "mesh"])
def test_auto_counts_the_heads_of_a_member(schedule):
    for q_heads, kv_heads in ((8, 1), (16, 2), (32, 8), (8, 8), (48, 4)):
        for ulysses in even_ulysses(16, q_heads, kv_heads):
            size = 16 * ulysses
            config = SequenceParallelConfig(size=size, ulysses=ulysses, schedule=schedule)
            ulysses_rank = q_heads // ulysses, max(1, kv_heads // ulysses)
            wanted = _axes(schedule, 16, ulysses_rank)
            assert config.resolve(size, (q_heads, kv_heads)).cp_axes == wanted, (q_heads, kv_heads, ulysses)


# all Ulysses ranks must choose the same: that of the Ulysses rank with the most heads
def test_auto_counts_the_most_heads_of_a_member_where_they_differ():
    for heads, ulysses, ulysses_rank in (((40, 10), 4, (12, 3)), ((14, 2), 4, (4, 1)), ((25, 5), 8, (5, 1))):
        size = 16 * ulysses
        config = SequenceParallelConfig(size=size, ulysses=ulysses, schedule="mesh")
        assert config.resolve(size, heads).cp_axes == _axes("mesh", 16, ulysses_rank)


# ---- refusals say what to use instead

REFUSED = [
    ({"schedule": "double_ring", "ring_size": 3}, "[1, 2, 4, 8]"),
    ({"schedule": "attention2d", "rows": 3}, "(rows, cols) = [(8, 1), (4, 2), (2, 4), (1, 8)]"),
    ({"schedule": "attention2d", "rows": 2, "cols": 2}, "(rows, cols) = [(8, 1), (4, 2), (2, 4), (1, 8)]"),
    ({"schedule": "wallfacer", "team": 4}, "[1, 2]"),
    ({"schedule": "mesh", "mesh": [2, 2, 1]}, "[1, 1, 8]"),
    ({"schedule": "ring", "team": 2}, '"wallfacer"'),
    ({"schedule": "wallfacer", "mesh": [2, 2, 2]}, '"mesh"'),
    ({"schedule": "distflash", "layout": "striped"}, '"contiguous"'),
    ({"schedule": "distflash", "layout": "zigzag"}, '"ring" or "wallfacer"'),
    ({"schedule": "distflash", "rotate_backward": "q"}, '"ring" or "wallfacer"'),
    ({"schedule": "ring", "rank_order": "collectives_intra"}, '"ulysses_intra" or "ring_intra"'),
    ({"schedule": "double_ring", "rank_order": "collectives_intra"}, '"ulysses_intra" or "ring_intra"'),
    ({"schedule": "ring", "rank_order": "collectives_intra"}, '"attention2d", "mesh" or "wallfacer"'),
    ({"schedule": "mesh", "rank_order": ["x", "y", "z"]}, "ulysses, x, y, z"),
    ({"schedule": "mesh", "rank_order": ["x", "y", "y", "z", "ulysses"]}, "ulysses, x, y, z"),
    ({"schedule": "ring", "rank_order": ["ulysses", "x"]}, "ulysses, ring"),
]


@pytest.mark.parametrize(
    ("settings", "words"), REFUSED, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_a_shape_that_makes_no_sense_is_answered_with_one_that_does(settings, words):
    with pytest.raises(ConfigError) as caught:
        SequenceParallelConfig(size=8, ulysses=1, **settings).resolve(8)
    sentence = str(caught.value)
    assert words in sentence
    assert "got" in sentence
    assert "\n" not in sentence


# ---- placement

CONFIGS = [
    {"schedule": "ring", "size": 6},
    {"schedule": "distflash", "size": 8, "ulysses": 2},
    {"schedule": "double_ring", "size": 24, "ulysses": 2, "ring_size": 3},
    {"schedule": "attention2d", "size": 12, "ulysses": 2, "rows": 2},
    {"schedule": "wallfacer", "size": 24, "ulysses": 2, "team": 2},
    {"schedule": "mesh", "size": 24, "ulysses": 2, "mesh": (3, 2, 2)},
    {"schedule": "triangle", "size": 12, "ulysses": 2},
]
# preset -> the axes that it puts first, of those that a schedule has
FIRST = {
    "auto": ("ulysses",),
    "ulysses_intra": ("ulysses",),
    "collectives_intra": ("x", "y"),
    "ring_intra": ("z", "inner_ring", "ring", "strip", "pair"),
}


def _topologies():
    """(config, topology) of every schedule, in every preset that it takes and in orders of one's own, two groups."""
    for fields in CONFIGS:
        names = [name for name, _ in SequenceParallelConfig(**fields).resolve(fields["size"]).cp_axes]
        orders = [("ulysses", *names), (*reversed(names), "ulysses"), ("data", *names[1:], "ulysses", names[0])]
        presets = [preset for preset in RANK_ORDERS if preset != "collectives_intra" or "x" in names]
        for rank_order in (*presets, *orders):
            config = SequenceParallelConfig(rank_order=rank_order, **fields).resolve(2 * fields["size"])
            yield config, config.topology(2 * config.size)


def test_every_schedule_is_placed():
    assert {config.schedule for config, _ in _topologies()} == set(SCHEDULES)
    assert set(FIRST) == set(RANK_ORDERS)


def test_a_placement_puts_its_axes_first_and_loses_none():
    for config, topology in _topologies():
        order = [name for name, _ in topology.axes]
        names = [name for name, _ in config.cp_axes]
        assert sorted(order) == sorted(["ulysses", "data", *names])
        if isinstance(config.rank_order, str):
            first = [name for name in FIRST[config.rank_order] if name in order]
            rest = [name for name in ("ulysses", *names, "data") if name not in first]
            assert order == [*first, *rest]
        else:
            assert tuple(order[: len(config.rank_order)]) == config.rank_order
            assert order[-1] == "data" or "data" in config.rank_order
        sizes = dict(config.cp_axes)
        assert dict(topology.axes) == {**sizes, "ulysses": config.ulysses, "data": 2}


def test_inner_ranks_are_numbered_by_their_axes_wherever_these_are_placed():
    for config, topology in _topologies():
        names = [name for name, _ in config.cp_axes]
        assert topology.cp_axes == tuple(names)
        for rank in range(topology.world_size):
            at, number, stride = topology.coordinates(rank), 0, 1
            for name, size in config.cp_axes:  # the first fastest
                number, stride = number + at[name] * stride, stride * size
            assert topology.index(rank, *topology.cp_axes) == number
        # the ranks of one schedule hold every number once, in this order
        for ranks in topology.groups(*topology.cp_axes):
            assert [topology.index(rank, *names) for rank in ranks] == list(range(config.size // config.ulysses))


def test_what_a_preset_names_lies_in_one_node():
    # the node: as many neighboring ranks as the preset's groups have
    for config, topology in _topologies():
        if isinstance(config.rank_order, str):
            together = [name for name in FIRST[config.rank_order] if name in ("ulysses", *topology.cp_axes)]
            node = topology.size(*together)
            for ranks in topology.groups(*together):
                assert {rank // node for rank in ranks} == {ranks[0] // node}, (config.schedule, config.rank_order)
