"""Samples of an optimizer step on groups and micro-batches: equal costs, a cap on tokens, and what is refused."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_seqpar.base.errors import InputError
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.data.balance import balanced
from ds_seqpar.data.dealing import deal, deal_by_length
from ds_seqpar.planner.lengths import Costs
from ds_seqpar.planner.machine import Machine
from ds_seqpar.planner.request import Job, Model
from tests.unit.packs import causal_pairs

SIZE, CAP = 8, 8 * 16384
MODEL = Model(
    hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, head_dim=64, vocab=128256, parameters=1,
    layer_parameters=1,
)  # fmt: skip


def costs():
    config = SequenceParallelConfig(size=SIZE).resolve(64, (32, 8))
    return Costs.of(config, Job(model=MODEL), 64, Machine.load("h100-ib"))


COSTS = costs()


def chat(rng):
    """Of 1,000 tokens, but for one in 200, which is long."""
    return rng.randint(20_000, 100_000) if rng.random() < 0.005 else min(int(rng.lognormvariate(6.6, 0.9)) + 1, CAP)


def code(rng):
    """Files of repositories, end to end."""
    return min(int(rng.lognormvariate(8.3, 1.3)) + 1, CAP)


def uniform(rng):
    return rng.randint(1, 32_768)


KINDS = {"chat": (chat, 2048), "code": (code, 512), "uniform": (uniform, 256)}


def step_of(kind, seed):
    draw, count = KINDS[kind]
    rng = random.Random(seed)
    return [draw(rng) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [2, 4])
def test_groups_have_equal_costs(kind, groups):
    for seed in range(5):
        tokens = step_of(kind, seed)
        of = [COSTS.seconds([n]) for n in tokens]
        dealt = deal(tokens, of, groups, CAP)
        by_group = [sum(of[sample] for pack in packs for sample in pack) for packs in dealt]
        assert max(by_group) <= 1.1 * sum(by_group) / groups, (seed, by_group)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_have_equal_costs(kind):
    tokens = step_of(kind, 1)
    packs = [pack for packs in deal(tokens, [COSTS.seconds([n]) for n in tokens], 2, CAP) for pack in packs][:6]
    for lengths in ([tokens[sample] for sample in pack] for pack in packs):
        runs, starts = balanced(lengths, SIZE), Mask.documents_of(lengths)
        pair, token = COSTS.work
        found = [pair * causal_pairs(held, starts) + token * sum(run.length for run in held) for held in runs]
        assert max(found) <= 1.05 * sum(found) / SIZE, lengths


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 5), st.integers(50, 90))
def test_every_sample_is_in_one_pack_within_the_cap(tokens, groups, cap):
    of = [n + n * n / 7 for n in tokens]
    dealt = deal(tokens, of, groups, cap)
    assert dealt == deal(tokens, of, groups, cap)
    assert len(dealt) == groups
    assert len({len(packs) for packs in dealt}) == 1
    assert sorted(sample for packs in dealt for pack in packs for sample in pack) == list(range(len(tokens)))
    assert all(sum(tokens[sample] for sample in pack) <= cap for packs in dealt for pack in packs)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_have_whole_samples_but_for_the_longest_and_groups_equal_costs(kind):
    tokens, groups, cap = step_of(kind, 1), 2, CAP // SIZE
    of = [COSTS.seconds([n]) for n in tokens]
    dealt = deal_by_length(tokens, of, groups, SIZE, cap)
    costs_of_ranks, found, waited = [], [], []
    for shared, whole in zip(*dealt, strict=True):
        assert all(sum(tokens[x] for x in pack) <= CAP for pack in shared)
        assert all(sum(tokens[x] for x in pack) <= cap for packs in whole for pack in packs)
        found += [x for pack in (*shared, *(x for packs in whole for x in packs)) for x in pack]
        part = sum(of[x] for pack in shared for x in pack) / SIZE
        costs_of_ranks += [part + sum(of[x] for pack in mine for x in pack) for mine in zip(*whole, strict=True)]
        waited.append(part + sum(max(sum(of[x] for x in pack) for pack in packs) for packs in whole))
    assert sorted(found) == list(range(len(tokens)))
    assert max(costs_of_ranks) <= max(waited) <= 1.05 * sum(costs_of_ranks) / len(costs_of_ranks)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 90), max_size=30), st.integers(1, 3), st.integers(2, 4), st.floats(1.0, 4.0))
def test_ranks_share_what_does_not_fit_one_of_them(tokens, groups, size, sharing):
    cap, of = -(-90 // size), [n + n * n / 7 for n in tokens]
    dealt = deal_by_length(tokens, of, groups, size, cap, sharing)
    of_shared = [x for packs in dealt.shared for pack in packs for x in pack]
    of_whole = [x for packs in dealt.whole for by_rank in packs for pack in by_rank for x in pack]
    assert sorted([*of_shared, *of_whole]) == list(range(len(tokens)))
    assert all(sum(tokens[x] for x in pack) <= cap * size for packs in dealt.shared for pack in packs)
    assert all(sum(tokens[x] for x in pack) <= cap for packs in dealt.whole for by_rank in packs for pack in by_rank)
    assert {len(packs) for packs in (dealt.shared, dealt.whole)} == {groups}
    assert {len(by_rank) for packs in dealt.whole for by_rank in packs} <= {size}
    assert all(len({len(packs) for packs in of_groups}) == 1 for of_groups in dealt)


@pytest.mark.parametrize("samples", [8, 24])
def test_ranks_share_nothing_where_samples_divide_evenly(samples):
    dealt = deal_by_length([100] * samples, [1.0] * samples, 2, 4, 100)
    assert dealt.shared == [[], []]
    assert all(len(pack) == 1 for packs in dealt.whole for by_rank in packs for pack in by_rank)


def test_ranks_share_others_only_where_that_takes_less_than_waiting():
    tokens, of = [100, 60, 60, 60], [100.0, 60.0, 60.0, 60.0]
    assert deal_by_length(tokens, of, 1, 4, 100, sharing=1.0).shared != [[]]
    assert deal_by_length(tokens, of, 1, 4, 100, sharing=3.0).shared == [[]]


def test_a_sample_that_is_too_long_is_refused_with_the_length_that_fits():
    with pytest.raises(InputError, match=r"128 tokens; got 129 in sample 1 of a step, cut it to 128"):
        deal([5, 129], [1.0, 9.0], 2, 128)


def test_ulysses_is_one_where_few_documents_are_cut():
    assert COSTS.ulysses_sizes == [1, 2, 4, 8]
    assert COSTS.ulysses((1024,) * 128, COSTS.ulysses_sizes) == 1
