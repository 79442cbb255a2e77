"""Plans: every schedule builds right ones, and the validator rejects each way in which a plan can be wrong.

A plan that passes the validator neither hangs nor computes something else, so the validator is tested by breaking good
plans in every place. (ring-flash-attention#39: requests that do not match collectives; pytorch#174288, nccl#1967:
batched sends and receives that hang; diffusers#14265: forward right, gradients wrong.)
"""

import dataclasses
import itertools
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_seqpar import schedules
from ds_seqpar.errors import PlanError
from ds_seqpar.plan import Collective, Compute, Gather, Move, Plan, ReduceScatter, Step, last_uses, validate
from ds_seqpar.schedules import SCHEDULES
from tests.unit.mesh import mesh
from tests.unit.plans import added, build, causal_contiguous, changed, everything, places, replaced, topology

DIRECTIONS = ("forward", "backward")
MESHES = [(2, 2, 1), (2, 1, 2), (1, 2, 2), (3, 2, 1), (2, 3, 2), (2, 2, 3), (4, 4, 1), (4, 1, 4), (1, 1, 5)]


def _mesh_plan(shape, direction):
    return build(mesh(*shape), shape[0] * shape[1] * shape[2], direction)


# (name, builder, size): what the systematic mutations start from
PLANS = [("ring", SCHEDULES["ring"], 4), ("mesh 2x2x1", mesh(2, 2, 1), 4), ("mesh 2x2x2", mesh(2, 2, 2), 8)]
_plans = pytest.mark.parametrize(("builder", "size"), [plan[1:] for plan in PLANS], ids=[plan[0] for plan in PLANS])
_directions = pytest.mark.parametrize("direction", DIRECTIONS)
_schedules = pytest.mark.parametrize("schedule", SCHEDULES)


@st.composite
def _relations(draw, most):
    """(size, pairs): which products are needed; always the diagonal, for every query sees its own key."""
    size = draw(st.integers(1, most))
    kind = draw(st.sampled_from(["random", "random", "all", "causal contiguous", "diagonal"]))
    if kind == "all":
        return size, everything(size)
    if kind == "causal contiguous":
        return size, causal_contiguous(size)
    density = draw(st.floats(0, 1)) if kind == "random" else 0
    dice = random.Random(draw(st.integers(0, 2**32)))
    return size, frozenset((i, j) for i, j in sorted(everything(size)) if i == j or dice.random() < density)


# ---- right plans


@_directions
@_schedules
@settings(max_examples=50)
@given(relation=_relations(64))
def test_every_schedule_builds_plans_that_validate(schedule, direction, relation):
    size, pairs = relation
    validate(build(SCHEDULES[schedule], size, direction, pairs), pairs)


@_directions
@_schedules
@settings(max_examples=30)
@given(relation=_relations(24))
def test_builders_are_pure_and_plans_are_frozen(schedule, direction, relation):
    size, pairs = relation
    plan = build(SCHEDULES[schedule], size, direction, pairs)
    again = build(SCHEDULES[schedule], size, direction, pairs)
    assert plan == again
    assert hash(plan) == hash(again)
    for thing in (plan, plan.steps[0], *plan.steps[0].actions):
        field = dataclasses.fields(thing)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, None)


@_directions
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_gathered_and_reduced_groups_validate(shape, direction):
    size = shape[0] * shape[1] * shape[2]
    validate(_mesh_plan(shape, direction), everything(size))


@_directions
def test_a_plan_may_compute_more_than_is_needed(direction):
    validate(build(SCHEDULES["ring"], 4, direction), causal_contiguous(4))


@_schedules
def test_build_gives_one_validated_plan_for_the_same_settings(schedule):
    plan = schedules.build(schedule, topology(4), "zigzag", 16, True, "forward")
    assert schedules.build(schedule, topology(4), "zigzag", 16, True, "forward") is plan
    validate(plan, everything(4))


def test_build_asks_the_layout_which_products_are_needed():
    def products(layout, seq, causal):
        plan = schedules.build("ring", topology(4), layout, seq, causal, "forward")
        return {(c.q[0], c.kv[0]) for step in plan.steps for c in step.computes}

    assert products("contiguous", 8, True) == causal_contiguous(4)
    assert products("contiguous", 8, False) == everything(4)
    assert products("striped", 8, True) == everything(4)
    assert products("striped", 4, True) == causal_contiguous(4)  # one token a rank
    assert products("zigzag", 8, True) == everything(4)


def test_the_table_of_a_small_ring():
    assert build(SCHEDULES["ring"], 2, "backward").table() == (
        "ring backward, 2 ranks\n"
        "step  rank 0                        rank 1\n"
        "0     q(0)*kv(0) kv(0)>1 kv(1)<1    q(1)*kv(1) kv(0)<0 kv(1)>0\n"
        "1     q(0)*kv(1) dkv(0)<1 dkv(1)>1  q(1)*kv(0) dkv(0)>0 dkv(1)<0"
    )


# ---- bytes


_units = st.fixed_dictionaries({kind: st.integers(1, 1000) for kind in ("q", "kv", "out", "dq", "dkv")})


@settings(max_examples=40)
@given(st.integers(1, 16), _units)
def test_a_full_ring_receives_what_the_papers_table_says(size, units):
    forward, backward = (build(SCHEDULES["ring"], size, direction) for direction in DIRECTIONS)
    assert forward.received(units) == [(size - 1) * units["kv"]] * size
    assert backward.received(units) == [(size - 1) * (units["kv"] + units["dkv"])] * size


@settings(max_examples=40)
@given(st.integers(1, 16), _units)
def test_a_causal_contiguous_ring_sends_no_block_to_a_rank_that_precedes_it(size, units):
    forward, backward = (build(SCHEDULES["ring"], size, direction, causal_contiguous(size)) for direction in DIRECTIONS)
    assert forward.received(units) == [rank * units["kv"] for rank in range(size)]
    # gradients of visitors go one rank less far than their keys, and come home where there were visitors
    gradients = [max(0, rank - 1) + (rank < size - 1) for rank in range(size)]
    assert backward.received(units) == [r * units["kv"] + gradients[r] * units["dkv"] for r in range(size)]


@_directions
@given(relation=_relations(16))
def test_a_ring_sends_never_more_than_the_full_one_and_only_towards_ranks_that_need_it(direction, relation):
    size, pairs = relation
    plan = build(SCHEDULES["ring"], size, direction, pairs)
    units = {"kv": 2, "dkv": 3}
    full = build(SCHEDULES["ring"], size, direction).received(units)
    assert all(mine <= most for mine, most in zip(plan.received(units), full, strict=True))
    for index, step in enumerate(plan.steps):
        for move in step.moves:
            later = {c.q for after in plan.steps[index + 1 :] for c in after.computes if c.kv == move.key}
            assert later, f"{move} in step {index} serves nobody"


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_a_mesh_receives_what_the_papers_table_says(shape):
    a, b, rounds = shape
    size = a * b * rounds
    units = {"q": 3, "kv": 5, "out": 7, "dq": 11, "dkv": 13}
    visits = size // a - 1
    forward, backward = (_mesh_plan(shape, direction) for direction in DIRECTIONS)
    assert forward.received(units) == [(a - 1) * (3 + 7) + visits * 5] * size
    assert backward.received(units) == [(a - 1) * (3 + 11) + visits * (5 + 13)] * size


# ---- operands are freed after their last use


def _peak(plan, rank):
    """The most operands that `rank` holds at once, arrivals included; asserts that what it uses is there."""
    program = plan.program(rank)
    held, peak = {("q", (rank,)), ("kv", (rank,))}, 0
    for step, frees in zip(program, last_uses(program, rank), strict=True):
        held |= {(gather.kind, gather.whole) for gather in step.gathers}
        used = {(gather.kind, gather.part(rank)) for gather in step.gathers}
        used |= {unit for compute in step.computes for unit in (("q", compute.q), ("kv", compute.kv))}
        used |= {move.unit for move in step.moves if move.src == rank}
        assert used <= held, f"rank {rank} uses what it freed: {used - held}"
        held |= {move.unit for move in step.moves if move.dst == rank}
        peak = max(peak, len(held))
        assert frees <= held
        held -= frees
    assert not held, f"rank {rank} never frees {held}"
    return peak


@_directions
@_schedules
@given(relation=_relations(16))
def test_a_freed_operand_is_never_used_again(schedule, direction, relation):
    size, pairs = relation
    plan = build(SCHEDULES[schedule], size, direction, pairs)
    for rank in range(size):
        assert _peak(plan, rank) >= 1


# ring-flash-attention#23: memory that grows with the ring
@_directions
def test_few_operands_are_held_at_once(direction):
    for size in range(1, 17):
        plan = build(SCHEDULES["ring"], size, direction)
        # own q, own kv, the visiting kv and the next one
        assert max(_peak(plan, rank) for rank in range(size)) <= 4
    for shape in MESHES:
        plan = _mesh_plan(shape, direction)
        # own q and kv, gathered q and kv, and where the gathered kv rotates, the next one
        assert max(_peak(plan, rank) for rank in range(plan.size)) <= (4 if shape[2] == 1 else 5)


# ---- broken plans


def _rejection(plan, pairs, programs=None):
    """The validator's sentence; it always names rank and step, and carries the table."""
    with pytest.raises(PlanError) as caught:
        validate(plan, pairs, programs)
    sentence, _, table = str(caught.value).partition("\n")
    assert re.match(r"rank -?\d+, step \d+: \S", sentence), sentence
    assert table == plan.table()
    return sentence


def _good(builder, size, direction):
    plan = build(builder, size, direction)
    validate(plan, everything(size))
    return plan


@_directions
@_plans
def test_a_dropped_action_is_noticed(builder, size, direction):
    plan = _good(builder, size, direction)
    for place in places(plan):
        sentence = _rejection(changed(plan, place), everything(size))
        action = place[3]
        if isinstance(action, Move) and place[1] == "results":
            assert re.search("is not home|is left over|which is not there", sentence)
        elif isinstance(action, Move | Gather):
            assert "which is not there" in sentence
        elif isinstance(action, ReduceScatter):
            assert "is not home" in sentence
        else:
            # the result that should travel may be missed before the product itself
            assert "is missing" in sentence or "which is not there" in sentence


@_directions
@_plans
def test_a_doubled_action_is_noticed(builder, size, direction):
    plan = _good(builder, size, direction)
    for place in places(plan):
        action = place[3]
        sentence = _rejection(changed(plan, place, action, action), everything(size))
        if isinstance(action, Compute):
            assert "a second time" in sentence
        elif isinstance(action, ReduceScatter) or place[1] == "results":
            assert "which is not there" in sentence
        else:
            assert "brings what is there already" in sentence


@_directions
def test_a_misdirected_move_is_noticed(direction):
    plan = _good(SCHEDULES["ring"], 4, direction)
    for place in places(plan):
        step, field, _, move = place
        if not isinstance(move, Move):
            continue
        for end, rank in itertools.product(("src", "dst"), range(-1, 5)):
            hops = (rank - move.key[0]) % 4  # from the block's owner to this rank, along the ring
            # a rank that the block has visited may still send it; a gradient may go straight home, or ahead to a rank
            # that sends it on later
            harmless = hops <= step if (field, end) == ("moves", "src") else field == "results" and end == "dst"
            harmless = harmless and (field == "moves" or hops == 0 or hops > step)
            broken = changed(plan, place, dataclasses.replace(move, **{end: rank}))
            if rank not in range(4) or rank in move.ranks or not harmless:
                if rank != getattr(move, end):
                    _rejection(broken, everything(4))
            else:
                validate(broken, everything(4))


@_directions
def test_a_misdirected_move_of_a_gathered_block_is_noticed(direction):
    plan = _good(mesh(2, 2, 2), 8, direction)
    for place in places(plan):
        if isinstance(place[3], Move):
            for rank in set(range(-1, 9)) - {place[3].dst}:
                broken = changed(plan, place, dataclasses.replace(place[3], dst=rank))
                if place[1] == "results" and rank in place[3].key:
                    validate(broken, everything(8))  # home by another member: the reduce-scatter adds it all the same
                else:
                    _rejection(broken, everything(8))


@_directions
@_plans
def test_a_product_on_the_wrong_rank_is_noticed(builder, size, direction):
    plan = _good(builder, size, direction)
    for place in places(plan):
        if isinstance(place[3], Compute):
            for rank in set(range(-1, size + 1)) - {place[3].rank}:
                _rejection(changed(plan, place, dataclasses.replace(place[3], rank=rank)), everything(size))


@_directions
@_plans
def test_another_block_in_an_action_is_noticed(builder, size, direction):
    plan = _good(builder, size, direction)
    for place in places(plan):
        for field in ("q", "kv", "key"):
            old = getattr(place[3], field, None)
            for block in range(size):
                if old and (block,) != old:
                    _rejection(
                        changed(plan, place, dataclasses.replace(place[3], **{field: (block,)})), everything(size)
                    )


@_directions
@_plans
def test_another_kind_in_an_action_is_noticed(builder, size, direction):
    plan = _good(builder, size, direction)
    for place in places(plan):
        for kind in {"q", "kv", "out", "dq", "dkv"} - {getattr(place[3], "kind", None)}:
            if isinstance(place[3], Move | Collective):
                _rejection(changed(plan, place, dataclasses.replace(place[3], kind=kind)), everything(size))


@_directions
@_plans
def test_a_move_that_comes_a_step_late_or_early_is_noticed(builder, size, direction):
    plan = _good(builder, size, direction)
    for place in places(plan):
        number, field, _, action = place
        for other in {number - 1, number + 1} & set(range(len(plan.steps))):
            if isinstance(action, Move):
                steps = added(replaced(plan.steps, place), other, field, action)
                _rejection(dataclasses.replace(plan, steps=steps), everything(size))


@_directions
@_plans
def test_parts_of_a_collective_in_another_order_or_a_member_less_are_noticed(builder, size, direction):
    plan = _good(builder, size, direction)
    for place in places(plan):
        action = place[3]
        if isinstance(action, Collective):
            turned = dataclasses.replace(action, parts=(*action.parts[1:], action.parts[0]))
            _rejection(changed(plan, place, turned), everything(size))
            fewer = dataclasses.replace(action, ranks=action.ranks[1:], parts=action.parts[1:])
            _rejection(changed(plan, place, fewer), everything(size))


def _programs(plan, rank, change):
    """All programs, `change`d on one rank."""
    programs = [plan.program(r) for r in range(plan.size)]
    programs[rank] = change(programs[rank])
    return programs


@_directions
@_plans
def test_what_only_one_rank_leaves_out_doubles_or_changes_is_noticed(builder, size, direction):
    plan = _good(builder, size, direction)
    for rank in range(size):
        mine = dataclasses.replace(plan, steps=plan.program(rank))
        for place in places(mine):
            action = place[3]
            changed = [(), (action, action)]
            if isinstance(action, Move):
                changed += [(dataclasses.replace(action, src=action.dst, dst=action.src),)]
                changed += [(dataclasses.replace(action, key=((action.key[0] + 1) % size,)),)]
            for actions in changed:
                programs = _programs(plan, rank, lambda steps, p=place, a=actions: replaced(steps, p, *a))
                sentence = _rejection(plan, everything(size), programs)
                if isinstance(action, Move | Collective):
                    assert re.search("has no counterpart on rank|does not stand in the order of rank", sentence)


def test_results_that_stay_with_a_visitor_or_go_to_a_stranger_are_noticed():
    plan = _good(SCHEDULES["ring"], 4, "backward")
    last = [place for place in places(plan) if place[1] == "results" and place[0] == len(plan.steps) - 1]
    assert len(last) == 4
    for place in last:
        move = place[3]
        assert re.search("is not home|is left over", _rejection(changed(plan, place), everything(4)))
        stranger = next(rank for rank in range(4) if rank not in move.ranks)
        sentence = _rejection(changed(plan, place, dataclasses.replace(move, dst=stranger)), everything(4))
        assert re.search(rf"dkv\({move.dst}\) is (not home|left over)", sentence)


def test_an_accumulator_that_nobody_sends_home_is_left_over():
    # rank 1 computes for query block 0, whose owner has all its products from others already
    product = Compute(rank=1, q=(0,), kv=(1,))
    step = Step(moves=(Move(src=0, dst=1, kind="q", key=(0,)),), computes=_own_products(2))
    plan = Plan(name="hand", direction="forward", size=2, steps=(step, Step(computes=(product,))))
    assert "rank 0, step 1: out(0) is not home: products [(0, 1)] are not in it" in _rejection(plan, {(0, 1)})
    sent = Step(computes=(product,), results=(Move(src=1, dst=0, kind="out", key=(0,)),))
    validate(dataclasses.replace(plan, steps=(step, sent)), {(0, 1)})
    # merged under a key that is no rank's own
    gathered = Step(
        gathers=(Gather(ranks=(0, 1), kind="q", parts=((0,), (1,))),),
        computes=(Compute(rank=0, q=(0, 1), kv=(0,)), Compute(rank=1, q=(1,), kv=(1,))),
    )
    plan = Plan(name="hand", direction="forward", size=2, steps=(gathered,))
    assert "is not home" in _rejection(plan, {(0, 0), (1, 1)})


def _own_products(size):
    return tuple(Compute(rank=rank, q=(rank,), kv=(rank,)) for rank in range(size))


def test_an_operand_that_is_absent_is_named():
    plan = Plan(name="hand", direction="forward", size=2, steps=(Step(computes=(Compute(rank=0, q=(0,), kv=(1,)),)),))
    assert _rejection(plan, {(0, 1)}) == "rank 0, step 0: q(0)*kv(1) needs kv(1), which is not there"


def test_an_operand_moves_among_the_moves_and_a_result_among_the_results():
    operand, result = Move(src=0, dst=1, kind="kv", key=(0,)), Move(src=0, dst=1, kind="out", key=(0,))
    for step, words in ((Step(moves=(result,)), "moves no operand"), (Step(results=(operand,)), "no forward result")):
        plan = Plan(name="hand", direction="forward", size=2, steps=(step,))
        assert words in _rejection(plan, ())


def test_collectives_of_a_group_out_of_order_are_noticed():
    gathers = tuple(Gather(ranks=(0, 1), kind=kind, parts=((0,), (1,))) for kind in ("q", "kv"))
    computes = tuple(Compute(rank=rank, q=(rank,), kv=(0, 1)) for rank in range(2))
    plan = Plan(name="hand", direction="forward", size=2, steps=(Step(gathers=gathers, computes=computes),))
    validate(plan, everything(2))
    swapped = lambda steps: (dataclasses.replace(steps[0], gathers=steps[0].gathers[::-1]),)  # noqa: E731
    for rank in range(2):
        sentence = _rejection(plan, everything(2), _programs(plan, rank, swapped))
        assert "does not stand in the order of rank" in sentence
        assert "Gather(q(0,1))" in sentence


def test_messages_between_two_ranks_out_of_order_are_noticed():
    moves = tuple(Move(src=0, dst=1, kind=kind, key=(0,)) for kind in ("q", "kv"))
    plan = Plan(name="hand", direction="forward", size=2, steps=(Step(moves=moves, computes=_own_products(2)),))
    validate(plan, {(0, 0), (1, 1)})
    swapped = lambda steps: (dataclasses.replace(steps[0], moves=steps[0].moves[::-1]),)  # noqa: E731
    for rank in range(2):
        sentence = _rejection(plan, {(0, 0), (1, 1)}, _programs(plan, rank, swapped))
        assert "does not stand in the order of rank" in sentence


@_directions
def test_a_program_of_the_wrong_length_is_noticed(direction):
    plan = _good(SCHEDULES["ring"], 4, direction)
    for rank, change in itertools.product(range(4), (lambda steps: steps[:-1], lambda steps: (*steps, Step()))):
        programs = _programs(plan, rank, change)
        sentence = _rejection(plan, everything(4), programs)
        assert sentence == f"rank {rank}, step 0: its program has {len(programs[rank])} steps, the plan 4"


@_directions
def test_an_action_in_a_strangers_program_is_noticed(direction):
    plan = _good(SCHEDULES["ring"], 4, direction)
    for place in places(plan):
        number, field, _, action = place
        stranger = next(rank for rank in range(4) if rank not in action.ranks)
        programs = _programs(plan, stranger, lambda steps, n=number, f=field, a=action: added(steps, n, f, a))
        assert f"{action} is not its own" in _rejection(plan, everything(4), programs)


@_directions
@_schedules
@settings(max_examples=100)
@given(relation=_relations(10), data=st.data())
def test_no_action_of_any_plan_can_be_dropped_or_doubled(schedule, direction, relation, data):
    size, pairs = relation
    plan = build(SCHEDULES[schedule], size, direction, pairs)
    place = data.draw(st.sampled_from(list(places(plan))))
    _rejection(changed(plan, place), pairs)
    _rejection(changed(plan, place, place[3], place[3]), pairs)
