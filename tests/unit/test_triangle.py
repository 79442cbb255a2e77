"""The triangle, whose tiles are squares or strips of q with whole blocks of k/v: every causal product once, nearly
equal work, the bytes of the closed form; equal to dense attention."""

import functools
import itertools
import random
from collections import Counter

import pytest

from ds_seqpar.base.errors import ConfigError, InputError
from ds_seqpar.core.compiler.compile import Compiler, Recipe, block_mask_of
from ds_seqpar.core.compiler.program.shape import shape_of
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.layout import LAYOUTS, multiple
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, Mask
from ds_seqpar.core.compiler.sharding.shards import EvenShards, UnevenShards
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.data.balance import shards_of
from ds_seqpar.schedules.overlap import overlapped
from ds_seqpar.schedules.triangle import STRIPS
from ds_seqpar.schedules.triangle.tiling import tiling
from ds_seqpar.schedules.validate import validate
from ds_seqpar.testing import attention
from tests.grids import each_then_rest
from tests.oracle import positions, tensors
from tests.unit.plans import DIRECTIONS, build, built, joint, shaped, topology
from tests.unit.test_schedule_bytes import UNITS

ITS = SCHEDULES["triangle"]


def _ranks(blocks, strips):
    return strips * blocks * (blocks - 1) // 2


# shapes are (blocks, strips); of many ranks, what looks at every product of every rank is in the whole alone
_ALL = [(blocks, strips) for strips in STRIPS for blocks in range(3, 25 if strips == 1 else 11)]
_ALL = [shape for shape in _ALL if _ranks(*shape) <= 276]
SHAPES = pytest.mark.parametrize(
    "shape",
    each_then_rest(*([shape for shape in _ALL if (_ranks(*shape) < 30) is few] for few in (True, False))),
    ids=str,
)
BOTH_WAYS = pytest.mark.parametrize("direction", DIRECTIONS)
SQUARE, SMALL = [(2, 1), (3, 1), (4, 1), (5, 1)], [(3, 2), (4, 2), (3, 4)]
LARGER = [(6, 1), (7, 1), (8, 1), (5, 2), (4, 4), (3, 8)]


def _axes(shape):
    return tuple(ITS.axes(_ranks(*shape), {"strips": shape[1]}))


@functools.lru_cache(maxsize=4)
def _causal(shape):
    return _meet(shape, CAUSAL, 4)


def _meet(shape, mask, tokens):
    """Which chunks meet, of so many tokens a rank."""
    ranks = _ranks(*shape)
    return block_mask_of(mask, EvenShards(STRIPS[shape[1]], tokens * ranks, ranks))


def _steps(shape, direction):
    return ITS.build(topology(*_axes(shape)), _causal(shape), direction, "kv")


def _plan(shape, direction, meet=None):
    return built("triangle", topology(*_axes(shape)), direction, "kv", meet or _causal(shape))


# ---- who owns what, and who computes what


@SHAPES
def test_a_rank_owns_an_early_chunk_of_its_strip_and_a_late_one_of_its_column(shape):
    (blocks, strips), ranks = shape, _ranks(*shape)
    its, long = tiling(ranks, strips), blocks - 1
    assert its.blocks == blocks
    assert sorted(itertools.chain(*its.owned)) == list(range(2 * ranks))
    tiles = [(i, p, j) for i in range(blocks) for j in range(i) for p in range(strips)]
    assert [its.tile(rank) for rank in range(ranks)] == tiles
    for (i, p, j), (late, early) in zip(tiles, its.owned, strict=True):
        assert early == (i * strips + p) * long + j
        assert late // (strips * long) == j
        assert late % long >= j  # beyond the early ones of its strip
        assert late < early


def test_the_layouts_hold_every_position_once_in_order_of_the_plans_blocks():
    for shape, ulysses, times in itertools.product([*SQUARE, (7, 1), *SMALL, *LARGER[3:]], (1, 2, 3), (1, 2)):
        layout, ranks = STRIPS[shape[1]], _ranks(*shape)
        size = ranks * ulysses
        seq = times * multiple(layout, size, ulysses)
        held = [positions(layout, seq, size, ulysses, rank) for rank in range(size)]
        assert sorted(itertools.chain(*held)) == list(range(seq))
        assert {len(x) for x in held} == {seq // size}
        shards = EvenShards(layout, seq, ranks)
        for block, chunk in enumerate(tiling(ranks, shape[1]).place):
            ((start, step, length),) = shards.runs("q", (block,))
            assert (start, step) == (chunk * length, 1)
            assert length == shards.tokens("kv", (block,)) == seq // (2 * ranks)
        for tokens in (1, 7, 40, 83):
            shards = shards_of(layout, (tokens,), ranks)
            assert (shards.size, shards.blocks_per_rank) == (ranks, 2)
            lengths = [shards.tokens("q", (block,)) for block in range(2 * ranks)]
            assert sum(lengths) == tokens
            assert max(lengths) - min(lengths) <= 1
    assert LAYOUTS["pairs2"].runs(24, 6, 0) != LAYOUTS["pairs"].runs(24, 6, 0)


@SHAPES
def test_every_causal_product_is_computed_once_and_ranks_have_nearly_as_much_to_do(shape):
    (blocks, strips), ranks = shape, _ranks(*shape)
    steps, place, seen, work = _steps(shape, "forward"), tiling(ranks, strips).place, Counter(), []
    for rank in range(ranks):
        mine = [(c.q[0], c.kv[0]) for step in steps(rank) for c in step.computes]
        seen.update(mine)
        work.append(sum(0.5 if q == kv else 1 for q, kv in mine))  # half of a chunk with itself is seen
    assert set(seen) == {(q, kv) for q in range(2 * ranks) for kv in range(2 * ranks) if place[kv] <= place[q]}
    assert set(seen.values()) == {1}
    mean = strips * blocks * (blocks - 1)
    assert sum(work) == mean * ranks
    # equal without strips, and else but for what the staircase cannot share out
    assert max(work) <= mean * (1 if strips == 1 else 1.043)


@BOTH_WAYS
@pytest.mark.parametrize("shape", each_then_rest([*SQUARE[:2], SQUARE[3], *SMALL], [SQUARE[2], *LARGER]), ids=str)
def test_its_plans_are_right_also_overlapped_and_as_many_bytes_are_received(shape, direction):
    blocks, strips = shape
    plan, meet = _plan(shape, direction), _causal(shape)
    validate(plan, meet.pairs())
    better = overlapped(plan, meet, shape_of("bf16", "bfloat16", 1, (4, 2, 64)).bytes_per_token(direction))
    validate(better, meet.pairs())
    units = UNITS[direction]
    assert better.received(units) == plan.received(units) == ITS.received(_axes(shape), direction, "kv", units)
    # a chunk goes on by one hop a turn
    assert len(plan.ranks[0]) == max(1, 4 * strips * (blocks - 1) - 3)
    for step in joint(plan) if strips == 1 else ():  # one a rank, on each way that it is on
        for kind in units:
            assert max(Counter(m.dst for m in (*step.moves, *step.results) if m.kind == kind).values(), default=0) <= 2


# ---- what is received


def _received(side, direction, units):
    """Of square tiles, written out: T - 2 chunks of each operand. Results: of the T - 1 chunks of its row all but those
    whose result it is the first to have, and one that comes home from the row of its other block. In backward it is
    the same of columns."""
    kinds = {"q": "out"} if direction == "forward" else {"q": "dq", "kv": "dkv"}
    pairs = [(i, j) for i in range(side) for j in range(i)]
    found = [(side - 2) * (units["q"] + units["kv"]) for _ in pairs]
    for rank, (i, j) in enumerate(pairs):
        for line, ulysses_size, number, comes_home in (
            ("q", i, j, j > 0),
            ("kv", side - 1 - j, i - j - 1, i < side - 1),
        ):
            if line in kinds:
                if line == "kv":  # Ulysses ranks of a column stand in the order of their chunks, the last row first
                    number = ulysses_size - 1 - number
                before = (number - 1) % ulysses_size  # the Ulysses rank whose chunk starts before
                at, at_before = (n * (side - 1) // ulysses_size for n in (number, before))
                first = (at - at_before) % (side - 1) or (side - 1)
                found[rank] += (side - 1 - first + comes_home) * units[kinds[line]]
    return found


@BOTH_WAYS
@SHAPES
def test_every_rank_receives_what_the_closed_form_says(shape, direction):
    units = UNITS[direction]
    wanted = ITS.received(_axes(shape), direction, "kv", units)
    assert _steps(shape, direction).received(units) == wanted
    if shape[1] == 1:
        assert wanted == _received(shape[0], direction, units)
        assert shape[0] > 12 or _plan(shape, direction).received(units) == wanted


MHA = {"q": 0.5, "kv": 1, "out": 0.5}  # of q, bf16, forward


@pytest.mark.parametrize("side", range(3, 25))
def test_bytes_follow_the_causal_floor_and_are_at_most_three_quarters_of_the_best_meshs(side):
    ranks = _ranks(side, 1)
    received = ITS.received(_axes((side, 1)), "forward", "kv", MHA)
    assert max(received) <= 2 * side - 3.5
    assert sum(received) / ranks == pytest.approx(2 * side - 4)
    assert min(received) >= 1.5 * (side - 2)
    whole = {kind: 2 * size for kind, size in MHA.items()}  # a mesh's block is all that a rank has
    assert side < 5 or max(received) <= 0.75 * _mesh(ranks, "forward", whole)


def _mesh(ranks, direction, units):
    """The fewest units for the busiest rank of any mesh, and of what travels."""
    its = SCHEDULES["mesh"]
    return min(
        max(its.received(tuple(its.axes(ranks, own)), direction, travels, units))
        for own in its.shapes(ranks)
        for travels in its.moving_sides
    )


@pytest.mark.parametrize(("strips", "heads", "sizes"), [
    (4, (32, 8), (24, 40, 60, 84, 112)), (8, (64, 8), (48, 80, 120, 168)),
], ids=str)  # fmt: skip
def test_with_as_many_strips_as_queries_share_a_key_it_receives_less_than_any_mesh(strips, heads, sizes):
    shape = shape_of("bf16", "bfloat16", 1, (*heads, 128))
    for ranks, way in itertools.product(sizes, DIRECTIONS):
        units = shape.bytes_per_token(way)
        axes, half = tuple(ITS.axes(ranks, {"strips": strips})), {kind: size / 2 for kind, size in units.items()}
        assert max(ITS.received(axes, way, "kv", half)) < 0.9 * _mesh(ranks, way, units), (ranks, way)


# ---- masks that only remove


def _masks(shape):
    """Of 8 tokens a rank."""
    seq, dice = 8 * _ranks(*shape), random.Random(shape[0])
    yield from (Mask(window=window) for window in (1, 5, seq // 3))
    starts = tuple(sorted({0, *(dice.randrange(1, seq) for _ in range(4))}))
    yield Mask(documents=starts)
    yield Mask(window=seq // 5, documents=starts)


@BOTH_WAYS
@pytest.mark.parametrize("shape", [(3, 1), (4, 1), (6, 1), *SMALL], ids=str)
def test_what_a_mask_leaves_out_is_neither_computed_nor_sent(shape, direction):
    full, units = _plan(shape, direction), UNITS[direction]
    for mask in _masks(shape):
        meet = _meet(shape, mask, 8)
        plan = _plan(shape, direction, meet)
        validate(plan, meet.pairs())
        assert sorted((c.q[0], c.kv[0]) for step in joint(plan) for c in step.computes) == sorted(meet.pairs())
        assert all(a <= b for a, b in zip(plan.received(units), full.received(units), strict=True))
        assert sum(plan.received(units)) < sum(full.received(units))
        # an operand comes where a product of its rank reads it, and nowhere else
        for rank, steps in enumerate(plan.ranks):
            reads = {u for step in steps for c in step.computes for u in (("q", c.q), ("kv", c.kv))}
            assert {m.unit for step in steps for m in step.moves if m.dst == rank} <= reads
        validate(overlapped(plan, meet, units), meet.pairs())


# ---- on ranks


def _config(shape):
    return SequenceParallelConfig(size=_ranks(*shape), ulysses=1, schedule="triangle", strips=shape[1])


def test_what_virtual_ranks_receive_is_the_closed_form():
    side, heads, dim, seq = 5, (4, 2), 8, 40
    found = attention(_config((side, 1)), *tensors(1, seq, heads, dim))
    chunk = seq // (2 * _ranks(side, 1))
    q, kv, row = chunk * heads[0] * dim, 2 * chunk * heads[1] * dim, chunk * heads[0]
    forward = _received(side, "forward", {"q": q, "kv": kv, "out": q + row})
    backward = _received(side, "backward", {"q": 2 * q + 2 * row, "kv": kv, "dq": q, "dkv": kv})
    assert [sum(one.values()) for one in found.received] == [a + b for a, b in zip(forward, backward, strict=True)]


def test_a_rank_makes_its_own_program_of_a_thousand_without_the_others():
    side, ranks = 32, _ranks(32, 1)
    recipe = Recipe(schedule=ITS, topology=shaped("triangle", ranks))
    shape = shape_of("bf16", "bfloat16", 1, (8, 8, 64))
    program = Compiler(recipe, 200).inner_program("forward", CAUSAL, EvenShards("pairs", 8 * ranks, ranks), shape)
    received = sum(len(t.unit[1]) for one in program.code for t in getattr(one, "receives", ()))
    assert received == _received(side, "forward", {"q": 1, "kv": 1, "out": 1})[200]


# ---- what is chosen, and refused


@pytest.mark.parametrize("heads", [(32, 32), (32, 8), (64, 8), (8, 1)], ids=str)
def test_auto_takes_the_strips_that_bring_the_fewest_elements(heads):
    for ranks in range(3, 130):
        if legal := [own["strips"] for own in ITS.shapes(ranks)]:
            least = {strips: _elements(ranks, strips, heads) for strips in legal}
            assert least[ITS.resolve(ranks, {}, heads)["strips"]] == min(least.values())


def _elements(ranks, strips, heads):
    """Of one dtype, without lse and delta: as meshes choose."""
    q, kv = heads
    ways = {"forward": {"q": q, "kv": 2 * kv, "out": q}, "backward": {"q": 2 * q, "kv": 2 * kv, "dq": q, "dkv": 2 * kv}}
    axes = tuple(ITS.axes(ranks, {"strips": strips}))
    return sum(max(ITS.received(axes, way, "kv", units)) for way, units in ways.items())


def test_shapes_are_1_2_4_or_8_times_a_triangle():
    sizes = [ranks for ranks in range(1, 61) if ITS.shapes(ranks)]
    assert sizes == [1, 3, 6, 10, 12, 15, 20, 21, 24, 28, 30, 36, 40, 42, 45, 48, 55, 56, 60]
    assert ITS.shapes(12) == [{"strips": 2}, {"strips": 4}]
    assert ITS.shapes(24) == [{"strips": 4}, {"strips": 8}]


def _resolved(size, heads=None, **settings):
    return SequenceParallelConfig(size=size, **{"ulysses": 1, "schedule": "triangle", **settings}).resolve(size, heads)


def test_layouts_go_with_their_strips():
    found = _resolved(120, (64, 8))
    assert (found.strips, found.layout) == (8, "pairs8")
    assert (_resolved(120, (64, 64)).strips, _resolved(120).layout) == (1, "pairs")
    assert _resolved(6, strips=2).layout == "pairs2"
    for size, layout, strips in ((6, "pairs", 1), (6, "pairs2", 2), (12, "pairs2", 2), (12, "pairs4", 4)):
        assert {_resolved(size, heads, layout=layout).strips for heads in (None, (32, 8), (32, 32))} == {strips}
    assert found.resolve(120, (64, 8)) == found
    assert _resolved(12, (8, 8), ulysses="auto").ulysses == 4


def _attended(shape=(3, 1), seq=12, **how):
    return attention(_config(shape), *tensors(1, seq, (4, 2), 8), **how)


HALVES = UnevenShards([[(2 * block, 1, 2)] for block in range(6)], blocks_per_rank=2)
REFUSED = [
    *((lambda size=size: _resolved(size), rf"got {size}\b") for size in (2, 4, 9)),
    (lambda: _resolved(7, (4, 4), ulysses="auto"), r"got 7\b"),
    (lambda: _resolved(13), r"got 13.*12 or 15"),
    (lambda: _resolved(6, strips=4), r"strips.*got 4"),
    (lambda: tiling(1008, 8), "got 1008"),
    (lambda: _resolved(6, schedule="auto", strips=2), 'strips.*"triangle"'),
    (lambda: _resolved(3, strips=1, layout="zigzag"), 'got "zigzag"'),
    (lambda: _resolved(3, schedule="auto", layout="pairs"), 'got "pairs"'),
    (lambda: _resolved(6, strips=2, layout="pairs"), r'got "pairs"(?!.*schedule)'),
    (lambda: build("triangle", shaped("triangle", 3), "forward", "q"), "got traveling q"),
    (lambda: _attended((4, 1), 24, mask=Mask(causal=False)), "queries of chunk"),
    (lambda: _attended((3, 2), 24, mask=Mask(causal=False, documents=(0, 11))), "queries of chunk"),
    (lambda: _attended(shards=UnevenShards([[(4 * n, 1, 4)] for n in range(3)])), r"got 1\b.*blocks_per_rank=2"),
    (
        lambda: attention(SequenceParallelConfig(size=3, ulysses=1), *tensors(1, 12, (4, 2), 8), shards=HALVES),
        r"got 2\b.*blocks_per_rank=1",
    ),
    (lambda: UnevenShards([[(n, 1, 1)] for n in range(3)], blocks_per_rank=2), "blocks_per_rank 2"),
    (lambda: UnevenShards([[(2, 1, 2)], [(0, 1, 2)]], blocks_per_rank=2), "in order"),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_does_not_fit_is_refused(call, said):
    with pytest.raises((ConfigError, InputError), match=said):
        call()
