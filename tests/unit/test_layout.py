"""Layouts partition a sequence. Tiles of their blocks: see test_masks.py; the work that they give: test_balance.py."""

import itertools
import re
import weakref

import pytest

from ds_seqpar.base.errors import InputError
from ds_seqpar.core.compiler.sharding.layout import LAYOUTS, join, multiple
from ds_seqpar.core.compiler.sharding.shards import EvenShards, UnevenShards
from ds_seqpar.core.settings import LAYOUTS as COMMON
from ds_seqpar.data.batch_layout import positions_held
from tests.oracle import positions, positions_by_ulysses_rank

RANKS = range(1, 17)


def _blocks(layout, ranks, per_rank):
    return [LAYOUTS[layout].runs(ranks * per_rank, ranks, rank) for rank in range(ranks)]


def _held(runs):
    return [position for run in runs for position in run.positions]


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
            ulysses_size = [
                positions(layout, seq, ranks * ulysses, ulysses, inner * ulysses + u) for u in range(ulysses)
            ]
            assert list(itertools.chain(*ulysses_size)) == _held(LAYOUTS[layout].runs(seq, ranks, inner))


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


@pytest.mark.parametrize("layout", COMMON)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
def test_any_number_of_tokens_is_dealt_evenly(layout, ranks):
    """To one token, every token once."""
    for tokens in (*range(1, 80), 1001):
        held = [LAYOUTS[layout].runs(tokens, ranks, rank) for rank in range(ranks)]
        assert sorted(p for runs in held for run in runs for p in run.positions) == list(range(tokens))
        shares = [sum(run.length for run in runs) for runs in held]
        assert max(shares) - min(shares) <= 1


def test_positions_held_are_those_of_the_runs():
    """Of each side of uneven shards, of several blocks a rank, and of a rank without tokens."""
    runs = [[(0, 1, 5), (9, 1, 2)], [(5, 1, 4), (11, 3, 2)], [(12, 3, 1), (13, 3, 1)], [(15, 1, 2)], [], []]
    packed = UnevenShards([sorted(map(tuple, block)) for block in runs], [[(0, 2, 4)], [(1, 2, 4)]] + [[]] * 4)
    blocks = UnevenShards([[(0, 1, 2)], [(6, 1, 2)], [(2, 1, 2)], [(4, 1, 2)], [(8, 1, 1)], []], blocks_per_rank=2)
    for shards in (packed, blocks, EvenShards("striped", 24, 4)):
        for (cp_rank, ulysses), side in itertools.product(itertools.product(range(3), (1, 2, 3)), ("q", "kv")):
            expected = positions_by_ulysses_rank(shards, side, cp_rank, ulysses)
            found = [positions_held(shards, ulysses, cp_rank * ulysses + rank, side) for rank in range(ulysses)]
            assert [x.tolist() for x in found] == expected


def test_positions_of_past_sequences_are_freed():
    held = [weakref.ref(positions_held(EvenShards("contiguous", seq, 1), 1, 0)) for seq in range(1, 40)]
    assert sum(x() is not None for x in held) < 8
