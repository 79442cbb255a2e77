"""Which heads each Ulysses member works on: a rule of integers, which all ranks know. Torch-free.

Where there are at least as many key/value heads as members, those are dealt in neighbouring runs, and a member takes
the query heads that read its own. Otherwise members are dealt to key/value heads, in neighbouring runs too, and the
query heads of one to its members. Runs differ by one at most, the longer ones first: they are equal where that can be.
"""

from __future__ import annotations

from typing import NamedTuple

from .topology import divisors


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


def most(q_heads: int, kv_heads: int, members: int) -> tuple[int, int]:
    """How many (query, key/value) heads the member with the most query heads has."""
    # the longest runs come first; but of key/value heads with fewer members than others the last one is
    member = 0 if kv_heads >= members else members - members // kv_heads
    q, kv = heads_of(q_heads, kv_heads, members, member)
    return q.stop - q.start, kv.stop - kv.start


def equally(q_heads: int, kv_heads: int, members: int) -> bool:
    """Whether all members have as many heads as one another, and all shared key/value heads as many members."""
    return q_heads % members == 0 and (kv_heads % members == 0 or members % kv_heads == 0)
