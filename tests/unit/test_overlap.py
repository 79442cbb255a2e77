"""The overlap pass, and the simulator that it is judged by: critical paths come from plans, no clock is read."""

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_seqpar.errors import PlanError
from ds_seqpar.planning.overlap import overlapped
from ds_seqpar.planning.plan import Compute, Gather, Move, Plan, ReduceScatter, Step, validate
from ds_seqpar.planning.simulate import Costs, Event, communication, computation, simulate
from ds_seqpar.running.work import bytes_per_token
from tests.unit.plans import (
    DIRECTIONS,
    FORMS,
    build,
    causal_contiguous,
    changed,
    everything,
    mesh,
    places,
    problems,
    ranks,
    ring,
    topologies,
)

_forms = pytest.mark.parametrize(("schedule", "direction", "travels"), FORMS)


def _sizes(direction, q_heads=8, kv_heads=8):
    """Bytes a token of bf16 attention whose partial results travel in bf16."""
    q = torch.empty(1, 1, q_heads, 128, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(1, 1, 2, kv_heads, 128, dtype=torch.bfloat16, device="meta")
    return bytes_per_token(direction, q, kv, torch.bfloat16)


def _relations(schedule, size):
    """Which blocks see each other: without a mask, and under a causal one of contiguous tokens."""
    return [causal_contiguous(size)] if schedule == "distflash" else [everything(size), causal_contiguous(size)]


def _pairs(schedule, direction, travels, sizes=(2, 3, 4, 6, 8)):
    """(needed pairs, plan, the same overlapped) of every shape."""
    for size in sizes:
        for topology in topologies(schedule, size):
            for pairs in _relations(schedule, size):
                plan = build(schedule, topology, direction, travels, pairs)
                yield pairs, plan, overlapped(plan, lambda i, j, pairs=pairs: (i, j) in pairs, _sizes(direction))


def _places(plan):
    """(rank, q block, kv block) of every product, one by one."""
    return [
        (compute.rank, i, j) for step in plan.steps for compute in step.computes for i in compute.q for j in compute.kv
    ]


# ---- the pass


@_forms
def test_every_needed_product_stays_on_its_rank(schedule, direction, travels):
    for pairs, plan, better in _pairs(schedule, direction, travels):
        validate(better, pairs)
        found = _places(better)
        assert len(set(found)) == len(found)
        if better == plan:
            continue
        # what only a group needed is left out
        assert set(found) == {(rank, i, j) for rank, i, j in _places(plan) if (i, j) in pairs}
        assert not any(step.gathers or step.reduces for step in better.steps)
        assert all(
            len(key) == 1 for step in better.steps for compute in step.computes for key in (compute.q, compute.kv)
        )


@_forms
def test_operands_are_due_when_they_are_first_used_and_come_from_who_has_them(schedule, direction, travels):
    for _, plan, better in _pairs(schedule, direction, travels):
        if better == plan:
            continue
        uses = _uses(better)
        at = {(rank, kind, rank): 0 for rank in range(better.size) for kind in ("q", "kv")}  # there from step on
        for number, step in enumerate(better.steps):
            for move in step.moves:
                unit = move.kind, *move.key
                assert at[move.src, *unit] <= number, f"{move} is sent before it is there"
                assert (move.dst, *unit) not in at, f"{move} comes a second time"
                at[move.dst, *unit] = min(uses[move.dst, *unit])
                assert number + move.within == at[move.dst, *unit], f"{move} is due before or after its first use"
        foreign = {unit for unit in uses if unit[0] != unit[2]}
        assert foreign <= at.keys()


def _uses(plan):
    """(rank, kind, block) -> the steps in which the rank multiplies that operand or passes it on."""
    uses = defaultdict(list)
    for number, step in enumerate(plan.steps):
        for compute in step.computes:
            uses[compute.rank, "q", *compute.q].append(number)
            uses[compute.rank, "kv", *compute.kv].append(number)
        for move in step.moves:
            uses[move.src, move.kind, *move.key].append(number)
    return uses


@_forms
def test_own_blocks_leave_in_the_first_step_unless_links_are_taken(schedule, direction, travels):
    for _, plan, better in _pairs(schedule, direction, travels):
        if better == plan:
            continue
        first = better.steps[0].moves
        assert all(move.key == (move.src,) for move in first)
        sending, receiving = {move.src for move in first}, {move.dst for move in first}
        for step in better.steps[1:]:
            for move in step.moves:
                if move.key == (move.src,):
                    assert move.src in sending or move.dst in receiving, f"{move} could have gone in step 0"


@_forms
def test_results_go_straight_home_once_all_of_their_products_are_done(schedule, direction, travels):
    for _, plan, better in _pairs(schedule, direction, travels):
        if better == plan:
            continue
        products = defaultdict(list)
        for number, step in enumerate(better.steps):
            for compute in step.computes:
                for kind, key in (("out", compute.q), ("dq", compute.q), ("dkv", compute.kv)):
                    products[compute.rank, kind, key].append(number)
        results = [(number, move) for number, step in enumerate(better.steps) for move in step.results]
        for number, move in results:
            assert move.key == (move.dst,)
            assert number >= max(products[move.src, move.kind, move.key])
        kinds = {"out"} if direction == "forward" else {"dq", "dkv"}
        leaving = {unit for unit in products if unit[1] in kinds and unit[2] != (unit[0],)}
        assert sorted((move.src, move.kind, move.key) for _, move in results) == sorted(leaving)


@_forms
def test_no_plan_becomes_slower_for_mha_or_gqa(schedule, direction, travels):
    for size in (4, 8, 9, 12):
        for topology in topologies(schedule, size):
            for pairs in _relations(schedule, size):
                plan = build(schedule, topology, direction, travels, pairs)
                for heads in ((8, 8), (8, 2)):
                    sizes = _sizes(direction, *heads)
                    better = overlapped(plan, lambda i, j, pairs=pairs: (i, j) in pairs, sizes)
                    costs = Costs(transfer=sizes, product=1.0).balanced(plan)
                    assert simulate(better, costs).seconds <= simulate(plan, costs).seconds, topology


@pytest.mark.parametrize("travels", ["kv", "q"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 2, 2), (2, 2, 4)], ids=str)
def test_meshes_take_little_longer_than_the_longer_of_products_and_transfers(shape, direction, travels):
    plan = build("mesh", mesh(*shape), direction, travels)
    sizes = _sizes(direction)
    costs = Costs(transfer=sizes, product=1.0).balanced(plan)
    assert computation(plan, costs) == pytest.approx(communication(plan, costs))
    seconds = simulate(overlapped(plan, lambda i, j: True, sizes), costs).seconds
    assert seconds <= 1.3 * computation(plan, costs)
    # which says something: as it was, the plan takes longer
    assert simulate(plan, costs).seconds > 1.2 * computation(plan, costs)


def test_a_plan_without_transfers_is_left_as_it_is():
    for topology in (mesh(1, 1, 1), ring(1)):
        plan = build("mesh" if "x" in topology.inner_axes else "ring", topology, "forward")
        assert overlapped(plan, lambda i, j: True, _sizes("forward")) is plan
    diagonal = build("ring", ring(4), "backward", pairs={(r, r) for r in range(4)})
    assert overlapped(diagonal, lambda i, j: i == j, _sizes("backward")) is diagonal


SCRIPT = """
import sys
from tests.unit.plans import build, mesh
from ds_seqpar.planning.overlap import overlapped
sizes = {"q": 3, "kv": 5, "out": 7, "dq": 11, "dkv": 13}
for direction in ("forward", "backward"):
    plan = build("mesh", mesh(2, 2, 2), direction)
    sys.stdout.write(repr(overlapped(plan, lambda i, j: j != i + 1, sizes)))
"""


def test_every_process_makes_the_same_plan():
    """Ranks make plans by themselves; strings hash differently in each process, and so the order of sets differs."""
    found = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
    assert "overlapped" in found.pop()


# ---- when a transfer is due


def _good(direction, travels="kv"):
    plan = build("mesh", mesh(2, 2, 2), direction, travels)
    better = overlapped(plan, lambda i, j: True, _sizes(direction))
    assert better != plan
    return better


@pytest.mark.parametrize("travels", ["kv", "q"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_transfer_that_is_due_at_the_wrong_time_is_noticed(direction, travels):
    plan, pairs = _good(direction, travels), everything(8)
    kinds = set()
    for place in places(plan):
        number, field, _, move = place
        if not isinstance(move, Move):
            continue
        kinds.add((field, move.within > 1))

        def due(within, place=place, move=move):
            return changed(plan, place, dataclasses.replace(move, within=within))

        for within in (0, -1):
            with pytest.raises(PlanError, match=f"is due within {within} steps, before it was sent"):
                validate(due(within), pairs)
        if field == "moves":
            with pytest.raises(PlanError, match="which is not there"):  # used before it is due
                validate(due(move.within + 1), pairs)
            outside = len(plan.steps) - number + 1
            with pytest.raises(PlanError, match=f"is due within {outside} steps, outside the plan"):
                validate(due(outside), pairs)
            validate(due(1), pairs)  # it may lie there unused
    assert {("moves", True), ("results", True)} <= kinds


# ---- the simulator: examples by hand


def _plan(size, *steps, direction="forward"):
    return Plan(name="hand", direction=direction, size=size, steps=steps)


def _own(*ranks_):
    return tuple(Compute(rank=rank, q=(rank,), kv=(rank,)) for rank in ranks_)


def _story(timeline, rank, *kinds):
    """(kind, start, end) of a rank's events of these kinds."""
    return [(e.kind, e.start, e.end) for e in timeline.events if e.rank == rank and e.kind in kinds]


COSTS = Costs(transfer={"q": 1.0, "kv": 2.0, "out": 3.0, "dq": 3.0, "dkv": 4.0}, product=1.0)


def test_a_product_waits_for_the_transfer_that_began_with_the_one_before():
    kv = Move(src=0, dst=1, kind="kv", key=(0,))
    plan = _plan(2, Step(moves=(kv,), computes=_own(0, 1)), Step(computes=(Compute(rank=1, q=(1,), kv=(0,)),)))
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
    plan = _plan(2, Step(moves=(q, kv), computes=own), other, late)
    # q 0-1, kv behind it on the same link 1-3; the product with q 1-2 does not wait for kv
    assert _story(simulate(plan, COSTS), 1, "product", "wait", "move") == [
        ("move", 0, 1),
        ("move", 1, 3),
        ("product", 0, 1),
        ("product", 1, 2),
        ("wait", 2, 3),
        ("product", 3, 4),
    ]
    hasty = dataclasses.replace(plan.steps[0], moves=(q, dataclasses.replace(kv, within=1)))
    assert _story(simulate(_plan(2, hasty, other, late), COSTS), 1, "product", "wait") == [
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
        timeline = simulate(_plan(3, Step(moves=moves)), COSTS)
        assert [event.end for event in timeline.events if event.kind == "move"] == ends
    # rank 0's second transfer waits for its first, though rank 2's link has long been free
    both = (*into[:1], Move(src=2, dst=0, kind="q", key=(2,)))
    assert _story(simulate(_plan(3, Step(moves=both)), COSTS), 0, "move") == [("move", 0, 2), ("move", 2, 3)]


def test_a_transfer_starts_when_both_ends_have_posted_it():
    # rank 1 posts in step 1, after a product of 7; rank 0 has had nothing to do
    steps = Step(computes=(Compute(rank=1, q=(1,), kv=(1,)),)), Step(moves=(Move(src=0, dst=1, kind="kv", key=(0,)),))
    timeline = simulate(_plan(2, *steps), dataclasses.replace(COSTS, product=7.0))
    assert _story(timeline, 1, "product", "move", "wait") == [("product", 0, 7), ("move", 7, 9), ("wait", 7, 9)]


def test_a_gather_holds_its_members_until_they_have_their_parts():
    gather = Gather(ranks=(0, 1, 2), kind="kv", parts=((0,), (1,), (2,)))
    plan = _plan(3, Step(gathers=(gather,), computes=(Compute(rank=0, q=(0,), kv=(0, 1, 2)), *_own(1))))
    timeline = simulate(plan, COSTS)
    # two foreign blocks each of 2 seconds, then products of three blocks and of one
    for rank, end in ((0, 7), (1, 5)):
        assert _story(timeline, rank, "wait", "product") == [("wait", 0, 4), ("product", 4, end)]
    assert timeline.seconds == 7
    # unequal parts: a rank that has two blocks lacks one
    gather = Gather(ranks=(0, 1), kind="kv", parts=((0, 2), (1,)))
    timeline = simulate(_plan(3, Step(gathers=(gather,))), COSTS)
    assert [_story(timeline, rank, "wait") for rank in (0, 1, 2)] == [[("wait", 0, 2)], [("wait", 0, 4)], []]


def test_a_collective_waits_for_its_last_member():
    reduce = ReduceScatter(ranks=(0, 1), kind="out", parts=((0,), (1,)))
    plan = _plan(2, Step(computes=_own(1), reduces=(reduce,)))
    timeline = simulate(plan, dataclasses.replace(COSTS, product=5.0))
    assert _story(timeline, 0, "wait", "move") == [("wait", 0, 8), ("move", 5, 8)]
    assert _story(timeline, 1, "wait", "move", "product") == [("product", 0, 5), ("wait", 5, 8), ("move", 5, 8)]


def test_a_collective_waits_for_links_that_still_carry_something_else():
    move = Move(src=2, dst=0, kind="kv", key=(2,), within=2)
    gather = Gather(ranks=(0, 1), kind="q", parts=((0,), (1,)))
    timeline = simulate(_plan(3, Step(moves=(move,)), Step(gathers=(gather,))), COSTS)
    assert _story(timeline, 0, "move") == [("move", 0, 2), ("move", 2, 3)]
    assert _story(timeline, 1, "move") == [("move", 2, 3)]


def test_a_result_is_merged_after_the_products_of_the_next_step():
    out = Move(src=1, dst=0, kind="out", key=(0,))
    helped = Compute(rank=1, q=(0,), kv=(1,))
    q = Move(src=0, dst=1, kind="q", key=(0,))
    more = Compute(rank=0, q=(0,), kv=(0,))
    plan = _plan(2, Step(moves=(q,)), Step(computes=(helped,), results=(out,)), Step(computes=(more,)))
    # q 0-1, the product with it 1-2, its result 2-5; rank 0 has nothing to wait for until its own product is done
    timeline = simulate(plan, COSTS)
    assert _story(timeline, 0, "move", "product", "wait") == [("move", 2, 5), ("product", 0, 1), ("wait", 1, 5)]
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
    assert simulate(_plan(2), COSTS).seconds == 0


_costs = st.builds(
    lambda transfer, product: Costs(transfer=transfer, product=product),
    st.fixed_dictionaries({kind: st.floats(0.01, 100) for kind in ("q", "kv", "out", "dq", "dkv")}),
    st.floats(0.01, 100),
)


@_forms
@settings(max_examples=25)
@given(data=st.data(), costs=_costs, overlap=st.booleans())
def test_no_plan_is_faster_than_its_products_or_its_transfers(schedule, direction, travels, data, costs, overlap):
    topology, pairs = data.draw(problems(schedule, 9))
    plan = build(schedule, topology, direction, travels, pairs)
    if overlap:
        plan = overlapped(plan, lambda i, j: (i, j) in pairs, costs.transfer)
    timeline = simulate(plan, costs)
    bound = max(computation(plan, costs), communication(plan, costs))
    assert timeline.seconds >= bound * (1 - 1e-12)
    for rank in range(ranks(topology)):
        # one thing at a time: products and waits follow each other, and so do arriving transfers
        for kinds in (("product", "wait"), ("move",)):
            lane = _story(timeline, rank, *kinds)
            assert all(before[2] <= after[1] for before, after in itertools.pairwise(lane))
            assert all(math.isfinite(end) and end > start for _, start, end in lane)
