"""How evenly causal work is spread: visible pairs a rank and step, idle slots of block schedules, kernel calls."""

import itertools

import pytest

from ds_seqpar.core.compiler.compile import Recipe, block_mask_of
from ds_seqpar.core.compiler.program.shape import Shape
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.layout import LAYOUTS, Topology, join
from ds_seqpar.core.compiler.sharding.masks import CAUSAL
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.core.compiler.tiles.tiles import tiles
from ds_seqpar.core.settings import RANK_ORDERS, SequenceParallelConfig
from tests.grids import few_then_rest
from tests.unit.plans import DIRECTIONS, build, causal_contiguous, double_ring, joint, mesh, ranks, ring


def _blocks(layout, size, tokens):
    """Runs of every CP rank, `tokens` each."""
    return [LAYOUTS[layout].runs(size * tokens, size, rank) for rank in range(size)]


def _tiles(blocks, compute, square=False):
    """The kernel calls of a product under the causal mask."""
    q, kv = (join(blocks[block] for block in key) for key in (compute.q, compute.kv))
    return tiles(q, kv, CAUSAL, square)


def _work(plan, blocks):
    """work[step][rank]: visible (query, key) pairs, for the steps that compute."""
    found = []
    for step in joint(plan):
        if step.computes:
            found.append([0] * plan.size)
            for compute in step.computes:
                found[-1][compute.rank] += sum(tile.pairs for tile in _tiles(blocks, compute))
    return found


def _balance(work):
    """Mean over greatest."""
    return sum(work) / len(work) / max(work)


def _total(work):
    return [sum(steps) for steps in zip(*work, strict=True)]


def _assert_even(plan, tokens):
    """Every rank has as much to do as every other, in each step and in all."""
    work = _work(plan, _blocks("zigzag", plan.size, tokens))
    assert sum(map(sum, work)) == plan.size * tokens * (plan.size * tokens + 1) // 2  # half of everything
    for step in (*work, _total(work)):
        assert set(step) == {step[0]}, plan.name


SHAPES = [
    *((a, b, r) for a, b, r in itertools.product((1, 2, 3, 4), repeat=3) if a * b * r <= 16),
    *((8, 4, 1), (4, 8, 1), (1, 4, 8), (5, 3, 2), (3, 3, 3), (5, 1, 5), (7, 5, 1), (32, 1, 1), (1, 32, 1)),
]


# pytorch#189902: a load balancer that does not balance, which no test of correctness can see
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_zigzag_gives_every_rank_of_every_ring_equal_work_in_every_step(direction):
    for size in (*range(1, 17), 32):
        _assert_even(build("ring", ring(size), direction), 4)
    for size, window in ((4, 2), (6, 3), (8, 2), (9, 3), (12, 4), (15, 5), (16, 4)):
        _assert_even(build("double_ring", double_ring(size, window), direction), 4)


@pytest.mark.parametrize("travels", ["kv", "q"])
def test_zigzag_gives_every_rank_of_every_mesh_equal_work_in_every_step(travels):
    for shape in SHAPES:
        _assert_even(build("mesh", mesh(*shape), "forward", travels), 4)


def test_stripes_are_nearly_even_on_a_ring():
    for size in (2, 3, 4, 8, 16, 32):
        work = _work(build("ring", ring(size), "forward"), _blocks("striped", size, 256))
        assert len(work) == size
        assert all(0.99 <= _balance(step) <= 1 for step in (*work, _total(work)))
        # Striped Attention, section 3.2: a rank has the diagonal of a block or lacks it
        assert {x for step in work for x in step} == {256 * 257 // 2, 256 * 255 // 2}


def test_a_contiguous_ring_waits_for_its_last_rank_and_idles_almost_half_of_its_slots():
    for size in range(1, 33):
        plan = build("ring", ring(size), "forward", pairs=causal_contiguous(size))
        assert len(plan.ranks[0]) == size
        products = sum(len(step.computes) for step in joint(plan))
        assert (size * size - products) * 2 == size * size - size
        work = _work(plan, _blocks("contiguous", size, 4))
        # in every step but the first a rank is idle, and others have whole blocks
        assert all(min(step) == 0 < max(step) == 16 for step in work[1:])


# ---- DistFlashAttn: helpers fill the slots


def _slots(size):
    """distflash's products, a list a step; every rank has at most one in a step."""
    steps = [step.computes for step in joint(build("distflash", ring(size), "forward"))]
    assert len(steps) == size // 2 + 1
    for computes in steps:
        assert len({compute.rank for compute in computes}) == len(computes)
    return steps


def test_distflash_idles_no_slot_of_odd_sizes_and_a_share_of_1_in_a_plus_2_of_even_ones():
    for size in range(2, 17):
        steps = _slots(size)
        idle = size * len(steps) - sum(map(len, steps))
        assert idle * (size + 2) == (0 if size % 2 else size * len(steps))
        # those of the last step, whose half would do what the other half does
        assert all(len(computes) == size for computes in steps[:-1])
        assert len(steps[-1]) == (size if size % 2 else size // 2)


# the paper's Algorithm 2 as printed leaves them out
def test_distflash_has_helpers_in_the_last_step_of_odd_sizes():
    for size in range(3, 17, 2):
        helped = [compute for compute in _slots(size)[-1] if compute.q != (compute.rank,)]
        assert [compute.rank for compute in helped] == list(range(size // 2))
        assert all(compute.q[0] > compute.rank for compute in helped)


def test_distflash_halves_the_time_of_a_contiguous_ring():
    """Sum over steps of the greatest rank's visible pairs, against those of the ring."""
    for size in (8, 16, 32):
        blocks, pairs = _blocks("contiguous", size, 4), causal_contiguous(size)
        times = [
            sum(max(step) for step in _work(build(name, ring(size), "forward", pairs=pairs), blocks))
            for name in ("distflash", "ring")
        ]
        diagonal, whole = 4 * 5 // 2, 4 * 4
        assert times == [diagonal + size // 2 * whole, diagonal + (size - 1) * whole]


# ---- kernel calls


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("layout", ["balanced", "zigzag", "striped"])
def test_a_step_of_a_ring_is_one_kernel_call(layout, square):
    plans = [build("ring", ring(size), "forward") for size in (*range(1, 10), 16)]
    plans += [build("double_ring", double_ring(size, window), "forward") for size, window in ((8, 4), (16, 4), (12, 3))]
    for plan, tokens in itertools.product(plans, (2, 6)):
        blocks = _blocks(layout, plan.size, tokens)
        for step in joint(plan):
            assert {compute.rank for compute in step.computes} == set(range(plan.size))
            assert len(step.computes) == plan.size
            assert {len(_tiles(blocks, compute, square)) for compute in step.computes} == {1}


# 16 ranks of 6 tokens
PATTERN = block_mask_of(CAUSAL, EvenShards("zigzag", 96, 16))
SHAPE = Shape(batch=1, q_heads=2, kv_heads=2, head_dim=8, dtype="bfloat16", comm_dtype="float32")
MESHES = {
    "attention2d": [{"rows": rows} for rows in (1, 2, 4, 8)],
    "wallfacer": [{"team": team} for team in (1, 2, 4)],
    "mesh": [{"mesh": shape} for shape in ((2, 4, 2), (4, 2, 2), (2, 1, 8), (1, 2, 8), (8, 1, 2), (1, 8, 2))],
}


@pytest.mark.parametrize("ulysses_sizes", few_then_rest((2,), (1,)))
@pytest.mark.parametrize("schedule", MESHES)
@pytest.mark.parametrize("rank_order", RANK_ORDERS)
def test_a_visit_on_a_zigzag_mesh_is_few_kernel_calls_wherever_its_ranks_are(schedule, rank_order, ulysses_sizes):
    for fields in MESHES[schedule]:
        for ulysses in ulysses_sizes:
            size = 16 * ulysses
            config = SequenceParallelConfig(
                size=size, ulysses=ulysses, schedule=schedule, rank_order=rank_order, **fields
            ).resolve(size)
            topology = config.topology(size)
            # tokens are numbered by mesh coordinates, so a rank order changes no plan
            plain = Topology(axes=(("ulysses", ulysses), *config.cp_axes, ("data", 1)))
            for direction in DIRECTIONS:
                plan, same = (
                    Recipe(schedule=SCHEDULES[schedule], topology=its).plan(direction, PATTERN, SHAPE)
                    for its in (topology, plain)
                )
                assert plan == same
                _assert_few_calls(plan, 6)


def _assert_few_calls(plan, tokens):
    blocks = _blocks("zigzag", plan.size, tokens)
    for step in joint(plan):
        assert len({compute.rank for compute in step.computes}) == len(step.computes)  # one visit a step
        for compute in step.computes:
            assert len(_tiles(blocks, compute)) <= 4
            assert len(_tiles(blocks, compute, square=True)) <= 6


def test_a_visit_on_any_zigzag_mesh_is_few_kernel_calls():
    for shape in SHAPES:
        for travels in ("kv", "q"):
            _assert_few_calls(build("mesh", mesh(*shape), "forward", travels), 4)


def test_a_visit_on_a_striped_mesh_is_a_kernel_call_for_each_pair_of_blocks():
    for a, b, r in ((2, 2, 2), (3, 2, 1), (2, 4, 2), (1, 3, 2)):
        plan = build("mesh", mesh(a, b, r), "forward")
        blocks = _blocks("striped", ranks(mesh(a, b, r)), 6)
        calls = {len(_tiles(blocks, compute)) for step in joint(plan) for compute in step.computes}
        assert calls == {a * b}
