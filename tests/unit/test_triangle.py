"""The triangle: every causal product once, equal work, the bytes of the closed form; equal to dense attention."""

import functools
import itertools
import random
from collections import Counter

import pytest
import torch

from ds_seqpar.compiler.balance import shards_of
from ds_seqpar.compiler.compile import PROBE, Compiler, Recipe, pattern_of
from ds_seqpar.compiler.layout import multiple
from ds_seqpar.compiler.masks import CAUSAL, Mask
from ds_seqpar.compiler.overlap import overlapped
from ds_seqpar.compiler.schedules import SCHEDULES
from ds_seqpar.compiler.schedules.triangle.tiling import tiling
from ds_seqpar.compiler.shape import shape_of
from ds_seqpar.compiler.shards import EvenShards, UnevenShards, positions
from ds_seqpar.compiler.validate import validate
from ds_seqpar.config import SequenceParallelConfig
from ds_seqpar.errors import ConfigError, InputError
from ds_seqpar.testing import attention
from tests.grids import each_then_rest, grouped, whole
from tests.oracle import dense, errors, spreads, tensors
from tests.unit.plans import DIRECTIONS, build, built, joint, pattern, shaped
from tests.unit.test_schedule_bytes import UNITS

ITS = SCHEDULES["triangle"]
SIDES = each_then_rest(range(3, 11), range(11, 25))  # T
LARGE = 12  # from which on whole plans take long


def _ranks(side):
    return side * (side - 1) // 2


PAIRS = [(i, j) for i in range(33) for j in range(i)]


def _pair(rank):
    """(i, j), counted up."""
    return PAIRS[rank]


def _place(side):
    """Block of the plan -> which of the sequence's chunks it is."""
    ranks = _ranks(side)
    return {2 * rank + part: chunk for rank in range(ranks) for part, chunk in enumerate(tiling(ranks, 1).owned[rank])}


@functools.lru_cache(maxsize=2)
def _causal(side):
    place = _place(side)
    rows = [sum(1 << kv for kv, at in place.items() if at <= place[q]) for q in range(len(place))]
    return pattern(len(rows), ((q, kv) for q, row in enumerate(rows) for kv in range(len(rows)) if row >> kv & 1))


def _steps(side, direction, meet=None):
    return ITS.build(shaped("triangle", _ranks(side)), meet or _causal(side), direction, "kv")


def _plan(side, direction, meet=None):
    return built("triangle", shaped("triangle", _ranks(side)), direction, "kv", meet or _causal(side))


# ---- who owns what


@pytest.mark.parametrize("side", range(2, 25))
def test_a_block_is_owned_by_its_row_early_and_by_its_column_late(side):
    owners = {}
    for rank in range(_ranks(side)):
        (i, j), (late, early) = _pair(rank), tiling(_ranks(side), 1).owned[rank]
        assert late // (side - 1) == j
        assert late % (side - 1) >= j
        assert early // (side - 1) == i
        assert early % (side - 1) < i
        owners |= {late: rank, early: rank}
    assert sorted(owners) == list(range(side * (side - 1)))


def test_the_layout_holds_every_position_once_in_order_of_the_plans_blocks():
    for side, ulysses, times in itertools.product((2, 3, 4, 7), (1, 2, 3), (1, 3)):
        size = _ranks(side) * ulysses
        seq = times * multiple("pairs", size, ulysses)
        held = [positions("pairs", seq, size, ulysses, rank) for rank in range(size)]
        assert sorted(itertools.chain(*held)) == list(range(seq))
        assert {len(x) for x in held} == {seq // size}
        shards = EvenShards("pairs", seq, _ranks(side))
        for block, chunk in _place(side).items():
            ((start, step, length),) = shards.runs("q", (block,))
            assert (start, step) == (chunk * length, 1)
            assert length == shards.tokens("kv", (block,)) == seq // (2 * _ranks(side))


def test_any_number_of_tokens_is_dealt_in_chunks_that_differ_by_one_at_most():
    for side, tokens in itertools.product((2, 3, 5), (1, 7, 40, 83)):
        shards = shards_of("pairs", (tokens,), _ranks(side))
        assert (shards.size, shards.parts) == (_ranks(side), 2)
        lengths = [shards.tokens("q", (block,)) for block in range(2 * shards.size)]
        assert sum(lengths) == tokens
        assert max(lengths) - min(lengths) <= 1


# ---- what is computed


@pytest.mark.parametrize("side", SIDES)
def test_every_causal_product_is_computed_once_and_all_ranks_have_as_much_to_do(side):
    steps, seen, place = _steps(side, "forward"), Counter(), _place(side)
    for rank in range(_ranks(side)):
        mine = [(c.q[0], c.kv[0]) for step in steps(rank) for c in step.computes]
        seen.update(mine)
        # half of a chunk with itself is seen, and no rank has more than another: a balance of 1.00 exactly
        assert sum(0.5 if q == kv else 1 for q, kv in mine) == side * (side - 1)
    assert set(seen) == {(q, kv) for q in place for kv in place if place[kv] <= place[q]}
    assert set(seen.values()) == {1}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("side", each_then_rest([2, 3, 5], [4, 6, 7, 8]))
def test_its_plans_are_right_also_overlapped_and_as_many_bytes_are_received(side, direction):
    plan, meet = _plan(side, direction), _causal(side)
    validate(plan, meet.pairs())
    better = overlapped(plan, meet, shape_of("bf16", "bfloat16", 1, (4, 2, 64)).bytes_per_token(direction))
    validate(better, meet.pairs())
    units = UNITS[direction]
    assert better.received(units) == plan.received(units) == _received(side, direction, units)
    # one hop of a chunk a step and rank, on each way that it is on
    for step in joint(plan):
        for kind in units:
            assert max(Counter(m.dst for m in (*step.moves, *step.results) if m.kind == kind).values(), default=0) <= 2


def test_steps_have_nearly_as_many_products_each():
    for side in (6, 8, 12):
        for rank in (0, _ranks(side) // 2, _ranks(side) - 1):
            counts = [len(step.computes) for step in _steps(side, "forward")(rank)]
            assert len(counts) == 4 * side - 7
            # its tile, and of the diagonal T - 1 full products, of which two halves may be one
            assert sum(counts) == (side - 1) ** 2 + side
            assert max(counts) <= side // 4 + 2


# ---- what is received


def _received(side, direction, units):
    """Written out: T - 2 chunks of each operand. Results: of the T - 1 chunks of its row all but those whose result it
    is the first to have, and one that comes home from the row of its other block; in backward the same of columns."""
    kinds = {"q": "out"} if direction == "forward" else {"q": "dq", "kv": "dkv"}
    found = [(side - 2) * (units["q"] + units["kv"]) for _ in range(_ranks(side))]
    for rank in range(_ranks(side)):
        i, j = _pair(rank)
        for line, members, number, comes_home in (("q", i, j, j > 0), ("kv", side - 1 - j, i - j - 1, i < side - 1)):
            if line in kinds:
                if line == "kv":  # members of a column stand in the order of their chunks, the last row first
                    number = members - 1 - number
                before = (number - 1) % members  # the member whose chunk starts before
                at, at_before = (n * (side - 1) // members for n in (number, before))
                first = (at - at_before) % (side - 1) or (side - 1)
                found[rank] += (side - 1 - first + comes_home) * units[kinds[line]]
    return found


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("side", SIDES)
def test_every_rank_receives_what_the_closed_form_says(side, direction):
    units, axes = UNITS[direction], (("pair", _ranks(side)),)
    wanted = _received(side, direction, units)
    assert ITS.received(axes, direction, "kv", units) == wanted
    steps = _steps(side, direction)
    assert steps.received(units) == wanted
    if side <= LARGE:
        assert _plan(side, direction).received(units) == wanted


MHA = {"forward": {"q": 0.5, "kv": 1, "out": 0.5}, "backward": {"q": 1, "kv": 1, "dq": 0.5, "dkv": 1}}  # of q, bf16


@pytest.mark.parametrize("side", range(3, 25))
def test_bytes_follow_the_causal_floor(side):
    received = ITS.received((("pair", _ranks(side)),), "forward", "kv", MHA["forward"])
    assert max(received) <= 2 * side - 3.5
    assert sum(received) / len(received) == pytest.approx(2 * side - 4)
    assert min(received) >= 1.5 * (side - 2)


@pytest.mark.parametrize("side", range(5, 25))
def test_at_most_three_quarters_of_the_best_meshs_bytes(side):
    ranks = _ranks(side)
    whole = {kind: 2 * size for kind, size in MHA["forward"].items()}  # a mesh's block is all that a rank has
    meshes = [
        max(SCHEDULES["mesh"].received(tuple(SCHEDULES["mesh"].axes(ranks, own)), "forward", travels, whole))
        for own in SCHEDULES["mesh"].shapes(ranks)
        for travels in ("kv", "q")
    ]
    ours = max(ITS.received((("pair", ranks),), "forward", "kv", MHA["forward"]))
    assert ours <= 0.75 * min(meshes)


# ---- masks that only remove


def _masks(side):
    dice = random.Random(side)
    seq = 4 * 2 * _ranks(side)
    yield from (Mask(window=window) for window in (1, 5, seq // 3))
    starts = sorted({0, *(dice.randrange(1, seq) for _ in range(4))})
    yield Mask(documents=tuple(starts))
    yield Mask(window=seq // 5, documents=tuple(starts))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("side", [3, 4, 6])
def test_what_a_mask_leaves_out_is_neither_computed_nor_sent(side, direction):
    whole = _plan(side, direction)
    for mask in _masks(side):
        meet = pattern_of(mask, EvenShards("pairs", 4 * 2 * _ranks(side), _ranks(side)))
        plan = _plan(side, direction, meet)
        validate(plan, meet.pairs())
        done = [(c.q[0], c.kv[0]) for step in joint(plan) for c in step.computes]
        assert sorted(done) == sorted(meet.pairs())
        units = UNITS[direction]
        assert all(a <= b for a, b in zip(plan.received(units), whole.received(units), strict=True))
        assert sum(plan.received(units)) < sum(whole.received(units))
        # an operand comes where a product of its rank reads it, and nowhere else
        for rank, steps in enumerate(plan.ranks):
            reads = {u for step in steps for c in step.computes for u in (("q", c.q), ("kv", c.kv))}
            assert {m.unit for step in steps for m in step.moves if m.dst == rank} <= reads
        better = overlapped(plan, meet, units)
        validate(better, meet.pairs())


# ---- tensors


def _found(config, inputs, **how):
    found = attention(config, *inputs, **how)
    return found.out, found.dq, found.dk, found.dv


def _config(side, ulysses=1, **options):
    """Of square tiles."""
    size = _ranks(side) * ulysses
    return SequenceParallelConfig(size=size, ulysses=ulysses, schedule="triangle", strips=1, **options)


@functools.lru_cache(maxsize=8)
def _problem(seq, heads):
    inputs = tensors(1, seq, heads, 8)
    return inputs, dense(*inputs)


GRID = {
    "side": (2, 3, 4, 5, 6, 7, 8),
    "ulysses": (1, 2),
    "heads": ((4, 4), (4, 2), (4, 1)),
    "overlap": (False, True),
}


LONG = [
    pytest.param(whole(**{**GRID, "side": (side,)}), id=f"side_{side}", marks=pytest.mark.whole)
    for side in GRID["side"]
    if side > 4
]


@pytest.mark.parametrize("cases", [*grouped(("side",), **{**GRID, "side": (2, 3, 4)}), *LONG])
def test_it_equals_dense_attention(cases):
    compilers = {}
    for case in cases:
        config = _config(case["side"], case["ulysses"], overlap=case["overlap"])
        inputs, wanted = _problem(2 * multiple("pairs", config.size, config.ulysses), case["heads"])
        assert max(errors(_found(config, inputs, compilers=compilers), wanted)) <= 1e-10, case


def test_tiles_of_long_chunks_grow_with_them():
    for side, length in ((3, PROBE + 1), (4, 2 * PROBE + 3)):
        inputs = tensors(2, 2 * _ranks(side) * length, (4, 2), 8)
        assert max(errors(_found(_config(side), inputs), dense(*inputs))) <= 1e-10


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("side", [4, pytest.param(6, marks=pytest.mark.whole)])
def test_partial_results_that_travel_in_bf16_cost_their_rounding_only(side, heads, overlap):
    inputs = tensors(1, 8 * _ranks(side), heads, 32, torch.bfloat16)
    wanted = dense(*inputs)
    wide, narrow = (
        spreads(_found(_config(side, overlap=overlap, travel_dtype=travel), inputs), wanted)
        for travel in ("fp32", "bf16")
    )
    assert max(wide) < 0.01
    # each of T - 1 partial results at most is rounded once a hop, to 8 bits
    assert all(b <= a + (side - 1) * 2**-9 for a, b in zip(wide, narrow, strict=True))


@pytest.mark.parametrize("side", [3, 4])
def test_with_masks_it_equals_dense_attention(side):
    inputs = tensors(1, 4 * 2 * _ranks(side), (4, 2), 8)
    for mask, overlap in itertools.product(_masks(side), (False, True)):
        found = _found(_config(side, overlap=overlap), inputs, mask=mask)
        assert not any(x.isnan().any() for x in found)
        wanted = dense(*inputs, mask=mask)
        for a, b in zip(found, wanted, strict=True):  # a window of 1 leaves dq and dk nothing
            assert (a - b).abs().max() <= 1e-10 * max(1, b.abs().max()), mask


def test_sequences_of_any_length_are_exact():
    for side, seq, ulysses in itertools.product((3, 4), (1, 5, 29, 50), (1, 2)):
        inputs = tensors(1, seq, (4, 2), 8)
        found = _found(_config(side, ulysses), inputs, shards=shards_of("pairs", (seq,), _ranks(side)))
        for a, b in zip(found, dense(*inputs), strict=True):
            assert (a - b).abs().max() <= 1e-10 * max(1, b.abs().max()), (side, seq, ulysses)


def test_what_virtual_ranks_receive_is_the_closed_form():
    side, heads, dim, seq = 5, (4, 2), 8, 40
    found = attention(_config(side), *tensors(1, seq, heads, dim))
    chunk = seq // (2 * _ranks(side))
    q, kv, row = chunk * heads[0] * dim, 2 * chunk * heads[1] * dim, chunk * heads[0]
    forward = _received(side, "forward", {"q": q, "kv": kv, "out": q + row})
    backward = _received(side, "backward", {"q": 2 * q + 2 * row, "kv": kv, "dq": q, "dkv": kv})
    assert [sum(one.values()) for one in found.received] == [a + b for a, b in zip(forward, backward, strict=True)]


def test_a_rank_makes_its_own_program_of_a_thousand_without_the_others():
    side = 32
    recipe = Recipe(schedule=ITS, topology=shaped("triangle", _ranks(side)))
    shards = EvenShards("pairs", 4 * 2 * _ranks(side), _ranks(side))
    shape = shape_of("bf16", "bfloat16", 1, (8, 8, 64))
    program = Compiler(recipe, 200).program("forward", CAUSAL, shards, shape)
    received = sum(len(t.unit[1]) for one in program.code for t in getattr(one, "receives", ()))
    assert received == _received(side, "forward", {"q": 1, "kv": 1, "out": 1})[200]


# ---- refusals


def test_full_attention_is_refused_in_a_sentence():
    inputs = tensors(1, 24, (4, 2), 8)
    for mask in (Mask(causal=False), Mask(causal=False, documents=(0, 11))):
        with pytest.raises(ConfigError, match=r"triangle.*causal.*queries of chunk") as caught:
            attention(_config(4), *inputs, mask=mask)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="got travelling q"):
        build("triangle", shaped("triangle", 3), "forward", "q")


def test_other_numbers_of_ranks_layouts_and_shards_are_refused():
    for size in (2, 4, 5, 7, 8, 9):
        with pytest.raises(ConfigError, match=rf"triangle.*inner ranks.*got {size}\b"):
            SequenceParallelConfig(size=size, ulysses=1, schedule="triangle").resolve(size)
    assert SequenceParallelConfig(size=12, schedule="triangle").resolve(12, heads=(8, 8)).ulysses == 4
    with pytest.raises(ConfigError, match=r"triangle.*inner ranks.*got 7\b"):
        SequenceParallelConfig(size=7, schedule="triangle").resolve(7, heads=(4, 4))
    with pytest.raises(ConfigError, match=r'layout.*"pairs".*"triangle".*got "zigzag"'):
        _config(3, layout="zigzag").resolve(3)
    with pytest.raises(ConfigError, match=r'layout.*got "pairs".*"triangle"'):
        SequenceParallelConfig(size=3, layout="pairs").resolve(3)
    inputs = tensors(1, 12, (4, 2), 8)
    whole = UnevenShards([[(4 * rank, 1, 4)] for rank in range(3)])
    with pytest.raises(InputError, match=r"2 blocks.*got 1\b.*parts=2"):
        attention(_config(3), *inputs, shards=whole)
    halves = UnevenShards([[(2 * block, 1, 2)] for block in range(6)], parts=2)
    with pytest.raises(InputError, match=r"1 block\b.*got 2\b.*parts=1"):
        attention(SequenceParallelConfig(size=3, ulysses=1), *inputs, shards=halves)
    with pytest.raises(InputError, match=r"blocks.*got 3, parts 2"):
        UnevenShards([[(0, 1, 1)], [(1, 1, 1)], [(2, 1, 1)]], parts=2)
    with pytest.raises(InputError, match=r"runs of q.*in order"):
        UnevenShards([[(2, 1, 2)], [(0, 1, 2)]], parts=2)


def _work(own, q, kv):
    """Products of chunks that a rank can do, a chunk with itself counting half, of what it owns and receives."""
    return sum((m > n) + (m == n) / 2 for m in {*own, *q} for n in {*own, *kv})


def test_no_rank_can_do_its_share_with_fewer_chunks_than_the_triangles():
    """All choices of the two chunks that a rank owns and of those that it receives, for T = 3; and for T = 4 of those
    that see most: where chunks are as good as they can be, queries are the last and keys the first."""
    chunks = range(6)
    for own in itertools.combinations(chunks, 2):
        for received in range(2):
            for a in range(received + 1):
                for q in itertools.combinations(chunks, a):
                    for kv in itertools.combinations(chunks, received - a):
                        assert _work(own, q, kv) < 3 * 2
    most = {side: max((a + 2) * (2 * side - 5 - a + 2) - 2 for a in range(2 * side - 4)) for side in range(3, 25)}
    assert all(most[side] < side * (side - 1) for side in most)
    chunks = range(4 * 3)
    best = max(
        _work(own, chunks[len(chunks) - a :], chunks[: 3 - a])
        for a in range(4)
        for own in itertools.combinations(chunks, 2)
    )
    assert 0 < best <= most[4]
