"""What no query needs is neither computed nor sent: plans under windows and documents, against brute force."""

import itertools
from collections import defaultdict

import pytest

from ds_seqpar.core.compiler.compile import block_mask_of
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.layout import Run
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, FULL, Mask
from ds_seqpar.core.compiler.sharding.shards import EvenShards, UnevenShards
from ds_seqpar.core.settings import LAYOUTS
from ds_seqpar.schedules.validate import validate
from tests.oracle import seen
from tests.unit.plans import DIRECTIONS, SINGLE, built, joint, topologies

SEQ = 48
MASKS = [
    CAUSAL,
    FULL,
    *(Mask(window=window) for window in (1, 3, 9, 20, 47)),
    *(Mask(documents=Mask.documents_of(lengths)) for lengths in ([24, 24], [5, 30, 13], [12] * 4, [1] * 48)),
    Mask(documents=(0, 10, 14, 15, 30, 36), parents=(-1, 0, 1, 0, -1, 4)),
    Mask(window=7, documents=(0, 10, 33)),
    Mask(causal=False, window=4),
    Mask(causal=False, documents=(0, 16, 20)),
]
UNEVEN = {
    4: UnevenShards([(Run(0, 1, 3),), (Run(3, 1, 20), Run(40, 1, 1)), (), (Run(23, 1, 17), Run(41, 1, 7))]),
    6: UnevenShards([(Run(8 * block, 1, 8),) for block in (0, 2, 4, 1, 3, 5)]),
}


def _met(mask, shards):
    """The pairs of blocks of which a query sees a key, by looking at all of them."""
    held = [[[p for run in shards.runs(side, (b,)) for p in run.positions] for b in range(shards.size)]
            for side in ("q", "kv")]  # fmt: skip
    blocks = range(shards.size)
    return {(i, j) for i in blocks for j in blocks if seen(mask, held[0][i], held[1][j]).any()}


def _shards(schedule, size):
    return [*(EvenShards(layout, SEQ, size) for layout in LAYOUTS if layout in SCHEDULES[schedule].layouts),
            UNEVEN[size]]  # fmt: skip


# ranks, and masks
_sizes = pytest.mark.parametrize(
    ("size", "masks"),
    [
        pytest.param(4, MASKS[::2], id="4"),
        *(pytest.param(size, MASKS, marks=pytest.mark.slow, id=f"{size}, all masks") for size in (4, 6)),
    ],
)


def _plans(schedule, direction, travels, size, masks):
    """(pairs that meet, plan) under each mask of each layout, in every shape of `size` ranks."""
    for shards, mask in itertools.product(_shards(schedule, size), masks):
        pairs = _met(mask, shards)
        if not all(SCHEDULES[schedule].can_compute(*pair) for pair in pairs):
            continue
        meet = block_mask_of(mask, shards)
        assert set(meet.pairs()) == pairs
        for topology in topologies(schedule, size):
            yield pairs, built(schedule, topology, direction, travels, meet)


_ways = pytest.mark.parametrize(
    ("schedule", "direction", "travels"),
    [(name, way, side) for name in SINGLE for way in DIRECTIONS for side in SCHEDULES[name].moving_sides],
)


@_sizes
@_ways
def test_no_product_is_computed_and_no_block_is_sent_that_nobody_needs(schedule, direction, travels, size, masks):
    met = 0
    for pairs, plan in _plans(schedule, direction, travels, size, masks):
        validate(plan, pairs)
        steps = joint(plan)
        for compute in (compute for step in steps for compute in step.computes):
            products = {(i, j) for i in compute.q for j in compute.kv}
            if len(products) == 1:
                assert products <= pairs
            else:  # of groups: any pair that meets
                assert products & pairs
        _assert_operands_are_read(plan, steps)
        _assert_gathers_are_read(steps, pairs)
        _assert_results_have_something(plan, steps)
        met += 1
    assert met > 5


def _assert_operands_are_read(plan, steps):
    """Who gets a block multiplies it in a later step, or passes it on to one that does."""
    uses = defaultdict(set)
    for index, step in reversed([*enumerate(steps)]):
        for compute in step.computes:
            uses[compute.rank] |= {("q", compute.q), ("kv", compute.kv)}
        for move in step.moves:
            assert move.unit in uses[move.dst], f"{move} in step {index} serves nobody\n{plan.table()}"
        for move in step.moves:
            uses[move.src].add(move.unit)


def _assert_gathers_are_read(steps, pairs):
    """Every block that is gathered meets one of the other side's on the rank that gets it."""
    for rank_groups in steps:
        for gather in rank_groups.gathers:
            for rank in gather.ranks:
                computes = [c for step in steps for c in step.computes if c.rank == rank]
                for block in gather.blocks:
                    if gather.kind == "q":
                        assert any((block, j) in pairs for c in computes if block in c.q for j in c.kv)
                    else:
                        assert any((i, block) in pairs for c in computes if block in c.kv for i in c.q)


def _assert_results_have_something(plan, steps):
    """A result that leaves a rank has products in it: those of the rank, or what came to it."""
    held = defaultdict(set)
    for step in steps:
        for compute in step.computes:
            held[compute.rank] |= {("out", compute.q), ("dq", compute.q), ("dkv", compute.kv)}
        arrived = []
        for move in step.results:
            assert move.unit in held[move.src], f"{move} takes nothing home\n{plan.table()}"
            arrived.append(move)
        for move in arrived:
            held[move.src].discard(move.unit)
        for move in arrived:
            held[move.dst].add(move.unit)


@_sizes
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_block_goes_round_as_far_as_the_last_rank_that_needs_it(direction, size, masks):
    for schedule in ("ring", "double_ring"):
        for pairs, plan in _plans(schedule, direction, "kv", size, masks):
            hops = defaultdict(int)
            for move in (move for step in joint(plan) for move in step.moves):
                hops[move.key[0]] += 1
            if schedule == "ring":
                far = {j: max((i - j) % plan.size for i, k in pairs if k == j) for j in {j for _, j in pairs}}
                assert hops == {j: hop for j, hop in far.items() if hop}
            assert all(count <= plan.size - 1 for count in hops.values())


@_sizes
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_blocks_that_go_straight_arrive_once_where_they_are_read(direction, size, masks):
    """DistFlashAttn's, and what becomes of a mesh whose groups have holes: one transfer a foreign operand, and one for
    each result that others computed."""
    met = 0
    for schedule in ("distflash", "mesh"):
        for _, plan in _plans(schedule, direction, "kv", size, masks):
            steps = joint(plan)
            keys = {len(key) for step in steps for c in step.computes for key in (c.q, c.kv)}
            owners = all(move.key == (move.src,) for step in steps for move in step.moves)
            if keys != {1} or any(step.gathers for step in steps) or not owners:
                continue
            computes = [c for step in steps for c in step.computes]
            wanted = {(c.rank, kind, key[0]) for c in computes for kind, key in (("q", c.q), ("kv", c.kv))}
            moves = sorted((move.dst, move.kind, move.key[0]) for step in steps for move in step.moves)
            assert moves == sorted(unit for unit in wanted if unit[0] != unit[2])
            kinds = [("out", 0)] if direction == "forward" else [("dq", 0), ("dkv", 1)]
            home = {(c.rank, kind, (c.q, c.kv)[side][0]) for c in computes for kind, side in kinds}
            results = sorted((move.src, move.kind, move.key[0]) for step in steps for move in step.results)
            assert results == sorted(unit for unit in home if unit[0] != unit[2])
            met += 1
    assert met > 50
