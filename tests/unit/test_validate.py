"""The validator rejects each way in which a plan can be wrong.

A plan that passes it neither hangs nor computes something else, so it is tested by breaking good plans in every place.
(ring-flash-attention#39: requests that do not match collectives; pytorch#174288, nccl#1967: batched sends and receives
that hang.)
"""

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_seqpar.base.errors import PlanError
from ds_seqpar.core.compiler.schedules.actions import Collective, Compute, Gather, Move, ReduceScatter, Step
from ds_seqpar.schedules.validate import validate
from tests.grids import each_then_rest, examples
from tests.unit.plans import (
    DIRECTIONS,
    FORMS,
    added,
    build,
    by_hand,
    causal_contiguous,
    changed,
    changed_on,
    double_ring,
    everything,
    joint,
    mesh,
    places,
    problems,
    rejoined,
    replaced,
    ring,
)
from tests.words import missing

_forms = pytest.mark.parametrize(("schedule", "direction", "travels"), FORMS)


def _rejection(plan, pairs):
    """The validator's sentence; it always names rank and step, and carries the table around the step."""
    with pytest.raises(PlanError) as caught:
        validate(plan, pairs)
    sentence, _, table = str(caught.value).partition("\n")
    rank, step = re.match(r"rank (-?\d+), step (\d+): \S", sentence).groups()
    assert table == plan.around(int(step), int(rank))
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


LONG = "mesh 2x2x2"  # it has what the other meshes have, in many more places
_names = each_then_rest([name for name in PLANS if name != LONG], [LONG])


@pytest.fixture(params=DIRECTIONS)
def direction(request):
    return request.param


@pytest.fixture(params=_names)
def good(request, direction):
    """(plan, pairs)"""
    name = request.param
    schedule, topology, travels, pairs = PLANS[name]
    plan = build(schedule, topology, direction, travels, pairs)
    validate(plan, pairs)
    return plan, pairs


def test_a_dropped_action_is_noticed(good):
    plan, pairs = good
    for place in places(joint(plan)):
        sentence, action = _rejection(changed(plan, place), pairs), place[3]
        if place[1] == "results":
            assert re.search("not home|left over|not there", sentence)
        elif isinstance(action, ReduceScatter):
            assert re.search("not home|left over", sentence)
        elif isinstance(action, Compute):
            # the result that should travel may be missed before the product itself
            assert re.search("missing|not there", sentence)
        else:
            assert "not there" in sentence


def test_a_doubled_action_is_noticed(good):
    plan, pairs = good
    for place in places(joint(plan)):
        action = place[3]
        sentence = _rejection(changed(plan, place, action, action), pairs)
        if isinstance(action, Compute):
            assert "second time" in sentence
        elif isinstance(action, ReduceScatter) or place[1] == "results":
            assert "not there" in sentence
        else:
            assert "there already" in sentence


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_misdirected_move_is_noticed(direction):
    plan = build("ring", ring(4), direction)
    for place in places(joint(plan)):
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


def _others(action, plan):
    """The action with one field changed, in each way in which no good plan has it."""
    ranks = range(-1, plan.size + 1)
    if isinstance(action, Move) and action.kind in ("q", "kv"):  # to a rank that does not need it or does not exist
        yield from (dataclasses.replace(action, dst=rank) for rank in ranks if rank != action.dst)
    if isinstance(action, Compute):
        yield from (dataclasses.replace(action, rank=rank) for rank in ranks if rank != action.rank)
    for field in ("q", "kv", "key"):
        old = getattr(action, field, None)
        blocks = ((block,) for block in range(plan.size) if old and (block,) != old)
        yield from (dataclasses.replace(action, **{field: block}) for block in blocks)
    if isinstance(action, Move | Collective):
        kinds = {"q", "kv", "out", "dq", "dkv"} - {action.kind}
        yield from (dataclasses.replace(action, kind=kind) for kind in kinds)
    if isinstance(action, Collective):  # parts in another order, a Ulysses rank less
        yield dataclasses.replace(action, keys=(*action.keys[1:], action.keys[0]))
        yield dataclasses.replace(action, ranks=action.ranks[1:], keys=action.keys[1:])


def test_another_rank_block_kind_or_order_in_an_action_is_noticed(good):
    plan, pairs = good
    for place in places(joint(plan)):
        for other in _others(place[3], plan):
            _rejection(changed(plan, place, other), pairs)


def test_a_move_that_comes_a_step_late_or_early_is_noticed(good):
    plan, pairs = good
    for place in places(joint(plan)):
        number, field, _, action = place
        if not isinstance(action, Move):
            continue
        for other in {number - 1, number + 1} & set(range(len(plan.ranks[0]))):
            # straight from its owner an operand may come early and wait; straight to its owner a result may come late
            early = field == "moves" and action.key == (action.src,) and other < number
            late = field == "results" and action.key == (action.dst,) and other > number
            if not early and not late:
                steps = added(replaced(joint(plan), place), other, field, action)
                _rejection(rejoined(plan, steps), pairs)


def test_a_move_that_is_due_too_late_or_before_it_was_sent_is_noticed(good):
    plan, pairs = good
    for place in places(joint(plan)):
        number, field, _, action = place
        if not isinstance(action, Move):
            continue
        for within in (-1, 0):
            sentence = _rejection(changed(plan, place, dataclasses.replace(action, within=within)), pairs)
            assert f"within {within} steps" in sentence
        broken = changed(plan, place, dataclasses.replace(action, within=len(plan.ranks[0]) - number + 1))
        if field == "moves":
            assert "outside" in _rejection(broken, pairs)
        elif action.dst in action.key and not plan.ranks[0][-1].reduces:
            validate(broken, pairs)  # a result may be on its way home until the very end
        else:
            _rejection(broken, pairs)


def test_what_only_one_rank_leaves_out_doubles_or_changes_is_noticed(good):
    plan, pairs = good
    for rank in range(plan.size):
        for place in places(plan.ranks[rank]):
            action = place[3]
            options = [(), (action, action)]
            if isinstance(action, Move):
                options += [(dataclasses.replace(action, src=action.dst, dst=action.src),)]
                options += [(dataclasses.replace(action, key=((action.key[0] + 1) % plan.size,)),)]
                options += [(dataclasses.replace(action, within=2),)]
            for actions in options:
                broken = changed_on(plan, rank, lambda steps, p=place, a=actions: replaced(steps, p, *a))
                sentence = _rejection(broken, pairs)
                if isinstance(action, Move | Collective):
                    assert re.search("no counterpart|the order of", sentence)


def test_an_action_among_a_strangers_is_noticed(good):
    plan, pairs = good
    for number, field, _, action in places(joint(plan)):
        for rank in set(range(plan.size)) - set(action.ranks):
            broken = changed_on(plan, rank, lambda steps, n=number, f=field, a=action: added(steps, n, f, a))
            assert missing(_rejection(broken, pairs), str(action), "not its own") == []


def test_a_rank_with_more_or_fewer_steps_is_noticed(good):
    plan, pairs = good
    for rank, change in itertools.product(range(plan.size), (lambda steps: steps[:-1], lambda steps: (*steps, Step()))):
        broken = changed_on(plan, rank, change)
        with pytest.raises(PlanError) as caught:
            validate(broken, pairs)
        # rank 0's are the measure
        lengths = [len(steps) for steps in broken.ranks]
        wrong = next(r for r, length in enumerate(lengths) if length != lengths[0])
        sentence = str(caught.value).partition("\n")[0]
        assert sentence.startswith(f"rank {wrong}, step 0: ")
        assert missing(sentence, f"{lengths[wrong]} steps", f"rank 0 has {lengths[0]}") == []


def test_a_result_that_stays_with_a_visitor_is_left_over_there():
    plan = build("ring", ring(4), "backward")
    last = [place for place in places(joint(plan)) if place[1] == "results" and place[0] == 3]
    (from_rank_0,) = [place for place in last if place[3].src == 0]
    sentence = _rejection(changed(plan, from_rank_0), everything(4))
    assert sentence.startswith("rank 0, step 3: ")
    assert missing(sentence, f"dkv({from_rank_0[3].dst})", "left over") == []
    (from_rank_3,) = [place for place in last if place[3].src == 3]
    sentence = _rejection(changed(plan, from_rank_3), everything(4))
    assert sentence.startswith("rank 0, step 3: ")
    assert missing(sentence, "dkv(0)", "not home", "q(1)*kv(0)") == []


def _local_products(size):
    return tuple(Compute(rank=rank, q=(rank,), kv=(rank,)) for rank in range(size))


def test_an_accumulator_that_nobody_sends_home_is_noticed():
    first = Step(moves=(Move(src=0, dst=1, kind="q", key=(0,)),), computes=_local_products(2))
    helped = Compute(rank=1, q=(0,), kv=(1,))
    plan = by_hand(2, first, Step(computes=(helped,)))
    assert missing(_rejection(plan, {(0, 1)}), "rank 0, step 1: ", "out(0)", "not home", "q(0)*kv(1)") == []
    sent = Step(computes=(helped,), results=(Move(src=1, dst=0, kind="out", key=(0,)),))
    validate(by_hand(2, first, sent), {(0, 1)})
    # under the key of a group it is nobody's own
    gathered = Step(
        gathers=(Gather(ranks=(0, 1), kind="q", keys=((0,), (1,))),),
        computes=(Compute(rank=0, q=(0, 1), kv=(0,)), Compute(rank=1, q=(1,), kv=(1,))),
    )
    assert missing(_rejection(by_hand(2, gathered), {(0, 0), (1, 1)}), "out(0)", "not home") == []


def test_an_operand_that_is_absent_is_named():
    plan = by_hand(2, Step(computes=(Compute(rank=0, q=(0,), kv=(1,)),)))
    assert missing(_rejection(plan, {(0, 1)}), "rank 0, step 0: ", "q(0)*kv(1) needs kv(1)", "not there") == []


def test_an_operand_moves_among_the_moves_and_a_result_among_the_results():
    operand, result = Move(src=0, dst=1, kind="kv", key=(0,)), Move(src=0, dst=1, kind="out", key=(0,))
    assert "no operand" in _rejection(by_hand(2, Step(moves=(result,))), ())
    assert "no forward result" in _rejection(by_hand(2, Step(results=(operand,))), ())
    assert "no backward result" in _rejection(by_hand(2, Step(results=(result,)), direction="backward"), ())


def test_a_rank_twice_in_one_action_is_noticed():
    within = Move(src=0, dst=0, kind="kv", key=(0,))
    assert missing(_rejection(by_hand(2, Step(moves=(within,))), ()), str(within), "rank twice") == []
    gather = Gather(ranks=(0, 0), kind="kv", keys=((0,), (0,)))
    assert missing(_rejection(by_hand(2, Step(gathers=(gather,))), ()), str(gather), "rank twice") == []


def test_a_message_without_a_receiver_is_noticed():
    plan = build("ring", ring(2), "forward")
    deaf = changed_on(plan, 1, lambda steps: (dataclasses.replace(steps[0], moves=()), *steps[1:]))
    sentence = _rejection(deaf, everything(2))
    assert missing(sentence, "rank 0, step 0: ", "kv(0):0>1", "no counterpart", "rank 1") == []


def test_collectives_and_messages_out_of_order_are_noticed():
    gathers = tuple(Gather(ranks=(0, 1), kind=kind, keys=((0,), (1,))) for kind in ("q", "kv"))
    computes = tuple(Compute(rank=rank, q=(rank,), kv=(0, 1)) for rank in range(2))
    moves = tuple(Move(src=0, dst=1, kind=kind, key=(0,)) for kind in ("q", "kv"))
    for field, step, pairs in (
        ("gathers", Step(gathers=gathers, computes=computes), everything(2)),
        ("moves", Step(moves=moves, computes=_local_products(2)), {(0, 0), (1, 1)}),
    ):
        plan = by_hand(2, step)
        validate(plan, pairs)
        for rank in range(2):
            (mine,) = plan.ranks[rank]
            swapped = dataclasses.replace(mine, **{field: getattr(mine, field)[::-1]})
            sentence = _rejection(changed_on(plan, rank, lambda steps, new=swapped: (new,)), pairs)
            assert "the order of" in sentence
            assert field == "moves" or "Gather(q(0,1))" in sentence


@_forms
@examples(40)
@given(data=st.data())
def test_no_action_of_any_plan_can_be_dropped_or_doubled(schedule, direction, travels, data):
    topology, pairs = data.draw(problems(schedule, 10))
    plan = build(schedule, topology, direction, travels, pairs)
    place = data.draw(st.sampled_from(list(places(joint(plan)))))
    _rejection(changed(plan, place), pairs)
    _rejection(changed(plan, place, place[3], place[3]), pairs)
