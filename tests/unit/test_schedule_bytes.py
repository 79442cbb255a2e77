"""What ranks receive, by schedule, direction and traveling side: the formulas, the papers' examples, and what "auto"
and overlap make of it.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_seqpar.core.compiler.compile import Recipe
from ds_seqpar.core.compiler.program.shape import Shape
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.schedules.overlap import overlapped
from tests.grids import examples, few_then_rest
from tests.unit.plans import (
    DIRECTIONS,
    FORMS,
    block_mask,
    build,
    causal_contiguous,
    double_ring,
    everything,
    joint,
    mesh,
    problems,
    ranks,
    ring,
    topologies,
)

# Elements of one block. Powers of a number that is greater than any factor in a formula, so that two sums are equal
# only where all their factors are.
Q, O, L, KV, DO, DQ, DKV = (1000**power for power in range(7))  # noqa: E741
# with queries and their results goes the lse, and in backward delta, as much
UNITS = {
    "forward": {"q": Q, "kv": KV, "out": O + L},
    "backward": {"q": Q + DO + 2 * L, "kv": KV, "dq": DQ, "dkv": DKV},
}
SIDES = ("kv", "q")


def _mesh_formula(a, b, r, direction, travels):
    of_q = {"forward": Q + O + L, "backward": Q + DO + DQ + 2 * L}[direction]
    of_kv = {"forward": KV, "backward": KV + DKV}[direction]
    if travels == "kv":
        return (a - 1) * of_q + (b * r - 1) * of_kv
    return (a * r - 1) * of_q + (b - 1) * of_kv


def _distflash_formula(size, p, direction):
    m, c = size // 2, -(-size // 2)
    kv, q, back = min(p, m), max(0, c - 1 - p), max(0, p - m)
    if direction == "forward":
        return kv * KV + q * Q + back * (O + L)
    return kv * KV + min(m, size - 1 - p) * DKV + q * (Q + DO + 2 * L) + back * DQ


@pytest.mark.parametrize("travels", SIDES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rings_receive_what_the_table_says_whatever_their_windows(direction, travels):
    for size in range(1, 17):
        wanted = [_mesh_formula(1, 1, size, direction, travels)] * size
        assert build("ring", ring(size), direction, travels).received(UNITS[direction]) == wanted
        for topology in topologies("double_ring", size):
            assert build("double_ring", topology, direction, travels).received(UNITS[direction]) == wanted, topology


@pytest.mark.parametrize("travels", SIDES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_mesh_receives_what_the_table_says(direction, travels):
    met = 0
    for size in (*range(1, 13), 16, 18):
        for topology in topologies("mesh", size):
            wanted = _mesh_formula(*(topology.size(axis) for axis in "xyz"), direction, travels)
            # each rank the same: the greatest and the mean are this
            assert build("mesh", topology, direction, travels).received(UNITS[direction]) == [wanted] * size, topology
            met += 1
    assert met > 60


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_attention2d_and_wallfacer_are_meshes(direction):
    for schedule, size in itertools.product(("attention2d", "wallfacer"), (4, 12, 16)):
        for topology in topologies(schedule, size):
            assert build(schedule, topology, direction).ranks == build("mesh", topology, direction).ranks


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_distflash_receives_what_the_table_says_rank_by_rank(direction):
    for size in range(1, 33):
        received = build("distflash", ring(size), direction).received(UNITS[direction])
        assert received == [_distflash_formula(size, p, direction) for p in range(size)], size


def _bytes(direction, q_heads, kv_heads, travel, head_dim=128):
    """Bytes a token of bf16 attention."""
    shape = Shape(batch=1, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype="bfloat16", comm_dtype=travel)
    return shape.bytes_per_token(direction)


GIB = 2**30
EXAMPLE = {(4, 4, 4): 0.457, (4, 1, 16): 0.457, (8, 8, 1): 0.355, (1, 1, 64): 1.60}


# WallFacer, section 4: 64 ranks, 65,536 tokens, hidden size 6,656; the paper has 0.558 for teams of 4, 1.625 for a ring
@pytest.mark.parametrize("shape", EXAMPLE, ids=str)
def test_the_example_of_wallfacer(shape):
    tokens = 65536 // 64
    units = {kind: tokens * size for kind, size in _bytes("forward", 52, 52, "bfloat16").items()}
    assert units["kv"] == 2 * tokens * 6656 * 2
    units["out"] -= tokens * 52 * 4  # lse apart
    received = build("mesh", mesh(*shape), "forward").received(units)
    assert {round(x / GIB, 3 if shape[0] > 1 else 2) for x in received} == {EXAMPLE[shape]}


# ---- a double ring leaves the node rarely


def _leaving(plan, window, kind):
    """Per receiving rank: how many transfers of this kind come from another window of ranks."""
    found = [0] * plan.size
    for step in joint(plan):
        for move in (*step.moves, *step.results):
            if move.kind == kind:
                found[move.dst] += move.src // window != move.dst // window
    return found


WINDOWS = ((4, 2), (8, 2), (8, 4), (12, 3), (12, 4), (16, 4), (16, 8))


@pytest.mark.parametrize(("size", "window"), WINDOWS)
def test_few_hops_of_a_double_ring_leave_the_node(size, window):
    for direction, travels in itertools.product(DIRECTIONS, SIDES):
        plan = build("double_ring", double_ring(size, window), direction, travels)
        assert _leaving(plan, window, travels) == [size // window - 1] * size
    forward, backward = (build("double_ring", double_ring(size, window), "backward", travels) for travels in SIDES)
    # the gradient follows from the first visit on; its last hop goes home, to the first window
    assert _leaving(forward, window, "dkv") == _leaving(backward, window, "dq") == [size // window] * size


@pytest.mark.parametrize(("size", "window"), WINDOWS)
def test_all_hops_of_a_ring_into_the_first_rank_of_a_node_leave_another(size, window):
    plan = build("ring", ring(size), "forward")
    first = [size - 1 if rank % window == 0 else 0 for rank in range(size)]
    assert _leaving(plan, window, "kv") == first


# ---- "auto"

HEADS = ((8, 8), (8, 4), (8, 2), (8, 1), (32, 32), (32, 8))


def _chosen(topology, direction, sizes, schedule="mesh"):
    """Which side "auto" lets travel."""
    recipe, size = Recipe(schedule=SCHEDULES[schedule], topology=topology), ranks(topology)
    chosen = recipe.moving_side(direction, block_mask(size, everything(size)), sizes)
    plans = {side: build(schedule, topology, direction, side) for side in SIDES}
    assert max(plans[chosen].received(sizes)) == min(max(plan.received(sizes)) for plan in plans.values())
    return {chosen}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("q_heads", "kv_heads"), HEADS, ids=str)
def test_auto_lets_the_side_travel_that_the_inequality_says(q_heads, kv_heads, direction):
    dim = 16
    # all of one dtype, lse too: elements
    shape = Shape(batch=1, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim, dtype="float64", comm_dtype="float64")
    sizes = shape.bytes_per_token(direction)
    for a, b, r in ((1, 1, 4), (2, 1, 2), (1, 2, 2), (1, 4, 2), (1, 8, 2), (2, 4, 2), (4, 2, 2), (2, 2, 3), (1, 6, 2)):
        if direction == "backward":
            # a(3hq + 2hq/D) < 4 b hk
            wins = a * (3 * q_heads * dim + 2 * q_heads) < 4 * b * kv_heads * dim
        else:
            # a(2hq + hq/D) < 2 b hk: never on a ring
            wins = a * (2 * q_heads * dim + q_heads) < 2 * b * kv_heads * dim
            assert not (wins and b == 1)
        assert _chosen(mesh(a, b, r), direction, sizes) == {"q" if wins else "kv"}, (a, b, r)


# BurstAttention's backward moves 3 large tensors where a ring moves 4
def test_on_a_ring_backward_lets_queries_travel_for_mha_only():
    for q_heads, kv_heads in HEADS:
        sizes = _bytes("backward", q_heads, kv_heads, "bfloat16")
        assert _chosen(ring(4), "backward", sizes, "ring") == {"q" if q_heads == kv_heads else "kv"}
        assert _chosen(ring(4), "forward", _bytes("forward", q_heads, kv_heads, "bfloat16"), "ring") == {"kv"}


def test_auto_weighs_what_partial_results_travel_in():
    # (1, 5, 2), forward, 4 query heads for each of k/v: a(q + o) against b kv, and o is twice as much in fp32
    sides = {
        travel: _chosen(mesh(1, 5, 2), "forward", _bytes("forward", 8, 2, travel)) for travel in ("bfloat16", "float32")
    }
    assert sides == {"bfloat16": {"q"}, "float32": {"kv"}}


# ---- overlap changes the order, not the bytes


SIZES = {direction: _bytes(direction, 8, 4, "bfloat16") for direction in DIRECTIONS}


@pytest.mark.parametrize("numbers", few_then_rest((3, 4, 6), (8, 9, 12)))
@pytest.mark.parametrize(("schedule", "direction", "travels"), FORMS)
def test_an_overlapped_plan_receives_as_much_on_every_rank(schedule, direction, travels, numbers):
    for size in numbers:
        pairs = causal_contiguous(size) if schedule == "distflash" else everything(size)
        for topology in topologies(schedule, size):
            plan = build(schedule, topology, direction, travels, pairs)
            better = overlapped(plan, block_mask(plan.size, pairs), SIZES[direction])
            assert better.received(UNITS[direction]) == plan.received(UNITS[direction]), topology


@pytest.mark.parametrize(("schedule", "direction", "travels"), FORMS)
@examples(25)
@given(data=st.data())
def test_an_overlapped_plan_never_moves_more(schedule, direction, travels, data):
    topology, pairs = data.draw(problems(schedule, 12))
    plan = build(schedule, topology, direction, travels, pairs)
    better = overlapped(plan, block_mask(plan.size, pairs), SIZES[direction])
    moved = [_blocks(x) for x in (plan, better)]
    assert all(moved[1][kind] <= moved[0][kind] for kind in moved[1])


def _blocks(plan):
    """Blocks that are received, by kind."""
    kinds = UNITS[plan.direction]
    return {kind: sum(plan.received({other: int(other == kind) for other in kinds})) for kind in kinds}
