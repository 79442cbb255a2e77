"""Benchmarks that price plans count the tokens of a block, of which a rank may own several; and the floor of bytes."""

import argparse
import statistics

import pytest
import torch

from benchmarks import overlap, schedule_tables, timeline, triangle_bytes
from benchmarks.blocks import block_bytes, unit
from ds_seqpar.compiler.compile import Compiler, pattern_of, weight
from ds_seqpar.compiler.masks import CAUSAL
from ds_seqpar.compiler.program import Product
from ds_seqpar.compiler.shape import shape_of
from ds_seqpar.compiler.shards import EvenShards
from ds_seqpar.compiler.simulate import Costs, computation
from ds_seqpar.compiler.timeline import Event, Timeline
from ds_seqpar.config import SequenceParallelConfig
from ds_seqpar.runtime.kernels import KERNELS
from tests.unit.plans import DIRECTIONS

TRIANGLE = {"schedule": "triangle"}
SHAPE = shape_of("bf16", "bfloat16", 1, (2, 2, 64))


def made(schedule, ranks=6, tokens=8):
    """Recipe and shards of a causal schedule."""
    config = SequenceParallelConfig(size=ranks, ulysses=1, schedule=schedule).resolve(ranks, heads=(2, 2))
    return config, config.recipe(config.topology(ranks)), EvenShards(config.layout, tokens * ranks, ranks)


@pytest.mark.parametrize(("schedule", "parts"), [("ring", 1), ("triangle", 2)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_block_is_as_long_as_its_tokens(schedule, parts, direction):
    _, _, shards = made(schedule)
    for kind, size in SHAPE.bytes_per_token(direction).items():
        assert block_bytes(SHAPE, direction, shards)[kind] * parts == 8 * size
    assert unit(SHAPE, shards) == 8 * 2 * 64 * 2


def test_the_tables_have_the_bytes_of_docs_triangle():
    """T = 4: 2 T - 3.5 units at most, 2 T - 4 on average, and 1/64 more with each unit of partial outputs: lse."""
    shape = schedule_tables.shape_for((32, 32), "bf16")
    assert schedule_tables.received(6, TRIANGLE, "forward", shape) == "4.52 (4.02)"
    assert schedule_tables.received(6, {"schedule": "ring"}, "forward", shape) == "10.00"
    assert TRIANGLE in schedule_tables.settings(6)
    assert TRIANGLE not in schedule_tables.settings(16)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_simulated_time_line_carries_what_is_received(direction):
    config, recipe, shards = made("triangle", tokens=64)
    args = argparse.Namespace(seq=64 * 6, ranks=6, heads=(2, 2), head_dim=64)
    shape = shape_of("fp32", "float32", 1, (2, 2, 64))
    plan = recipe.plan(direction, pattern_of(CAUSAL, shards), shape)
    measured = Timeline((Event(0, "product", 0.0, 1.5, "", direction=direction),))
    found = timeline.simulated_walk(config, direction, measured, 1e6, args)
    # a rank's link in carries one transfer at a time
    received = [sum(e.end - e.start for e in found.of(rank, "move")) * 1e6 for rank in range(6)]
    whole = [size * 64 for size in plan.received(shape.bytes_per_token(direction))]
    assert received == pytest.approx([size / 2 for size in whole])
    assert sum(e.end - e.start for e in found.events if e.kind == "product") == pytest.approx(1.5)


@pytest.mark.parametrize("schedule", ["ring", "triangle"])
def test_products_sleep_for_the_pairs_that_are_visible(schedule, monkeypatch):
    slept, now = [], [0.0]
    monkeypatch.setattr(overlap.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(overlap.time, "sleep", slept.append)
    _, recipe, shards = made(schedule)
    plan = recipe.plan("forward", pattern_of(CAUSAL, shards), SHAPE)
    costs = Costs(transfer={}, product=1.0, weight=weight(CAUSAL, shards))
    work = overlap.Sleeping(KERNELS["reference"], 1.0, *(torch.zeros(1, 8, 2, 64) for _ in range(3)))
    work.pair = 1 / (shards.tokens("q", (0,)) * shards.tokens("kv", (0,)))
    total = []
    for rank in range(6):
        bound = Compiler(recipe, rank).bound("forward", CAUSAL, shards, SHAPE)
        for one in bound.program.code:
            if isinstance(one, Product):
                work.product((), (), 0, bound.tiles(one.q, one.kv), [Placed()])
        total.append(sum(slept))
        slept.clear()
    assert max(total) == pytest.approx(computation(plan, costs))


class Placed:
    def placed(self): ...


@pytest.mark.parametrize("ranks", [3, 6, 12, 24, 28])
@pytest.mark.parametrize("heads", [(32, 32), (32, 8), (64, 8)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nothing_receives_less_than_the_floor(ranks, heads, direction):
    for travel in ("fp32", "bf16"):
        shape = shape_of(travel, "bfloat16", 1, (*heads, 128))
        floor = triangle_bytes.floor(ranks, direction, shape)
        assert floor <= min(triangle_bytes.least(name, ranks, direction, shape)[0] for name in triangle_bytes.SHOWN)
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
    plan = config.recipe(config.topology(ranks)).plan("forward", pattern_of(CAUSAL, shards), shape)
    found = [size / unit(shape, shards) for size in plan.received(block_bytes(shape, "forward", shards))]
    assert max(found) == pytest.approx(triangle_bytes.least("triangle", ranks, "forward", shape)[0])
    assert 0 < statistics.fmean(found) - triangle_bytes.floor(ranks, "forward", shape) < 1
