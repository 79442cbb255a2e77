"""Plans: every schedule builds right ones, and the validator rejects each way in which a plan can be wrong.

A plan that passes the validator neither hangs nor computes something else, so the validator is tested by breaking good
plans in every place. (ring-flash-attention#39: requests that do not match collectives; pytorch#174288, nccl#1967:
batched sends and receives that hang; diffusers#14265: forward right, gradients wrong.)
"""

import dataclasses
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_seqpar.errors import ConfigError, PlanError
from ds_seqpar.planning import schedules
from ds_seqpar.planning.overlap import overlapped
from ds_seqpar.planning.plan import Collective, Compute, Gather, Move, Plan, ReduceScatter, Step, last_uses, validate
from ds_seqpar.planning.schedules import SCHEDULES
from tests.unit.plans import (
    DIRECTIONS,
    FORMS,
    added,
    build,
    causal_contiguous,
    changed,
    double_ring,
    everything,
    mesh,
    places,
    problems,
    replaced,
    ring,
    topologies,
)

MESHES = [(2, 2, 1), (2, 1, 2), (1, 2, 2), (3, 2, 1), (2, 3, 2), (2, 2, 3), (4, 4, 1), (4, 1, 4), (1, 1, 5)]

_directions = pytest.mark.parametrize("direction", DIRECTIONS)
_forms = pytest.mark.parametrize(("schedule", "direction", "travels"), FORMS)


# ---- right plans


@_forms
@settings(max_examples=20)
@given(data=st.data())
def test_every_schedule_builds_plans_that_validate(schedule, direction, travels, data):
    topology, pairs = data.draw(problems(schedule, 64))
    validate(build(schedule, topology, direction, travels, pairs), pairs)


@_forms
@settings(max_examples=20)
@given(data=st.data())
def test_builders_are_pure_and_plans_are_frozen(schedule, direction, travels, data):
    topology, pairs = data.draw(problems(schedule, 16))
    plan, again = (build(schedule, topology, direction, travels, pairs) for _ in range(2))
    assert plan == again
    assert hash(plan) == hash(again)
    for thing in (plan, plan.steps[0], *plan.steps[0].actions):
        field = dataclasses.fields(thing)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, None)


_sizes = st.fixed_dictionaries({kind: st.integers(1, 1000) for kind in ("q", "kv", "out", "dq", "dkv")})


@_directions
def test_a_plan_may_compute_more_than_is_needed(direction):
    validate(build("ring", ring(4), direction), causal_contiguous(4))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_build_gives_one_validated_plan_for_the_same_settings(schedule):
    settings = schedule, topologies(schedule, 4)[-1], "contiguous", 16, True, "forward"
    plan = schedules.build(*settings)
    assert schedules.build(*settings) is plan
    validate(plan, causal_contiguous(4))


def test_build_asks_the_layout_which_products_are_needed():
    def products(layout, seq, causal):
        plan = schedules.build("ring", ring(4), layout, seq, causal, "forward")
        return {(c.q[0], c.kv[0]) for step in plan.steps for c in step.computes}

    assert products("contiguous", 8, True) == causal_contiguous(4)
    assert products("contiguous", 8, False) == everything(4)
    assert products("striped", 8, True) == everything(4)
    assert products("striped", 4, True) == causal_contiguous(4)  # one token a rank
    assert products("zigzag", 8, True) == everything(4)


# pytorch#141429: non-causal attention, wrong under a load balancer made for causal masks
def test_distflash_refuses_what_it_cannot_balance():
    for pairs in (everything(4), everything(4) - {(0, 1)}, causal_contiguous(4) - {(3, 0)}):
        with pytest.raises(ConfigError, match="distflash needs causal attention on the contiguous layout"):
            build("distflash", ring(4), "forward", "kv", pairs)
    with pytest.raises(ConfigError, match="got travelling q"):
        build("distflash", ring(4), "forward", "q")


def test_the_table_of_a_small_ring():
    assert build("ring", ring(2), "backward").table() == (
        "ring backward, 2 ranks\n"
        "step  rank 0                        rank 1\n"
        "0     q(0)*kv(0) kv(0)>1 kv(1)<1    q(1)*kv(1) kv(0)<0 kv(1)>0\n"
        "1     q(0)*kv(1) dkv(0)<1 dkv(1)>1  q(1)*kv(0) dkv(0)>0 dkv(1)<0"
    )


# ---- what nobody needs is not sent (test_schedule_bytes.py has the rest)


@settings(max_examples=40)
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
@settings(max_examples=40)
@given(problem=problems("ring", 16))
def test_a_ring_sends_never_more_than_the_full_one_and_only_towards_ranks_that_need_it(direction, problem):
    topology, pairs = problem
    plan = build("ring", topology, direction, pairs=pairs)
    units = {"kv": 2, "dkv": 3}
    full = build("ring", topology, direction).received(units)
    assert all(mine <= most for mine, most in zip(plan.received(units), full, strict=True))
    for index, step in enumerate(plan.steps):
        for move in step.moves:
            later = {c.q for after in plan.steps[index + 1 :] for c in after.computes if c.kv == move.key}
            assert later, f"{move} in step {index} serves nobody"


# ---- operands are freed after their last use


def _peak(plan, rank):
    """The most operands that `rank` holds at once, arrivals included; asserts that what it uses is there."""
    program = plan.program(rank)
    held, peak, due = {("q", (rank,)), ("kv", (rank,))}, 0, {}
    for index, (step, frees) in enumerate(zip(program, last_uses(program, rank), strict=True)):
        held |= {(gather.kind, gather.whole) for gather in step.gathers}
        used = {(gather.kind, gather.part(rank)) for gather in step.gathers}
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


@_forms
@pytest.mark.parametrize("overlap", [False, True])
@settings(max_examples=15)
@given(data=st.data())
def test_a_freed_operand_is_never_used_again(schedule, direction, travels, overlap, data):
    topology, pairs = data.draw(problems(schedule, 12))
    plan = build(schedule, topology, direction, travels, pairs)
    if overlap:
        plan = overlapped(plan, lambda i, j: (i, j) in pairs, {"q": 1, "kv": 2, "out": 1, "dq": 1, "dkv": 2})
    for rank in range(plan.size):
        assert _peak(plan, rank) >= 2


def test_an_operand_that_nobody_uses_is_freed_when_it_arrives():
    for within in (1, 2):
        steps = [Step(moves=(Move(src=0, dst=1, kind="kv", key=(0,), within=within),)), Step(), Step()]
        plan = Plan(name="hand", direction="forward", size=2, steps=tuple(steps))
        assert [("kv", (0,)) in frees for frees in last_uses(plan.program(1), 1)] == [
            index == within - 1 for index in range(3)
        ]


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


# ---- broken plans


def _rejection(plan, pairs, programs=None):
    """The validator's sentence; it always names rank and step, and carries the table."""
    with pytest.raises(PlanError) as caught:
        validate(plan, pairs, programs)
    sentence, _, table = str(caught.value).partition("\n")
    assert re.match(r"rank -?\d+, step \d+: \S", sentence), sentence
    assert table == plan.table()
    return sentence


# (schedule, topology, what travels, needed products): what the systematic changes start from
PLANS = {
    "ring": ("ring", ring(4), "kv", everything(4)),
    "ring, q travels": ("ring", ring(3), "q", everything(3)),
    "double ring": ("double_ring", double_ring(4, 2), "kv", everything(4)),
    "distflash": ("distflash", ring(5), "kv", causal_contiguous(5)),
    "mesh 2x2x1": ("mesh", mesh(2, 2, 1), "kv", everything(4)),
    "mesh 2x2x2": ("mesh", mesh(2, 2, 2), "kv", everything(8)),
    "mesh 2x1x2, q travels": ("mesh", mesh(2, 1, 2), "q", everything(4)),
}


@pytest.fixture(params=list(itertools.product(PLANS, DIRECTIONS)), ids="-".join)
def good(request):
    """(plan, pairs)"""
    name, direction = request.param
    schedule, topology, travels, pairs = PLANS[name]
    plan = build(schedule, topology, direction, travels, pairs)
    validate(plan, pairs)
    return plan, pairs


def test_a_dropped_action_is_noticed(good):
    plan, pairs = good
    for place in places(plan):
        sentence, action = _rejection(changed(plan, place), pairs), place[3]
        if place[1] == "results":
            assert re.search("is not home|is left over|which is not there", sentence)
        elif isinstance(action, ReduceScatter):
            assert re.search("is not home|is left over", sentence)
        elif isinstance(action, Compute):
            # the result that should travel may be missed before the product itself
            assert re.search("is missing|which is not there", sentence)
        else:
            assert "which is not there" in sentence


def test_a_doubled_action_is_noticed(good):
    plan, pairs = good
    for place in places(plan):
        action = place[3]
        sentence = _rejection(changed(plan, place, action, action), pairs)
        if isinstance(action, Compute):
            assert "a second time" in sentence
        elif isinstance(action, ReduceScatter) or place[1] == "results":
            assert "which is not there" in sentence
        else:
            assert "brings what is there already" in sentence


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_misdirected_move_is_noticed(direction):
    plan = build("ring", ring(4), direction)
    for place in places(plan):
        step, field, _, move = place
        if not isinstance(move, Move):
            continue
        for end, rank in itertools.product(("src", "dst"), range(-1, 5)):
            if rank == getattr(move, end):
                continue
            broken = changed(plan, place, dataclasses.replace(move, **{end: rank}))
            hops = (rank - move.key[0]) % 4  # from the block's owner to this rank, along the ring
            # a rank that the block has visited may still send it; a gradient may go straight home, or ahead to a rank
            # that sends it on later
            by_another = (field, end) == ("moves", "src") and hops <= step
            ahead = (field, end) == ("results", "dst") and (hops == 0 or hops > step)
            if rank in range(4) and rank not in move.ranks and (by_another or ahead):
                validate(broken, everything(4))
            else:
                _rejection(broken, everything(4))


def test_a_move_to_a_rank_that_does_not_need_it_or_does_not_exist_is_noticed(good):
    plan, pairs = good
    for place in places(plan):
        move = place[3]
        if place[1] != "moves":
            continue
        for rank in set(range(-1, plan.size + 1)) - {move.dst}:
            _rejection(changed(plan, place, dataclasses.replace(move, dst=rank)), pairs)


def test_a_product_on_the_wrong_rank_is_noticed(good):
    plan, pairs = good
    for place in places(plan):
        if isinstance(place[3], Compute):
            for rank in set(range(-1, plan.size + 1)) - {place[3].rank}:
                _rejection(changed(plan, place, dataclasses.replace(place[3], rank=rank)), pairs)


def test_another_block_in_an_action_is_noticed(good):
    plan, pairs = good
    for place in places(plan):
        for field in ("q", "kv", "key"):
            old = getattr(place[3], field, None)
            for block in range(plan.size):
                if old and (block,) != old:
                    _rejection(changed(plan, place, dataclasses.replace(place[3], **{field: (block,)})), pairs)


def test_another_kind_in_an_action_is_noticed(good):
    plan, pairs = good
    for place in places(plan):
        for kind in {"q", "kv", "out", "dq", "dkv"} - {getattr(place[3], "kind", None)}:
            if isinstance(place[3], Move | Collective):
                _rejection(changed(plan, place, dataclasses.replace(place[3], kind=kind)), pairs)


def test_a_move_that_comes_a_step_late_or_early_is_noticed(good):
    plan, pairs = good
    for place in places(plan):
        number, field, _, action = place
        if not isinstance(action, Move):
            continue
        for other in {number - 1, number + 1} & set(range(len(plan.steps))):
            # straight from its owner an operand may come early and wait; straight to its owner a result may come late
            early = field == "moves" and action.key == (action.src,) and other < number
            late = field == "results" and action.key == (action.dst,) and other > number
            if not early and not late:
                steps = added(replaced(plan.steps, place), other, field, action)
                _rejection(dataclasses.replace(plan, steps=steps), pairs)


def test_a_move_that_is_due_too_late_or_before_it_was_sent_is_noticed(good):
    plan, pairs = good
    for place in places(plan):
        number, field, _, action = place
        if not isinstance(action, Move):
            continue
        for within in (-1, 0):
            sentence = _rejection(changed(plan, place, dataclasses.replace(action, within=within)), pairs)
            assert f"is due within {within} steps" in sentence
        broken = changed(plan, place, dataclasses.replace(action, within=len(plan.steps) - number + 1))
        if field == "moves":
            assert "outside the plan" in _rejection(broken, pairs)
        elif action.dst in action.key and not plan.steps[-1].reduces:
            validate(broken, pairs)  # a result may be on its way home until the very end
        else:
            _rejection(broken, pairs)


def test_parts_of_a_collective_in_another_order_or_a_member_less_are_noticed(good):
    plan, pairs = good
    for place in places(plan):
        action = place[3]
        if isinstance(action, Collective):
            turned = dataclasses.replace(action, parts=(*action.parts[1:], action.parts[0]))
            _rejection(changed(plan, place, turned), pairs)
            fewer = dataclasses.replace(action, ranks=action.ranks[1:], parts=action.parts[1:])
            _rejection(changed(plan, place, fewer), pairs)


def _programs(plan, rank, change):
    """All programs, `change`d on one rank."""
    programs = [plan.program(r) for r in range(plan.size)]
    programs[rank] = change(programs[rank])
    return programs


def test_what_only_one_rank_leaves_out_doubles_or_changes_is_noticed(good):
    plan, pairs = good
    for rank in range(plan.size):
        mine = dataclasses.replace(plan, steps=plan.program(rank))
        for place in places(mine):
            action = place[3]
            options = [(), (action, action)]
            if isinstance(action, Move):
                options += [(dataclasses.replace(action, src=action.dst, dst=action.src),)]
                options += [(dataclasses.replace(action, key=((action.key[0] + 1) % plan.size,)),)]
                options += [(dataclasses.replace(action, within=2),)]
            for actions in options:
                programs = _programs(plan, rank, lambda steps, p=place, a=actions: replaced(steps, p, *a))
                sentence = _rejection(plan, pairs, programs)
                if isinstance(action, Move | Collective):
                    assert re.search("has no counterpart on rank|does not stand in the order of rank", sentence)


def test_an_action_in_a_strangers_program_is_noticed(good):
    plan, pairs = good
    for place in places(plan):
        number, field, _, action = place
        for rank in set(range(plan.size)) - set(action.ranks):
            programs = _programs(plan, rank, lambda steps, n=number, f=field, a=action: added(steps, n, f, a))
            assert f"{action} is not its own" in _rejection(plan, pairs, programs)


def test_a_program_of_the_wrong_length_is_noticed(good):
    plan, pairs = good
    for rank, change in itertools.product(range(plan.size), (lambda steps: steps[:-1], lambda steps: (*steps, Step()))):
        programs = _programs(plan, rank, change)
        sentence = _rejection(plan, pairs, programs)
        words = f"its program has {len(programs[rank])} steps, the plan {len(plan.steps)}"
        assert sentence == f"rank {rank}, step 0: {words}"


def test_a_result_that_stays_with_a_visitor_is_left_over_there():
    plan = build("ring", ring(4), "backward")
    last = [place for place in places(plan) if place[1] == "results" and place[0] == 3]
    (from_rank_0,) = [place for place in last if place[3].src == 0]
    sentence = _rejection(changed(plan, from_rank_0), everything(4))
    assert sentence == f"rank 0, step 3: dkv({from_rank_0[3].dst}) is left over and never sent home"
    (from_rank_3,) = [place for place in last if place[3].src == 3]
    assert "rank 0, step 3: dkv(0) is not home: products [(1, 0)" in _rejection(
        changed(plan, from_rank_3), everything(4)
    )


def _own_products(size):
    return tuple(Compute(rank=rank, q=(rank,), kv=(rank,)) for rank in range(size))


def _by_hand(size, *steps, direction="forward"):
    return Plan(name="hand", direction=direction, size=size, steps=steps)


def test_an_accumulator_that_nobody_sends_home_is_noticed():
    first = Step(moves=(Move(src=0, dst=1, kind="q", key=(0,)),), computes=_own_products(2))
    helped = Compute(rank=1, q=(0,), kv=(1,))
    plan = _by_hand(2, first, Step(computes=(helped,)))
    assert "rank 0, step 1: out(0) is not home: products [(0, 1)] are not in it" in _rejection(plan, {(0, 1)})
    sent = Step(computes=(helped,), results=(Move(src=1, dst=0, kind="out", key=(0,)),))
    validate(_by_hand(2, first, sent), {(0, 1)})
    # under the key of a group it is nobody's own
    gathered = Step(
        gathers=(Gather(ranks=(0, 1), kind="q", parts=((0,), (1,))),),
        computes=(Compute(rank=0, q=(0, 1), kv=(0,)), Compute(rank=1, q=(1,), kv=(1,))),
    )
    assert "out(0) is not home" in _rejection(_by_hand(2, gathered), {(0, 0), (1, 1)})


def test_an_operand_that_is_absent_is_named():
    plan = _by_hand(2, Step(computes=(Compute(rank=0, q=(0,), kv=(1,)),)))
    assert _rejection(plan, {(0, 1)}) == "rank 0, step 0: q(0)*kv(1) needs kv(1), which is not there"


def test_an_operand_moves_among_the_moves_and_a_result_among_the_results():
    operand, result = Move(src=0, dst=1, kind="kv", key=(0,)), Move(src=0, dst=1, kind="out", key=(0,))
    assert "moves no operand" in _rejection(_by_hand(2, Step(moves=(result,))), ())
    assert "moves no forward result" in _rejection(_by_hand(2, Step(results=(operand,))), ())
    assert "moves no backward result" in _rejection(_by_hand(2, Step(results=(result,)), direction="backward"), ())


def test_a_rank_twice_in_one_action_is_noticed():
    within = Move(src=0, dst=0, kind="kv", key=(0,))
    assert f"{within} names a rank twice" in _rejection(_by_hand(2, Step(moves=(within,))), ())
    gather = Gather(ranks=(0, 0), kind="kv", parts=((0,), (0,)))
    assert f"{gather} names a rank twice" in _rejection(_by_hand(2, Step(gathers=(gather,))), ())


def test_a_message_without_a_receiver_is_noticed():
    plan = build("ring", ring(2), "forward")
    programs = _programs(plan, 1, lambda steps: (dataclasses.replace(steps[0], moves=()), *steps[1:]))
    sentence = _rejection(plan, everything(2), programs)
    assert sentence == "rank 0, step 0: kv(0):0>1 has no counterpart on rank 1"


def test_collectives_of_a_group_out_of_order_are_noticed():
    gathers = tuple(Gather(ranks=(0, 1), kind=kind, parts=((0,), (1,))) for kind in ("q", "kv"))
    computes = tuple(Compute(rank=rank, q=(rank,), kv=(0, 1)) for rank in range(2))
    plan = _by_hand(2, Step(gathers=gathers, computes=computes))
    validate(plan, everything(2))
    swapped = lambda steps: (dataclasses.replace(steps[0], gathers=steps[0].gathers[::-1]),)  # noqa: E731
    for rank in range(2):
        sentence = _rejection(plan, everything(2), _programs(plan, rank, swapped))
        assert "does not stand in the order of rank" in sentence
        assert "Gather(q(0,1))" in sentence


def test_messages_between_two_ranks_out_of_order_are_noticed():
    moves = tuple(Move(src=0, dst=1, kind=kind, key=(0,)) for kind in ("q", "kv"))
    plan = _by_hand(2, Step(moves=moves, computes=_own_products(2)))
    validate(plan, {(0, 0), (1, 1)})
    swapped = lambda steps: (dataclasses.replace(steps[0], moves=steps[0].moves[::-1]),)  # noqa: E731
    for rank in range(2):
        sentence = _rejection(plan, {(0, 0), (1, 1)}, _programs(plan, rank, swapped))
        assert "does not stand in the order of rank" in sentence


@_forms
@settings(max_examples=40)
@given(data=st.data())
def test_no_action_of_any_plan_can_be_dropped_or_doubled(schedule, direction, travels, data):
    topology, pairs = data.draw(problems(schedule, 10))
    plan = build(schedule, topology, direction, travels, pairs)
    place = data.draw(st.sampled_from(list(places(plan))))
    _rejection(changed(plan, place), pairs)
    _rejection(changed(plan, place, place[3], place[3]), pairs)
