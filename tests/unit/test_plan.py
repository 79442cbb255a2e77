"""Plans: every schedule builds right ones, that send what is needed and hold few operands.

test_validate.py breaks them. (diffusers#14265: forward right, gradients wrong.)
"""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.compiler.compile import Compiler, Recipe, block_mask_of
from ds_seqpar.core.compiler.program.shape import Shape
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, FULL
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.schedules.validate import validate
from tests import grids
from tests.grids import examples
from tests.unit.plans import (
    DIRECTIONS,
    FORMS,
    SINGLE,
    build,
    by_hand,
    causal_contiguous,
    everything,
    joint,
    mesh,
    problems,
    ring,
    topologies,
)

MESHES = [(2, 2, 1), (2, 1, 2), (1, 2, 2), (3, 2, 1), (2, 3, 2), (2, 2, 3), (4, 4, 1), (4, 1, 4), (1, 1, 5)]

_directions = pytest.mark.parametrize("direction", DIRECTIONS)
_forms = pytest.mark.parametrize(("schedule", "direction", "travels"), FORMS)


# ---- right plans


@_forms
@examples(20)
@given(data=st.data())
def test_every_schedule_builds_plans_that_validate(schedule, direction, travels, data):
    """The same ones again, which cannot be changed. Blocks of different lengths need no collectives."""
    topology, pairs = data.draw(problems(schedule, 16 if grids.quick else 64))
    plan, again = (build(schedule, topology, direction, travels, pairs) for _ in range(2))
    validate(plan, pairs)
    assert (plan, hash(plan)) == (again, hash(again))
    for thing in (plan, plan.ranks[0][0], *plan.ranks[0][0].actions):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, dataclasses.fields(thing)[0].name, None)
    uneven = build(schedule, topology, direction, travels, pairs, even=False)
    validate(uneven, pairs)
    assert not any(step.gathers or step.reduces for step in joint(uneven))


_sizes = st.fixed_dictionaries({kind: st.integers(1, 1000) for kind in ("q", "kv", "out", "dq", "dkv")})


@_directions
def test_a_plan_may_compute_more_than_is_needed(direction):
    validate(build("ring", ring(4), direction), causal_contiguous(4))


def test_a_plan_says_in_all_steps_of_all_ranks_what_its_ranks_do():
    for schedule in SCHEDULES:
        plan = build(schedule, topologies(schedule, 6)[-1], "backward")
        assert {len(steps) for steps in plan.ranks} == {len(plan.ranks[0])}
        # dealing out what stands once for all gives each rank the same again
        again = by_hand(plan.size, *joint(plan), direction="backward", name=schedule)
        for mine, theirs in zip(plan.ranks, again.ranks, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert sorted(map(str, a.actions)) == sorted(map(str, b.actions))


SHAPE = Shape(batch=1, q_heads=2, kv_heads=2, head_dim=8, dtype="bfloat16", comm_dtype="float32")


@pytest.mark.parametrize("schedule", SINGLE)
def test_one_program_is_made_for_the_same_settings_whatever_the_length(schedule):
    recipe = Recipe(schedule=SCHEDULES[schedule], topology=topologies(schedule, 4)[-1])
    compiler = Compiler(recipe, 1)
    shards = [EvenShards("contiguous", tokens, 4) for tokens in (16, 24)]
    bound = compiler.bound_inner("forward", CAUSAL, shards[0], SHAPE)
    assert compiler.bound_inner("forward", CAUSAL, shards[0], SHAPE) is bound
    longer = compiler.bound_inner("forward", CAUSAL, shards[1], SHAPE)
    assert longer is not bound
    assert longer.program is bound.program
    validate(recipe.plan("forward", block_mask_of(CAUSAL, shards[0]), SHAPE), causal_contiguous(4))


def test_the_mask_and_the_layout_say_which_products_are_needed():
    def products(layout, seq, mask):
        meet = block_mask_of(mask, EvenShards(layout, seq, 4))
        plan = build("ring", ring(4), "forward", pairs=meet.pairs())
        return {(c.q[0], c.kv[0]) for step in joint(plan) for c in step.computes}

    assert products("contiguous", 8, CAUSAL) == causal_contiguous(4)
    assert products("contiguous", 8, FULL) == everything(4)
    assert products("striped", 8, CAUSAL) == everything(4)
    assert products("striped", 4, CAUSAL) == causal_contiguous(4)  # one token a rank
    assert products("zigzag", 8, CAUSAL) == everything(4)


# pytorch#141429: non-causal attention, wrong under a load balancer made for causal masks
def test_distflash_refuses_what_it_cannot_balance():
    for pairs in (everything(4), everything(4) - {(0, 1)}, causal_contiguous(4) | {(1, 2)}):
        with pytest.raises(ConfigError, match=r"distflash.*causal.*block"):
            build("distflash", ring(4), "forward", "kv", pairs)
    with pytest.raises(ConfigError, match="got traveling q"):
        build("distflash", ring(4), "forward", "q")


def test_the_table_of_a_small_ring():
    assert build("ring", ring(2), "backward").table() == (
        "ring backward, 2 ranks\n"
        "step  rank 0                        rank 1\n"
        "0     q(0)*kv(0) kv(0)>1 kv(1)<1    q(1)*kv(1) kv(0)<0 kv(1)>0\n"
        "1     q(0)*kv(1) dkv(0)<1 dkv(1)>1  q(1)*kv(0) dkv(0)>0 dkv(1)<0"
    )


# ---- what nobody needs is not sent (test_schedule_bytes.py has the rest)


@examples(40)
@given(st.integers(1, 16), _sizes)
def test_a_causal_contiguous_ring_sends_no_block_to_a_rank_that_precedes_it(size, units):
    forward, backward = (
        build("ring", ring(size), direction, pairs=causal_contiguous(size)) for direction in DIRECTIONS
    )
    assert forward.received(units) == [rank * units["kv"] for rank in range(size)]
    # gradients of visitors go one rank less far than their keys, and come home where there were visitors
    gradients = [max(0, rank - 1) + (rank < size - 1) for rank in range(size)]
    assert backward.received(units) == [r * units["kv"] + gradients[r] * units["dkv"] for r in range(size)]


@_directions
@examples(40)
@given(problem=problems("ring", 16))
def test_a_ring_sends_never_more_than_the_full_one_and_only_towards_ranks_that_need_it(direction, problem):
    topology, pairs = problem
    plan = build("ring", topology, direction, pairs=pairs)
    units = {"kv": 2, "dkv": 3}
    full = build("ring", topology, direction).received(units)
    assert all(mine <= most for mine, most in zip(plan.received(units), full, strict=True))
    steps = joint(plan)
    for index, step in enumerate(steps):
        for move in step.moves:
            later = {c.q for after in steps[index + 1 :] for c in after.computes if c.kv == move.key}
            assert later, f"{move} in step {index} serves nobody"


# ---- operands are freed after their last use


def _last_uses(steps, rank):
    """For each step, the operands that `rank` does not use after it (its own blocks too)."""
    touched = [set() for _ in steps]
    for index, step in enumerate(steps):
        for move in step.moves:
            at = index if move.src == rank else min(index + move.within, len(steps)) - 1
            touched[at].add(move.unit)
        for compute in step.computes:
            touched[index] |= {("q", compute.q), ("kv", compute.kv)}
        for gather in step.gathers:
            touched[index] |= {(gather.kind, gather.key_of(rank)), (gather.kind, gather.blocks)}
    seen, frees = set(), []
    for units in reversed(touched):
        frees.append(units - seen)
        seen |= units
    return frees[::-1]


def _peak(plan, rank):
    """The most operands that `rank` holds at once, arrivals included; asserts that what it uses is there."""
    steps = plan.ranks[rank]
    held, peak, due = {("q", (rank,)), ("kv", (rank,))}, 0, {}
    for index, (step, frees) in enumerate(zip(steps, _last_uses(steps, rank), strict=True)):
        held |= {(gather.kind, gather.blocks) for gather in step.gathers}
        used = {(gather.kind, gather.key_of(rank)) for gather in step.gathers}
        used |= {unit for compute in step.computes for unit in (("q", compute.q), ("kv", compute.kv))}
        used |= {move.unit for move in step.moves if move.src == rank}
        assert used <= held, f"rank {rank} uses what it freed: {used - held}"
        for move in step.moves:
            if move.dst == rank:
                due.setdefault(index + move.within - 1, set()).add(move.unit)
        peak = max(peak, len(held.union(*due.values())))
        held |= due.pop(index, set())
        assert frees <= held
        held -= frees
    assert not held, f"rank {rank} never frees {held}"
    return peak


# ring-flash-attention#23: memory that grows with the ring
@pytest.mark.parametrize("travels", ["kv", "q"])
@_directions
def test_few_operands_are_held_at_once(direction, travels):
    for size in range(1, 17):
        # own q, own kv, the visitor and the next one
        for plan in (build("ring", ring(size), direction, travels), build("distflash", ring(size), direction)):
            assert max(_peak(plan, rank) for rank in range(size)) <= 4
    for a, b, r in MESHES:
        plan = build("mesh", mesh(a, b, r), direction, travels)
        # own q and kv, gathered q and kv, and where one of them goes round, the next one
        assert max(_peak(plan, rank) for rank in range(plan.size)) <= (4 if r == 1 else 5)
