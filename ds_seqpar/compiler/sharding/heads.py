"""Which heads each Ulysses rank works on: a rule of integers, which all ranks know. Torch-free.

Where there are at least as many key/value heads as Ulysses ranks, a Ulysses rank takes neighbouring key/value heads,
and the query heads that read them. Otherwise neighbouring Ulysses ranks share a key/value head, and divide the query
heads that read it. Shares differ by one at most, the larger ones first: they are equal where that can be.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from .layout import divisors


class HeadChunk(NamedTuple):
    """Heads that are attended to together."""

    q: slice
    kv: slice

    @property
    def counts(self) -> tuple[int, int]:
        """(query heads, key/value heads)."""
        return self.q.stop - self.q.start, self.kv.stop - self.kv.start


def head_chunks(q_heads: int, kv_heads: int, count: int) -> tuple[HeadChunk, ...]:
    """`count` head chunks, at most kv_heads: neighbouring key/value heads with the query heads that read them."""
    group, parts = q_heads // kv_heads, [_part(kv_heads, count, index) for index in range(count)]
    return tuple(HeadChunk(slice(kv.start * group, kv.stop * group), kv) for kv in parts)


def max_head_chunks(q_heads: int, kv_heads: int, ulysses_size: int) -> int:
    """The most head chunks with which every Ulysses rank has a query head in each."""
    group = q_heads // kv_heads
    return max(1, kv_heads // -(-ulysses_size // group))  # a head chunk has a whole number of key/value heads


def free_head_chunk_counts(q_heads: int, kv_heads: int, ulysses_size: int) -> list[int]:
    """The numbers of equal head chunks that send no more bytes than one head chunk does, ascending."""
    limit = max_head_chunks(q_heads, kv_heads, ulysses_size)
    return [n for n in divisors(kv_heads) if n == 1 or (n <= limit and kv_heads // n % ulysses_size == 0)]


def heads_of_ulysses_rank(q_heads: int, kv_heads: int, ulysses_size: int, ulysses_rank: int) -> tuple[slice, slice]:
    """The query heads and the key/value heads of one of at most `q_heads` Ulysses ranks. q_heads: a multiple of
    kv_heads."""
    group = q_heads // kv_heads
    if kv_heads >= ulysses_size:
        kv = _part(kv_heads, ulysses_size, ulysses_rank)
        return slice(kv.start * group, kv.stop * group), kv
    sharers, larger = ulysses_size // kv_heads, ulysses_size % kv_heads
    if ulysses_rank < larger * (sharers + 1):  # the first key/value heads have one Ulysses rank more than the others
        sharers, larger = sharers + 1, 0
    head, index = (ulysses_rank - larger) // sharers, (ulysses_rank - larger) % sharers
    q = _part(group, sharers, index)
    return slice(head * group + q.start, head * group + q.stop), slice(head, head + 1)


def _part(total: int, parts: int, index: int) -> slice:
    """Part `index` of `total` things that are divided into parts; the first parts have one more than the others."""
    least, larger = total // parts, total % parts  # which a compiler can trace with symbols, and divmod not
    start = index * least + min(index, larger)
    return slice(start, start + least + (1 if index < larger else 0))


def heads_by_ulysses_rank(q_heads: int, kv_heads: int, ulysses_size: int) -> tuple[tuple[slice, slice], ...]:
    """`heads_of_ulysses_rank` for every Ulysses rank."""
    return tuple(
        heads_of_ulysses_rank(q_heads, kv_heads, ulysses_size, ulysses_rank) for ulysses_rank in range(ulysses_size)
    )


def busiest_ulysses_rank(q_heads: int, kv_heads: int, ulysses_size: int) -> int:
    """A Ulysses rank with the most query heads."""
    # the largest shares come first; with fewer key/value heads than Ulysses ranks, the last head is shared by the
    # fewest
    return 0 if kv_heads >= ulysses_size else ulysses_size - ulysses_size // kv_heads


def largest_share(q_heads: int, kv_heads: int, ulysses_size: int) -> tuple[int, int]:
    """How many (query, key/value) heads the busiest Ulysses rank has."""
    q, kv = heads_of_ulysses_rank(
        q_heads, kv_heads, ulysses_size, busiest_ulysses_rank(q_heads, kv_heads, ulysses_size)
    )
    return q.stop - q.start, kv.stop - kv.start


def has_equal_shares(q_heads: int, kv_heads: int, ulysses_size: int) -> bool:
    """Whether all Ulysses ranks have equally many heads, and all shared key/value heads equally many Ulysses ranks."""
    return q_heads % ulysses_size == 0 and (kv_heads % ulysses_size == 0 or ulysses_size % kv_heads == 0)


# ---- an exchange of heads


def tensor_share(heads: int, kv_heads: int, ulysses_size: int, ulysses_rank: int) -> slice:
    """The heads that a Ulysses rank works on, of a tensor of `heads` in all. That is k or v where these are kv_heads,
    else q. (Where q has as many as k, both have the same shares.)"""
    q, kv = heads_of_ulysses_rank(heads, kv_heads, ulysses_size, ulysses_rank)
    return kv if heads == kv_heads else q


class EqualShares(NamedTuple):
    """Neighbouring Ulysses ranks with equal shares: `ulysses_size` of them. For each tensor, heads: those of one
    Ulysses rank; spans: those of all together; sharers: how many of these Ulysses ranks work on one and the same
    head."""

    ranks: int
    heads: tuple[int, ...]
    spans: tuple[slice, ...]
    sharers: tuple[int, ...]


class HeadShares(NamedTuple):
    """How Ulysses ranks share the heads of tensors that travel together. totals: heads of each tensor. groups: all
    Ulysses ranks, in order. heads_per_rank: for each Ulysses rank, its heads of all tensors together. split: for each
    tensor, whether Ulysses ranks that share one of its heads are in several groups."""

    totals: tuple[int, ...]
    groups: tuple[EqualShares, ...]
    heads_per_rank: tuple[int, ...]
    split: tuple[bool, ...]


@functools.lru_cache(maxsize=256)
def head_shares(totals: tuple[int, ...], kv_heads: int, ulysses_size: int) -> HeadShares:
    """totals: as in `HeadShares`."""
    shares = [
        tuple(tensor_share(total, kv_heads, ulysses_size, ulysses_rank) for total in totals)
        for ulysses_rank in range(ulysses_size)
    ]
    heads = [tuple(x.stop - x.start for x in share) for share in shares]

    def size(ulysses_rank: int) -> tuple:
        sharers = [sum(other[i] == own for other in shares) for i, own in enumerate(shares[ulysses_rank])]
        return heads[ulysses_rank], sharers

    groups = [
        _group([shares[ulysses_rank] for ulysses_rank in equal])
        for _, equal in itertools.groupby(range(ulysses_size), size)
    ]
    split = (
        any(after.start < before.stop for before, after in itertools.pairwise(spans))
        for spans in zip(*(group.spans for group in groups), strict=True)
    )
    return HeadShares(totals, tuple(groups), tuple(map(sum, heads)), tuple(split))


def _group(shares: list[tuple[slice, ...]]) -> EqualShares:
    """shares: for each Ulysses rank, its heads of each tensor."""
    heads = tuple(own.stop - own.start for own in shares[0])
    spans = tuple(slice(first.start, last.stop) for first, last in zip(shares[0], shares[-1], strict=True))
    sharers = (len(shares) * h // (span.stop - span.start) for h, span in zip(heads, spans, strict=True))
    return EqualShares(len(shares), heads, spans, tuple(sharers))


def element_counts(
    shares: HeadShares, tokens: Sequence[int], ulysses_rank: int, per_token: int
) -> tuple[list[int], list[int]]:
    """Elements that `ulysses_rank` sends to every Ulysses rank inward, and those that come from each; outward the other
    way round. tokens: of every Ulysses rank. per_token: elements of one head of a token, in the whole batch."""
    own = tokens[ulysses_rank] * per_token
    return [own * heads for heads in shares.heads_per_rank], [
        n * shares.heads_per_rank[ulysses_rank] * per_token for n in tokens
    ]
