"""The triangle whose tiles are rectangles: strips of q with whole blocks of k/v."""

import functools
import itertools
from collections import Counter

import pytest
import torch

from ds_seqpar.compiler.balance import shards_of
from ds_seqpar.compiler.compile import pattern_of
from ds_seqpar.compiler.layout import LAYOUTS, multiple
from ds_seqpar.compiler.masks import CAUSAL, Mask
from ds_seqpar.compiler.overlap import overlapped
from ds_seqpar.compiler.schedules import SCHEDULES
from ds_seqpar.compiler.schedules.triangle import STRIPS
from ds_seqpar.compiler.schedules.triangle.tiling import tiling
from ds_seqpar.compiler.shape import shape_of
from ds_seqpar.compiler.shards import EvenShards, positions
from ds_seqpar.compiler.validate import validate
from ds_seqpar.config import SequenceParallelConfig
from ds_seqpar.errors import ConfigError
from ds_seqpar.testing import attention
from tests.grids import each_then_rest, grouped, whole
from tests.oracle import dense, errors, spreads, tensors
from tests.unit.plans import DIRECTIONS, built, joint, topology
from tests.unit.test_schedule_bytes import UNITS

ITS = SCHEDULES["triangle"]
WIDE = [strips for strips in STRIPS if strips > 1]
LARGE = 30  # ranks from which on what looks at every product of every rank is in the whole alone
SHAPES = [
    pytest.param(blocks, strips, marks=pytest.mark.whole if strips * blocks * (blocks - 1) // 2 >= LARGE else [])
    for strips in STRIPS
    for blocks in range(3, 11)
    if strips * blocks * (blocks - 1) // 2 <= 240
]
MOST = {1: 0, 2: 2, 4: 6, 8: 12}  # k/v chunks of the staircase that a rank takes for its row, where there is a column
SMALL = [(3, 2), (4, 2), (3, 4), (5, 2), (4, 4), (3, 8)]


def _ranks(blocks, strips):
    return strips * blocks * (blocks - 1) // 2


def _topology(blocks, strips):
    return topology(*ITS.axes(_ranks(blocks, strips), {"strips": strips}))


@functools.lru_cache(maxsize=4)
def _causal(blocks, strips):
    ranks = _ranks(blocks, strips)
    return pattern_of(CAUSAL, EvenShards(STRIPS[strips], 4 * ranks, ranks))


def _steps(blocks, strips, direction):
    return ITS.build(_topology(blocks, strips), _causal(blocks, strips), direction, "kv")


def _plan(blocks, strips, direction, meet=None):
    return built("triangle", _topology(blocks, strips), direction, "kv", meet or _causal(blocks, strips))


# ---- who owns what, and who computes what


@pytest.mark.parametrize(("blocks", "strips"), SHAPES)
def test_a_rank_owns_an_early_chunk_of_its_strip_and_a_late_one_of_its_column(blocks, strips):
    ranks, long = _ranks(blocks, strips), blocks - 1
    its = tiling(ranks, strips)
    assert its.blocks == blocks
    owners = [tiling(ranks, strips).owned[rank] for rank in range(ranks)]
    assert sorted(itertools.chain(*owners)) == list(range(2 * ranks))
    tiles = [(i, p, j) for i in range(blocks) for j in range(i) for p in range(strips)]
    assert [its.tile(rank) for rank in range(ranks)] == tiles
    for (i, p, j), (late, early) in zip(tiles, owners, strict=True):
        assert early == (i * strips + p) * long + j
        assert late // (strips * long) == j
        assert late % long >= j  # beyond the early ones of its strip
        assert late < early


def test_the_layouts_hold_every_position_once():
    for (blocks, strips), ulysses in itertools.product(SMALL, (1, 3)):
        layout, size = STRIPS[strips], _ranks(blocks, strips) * ulysses
        seq = 2 * multiple(layout, size, ulysses)
        held = [positions(layout, seq, size, ulysses, rank) for rank in range(size)]
        assert sorted(itertools.chain(*held)) == list(range(seq))
        assert {len(x) for x in held} == {seq // size}
        for tokens in (1, 7, 83):
            shards = shards_of(layout, (tokens,), size // ulysses)
            lengths = [shards.tokens("q", (block,)) for block in range(2 * shards.size)]
            assert sum(lengths) == tokens
            assert max(lengths) - min(lengths) <= 1
    assert LAYOUTS["pairs2"].runs(24, 6, 0) != LAYOUTS["pairs"].runs(24, 6, 0)


@pytest.mark.parametrize(("blocks", "strips"), SHAPES)
def test_every_causal_product_is_computed_once_and_ranks_have_nearly_as_much_to_do(blocks, strips):
    ranks = _ranks(blocks, strips)
    steps, place, seen, work = _steps(blocks, strips, "forward"), tiling(ranks, strips).place, Counter(), []
    for rank in range(ranks):
        mine = [(c.q[0], c.kv[0]) for step in steps(rank) for c in step.computes]
        seen.update(mine)
        work.append(sum(0.5 if q == kv else 1 for q, kv in mine))
    assert set(seen) == {(q, kv) for q in range(2 * ranks) for kv in range(2 * ranks) if place[kv] <= place[q]}
    assert set(seen.values()) == {1}
    mean = strips * blocks * (blocks - 1)
    assert sum(work) == mean * ranks
    # equal without strips, and else but for what the staircase cannot share out
    assert max(work) <= mean * (1 if strips == 1 else 1.043)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", each_then_rest(SMALL[:3], SMALL[3:]), ids=str)
def test_its_plans_are_right_also_overlapped_and_as_many_bytes_are_received(shape, direction):
    blocks, strips = shape
    plan, meet = _plan(blocks, strips, direction), _causal(blocks, strips)
    validate(plan, meet.pairs())
    better = overlapped(plan, meet, shape_of("bf16", "bfloat16", 1, (4, 2, 64)).bytes_per_token(direction))
    validate(better, meet.pairs())
    units = UNITS[direction]
    wanted = ITS.received(_axes(blocks, strips), direction, "kv", units)
    assert better.received(units) == plan.received(units) == wanted
    # a chunk goes on by one hop a turn
    assert len(plan.ranks[0]) == 4 * strips * (blocks - 1) - 3


# ---- what is received


def _axes(blocks, strips):
    return tuple(ITS.axes(_ranks(blocks, strips), {"strips": strips}))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("blocks", "strips"), SHAPES)
def test_every_rank_receives_what_the_closed_form_says(blocks, strips, direction):
    units = UNITS[direction]
    wanted = ITS.received(_axes(blocks, strips), direction, "kv", units)
    assert _steps(blocks, strips, direction).received(units) == wanted


@pytest.mark.parametrize(("blocks", "strips"), SHAPES)
def test_a_rank_receives_its_strip_its_column_and_little_more(blocks, strips):
    """Written out for each side alone: all that its tile needs but what it owns of it; of the staircase a few
    k/v chunks, or its share of all before its strip where no column is, and one query at most."""
    ranks, long = _ranks(blocks, strips), blocks - 1
    q, kv = (ITS.received(_axes(blocks, strips), "forward", "kv", units) for units in (
        {"q": 1, "kv": 0, "out": 0}, {"q": 0, "kv": 1, "out": 0}
    ))  # fmt: skip
    for rank in range(ranks):
        i, p, j = tiling(ranks, strips).tile(rank)
        taken = p * long if i == long else min(p * long, MOST[strips] * i)
        assert kv[rank] == strips * long - 1 + len(range(j, taken, i))
        assert q[rank] - (blocks - 2) in (0, 1)
    # a query is lent for every early chunk of a strip whose row does not take all k/v before it
    lent = sum(i for i in range(1, long) for p in range(strips) if p * long > MOST[strips] * i)
    assert sum(q) == ranks * (blocks - 2) + lent


def _busiest(ranks, strips, heads, travel="bf16"):
    shape = shape_of(travel, "bfloat16", 1, (*heads, 128))
    axes = tuple(ITS.axes(ranks, {"strips": strips}))
    return {
        way: max(ITS.received(axes, way, "kv", {k: n / 2 for k, n in shape.bytes_per_token(way).items()}))
        for way in DIRECTIONS
    }


def _mesh(ranks, heads, direction, travel="bf16"):
    """The fewest bytes of a token for the busiest rank of any mesh, and of what travels."""
    its, units = SCHEDULES["mesh"], shape_of(travel, "bfloat16", 1, (*heads, 128)).bytes_per_token(direction)
    return min(
        max(its.received(tuple(its.axes(ranks, own)), direction, travels, units))
        for own in its.shapes(ranks)
        for travels in its.travellers
    )


@pytest.mark.parametrize(("ranks", "strips", "heads"), [
    (24, 4, (32, 8)), (40, 4, (32, 8)), (60, 4, (32, 8)), (84, 4, (32, 8)), (112, 4, (32, 8)),
    (48, 8, (64, 8)), (80, 8, (64, 8)), (120, 8, (64, 8)), (168, 8, (64, 8)),
], ids=str)  # fmt: skip
def test_with_as_many_strips_as_queries_share_a_key_it_receives_less_than_any_mesh(ranks, strips, heads):
    for way, ours in _busiest(ranks, strips, heads).items():
        assert ours < 0.9 * _mesh(ranks, heads, way), way


# ---- masks that only remove


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("blocks", "strips"), [(3, 2), (4, 2), (3, 4)])
def test_what_a_mask_leaves_out_is_neither_computed_nor_sent(blocks, strips, direction):
    full, ranks = _plan(blocks, strips, direction), _ranks(blocks, strips)
    units = UNITS[direction]
    for mask in _masks(ranks):
        meet = pattern_of(mask, EvenShards(STRIPS[strips], 8 * ranks, ranks))
        plan = _plan(blocks, strips, direction, meet)
        validate(plan, meet.pairs())
        assert sorted((c.q[0], c.kv[0]) for step in joint(plan) for c in step.computes) == sorted(meet.pairs())
        assert all(a <= b for a, b in zip(plan.received(units), full.received(units), strict=True))
        assert sum(plan.received(units)) < sum(full.received(units))
        validate(overlapped(plan, meet, units), meet.pairs())


def _masks(ranks):
    seq = 8 * ranks
    yield from (Mask(window=window) for window in (1, 5, seq // 3))
    yield Mask(documents=(0, 3, seq // 2, seq - 5))
    yield Mask(window=seq // 5, documents=(0, seq // 3))


# ---- tensors


def _found(config, inputs, **how):
    found = attention(config, *inputs, **how)
    return found.out, found.dq, found.dk, found.dv


def _config(blocks, strips, ulysses=1, **options):
    size = _ranks(blocks, strips) * ulysses
    return SequenceParallelConfig(size=size, ulysses=ulysses, schedule="triangle", strips=strips, **options)


GRID = {
    "shape": ((3, 2), (3, 4)),
    "ulysses": (1, 2),
    "heads": ((4, 4), (4, 2), (4, 1)),
    "overlap": (False, True),
}
LONG = [
    pytest.param(whole(**{**GRID, "shape": (shape,)}), id=f"shape_{shape}", marks=pytest.mark.whole)
    for shape in ((4, 2), (4, 4), (3, 8), (5, 2))
]


@functools.lru_cache(maxsize=8)
def _problem(seq, heads):
    inputs = tensors(1, seq, heads, 8)
    return inputs, dense(*inputs)


@pytest.mark.parametrize("cases", [*grouped(("shape",), **GRID), *LONG])
def test_it_equals_dense_attention(cases):
    compilers = {}
    for case in cases:
        config = _config(*case["shape"], case["ulysses"], overlap=case["overlap"])
        layout = STRIPS[case["shape"][1]]
        inputs, wanted = _problem(multiple(layout, config.size, config.ulysses), case["heads"])
        assert max(errors(_found(config, inputs, compilers=compilers), wanted)) <= 1e-10, case


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=str)
def test_partial_results_that_travel_in_bf16_cost_their_rounding_only(heads):
    inputs = tensors(1, 48, heads, 32, torch.bfloat16)
    wanted = dense(*inputs)
    wide, narrow = (spreads(_found(_config(3, 2, travel_dtype=t), inputs), wanted) for t in ("fp32", "bf16"))
    assert max(wide) < 0.01
    assert all(b <= a + 4 * 2**-9 for a, b in zip(wide, narrow, strict=True))


@pytest.mark.parametrize("shape", [(3, 2), (4, 2)], ids=str)
def test_with_masks_it_equals_dense_attention(shape):
    ranks = _ranks(*shape)
    inputs = tensors(1, 8 * ranks, (4, 2), 8)
    for mask, overlap in zip(_masks(ranks), itertools.cycle((False, True))):
        found = _found(_config(*shape, overlap=overlap), inputs, mask=mask)
        for a, b in zip(found, dense(*inputs, mask=mask), strict=True):  # a window of 1 leaves dq and dk nothing
            assert (a - b).abs().max() <= 1e-10 * max(1, b.abs().max()), mask


def test_sequences_of_any_length_are_exact():
    for shape, seq in itertools.product(((3, 2), (3, 4)), (1, 29, 50)):
        inputs = tensors(1, seq, (4, 2), 8)
        found = _found(_config(*shape), inputs, shards=shards_of(STRIPS[shape[1]], (seq,), _ranks(*shape)))
        for a, b in zip(found, dense(*inputs), strict=True):
            assert (a - b).abs().max() <= 1e-10 * max(1, b.abs().max()), (shape, seq)


# ---- what is chosen, and refused


@pytest.mark.parametrize("heads", [(32, 32), (32, 8), (64, 8), (8, 1)], ids=str)
def test_auto_takes_the_strips_that_bring_the_fewest_elements(heads):
    for ranks in range(3, 130):
        legal = [own["strips"] for own in ITS.shapes(ranks)]
        if legal:
            least = {strips: _elements(ranks, strips, heads) for strips in legal}
            chosen = ITS.resolve(ranks, {}, heads)["strips"]
            assert least[chosen] == min(least.values())


def _elements(ranks, strips, heads):
    """Of one dtype, without lse and delta: as meshes choose."""
    q, kv = heads
    ways = (("forward", {"q": q, "kv": 2 * kv, "out": q}),
            ("backward", {"q": 2 * q, "kv": 2 * kv, "dq": q, "dkv": 2 * kv}))  # fmt: skip
    return sum(max(ITS.received(tuple(ITS.axes(ranks, {"strips": strips})), way, "kv", units)) for way, units in ways)


def test_shapes_are_1_2_4_or_8_times_a_triangle():
    sizes = [ranks for ranks in range(1, 61) if ITS.shapes(ranks)]
    assert sizes == [1, 3, 6, 10, 12, 15, 20, 21, 24, 28, 30, 36, 40, 42, 45, 48, 55, 56, 60]
    assert ITS.shapes(12) == [{"strips": 2}, {"strips": 4}]
    assert ITS.shapes(24) == [{"strips": 4}, {"strips": 8}]


def test_layouts_go_with_their_strips():
    def resolved(size, heads=None, **settings):
        return SequenceParallelConfig(size=size, ulysses=1, schedule="triangle", **settings).resolve(size, heads)

    found = resolved(120, (64, 8))
    assert (found.strips, found.layout) == (8, "pairs8")
    assert (resolved(120, (64, 64)).strips, resolved(120).layout) == (1, "pairs")
    assert resolved(6, strips=2).layout == "pairs2"
    for size, layout, strips in ((6, "pairs", 1), (6, "pairs2", 2), (12, "pairs2", 2), (12, "pairs4", 4)):
        assert {resolved(size, heads, layout=layout).strips for heads in (None, (32, 8), (32, 32))} == {strips}
    assert resolved(120, (64, 8)).resolve(120, (64, 8)) == found
    with pytest.raises(ConfigError, match=r'layout.*"pairs2".*got "pairs"(?!.*schedule)'):
        resolved(6, strips=2, layout="pairs")
    with pytest.raises(ConfigError, match=r"8 strips.*got 1008"):
        tiling(1008, 8)
    with pytest.raises(ConfigError, match=r"strips.*\[1, 2\].*6 inner ranks.*got 4"):
        resolved(6, strips=4)
    with pytest.raises(ConfigError, match=r"triangle.*got 13.*12 or 15"):
        resolved(13)
    with pytest.raises(ConfigError, match=r'strips.*"triangle".*"ring"'):
        SequenceParallelConfig(size=6, strips=2).resolve(6)
    inputs = tensors(1, 24, (4, 2), 8)
    with pytest.raises(ConfigError, match=r"triangle.*causal.*queries of chunk"):
        attention(_config(3, 2), *inputs, mask=Mask(causal=False))
