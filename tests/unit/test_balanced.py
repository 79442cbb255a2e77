"""`balanced` deals every token once, evenly in tokens and in causal pairs, and leaves most documents whole."""

import functools
import itertools
import random
import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_seqpar.base.errors import InputError
from ds_seqpar.core.compiler.compile import block_mask_of
from ds_seqpar.core.compiler.sharding.layout import LAYOUTS, Run
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.compiler.sharding.shards import UnevenShards
from ds_seqpar.core.compiler.tiles.tiles import tiles
from ds_seqpar.data.balance import balanced
from tests.grids import examples
from tests.unit.packs import by_balance, by_layout, causal_pairs, lognormal, packs, traveling
from tests.unit.plans import built, ring

LENGTHS = st.one_of(
    st.lists(st.integers(1, 5), min_size=1, max_size=40),
    st.lists(st.one_of(st.integers(1, 4), st.integers(1, 3000)), min_size=1, max_size=40),
    st.lists(st.integers(1, 300), min_size=200, max_size=400),
    st.builds(lambda n, count: [n] * count, st.integers(1, 50), st.integers(1, 40)),
)


def _documents_on(runs, starts):
    """Which documents some runs have tokens of."""
    return {
        number
        for number, (lo, hi) in enumerate(itertools.pairwise(starts))
        if any(run.start < hi and run.last >= lo for run in runs)
    }


@given(LENGTHS, st.integers(1, 16))
@examples(100)
@example([1], 16)
@example([7], 16)
@example([1] * 15, 16)
@example([1] * 600, 16)
@example([10000, *[1] * 100], 7)
@example([3, 3, 3], 2)
def test_every_token_is_dealt_once_and_evenly(lengths, ranks):
    blocks = balanced(lengths, ranks)
    assert len(blocks) == ranks
    shards = UnevenShards(blocks)  # every position once, in order
    total = sum(lengths)
    held = [shards.tokens("q", (rank,)) for rank in range(ranks)]
    assert sum(held) == total
    assert set(held) <= {total // ranks, -(-total // ranks)}
    for runs in blocks:
        assert all(type(run) is Run and run.step == 1 and run.length > 0 for run in runs)
        assert all(a.start + a.length < b.start for a, b in itertools.pairwise(runs))
    assert sum(map(len, blocks)) <= len(lengths) + 4 * (ranks - 1)
    starts = [*itertools.accumulate(lengths, initial=0)]
    on = [_documents_on(runs, starts) for runs in blocks]
    cut = [number for number in range(len(lengths)) if sum(number in documents for documents in on) > 1]
    assert len(cut) <= 2 * (ranks - 1)
    mean = _needed(lengths) / ranks
    for runs in blocks:  # within some tokens' worth where there are few
        assert abs(causal_pairs(runs, starts[:-1]) - mean) <= mean / 32 + 4 * max(lengths)
    assert balanced(tuple(lengths), ranks) == blocks


@pytest.mark.parametrize(
    ("lengths", "ranks", "said"),
    [
        *((lengths, 2, f"documents.*got a length of {lengths[-1]!r}") for lengths in ([0], [3, -1], [2, 1.5], [True])),
        *(([4], ranks, f"ranks.*got {ranks!r}") for ranks in (0, -1, 2.0, True)),
    ],
)
def test_lengths_and_ranks_that_are_none_are_refused(lengths, ranks, said):
    with pytest.raises(InputError, match=said):
        balanced(lengths, ranks)


def test_nothing_is_dealt_of_no_documents():
    assert balanced([], 3) == ((), (), ())


@pytest.mark.parametrize("ranks", range(1, 17))
def test_one_document_is_dealt_as_zigzag_deals_it(ranks):
    seq = 2 * ranks * 5
    zigzag = [LAYOUTS["zigzag"].runs(seq, ranks, rank) for rank in range(ranks)]
    (start, _, length), (_, _, more) = zigzag[-1]
    assert balanced([seq], ranks) == (*zigzag[:-1], (Run(start, 1, length + more),))
    for seq in (*range(2 * ranks, 2 * ranks + 50), 1001, 65537):
        blocks = balanced([seq], ranks)
        inner = blocks[-1][0].length
        chunks = [run.length for runs in blocks[:-1] for run in runs] + [inner // 2, inner - inner // 2]
        assert len(chunks) == 2 * ranks
        assert max(chunks) - min(chunks) <= 1


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [8, 16])
def test_packs_are_even_in_tokens_and_in_causal_pairs(ranks, count):
    busiest = []
    for lengths in packs(count, ranks):
        blocks, total = balanced(lengths, ranks), sum(lengths)
        assert max(abs(sum(run.length for run in runs) - total / ranks) for runs in blocks) < 1
        starts = Mask.documents_of(lengths)
        busiest.append(max(causal_pairs(runs, starts) for runs in blocks) * ranks / _needed(lengths))
    assert statistics.mean(busiest) <= 1.002
    assert max(busiest) <= 1.01


@pytest.mark.parametrize("ranks", [2, 3, 5, 7, 12])
def test_ranks_that_are_no_power_of_two_are_even_too(ranks):
    for lengths in packs(30, ranks, seed=1):
        starts = Mask.documents_of(lengths)
        busiest = max(causal_pairs(runs, starts) for runs in balanced(lengths, ranks))
        assert busiest * ranks <= 1.01 * _needed(lengths)


def test_pairs_are_those_of_the_kernel_calls():
    for lengths in packs(20, 8, seed=2):
        dealt = by_balance(lengths, 8)
        keys = (Run(0, 1, sum(lengths)),)
        for runs in dealt.blocks:
            seen = sum(tile.pairs for tile in tiles(runs, keys, dealt.mask))
            assert causal_pairs(runs, dealt.mask.documents or (0,)) == seen


def _needed(lengths):
    return sum(length * (length + 1) // 2 for length in lengths)


@functools.cache
def _short(ranks):
    """Packs of which a rank can hold every document: in tokens, and in pairs."""
    found = []
    for seed in range(200):
        lengths = lognormal(random.Random(seed), 65536, 500, 1.0)
        most = max(lengths)
        if most * ranks <= sum(lengths) and most * (most + 1) // 2 * ranks <= _needed(lengths):
            found.append(lengths)
    return found


@pytest.mark.parametrize("ranks", [4, 8])
def test_where_ranks_can_hold_documents_whole_fewer_bytes_travel_than_under_zigzag(ranks):
    assert len(_short(ranks)) > 10
    for lengths in _short(ranks)[:30]:
        deals = by_balance(lengths, ranks), by_layout("zigzag", lengths, ranks)
        ours, zigzag = (sum(traveling(dealt)) for dealt in deals)
        assert ours < zigzag / 2


def test_equal_documents_are_whole_and_nothing_travels():
    for ranks, each in itertools.product((2, 3, 5, 8, 16), (1, 2, 3)):
        assert sum(traveling(by_balance([100] * ranks * each, ranks))) == 0


def test_the_bytes_that_are_counted_are_those_of_the_ring():
    for ranks, lengths in itertools.product((4, 8), packs(10, 4, seed=3)):
        dealt = by_balance(lengths, ranks)
        shards = UnevenShards(dealt.blocks)
        plan = built("ring", ring(ranks), "forward", "kv", block_mask_of(dealt.mask, shards))
        moved = [
            sum(shards.tokens("kv", move.key) for step in steps for move in step.moves if move.dst == rank)
            for rank, steps in enumerate(plan.ranks)
        ]
        assert moved == traveling(dealt)
