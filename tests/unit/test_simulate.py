"""The simulator: examples by hand, and what holds for every plan."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_seqpar.core.compiler.schedules.actions import Compute, Gather, Move, ReduceScatter, Step
from ds_seqpar.schedules import simulate as simulator
from ds_seqpar.schedules.overlap import overlapped
from ds_seqpar.schedules.simulate import Costs, Event, communication, computation, programs_of
from tests.grids import examples
from tests.unit.plans import FORMS, block_mask, build, by_hand, mesh, problems, ranks

_forms = pytest.mark.parametrize(("schedule", "direction", "travels"), FORMS)


def simulate(plan, costs):
    return simulator.simulate(programs_of(plan), costs)


def _own(*ranks_):
    return tuple(Compute(rank=rank, q=(rank,), kv=(rank,)) for rank in ranks_)


def _story(timeline, rank, *kinds):
    """(kind, start, end) of a rank's events of these kinds."""
    return [(e.kind, e.start, e.end) for e in timeline.events if e.rank == rank and e.kind in kinds]


COSTS = Costs(transfer={"q": 1.0, "kv": 2.0, "out": 3.0, "dq": 3.0, "dkv": 4.0}, product=1.0)


def test_a_product_waits_for_the_transfer_that_began_with_the_one_before():
    kv = Move(src=0, dst=1, kind="kv", key=(0,))
    plan = by_hand(2, Step(moves=(kv,), computes=_own(0, 1)), Step(computes=(Compute(rank=1, q=(1,), kv=(0,)),)))
    timeline = simulate(plan, COSTS)
    assert _story(timeline, 1, "product", "wait") == [("product", 0, 1), ("wait", 1, 2), ("product", 2, 3)]
    assert Event(1, "move", 0, 2, "kv(0):0>1") in timeline.events
    assert _story(timeline, 0, "product", "wait", "move") == [("product", 0, 1)]
    assert timeline.seconds == 3
    # where products are slow, the transfer is done beside them
    slow = dataclasses.replace(COSTS, product=5.0)
    assert simulate(plan, slow).seconds == 10
    assert _story(simulate(plan, slow), 1, "wait") == []
    # a mask leaves half of the second product
    masked = dataclasses.replace(COSTS, weight=lambda q, kv: 1.0 if q == kv else 0.5)
    assert simulate(plan, masked).seconds == 2.5


def test_a_transfer_due_later_is_waited_for_later():
    kv = Move(src=0, dst=1, kind="kv", key=(0,), within=2)
    late = Step(computes=(Compute(rank=1, q=(1,), kv=(0,)),))
    own = _own(0, 1)
    q = Move(src=0, dst=1, kind="q", key=(0,))
    other = Step(computes=(Compute(rank=1, q=(0,), kv=(1,)),))
    plan = by_hand(2, Step(moves=(q, kv), computes=own), other, late)
    # q 0-1, kv behind it on the same link 1-3; the product with q 1-2 does not wait for kv
    timeline = simulate(plan, COSTS)
    assert _story(timeline, 1, "move") == [("move", 0, 1), ("move", 1, 3)]
    assert _story(timeline, 1, "product", "wait") == [
        ("product", 0, 1),
        ("product", 1, 2),
        ("wait", 2, 3),
        ("product", 3, 4),
    ]
    hasty = Step(moves=(q, dataclasses.replace(kv, within=1)), computes=own)
    assert _story(simulate(by_hand(2, hasty, other, late), COSTS), 1, "product", "wait") == [
        ("product", 0, 1),
        ("wait", 1, 3),
        ("product", 3, 4),
        ("product", 4, 5),
    ]


def test_a_link_carries_one_transfer_at_a_time_in_the_order_of_posting():
    into = tuple(Move(src=src, dst=0, kind="kv", key=(src,)) for src in (1, 2))
    out_of = tuple(Move(src=0, dst=dst, kind="kv", key=(0,)) for dst in (1, 2))
    apart = (Move(src=0, dst=1, kind="kv", key=(0,)), Move(src=1, dst=0, kind="kv", key=(1,)))
    for moves, ends in ((into, [2, 4]), (out_of, [2, 4]), (apart, [2, 2])):
        timeline = simulate(by_hand(3, Step(moves=moves)), COSTS)
        assert [event.end for event in timeline.events if event.kind == "move"] == ends
    # rank 0's second transfer waits for its first, though rank 2's link has long been free
    both = (*into[:1], Move(src=2, dst=0, kind="q", key=(2,)))
    assert _story(simulate(by_hand(3, Step(moves=both)), COSTS), 0, "move") == [("move", 0, 2), ("move", 2, 3)]


def test_a_transfer_starts_when_both_ends_have_posted_it():
    # rank 1 posts in step 1, after a product of 7; rank 0 has had nothing to do
    steps = Step(computes=(Compute(rank=1, q=(1,), kv=(1,)),)), Step(moves=(Move(src=0, dst=1, kind="kv", key=(0,)),))
    timeline = simulate(by_hand(2, *steps), dataclasses.replace(COSTS, product=7.0))
    assert _story(timeline, 1, "product", "wait") == [("product", 0, 7), ("wait", 7, 9)]
    assert _story(timeline, 1, "move") == [("move", 7, 9)]


def test_what_is_posted_at_one_time_takes_its_links_in_the_order_of_posting():
    """Each of four ranks trades q with one and then kv with another: side by side, and not one behind the other."""
    q = [Move(src=src, dst=src ^ 1, kind="q", key=(src,)) for src in range(4)]
    kv = [Move(src=src, dst=src ^ 2, kind="kv", key=(src,)) for src in range(4)]
    timeline = simulate(by_hand(4, Step(moves=(*q, *kv))), COSTS)
    for rank in range(4):
        assert _story(timeline, rank, "move") == [("move", 0, 1), ("move", 1, 3)]
    gathers = [
        Gather(ranks=ranks_, kind=kind, keys=tuple((rank,) for rank in ranks_))
        for kind, groups in (("q", ((0, 1), (2, 3))), ("kv", ((0, 2), (1, 3))))
        for ranks_ in groups
    ]
    timeline = simulate(by_hand(4, Step(gathers=tuple(gathers))), COSTS)
    for rank in range(4):
        assert _story(timeline, rank, "move") == [("move", 0, 1), ("move", 1, 3)]


def test_what_is_ready_later_does_not_go_first():
    """Rank 2 is ready to receive from rank 0 long before rank 1 is, which stands first in rank 0's list."""
    busy = Step(computes=(Compute(rank=1, q=(1,), kv=(1,)),))
    late, soon = (Move(src=0, dst=dst, kind="kv", key=(0,)) for dst in (1, 2))
    timeline = simulate(by_hand(3, busy, Step(moves=(late, soon))), dataclasses.replace(COSTS, product=7.0))
    assert _story(timeline, 2, "move") == [("move", 0, 2)]
    assert _story(timeline, 1, "move") == [("move", 7, 9)]


def test_a_gather_holds_its_members_until_they_have_their_parts():
    gather = Gather(ranks=(0, 1, 2), kind="kv", keys=((0,), (1,), (2,)))
    plan = by_hand(3, Step(gathers=(gather,), computes=(Compute(rank=0, q=(0,), kv=(0, 1, 2)), *_own(1))))
    timeline = simulate(plan, COSTS)
    # two foreign blocks each of 2 seconds, then products of three blocks and of one
    for rank, end in ((0, 7), (1, 5)):
        assert _story(timeline, rank, "wait", "product") == [("wait", 0, 4), ("product", 4, end)]
    assert timeline.seconds == 7
    # unequal parts: a rank that has two blocks lacks one
    first = Gather(ranks=(0, 2), kind="kv", keys=((0,), (2,)))
    then = Gather(ranks=(0, 1), kind="kv", keys=((0, 2), (1,)))
    timeline = simulate(by_hand(3, Step(gathers=(first,)), Step(gathers=(then,))), COSTS)
    waits = [[("wait", 0, 2), ("wait", 2, 4)], [("wait", 0, 6)], [("wait", 0, 2)]]
    assert [_story(timeline, rank, "wait") for rank in (0, 1, 2)] == waits


def test_a_collective_waits_for_its_last_member():
    gather = Gather(ranks=(0, 1), kind="q", keys=((0,), (1,)))
    reduce = ReduceScatter(ranks=(0, 1), kind="out", keys=((0,), (1,)))
    computes = tuple(Compute(rank=rank, q=(0, 1), kv=(rank,)) for rank in range(2))
    # rank 0's product takes no time, and rank 1's two of 5 seconds each
    costs = dataclasses.replace(COSTS, product=5.0, weight=lambda q, kv: float(kv))
    timeline = simulate(by_hand(2, Step(gathers=(gather,), computes=computes, reduces=(reduce,))), costs)
    assert _story(timeline, 0, "wait", "product") == [("wait", 0, 1), ("wait", 1, 14)]
    assert _story(timeline, 1, "wait", "product") == [("wait", 0, 1), ("product", 1, 11), ("wait", 11, 14)]
    for rank in range(2):
        assert _story(timeline, rank, "move") == [("move", 0, 1), ("move", 11, 14)]


def test_a_collective_waits_for_links_that_still_carry_something_else():
    move = Move(src=2, dst=0, kind="kv", key=(2,), within=2)
    gather = Gather(ranks=(0, 1), kind="q", keys=((0,), (1,)))
    timeline = simulate(by_hand(3, Step(moves=(move,)), Step(gathers=(gather,))), COSTS)
    assert _story(timeline, 0, "move") == [("move", 0, 2), ("move", 2, 3)]
    assert _story(timeline, 1, "move") == [("move", 2, 3)]


def test_a_result_is_merged_after_the_products_of_the_next_step():
    out = Move(src=1, dst=0, kind="out", key=(0,))
    helped = Compute(rank=1, q=(0,), kv=(1,))
    q = Move(src=0, dst=1, kind="q", key=(0,))
    more = Compute(rank=0, q=(0,), kv=(0,))
    plan = by_hand(2, Step(moves=(q,)), Step(computes=(helped,), results=(out,)), Step(computes=(more,)))
    # q 0-1, the product with it 1-2, its result 2-5; rank 0 has nothing to wait for until its own product is done
    timeline = simulate(plan, COSTS)
    assert _story(timeline, 0, "product", "wait") == [("product", 0, 1), ("wait", 1, 5)]
    assert _story(timeline, 0, "move") == [("move", 2, 5)]
    assert timeline.seconds == 5


def test_balanced_costs_make_products_as_long_as_transfers():
    plan = build("mesh", mesh(2, 2, 1), "forward")
    costs = COSTS.balanced(plan)
    # q 1, kv 2, out 3 a rank, and products of 2 x 2 blocks
    assert communication(plan, costs) == 6
    assert computation(plan, costs) == 6
    assert costs.product == 1.5
    assert simulate(plan, costs).seconds == 12


def test_an_empty_plan_takes_no_time():
    assert simulate(by_hand(2), COSTS).seconds == 0


_costs = st.builds(
    lambda transfer, product: Costs(transfer=transfer, product=product),
    st.fixed_dictionaries({kind: st.floats(0.01, 100) for kind in ("q", "kv", "out", "dq", "dkv")}),
    st.floats(0.01, 100),
)


@_forms
@examples(25)
@given(data=st.data(), costs=_costs, overlap=st.booleans())
def test_no_plan_is_faster_than_its_products_or_its_transfers(schedule, direction, travels, data, costs, overlap):
    topology, pairs = data.draw(problems(schedule, 9))
    plan = build(schedule, topology, direction, travels, pairs)
    if overlap:
        plan = overlapped(plan, block_mask(plan.size, pairs), costs.transfer)
    timeline = simulate(plan, costs)
    bound = max(computation(plan, costs), communication(plan, costs))
    assert timeline.seconds >= bound * (1 - 1e-12)
    for rank in range(ranks(topology)):
        # one thing at a time: products and waits follow each other, and so do arriving transfers
        for kinds in (("product", "wait"), ("move",)):
            lane = _story(timeline, rank, *kinds)
            assert all(before[2] <= after[1] for before, after in itertools.pairwise(lane))
            assert all(math.isfinite(end) and end > start for _, start, end in lane)
