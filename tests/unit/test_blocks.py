"""Benchmarks that price plans count the tokens of a block, of which a rank may own several; and the floor of bytes."""

import statistics

import pytest

from benchmarks.attention import schedules
from benchmarks.attention.schedules import block_bytes, unit
from ds_seqpar.core.compiler.compile import block_mask_of
from ds_seqpar.core.compiler.program.shape import shape_of
from ds_seqpar.core.compiler.sharding.masks import CAUSAL
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.core.settings import SequenceParallelConfig
from tests.unit.plans import DIRECTIONS

SHAPE = shape_of("bf16", "bfloat16", 1, (2, 2, 64))


def made(schedule, ranks=6, tokens=8):
    """Recipe and shards of a causal schedule."""
    config = SequenceParallelConfig(size=ranks, ulysses=1, schedule=schedule).resolve(ranks, heads=(2, 2))
    return config.recipe(config.topology(ranks)), EvenShards(config.layout, tokens * ranks, ranks)


@pytest.mark.parametrize(("schedule", "parts"), [("ring", 1), ("triangle", 2)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_block_is_as_long_as_its_tokens(schedule, parts, direction):
    _, shards = made(schedule)
    for kind, size in SHAPE.bytes_per_token(direction).items():
        assert block_bytes(SHAPE, direction, shards)[kind] * parts == 8 * size
    assert unit(SHAPE, shards) == 8 * 2 * 64 * 2


def test_the_tables_have_the_bytes_of_docs_triangle():
    """T = 4: 2 T - 3.5 units at most, 2 T - 4 on average, and 1/64 more with each unit of partial outputs: lse."""
    shape = schedules.shape_for((32, 32), "bf16")
    assert schedules.received(6, "triangle", "forward", shape) == "4.52 (4.02)"
    assert schedules.received(6, "ring", "forward", shape) == "10.00"
    assert "triangle" in schedules.names(6)
    assert "triangle" not in schedules.names(16)


@pytest.mark.parametrize("ranks", [3, 6, 12, 24, 28])
@pytest.mark.parametrize("heads", [(32, 32), (32, 8), (64, 8)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nothing_receives_less_than_the_floor(ranks, heads, direction):
    for travel in ("fp32", "bf16"):
        shape = shape_of(travel, "bfloat16", 1, (*heads, 128))
        floor = schedules.floor(ranks, direction, shape)
        assert floor <= min(schedules.least(name, ranks, direction, shape)[0] for name in schedules.SHOWN)
        # the least over a grid of rows that have enough pairs is what is said, from above
        sizes, own = shape.bytes_per_token(direction), shape.bytes_per_token("forward")["q"]
        of_q = (sizes["q"] + sizes["out" if direction == "forward" else "dq"]) / own
        of_kv = (sizes["kv"] + (sizes["dkv"] if direction == "backward" else 0)) / own
        area = (ranks + 1) / 2
        rows = [1 + (area - 1) * step / 2000 for step in range(2001)]
        least = min(of_q * (x - 1) + of_kv * (area / x - 1) for x in rows)
        assert floor == pytest.approx(least, rel=1e-3)
        assert floor <= least + 1e-9


@pytest.mark.parametrize("ranks", [6, 15])
def test_the_triangle_is_as_said_by_its_plan_and_near_the_floor(ranks):
    shape = shape_of("bf16", "bfloat16", 1, (32, 32, 128))
    config = SequenceParallelConfig(size=ranks, ulysses=1, schedule="triangle").resolve(ranks)
    shards = EvenShards(config.layout, 4 * ranks, ranks)
    plan = config.recipe(config.topology(ranks)).plan("forward", block_mask_of(CAUSAL, shards), shape)
    found = [size / unit(shape, shards) for size in plan.received(block_bytes(shape, "forward", shards))]
    assert max(found) == pytest.approx(schedules.least("triangle", ranks, "forward", shape)[0])
    assert 0 < statistics.fmean(found) - schedules.floor(ranks, "forward", shape) < 1
