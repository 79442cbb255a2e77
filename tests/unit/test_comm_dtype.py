"""What "auto" lets travel: by what a mask really needs, not by whole blocks; and which way round queries go."""

import functools
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_seqpar.core.compiler.compile import Recipe, block_mask_of
from ds_seqpar.core.compiler.program.shape import Shape
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.schedules.plan import Counted
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, FULL, Mask
from ds_seqpar.core.compiler.sharding.shards import EvenShards, UnevenShards
from ds_seqpar.data.balance import balanced
from tests.grids import each_then_rest, examples
from tests.unit import toy_schedule
from tests.unit.plans import DIRECTIONS, FORMS, block_mask, built, joint, problems, ranks, ring, topologies, topology

# of each kind another, so that two sums are equal only where all their terms are
UNITS = {kind: 1000**power for power, kind in enumerate(("q", "kv", "out", "dq", "dkv"))}
BOTH = [(name, direction) for name in SCHEDULES for direction in DIRECTIONS if len(SCHEDULES[name].moving_sides) > 1]


# ---- counted, as the whole plan has it


@pytest.mark.parametrize("form", [form for form in FORMS if len(SCHEDULES[form[0]].moving_sides) > 1], ids=str)
@examples(60)
@given(data=st.data())
def test_what_is_counted_without_steps_is_what_the_plan_receives(form, data):
    schedule, direction, travels = form
    shape, pairs = data.draw(problems(schedule, 12))
    meet = block_mask(ranks(shape), pairs, even=data.draw(st.booleans()))
    steps = SCHEDULES[schedule].build(shape, meet, direction, travels)
    assert isinstance(steps, Counted)
    assert steps.received(UNITS) == built(schedule, shape, direction, travels, meet).received(UNITS)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_schedule_of_ones_own_that_rotates_is_counted_too(direction):
    for travels, (seats, cars) in itertools.product(("kv", "q"), ((1, 4), (2, 3), (3, 2), (4, 1))):
        size = seats * cars
        meet = block_mask(size, {(i, j) for i in range(size) for j in range(size) if (i * j) % 3 != 1 or i == j})
        steps = toy_schedule.carousel(topology(("seat", seats), ("car", cars)), meet, direction, travels)
        plan = [steps(rank) for rank in range(size)]
        received = [
            sum(UNITS[m.kind] * len(m.key) for s in mine for m in (*s.moves, *s.results) if m.dst == rank)
            + sum(UNITS[g.kind] * (seats - 1) for s in mine for g in (*s.gathers, *s.reduces))
            for rank, mine in enumerate(plan)
        ]
        assert steps.received(UNITS) == received


# ---- "auto" is never worse than either


def _shape(heads):
    return Shape(batch=1, q_heads=heads[0], kv_heads=heads[1], head_dim=128, dtype="bfloat16", comm_dtype="float32")


def _lengths(dice, tokens):
    """A long-tailed pack."""
    drawn = [dice.lognormvariate(0, 1) for _ in range(dice.randint(2, 40))]
    lengths = [1 + int(tokens * x / sum(drawn)) for x in drawn[1:]]
    return [tokens - sum(lengths), *lengths] if sum(lengths) < tokens else lengths


@functools.cache
def _patterns(size):
    """Name -> what meets under windows and packs, contiguous, zigzag and dealt evenly."""
    tokens, dice = 64 * size, random.Random(size)
    even = {layout: EvenShards(layout, tokens, size) for layout in ("contiguous", "zigzag")}
    found = {
        (f"window {window}", layout): block_mask_of(Mask(window=window), shards)
        for window in (2, 64, 65, 200, 64 * size // 3)
        for layout, shards in even.items()
    }
    for number in range(6):
        lengths = _lengths(dice, tokens)
        mask = Mask(documents=Mask.documents_of(lengths))
        near = Mask(documents=mask.documents, window=dice.randint(1, tokens))
        if sum(lengths) == tokens:
            found |= {(number, layout): block_mask_of(mask, shards) for layout, shards in even.items()}
        found[number, "balanced"] = block_mask_of(mask, UnevenShards(balanced(lengths, size)))
        found[number, "balanced, window"] = block_mask_of(near, UnevenShards(balanced(lengths, size)))
    return found


@pytest.mark.parametrize("size", each_then_rest([4, 8], [16]))
@pytest.mark.parametrize(("schedule", "direction"), BOTH)
def test_auto_makes_the_busiest_rank_receive_no_more_than_either_side_would(schedule, direction, size):
    unlike = 0
    for shape, (name, meet) in itertools.product(topologies(schedule, size)[:: 1 + size // 8], _patterns(size).items()):
        plans = {side: built(schedule, shape, direction, side, meet) for side in ("kv", "q")}
        for heads in ((8, 8), (8, 2)):
            sizes = _shape(heads).bytes_per_token(direction)
            travels = Recipe(schedule=SCHEDULES[schedule], topology=shape).moving_side(direction, meet, sizes)
            most = {side: max(plan.received(sizes)) for side, plan in plans.items()}
            assert most[travels] == min(most.values()), (name, shape, heads, most)
            unlike += most["kv"] != most["q"]
    assert unlike or schedule not in ("ring", "double_ring")  # on grids both sides may come to the same in every shape


def test_where_all_meet_nothing_is_counted(monkeypatch):
    def refused(*args):
        raise AssertionError("steps were built to choose what travels")

    for (schedule, direction), layout in itertools.product(BOTH, ("contiguous", "zigzag")):
        for shape, mask in itertools.product(topologies(schedule, 8), (CAUSAL, FULL)):
            recipe = Recipe(schedule=SCHEDULES[schedule], topology=shape)
            sizes = _shape((8, 8)).bytes_per_token(direction)
            meet = block_mask_of(mask, EvenShards(layout, 1024, 8))
            assert meet.plain
            with monkeypatch.context() as patch:
                patch.setattr("ds_seqpar.core.compiler.compile._cheapest_side", refused)
                assert recipe.moving_side(direction, meet, sizes) in ("kv", "q")
    assert not block_mask_of(Mask(window=64), EvenShards("contiguous", 1024, 8)).plain


# ---- the way round


def test_queries_go_to_the_ranks_before_theirs_and_no_further_than_their_window():
    meet = block_mask_of(Mask(window=64), EvenShards("contiguous", 64 * 16, 16))
    plan = built("ring", ring(16), "backward", "q", meet)
    moves = [move for step in joint(plan) for move in step.moves]
    assert sorted((move.src, move.dst) for move in moves) == [(rank, rank - 1) for rank in range(1, 16)]
    sizes = _shape((8, 8)).bytes_per_token("backward")
    # one block of queries, and one of their gradients from the rank that they went to
    assert max(plan.received(sizes)) == sizes["q"] + sizes["dq"]


def test_queries_of_a_causal_ring_go_to_the_first_rank_and_stop():
    meet = block_mask_of(CAUSAL, EvenShards("contiguous", 1024, 8))
    plan = built("ring", ring(8), "backward", "q", meet)
    received = plan.received({"q": 1, "kv": 0, "dq": 0, "dkv": 0})
    assert received == [7 - rank for rank in range(8)]
