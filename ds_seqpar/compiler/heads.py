"""Which heads each Ulysses member works on: a rule of integers, which all ranks know. Torch-free.

Where there are at least as many key/value heads as members, those are dealt in neighbouring runs, and a member takes
the query heads that read its own. Otherwise members are dealt to key/value heads, in neighbouring runs too, and the
query heads of one to its members. Runs differ by one at most, the longer ones first: they are equal where that can be.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from .layout import divisors


class Stage(NamedTuple):
    """Heads that are attended to together."""

    q: slice
    kv: slice

    @property
    def counts(self) -> tuple[int, int]:
        return self.q.stop - self.q.start, self.kv.stop - self.kv.start


def stages(q_heads: int, kv_heads: int, count: int) -> tuple[Stage, ...]:
    """So many stages, at most kv_heads: neighbouring key/value heads with the query heads that read them."""
    group, runs = q_heads // kv_heads, [_run(kv_heads, count, index) for index in range(count)]
    return tuple(Stage(slice(kv.start * group, kv.stop * group), kv) for kv in runs)


def most_stages(q_heads: int, kv_heads: int, members: int) -> int:
    """In how many stages every member still has a query head in each."""
    group = q_heads // kv_heads
    return max(1, kv_heads // -(-members // group))  # a stage has a whole number of key/value heads


def free_stages(q_heads: int, kv_heads: int, members: int) -> list[int]:
    """The numbers of equal stages that send no more bytes than one does, in order."""
    most = most_stages(q_heads, kv_heads, members)
    return [n for n in divisors(kv_heads) if n == 1 or (n <= most and kv_heads // n % members == 0)]


def heads_of(q_heads: int, kv_heads: int, members: int, member: int) -> tuple[slice, slice]:
    """The query heads and the key/value heads of one of at most `q_heads` members. q_heads: a multiple of kv_heads."""
    group = q_heads // kv_heads
    if kv_heads >= members:
        kv = _run(kv_heads, members, member)
        return slice(kv.start * group, kv.stop * group), kv
    sharers, more = members // kv_heads, members % kv_heads
    if member < more * (sharers + 1):  # the first key/value heads have one member more than the others
        sharers, more = sharers + 1, 0
    head, place = (member - more) // sharers, (member - more) % sharers
    q = _run(group, sharers, place)
    return slice(head * group + q.start, head * group + q.stop), slice(head, head + 1)


def _run(total: int, parts: int, index: int) -> slice:
    least, more = total // parts, total % parts  # which a compiler can trace with symbols, and divmod not
    start = index * least + min(index, more)
    return slice(start, start + least + (1 if index < more else 0))


def dealt(q_heads: int, kv_heads: int, members: int) -> tuple[tuple[slice, slice], ...]:
    """`heads_of` every member."""
    return tuple(heads_of(q_heads, kv_heads, members, member) for member in range(members))


def busiest(q_heads: int, kv_heads: int, members: int) -> int:
    """A member with the most query heads."""
    # the longest runs come first; with fewer key/value heads than members, the last head is shared by the fewest
    return 0 if kv_heads >= members else members - members // kv_heads


def most(q_heads: int, kv_heads: int, members: int) -> tuple[int, int]:
    """How many (query, key/value) heads that member has."""
    q, kv = heads_of(q_heads, kv_heads, members, busiest(q_heads, kv_heads, members))
    return q.stop - q.start, kv.stop - kv.start


def equally(q_heads: int, kv_heads: int, members: int) -> bool:
    """Whether all members have as many heads as one another, and all shared key/value heads as many members."""
    return q_heads % members == 0 and (kv_heads % members == 0 or members % kv_heads == 0)


# ---- an exchange of heads


def share_of(heads: int, kv_heads: int, members: int, member: int) -> slice:
    """The heads that a member works on, of a tensor of `heads` in all. That is k or v where these are kv_heads, else q.
    (Where q has as many as k it is dealt as k is.)"""
    q, kv = heads_of(heads, kv_heads, members, member)
    return kv if heads == kv_heads else q


class Run(NamedTuple):
    """Neighbouring members with equal shares. Of each tensor: the heads of one member, those of all together, and how
    many members work on one and the same head."""

    members: int
    heads: tuple[int, ...]
    spans: tuple[slice, ...]
    sharing: tuple[int, ...]


class Deal(NamedTuple):
    """How tensors of `totals` heads go to members. widths: the heads of all tensors that each member has; split: of
    each tensor, whether the members of one of its heads are in several runs."""

    totals: tuple[int, ...]
    runs: tuple[Run, ...]
    widths: tuple[int, ...]
    split: tuple[bool, ...]


@functools.lru_cache(maxsize=256)
def deal(totals: tuple[int, ...], kv_heads: int, members: int) -> Deal:
    """totals: heads of tensors that travel together."""
    shares = [tuple(share_of(total, kv_heads, members, member) for total in totals) for member in range(members)]
    heads = [tuple(x.stop - x.start for x in share) for share in shares]

    def alike(member: int) -> tuple:
        sharers = [sum(other[i] == mine for other in shares) for i, mine in enumerate(shares[member])]
        return heads[member], sharers

    runs = [_alike([shares[member] for member in mine]) for _, mine in itertools.groupby(range(members), alike)]
    split = (
        any(after.start < before.stop for before, after in itertools.pairwise(spans))
        for spans in zip(*(run.spans for run in runs), strict=True)
    )
    return Deal(totals, tuple(runs), tuple(map(sum, heads)), tuple(split))


def _alike(shares: list[tuple[slice, ...]]) -> Run:
    """shares: of each member, which heads of each tensor."""
    heads = tuple(mine.stop - mine.start for mine in shares[0])
    spans = tuple(slice(first.start, last.stop) for first, last in zip(shares[0], shares[-1], strict=True))
    sharing = (len(shares) * h // (span.stop - span.start) for h, span in zip(heads, spans, strict=True))
    return Run(len(shares), heads, spans, tuple(sharing))


def sizes(deal: Deal, counts: Sequence[int], member: int, token: int) -> tuple[list[int], list[int]]:
    """Elements that go to every member inward and that come from each; outward the other way round. token: those of one
    head of a token, in the whole batch."""
    outside = counts[member] * token
    return [outside * width for width in deal.widths], [count * deal.widths[member] * token for count in counts]
