"""Which heads each Ulysses member works on: a rule of integers, which all ranks know. Torch-free.

Where there are at least as many key/value heads as members, a member takes neighbouring key/value heads, and the query
heads that read them. Otherwise neighbouring members share a key/value head, and divide the query heads that read it.
Shares differ by one at most, the larger ones first: they are equal where that can be.
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


def max_head_chunks(q_heads: int, kv_heads: int, members: int) -> int:
    """The most head chunks with which every member has a query head in each."""
    group = q_heads // kv_heads
    return max(1, kv_heads // -(-members // group))  # a head chunk has a whole number of key/value heads


def free_head_chunk_counts(q_heads: int, kv_heads: int, members: int) -> list[int]:
    """The numbers of equal head chunks that send no more bytes than one head chunk does, ascending."""
    limit = max_head_chunks(q_heads, kv_heads, members)
    return [n for n in divisors(kv_heads) if n == 1 or (n <= limit and kv_heads // n % members == 0)]


def heads_of_member(q_heads: int, kv_heads: int, members: int, member: int) -> tuple[slice, slice]:
    """The query heads and the key/value heads of one of at most `q_heads` members. q_heads: a multiple of kv_heads."""
    group = q_heads // kv_heads
    if kv_heads >= members:
        kv = _part(kv_heads, members, member)
        return slice(kv.start * group, kv.stop * group), kv
    sharers, larger = members // kv_heads, members % kv_heads
    if member < larger * (sharers + 1):  # the first key/value heads have one member more than the others
        sharers, larger = sharers + 1, 0
    head, index = (member - larger) // sharers, (member - larger) % sharers
    q = _part(group, sharers, index)
    return slice(head * group + q.start, head * group + q.stop), slice(head, head + 1)


def _part(total: int, parts: int, index: int) -> slice:
    """Part `index` of `total` things that are divided into parts; the first parts have one more than the others."""
    least, larger = total // parts, total % parts  # which a compiler can trace with symbols, and divmod not
    start = index * least + min(index, larger)
    return slice(start, start + least + (1 if index < larger else 0))


def heads_of_members(q_heads: int, kv_heads: int, members: int) -> tuple[tuple[slice, slice], ...]:
    """`heads_of_member` for every member."""
    return tuple(heads_of_member(q_heads, kv_heads, members, member) for member in range(members))


def busiest_member(q_heads: int, kv_heads: int, members: int) -> int:
    """A member with the most query heads."""
    # the largest shares come first; with fewer key/value heads than members, the last head is shared by the fewest
    return 0 if kv_heads >= members else members - members // kv_heads


def largest_share(q_heads: int, kv_heads: int, members: int) -> tuple[int, int]:
    """How many (query, key/value) heads the busiest member has."""
    q, kv = heads_of_member(q_heads, kv_heads, members, busiest_member(q_heads, kv_heads, members))
    return q.stop - q.start, kv.stop - kv.start


def has_equal_shares(q_heads: int, kv_heads: int, members: int) -> bool:
    """Whether all members have equally many heads, and all shared key/value heads equally many members."""
    return q_heads % members == 0 and (kv_heads % members == 0 or members % kv_heads == 0)


# ---- an exchange of heads


def tensor_share(heads: int, kv_heads: int, members: int, member: int) -> slice:
    """The heads that a member works on, of a tensor of `heads` in all. That is k or v where these are kv_heads, else q.
    (Where q has as many as k, both have the same shares.)"""
    q, kv = heads_of_member(heads, kv_heads, members, member)
    return kv if heads == kv_heads else q


class EqualMembers(NamedTuple):
    """Neighbouring members with equal shares: `members` of them. For each tensor, heads: those of one member; spans:
    those of all together; sharers: how many of these members work on one and the same head."""

    members: int
    heads: tuple[int, ...]
    spans: tuple[slice, ...]
    sharers: tuple[int, ...]


class HeadShares(NamedTuple):
    """How members share the heads of tensors that travel together. totals: heads of each tensor. groups: all members,
    in order. per_member: for each member, its heads of all tensors together. split: for each tensor, whether members
    that share one of its heads are in several groups."""

    totals: tuple[int, ...]
    groups: tuple[EqualMembers, ...]
    per_member: tuple[int, ...]
    split: tuple[bool, ...]


@functools.lru_cache(maxsize=256)
def head_shares(totals: tuple[int, ...], kv_heads: int, members: int) -> HeadShares:
    """totals: as in `HeadShares`."""
    shares = [tuple(tensor_share(total, kv_heads, members, member) for total in totals) for member in range(members)]
    heads = [tuple(x.stop - x.start for x in share) for share in shares]

    def size(member: int) -> tuple:
        sharers = [sum(other[i] == own for other in shares) for i, own in enumerate(shares[member])]
        return heads[member], sharers

    groups = [_group([shares[member] for member in equal]) for _, equal in itertools.groupby(range(members), size)]
    split = (
        any(after.start < before.stop for before, after in itertools.pairwise(spans))
        for spans in zip(*(group.spans for group in groups), strict=True)
    )
    return HeadShares(totals, tuple(groups), tuple(map(sum, heads)), tuple(split))


def _group(shares: list[tuple[slice, ...]]) -> EqualMembers:
    """shares: for each member, its heads of each tensor."""
    heads = tuple(own.stop - own.start for own in shares[0])
    spans = tuple(slice(first.start, last.stop) for first, last in zip(shares[0], shares[-1], strict=True))
    sharers = (len(shares) * h // (span.stop - span.start) for h, span in zip(heads, spans, strict=True))
    return EqualMembers(len(shares), heads, spans, tuple(sharers))


def element_counts(
    shares: HeadShares, tokens: Sequence[int], member: int, per_token: int
) -> tuple[list[int], list[int]]:
    """Elements that `member` sends to every member inward, and those that come from each; outward the other way round.
    tokens: of every member. per_token: elements of one head of a token, in the whole batch."""
    own = tokens[member] * per_token
    return [own * heads for heads in shares.per_member], [n * shares.per_member[member] * per_token for n in tokens]
