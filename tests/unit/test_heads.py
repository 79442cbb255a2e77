"""Who gets which heads: the rule by itself, over any numbers of heads and Ulysses ranks."""

from hypothesis import given
from hypothesis import strategies as st

from ds_seqpar.core.compiler.sharding.heads import (
    has_equal_shares,
    heads_by_ulysses_rank,
    heads_of_ulysses_rank,
    largest_share,
)


@st.composite
def _numbers(draw):
    """(query heads, key/value heads, Ulysses ranks) that fit."""
    kv_heads = draw(st.integers(1, 40))
    q_heads = kv_heads * draw(st.integers(1, 9))
    return q_heads, kv_heads, draw(st.integers(1, q_heads))


def _heads(span):
    return list(range(span.start, span.stop))


def _spread(numbers):
    return max(numbers) - min(numbers)


@given(_numbers())
def test_every_query_head_is_dealt_once_in_order_with_the_keys_that_it_reads(numbers):
    q_heads, kv_heads, ulysses_size = numbers
    shares = [(_heads(q), _heads(kv)) for q, kv in heads_by_ulysses_rank(*numbers)]
    assert len(shares) == ulysses_size
    assert [head for q, _ in shares for head in q] == list(range(q_heads))
    group = q_heads // kv_heads
    for q, kv in shares:
        assert q
        assert sorted({head // group for head in q}) == kv
        assert len(q) % len(kv) == 0  # GQA as before: each key/value head has as many readers
        assert len(kv) == 1 or len(q) == group * len(kv)


@given(_numbers())
def test_shares_differ_by_no_more_than_they_must(numbers):
    _, kv_heads, ulysses_size = numbers
    shares = [(_heads(q), _heads(kv)) for q, kv in heads_by_ulysses_rank(*numbers)]
    if kv_heads >= ulysses_size:
        sizes = [len(kv) for _, kv in shares]
        assert _spread(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
        return
    sharers = [[len(q) for q, kv in shares if kv == [head]] for head in range(kv_heads)]
    assert _spread([len(mine) for mine in sharers]) <= 1
    for mine in [[len(mine) for mine in sharers], *sharers]:
        assert _spread(mine) <= 1
        assert mine == sorted(mine, reverse=True)


@given(_numbers())
def test_shares_are_equal_where_they_can_be(numbers):
    q_heads, kv_heads, ulysses_size = numbers
    counts = {(len(_heads(q)), len(_heads(kv))) for q, kv in heads_by_ulysses_rank(*numbers)}
    sharers = {
        sum(kv == other for _, other in heads_by_ulysses_rank(*numbers)) for _, kv in heads_by_ulysses_rank(*numbers)
    }
    assert has_equal_shares(*numbers) == (len(counts) == len(sharers) == 1)
    assert largest_share(*numbers) in counts
    assert largest_share(*numbers)[0] == max(q for q, _ in counts)
    if has_equal_shares(*numbers):
        assert counts == {(q_heads // ulysses_size, max(1, kv_heads // ulysses_size))}


def _sizes(*numbers):
    return tuple(zip(*((len(_heads(q)), len(_heads(kv))) for q, kv in heads_by_ulysses_rank(*numbers)), strict=True))


def test_what_is_dealt_to_some_members():
    assert _sizes(40, 10, 4) == ((12, 12, 8, 8), (3, 3, 2, 2))
    assert _sizes(33, 33, 4) == ((9, 8, 8, 8), (9, 8, 8, 8))
    assert _sizes(25, 5, 4) == ((10, 5, 5, 5), (2, 1, 1, 1))
    assert _sizes(14, 2, 4) == ((4, 3, 4, 3), (1, 1, 1, 1))
    assert _sizes(7, 1, 4) == ((2, 2, 2, 1), (1, 1, 1, 1))
    # three key/value heads for eight ulysses_size: two of them have three, one has two
    assert _sizes(12, 3, 8) == ((2, 1, 1, 2, 1, 1, 2, 2), (1,) * 8)
    assert heads_of_ulysses_rank(14, 2, 4, 2) == (slice(7, 11), slice(1, 2))
    assert largest_share(12, 3, 8) == (2, 1)
    assert largest_share(25, 5, 8) == (
        5,
        1,
    )  # of a Ulysses rank that has its key/value head for itself, not of the first
