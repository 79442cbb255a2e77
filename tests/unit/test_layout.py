"""Layouts partition a sequence, and tiles cover the visible part of (queries x keys) exactly, in few kernel calls."""

import itertools
import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ds_seqpar.compiler.layout import LAYOUTS, Run, join, multiple
from ds_seqpar.compiler.masks import CAUSAL, FULL
from ds_seqpar.compiler.shards import UnevenShards, positions
from ds_seqpar.compiler.tiles import tiles
from ds_seqpar.config import LAYOUTS as COMMON
from ds_seqpar.errors import InputError

RANKS = range(1, 17)


def _blocks(layout, ranks, per_rank):
    return [LAYOUTS[layout].runs(ranks * per_rank, ranks, rank) for rank in range(ranks)]


def _held(runs):
    return [position for run in runs for position in run.positions]


def visible(q, kv, causal, square=False):
    """The kernel calls of some queries and keys under a mask of order alone; test_masks.py has the others."""
    return tiles(q, kv, CAUSAL if causal else FULL, square)


def _mask(q, kv, causal):
    q, kv = torch.tensor(_held(q)), torch.tensor(_held(kv))
    return (q[:, None] >= kv[None, :]) if causal else torch.ones(len(q), len(kv), dtype=torch.bool)


def _assert_exact(q, kv, causal, square=False):
    """Every visible pair lies in exactly one tile and no other pair in any."""
    mask = _mask(q, kv, causal)
    covered = torch.zeros(mask.shape, dtype=torch.int64)
    found = visible(q, kv, causal, square)
    for tile in found:
        assert 0 <= tile.q0 < tile.q1 <= mask.shape[0], tile
        assert 0 <= tile.k0 < tile.k1 <= mask.shape[1], tile
        part = torch.ones(tile.q1 - tile.q0, tile.k1 - tile.k0, dtype=torch.int64)
        assert tile.kind in ("full", "causal"), tile
        part = part.tril() if tile.kind == "causal" else part
        assert tile.products == part.sum(), tile
        covered[tile.q0 : tile.q1, tile.k0 : tile.k1] += part
        if square and tile.kind == "causal":
            assert tile.q1 - tile.q0 == tile.k1 - tile.k0, tile
    assert torch.equal(covered, mask.long()), (q, kv, found)


@pytest.mark.parametrize("layout", COMMON)
def test_ranks_partition_the_sequence(layout):
    for ranks, ulysses, times in itertools.product(RANKS, (1, 2, 3, 4), (1, 2, 5)):
        size = ranks * ulysses
        seq = times * multiple(layout, size, ulysses)
        held = [positions(layout, seq, size, ulysses, index) for index in range(size)]
        assert {len(part) for part in held} == {seq // size}, (ranks, ulysses, seq)
        assert sorted(itertools.chain(*held)) == list(range(seq)), (ranks, ulysses, seq)


@pytest.mark.parametrize("layout", COMMON)
def test_ulysses_members_together_hold_the_runs_of_their_inner_rank_in_order(layout):
    for ranks, ulysses in itertools.product(RANKS, (1, 2, 3, 4)):
        seq = 2 * multiple(layout, ranks * ulysses, ulysses)
        for inner in range(ranks):
            members = [positions(layout, seq, ranks * ulysses, ulysses, inner * ulysses + u) for u in range(ulysses)]
            assert list(itertools.chain(*members)) == _held(LAYOUTS[layout].runs(seq, ranks, inner))


# deepspeed#7384, #7842: a sequence length that the ranks do not divide corrupts the result
@pytest.mark.parametrize("layout", COMMON)
def test_multiples_are_shared_equally(layout):
    for ranks, ulysses in itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 4)):
        size, step = ranks * ulysses, multiple(layout, ranks * ulysses, ulysses)
        for seq in (step, 2 * step):
            held = [positions(layout, seq, size, ulysses, index) for index in range(size)]
            assert sorted(itertools.chain(*held)) == list(range(seq))
            assert {len(x) for x in held} == {seq // size}


@pytest.mark.parametrize("run", [(3, -1, 4), (0, 0, 4), (0, 1, -2), (-1, 1, 4), (0, 1.0, 4), (True, 1, 4)])
def test_a_run_that_does_not_go_forward_is_refused(run):
    with pytest.raises(InputError, match=f"run of q.*got {re.escape(str(run))}"):
        UnevenShards([[run], [(4, 1, 4)]])


def test_joined_blocks_stand_in_position_order():
    blocks = _blocks("zigzag", 4, 6)
    runs = join([blocks[2], blocks[0]])
    assert _held(runs) == sorted(_held(blocks[0]) + _held(blocks[2]))


_runs = st.builds(Run, st.integers(0, 40), st.integers(1, 6), st.integers(1, 12))


@st.composite
def _equal_steps(draw):
    step = draw(st.integers(1, 4))
    run = st.builds(Run, st.integers(0, 40), st.just(step), st.integers(1, 12))
    return tuple(tuple(draw(st.lists(run, min_size=1, max_size=4))) for _ in range(2))


@st.composite
def _gathered(draw):
    """Two groups of blocks of one layout, each in the order of a gathered operand."""
    layout = draw(st.sampled_from(COMMON))
    ranks = draw(st.integers(1, 9))
    blocks = _blocks(layout, ranks, draw(st.integers(1, 4)) * (2 if layout == "zigzag" else 1))
    group = st.sets(st.integers(0, ranks - 1), min_size=1)
    return tuple(join(blocks[rank] for rank in draw(group)) for _ in range(2))


# one query may be the first to see two keys, where runs of one step follow each other closely
@example(((Run(1, 2, 3),), (Run(4, 2, 1), Run(5, 2, 1))), True, False)
@given(_equal_steps(), st.booleans(), st.booleans())
def test_tiles_of_equal_steps_are_exact(runs, causal, square):
    _assert_exact(*runs, causal, square)


@given(st.tuples(_runs), st.tuples(_runs), st.booleans())
def test_tiles_of_different_steps_are_exact(q, kv, square):
    _assert_exact(q, kv, True, square)


@given(*(st.lists(_runs, min_size=1, max_size=4).map(tuple) for _ in range(2)), st.booleans())
def test_tiles_of_any_runs_are_exact(q, kv, square):
    _assert_exact(q, kv, True, square)


@given(_gathered(), st.booleans(), st.booleans())
def test_tiles_of_gathered_groups_are_exact(runs, causal, square):
    _assert_exact(*runs, causal, square)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("layout", COMMON)
def test_a_ring_visit_is_one_kernel_call_at_most(layout, square):
    for ranks, per_rank in itertools.product(RANKS, (2, 6)):
        blocks = _blocks(layout, ranks, per_rank)
        for i, j in itertools.product(range(ranks), repeat=2):
            # only a later slice is seen by nobody
            wanted = layout != "contiguous" or j <= i
            assert len(visible(blocks[i], blocks[j], True, square)) == wanted, (ranks, i, j)


def _meshes(most):
    sides = range(1, most + 1)
    return [(a, b, r) for a, b, r in itertools.product(sides, repeat=3) if a * b * r <= most]


def _visits(shape, blocks):
    """(rank, ring step, q runs, kv runs) of a mesh: q gathered along x, kv along y, the gathered kv rotates along z."""
    a, b, rounds = shape
    number = lambda x, y, z: x + a * (y + b * z)  # noqa: E731
    for x, y, z, step in itertools.product(range(a), range(b), range(rounds), range(rounds)):
        q = join(blocks[number(i, y, z)] for i in range(a))
        kv = join(blocks[number(x, j, (z - step) % rounds)] for j in range(b))
        yield number(x, y, z), step, q, kv


def _check_zigzag_mesh(shape, per_rank):
    blocks = _blocks("zigzag", shape[0] * shape[1] * shape[2], per_rank)
    work = {}
    for _, step, q, kv in _visits(shape, blocks):
        found = visible(q, kv, True)
        assert len(found) <= 4, (shape, found)
        assert len(visible(q, kv, True, True)) <= 6, (shape, tiles)
        work.setdefault(step, set()).add(sum(tile.products for tile in found))
    # a step's work is one number: the same for all ranks
    assert all(len(different) == 1 for different in work.values()), (shape, work)


def test_zigzag_meshes_need_few_kernel_calls_and_give_all_ranks_equal_work_in_every_step():
    for shape in _meshes(16):
        _check_zigzag_mesh(shape, 4)


@pytest.mark.whole
@pytest.mark.parametrize("per_rank", [2, 6])
def test_zigzag_meshes_of_up_to_64_ranks(per_rank):
    for shape in _meshes(64):
        _check_zigzag_mesh(shape, per_rank)


def test_striped_meshes_need_a_times_b_kernel_calls():
    for a, b, rounds in _meshes(16):
        for _, _, q, kv in _visits((a, b, rounds), _blocks("striped", a * b * rounds, 4)):
            assert len(visible(q, kv, True)) <= a * b


# pytorch#189902: a load balancer that does not balance, which no test of correctness can see
def test_zigzag_ring_gives_every_rank_equal_work_in_every_step():
    for ranks, chunk in itertools.product((*range(1, 33), 48, 64), (1, 3)):
        blocks = _blocks("zigzag", ranks, 2 * chunk)
        for step in range(ranks):
            work = {
                sum(tile.products for tile in visible(blocks[rank], blocks[(rank - step) % ranks], True))
                for rank in range(ranks)
            }
            assert work == {chunk * chunk + chunk * (chunk + 1) if step == 0 else 2 * chunk * chunk}


def test_contiguous_ring_idles_almost_half_of_its_slots():
    for ranks in range(1, 33):
        blocks = _blocks("contiguous", ranks, 3)
        idle = sum(not visible(q, kv, True) for q, kv in itertools.product(blocks, repeat=2))
        assert idle * 2 == ranks * ranks - ranks


@pytest.mark.parametrize("layout", COMMON)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
def test_any_number_of_tokens_is_dealt_evenly(layout, ranks):
    """To one token, every token once."""
    for tokens in (*range(1, 80), 1001):
        held = [LAYOUTS[layout].runs(tokens, ranks, rank) for rank in range(ranks)]
        assert sorted(p for runs in held for run in runs for p in run.positions) == list(range(tokens))
        shares = [sum(run.length for run in runs) for runs in held]
        assert max(shares) - min(shares) <= 1
