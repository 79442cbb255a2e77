"""What a program hangs on: which blocks meet, and no length; tiles of any length from those of a short one."""

import gc
import itertools
import weakref

import pytest

from ds_seqpar.analysis.memory import peak
from ds_seqpar.core.compiler.compile import CACHE_SIZE, BoundProgram, Compiler, Recipe
from ds_seqpar.core.compiler.program.shape import Shape
from ds_seqpar.core.compiler.program.ulysses import Heads
from ds_seqpar.core.compiler.schedules import SCHEDULES
from ds_seqpar.core.compiler.sharding.masks import CAUSAL, FULL, Mask
from ds_seqpar.core.compiler.sharding.shards import EvenShards
from ds_seqpar.core.compiler.tiles.launches import PLAIN_KERNEL
from tests.unit.plans import DIRECTIONS, SINGLE, topologies

SHAPE = Shape(batch=1, q_heads=4, kv_heads=2, head_dim=8, dtype="bfloat16", comm_dtype="float32")
ORDER = (CAUSAL, FULL)  # masks that know no distance


def _recipe(schedule, topology, **settings):
    return Recipe(schedule=SCHEDULES[schedule], topology=topology, **settings)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("schedule", SINGLE)
def test_programs_of_n_and_2n_tokens_are_one_object(schedule, overlap):
    topology = topologies(schedule, 4)[-1]
    for layout, direction in itertools.product(SCHEDULES[schedule].layouts, DIRECTIONS):
        compiler = Compiler(_recipe(schedule, topology, overlap=overlap), 2)
        for mask in ORDER if schedule != "distflash" else (CAUSAL,):
            bounds = [compiler.bound_inner(direction, mask, EvenShards(layout, n, 4), SHAPE) for n in (48, 96, 8000)]
            assert len({id(bound.program) for bound in bounds}) == 1
            assert [bound.tokens("q", (1,)) for bound in bounds] == [12, 24, 2000]
        # a window of all tokens leaves the blocks that meet as they are, and one of few does not
        shards = EvenShards(layout, 48, 4)
        wide, narrow = (compiler.inner_program(direction, Mask(window=w), shards, SHAPE) for w in (48, 1))
        assert wide is compiler.inner_program(direction, CAUSAL, shards, SHAPE)
        assert narrow is not wide


def test_a_program_hangs_on_what_travels_and_how():
    compiler = Compiler(_recipe("ring", topologies("ring", 4)[0]), 0)
    shards = EvenShards("zigzag", 48, 4)
    wide = compiler.inner_program("backward", CAUSAL, shards, SHAPE)
    narrow = Shape(batch=1, q_heads=4, kv_heads=2, head_dim=8, dtype="bfloat16", comm_dtype="bfloat16")
    assert compiler.inner_program("backward", CAUSAL, shards, narrow) is not wide
    assert compiler.inner_program("forward", CAUSAL, shards, SHAPE) is not wide
    other = Shape(batch=7, q_heads=8, kv_heads=4, head_dim=64, dtype="bfloat16", comm_dtype="float32")
    assert compiler.inner_program("backward", CAUSAL, shards, other) is wide


def test_tiles_grow_without_looking_at_tokens():
    """Those of a million tokens are found by arithmetic, and a bound keeps them."""
    shards = EvenShards("zigzag", 1 << 20, 8)
    program = Compiler(_recipe("ring", topologies("ring", 8)[0]), 3).inner_program("forward", CAUSAL, shards, SHAPE)
    bound = BoundProgram(program, (SHAPE,), shards, CAUSAL, PLAIN_KERNEL, Heads.of(SHAPE.q_heads, SHAPE.kv_heads))
    found = bound.tiles((3,), (3,))
    assert bound.tiles((3,), (3,)) is found
    tokens = (1 << 20) // 8
    assert sum(tile.pairs for tile in found) == tokens // 2 * (tokens // 2 + 1) + (tokens // 2) ** 2


def test_packs_do_not_push_out_the_program_of_every_step():
    compiler = Compiler(_recipe("ring", topologies("ring", 4)[0]), 0)
    shards = EvenShards("zigzag", 2 * (CACHE_SIZE + 8), 4)
    static = compiler.bound_inner("forward", CAUSAL, shards, SHAPE)
    for start in range(1, CACHE_SIZE + 8):
        compiler.bound_inner("forward", Mask(documents=(0, start)), shards, SHAPE)
        assert compiler.bound_inner("forward", CAUSAL, shards, SHAPE) is static


def test_a_bound_program_dies_with_its_last_reference():
    """Without the garbage collector: training may run with it off."""
    compiler = Compiler(_recipe("ring", topologies("ring", 2)[0]), 0)
    bound = compiler.bound_inner("forward", CAUSAL, EvenShards("zigzag", 48, 2), SHAPE)
    gc.disable()
    try:
        assert peak.__wrapped__(bound) > 0  # which calls all that it caches
        last = weakref.ref(bound)
        del compiler, bound
        assert last() is None
    finally:
        gc.enable()
