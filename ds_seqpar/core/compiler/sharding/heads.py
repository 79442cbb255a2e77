"""The assignment of attention heads to Ulysses ranks, which every rank computes independently.

If there are at least as many key/value heads as Ulysses ranks, each Ulysses rank gets consecutive key/value heads and
the query heads that read them. With fewer key/value heads than Ulysses ranks, several consecutive Ulysses ranks share a
key/value head and divide its query heads among themselves. Shares are equal if possible. Unequal shares differ by at
most one head, with the larger shares first. This module does not import torch.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from ....base.errors import SECTION, ConfigError
from .layout import divisors


class HeadChunk(NamedTuple):
    """Heads that are computed together."""

    q: slice
    kv: slice

    @property
    def counts(self) -> tuple[int, int]:
        """Tuple (number of query heads, number of key/value heads)."""
        return self.q.stop - self.q.start, self.kv.stop - self.kv.start


def head_chunks(q_heads: int, kv_heads: int, count: int) -> tuple[HeadChunk, ...]:
    """Divide the heads into `count` head chunks, at most one per key/value head.

    Each head chunk has consecutive key/value heads and the query heads that read them.
    """
    group, kv_slices = q_heads // kv_heads, [_even_slice(kv_heads, count, index) for index in range(count)]
    return tuple(HeadChunk(slice(kv.start * group, kv.stop * group), kv) for kv in kv_slices)


def max_head_chunks(q_heads: int, kv_heads: int, ulysses_size: int) -> int:
    """Return the maximum number of head chunks for which every Ulysses rank has a query head in each chunk."""
    group = q_heads // kv_heads
    return max(1, kv_heads // -(-ulysses_size // group))  # a head chunk has whole key/value heads


def heads_of_ulysses_rank(q_heads: int, kv_heads: int, ulysses_size: int, ulysses_rank: int) -> tuple[slice, slice]:
    """Return the slices of query heads and key/value heads assigned to a Ulysses rank.

    Args:
        q_heads: Number of query heads, a multiple of `kv_heads`.
        ulysses_size: Number of Ulysses ranks, at most `q_heads`.
    """
    group = q_heads // kv_heads
    if kv_heads >= ulysses_size:
        kv = _even_slice(kv_heads, ulysses_size, ulysses_rank)
        return slice(kv.start * group, kv.stop * group), kv
    sharers, larger = ulysses_size // kv_heads, ulysses_size % kv_heads
    if ulysses_rank < larger * (sharers + 1):  # the first key/value heads get an extra Ulysses rank each
        sharers, larger = sharers + 1, 0
    head, index = (ulysses_rank - larger) // sharers, (ulysses_rank - larger) % sharers
    q = _even_slice(group, sharers, index)
    return slice(head * group + q.start, head * group + q.stop), slice(head, head + 1)


def _even_slice(total: int, count: int, index: int) -> slice:
    """Return slice `index` of `total` heads split into `count` slices. The first slices may get an extra head each."""
    least, larger = total // count, total % count  # torch.compile can trace // and % symbolically, but not divmod
    start = index * least + min(index, larger)
    return slice(start, start + least + (1 if index < larger else 0))


def heads_by_ulysses_rank(q_heads: int, kv_heads: int, ulysses_size: int) -> tuple[tuple[slice, slice], ...]:
    return tuple(
        heads_of_ulysses_rank(q_heads, kv_heads, ulysses_size, ulysses_rank) for ulysses_rank in range(ulysses_size)
    )


def busiest_ulysses_rank(q_heads: int, kv_heads: int, ulysses_size: int) -> int:
    """Return a Ulysses rank with the largest number of query heads."""
    # The largest shares come first. If there are fewer key/value heads than Ulysses ranks, the last key/value head is
    # shared by the fewest ranks.
    return 0 if kv_heads >= ulysses_size else ulysses_size - ulysses_size // kv_heads


def largest_share(q_heads: int, kv_heads: int, ulysses_size: int) -> tuple[int, int]:
    """Return the numbers of query heads and key/value heads on the busiest Ulysses rank."""
    q, kv = heads_of_ulysses_rank(
        q_heads, kv_heads, ulysses_size, busiest_ulysses_rank(q_heads, kv_heads, ulysses_size)
    )
    return q.stop - q.start, kv.stop - kv.start


def has_equal_shares(q_heads: int, kv_heads: int, ulysses_size: int) -> bool:
    """Return whether every Ulysses rank gets the same number of heads and every shared k/v head is shared by the same
    number of ranks.
    """
    return q_heads % ulysses_size == 0 and (kv_heads % ulysses_size == 0 or ulysses_size % kv_heads == 0)


def legal_ulysses(size: int, q_heads: int) -> list[int]:
    """Return the Ulysses sizes that divide `size` and give every rank at least one query head."""
    return [u for u in divisors(size) if u <= q_heads]


def even_ulysses(size: int, q_heads: int, kv_heads: int, head_chunks: int = 1) -> list[int]:
    """Return, in ascending order, the Ulysses sizes that divide both `size` and the heads evenly.

    Every Ulysses rank must have at least one head in each head chunk. If a Ulysses size U exceeds `kv_heads`, each
    key/value head is shared by U / kv_heads Ulysses ranks.
    """
    even = [u for u in divisors(size) if has_equal_shares(q_heads, kv_heads, u)]
    return [u for u in even if max_head_chunks(q_heads, kv_heads, u) >= head_chunks]


def check_heads(ulysses: int, q_heads: int, kv_heads: int, *, size: int, head_chunks: int | str = 1) -> None:
    """Raise ConfigError if the heads cannot be divided among the Ulysses ranks and head chunks."""
    if kv_heads < 1 or q_heads % kv_heads:
        raise ConfigError(f"query heads must be a multiple of key/value heads; got {q_heads} and {kv_heads}")
    if ulysses > q_heads:
        raise ConfigError(
            f"{SECTION}.ulysses must be at most the number of query heads, so that each Ulysses rank has one; got "
            f"ulysses {ulysses} for {q_heads} query and {kv_heads} key/value heads, use one of "
            f"{legal_ulysses(size, q_heads)}"
        )
    most = max_head_chunks(q_heads, kv_heads, ulysses)
    if isinstance(head_chunks, int) and head_chunks > most:
        raise ConfigError(
            f"{SECTION}.head_chunks must leave every head chunk a key/value head, and a query head for each "
            f"of {ulysses} Ulysses ranks; got {head_chunks} for {q_heads} query and {kv_heads} key/value heads, "
            f"use at most {most}"
        )


# ---- an exchange of heads


def tensor_share(heads: int, kv_heads: int | None, ulysses_size: int, ulysses_rank: int) -> slice:
    """Return the slice of a tensor's heads that a Ulysses rank works on.

    A tensor with `kv_heads` heads is treated as k or v, and any other tensor as q. If `kv_heads` is None, every tensor
    is treated as k or v. If q and k have the same number of heads, their shares are identical.
    """
    q, kv = heads_of_ulysses_rank(heads, kv_heads or heads, ulysses_size, ulysses_rank)
    return kv if kv_heads in (None, heads) else q


class EqualShares(NamedTuple):
    """A group of consecutive Ulysses ranks with equal shares of heads."""

    ranks: int  # number of Ulysses ranks in the group
    heads: tuple[int, ...]  # for each tensor, the number of heads per Ulysses rank
    spans: tuple[slice, ...]  # for each tensor, the heads of the whole group
    sharers: tuple[int, ...]  # for each tensor, the number of Ulysses ranks that share a head


class HeadShares(NamedTuple):
    """The division of heads among Ulysses ranks for tensors that are sent together."""

    totals: tuple[int, ...]  # total number of heads of each tensor
    groups: tuple[EqualShares, ...]  # groups of Ulysses ranks, in rank order
    split: tuple[bool, ...]  # for each tensor, whether a shared head spans several groups


@functools.lru_cache(maxsize=256)
def head_shares(totals: tuple[int, ...], kv_heads: int | None, ulysses_size: int) -> HeadShares:
    """Return the `HeadShares` for tensors with `totals` heads. See `tensor_share` for `kv_heads`."""
    shares = [
        tuple(tensor_share(total, kv_heads, ulysses_size, ulysses_rank) for total in totals)
        for ulysses_rank in range(ulysses_size)
    ]
    heads = [tuple(x.stop - x.start for x in share) for share in shares]

    def size(ulysses_rank: int) -> tuple:
        sharers = [sum(share[i] == local for share in shares) for i, local in enumerate(shares[ulysses_rank])]
        return heads[ulysses_rank], sharers

    groups = [
        _group([shares[ulysses_rank] for ulysses_rank in equal])
        for _, equal in itertools.groupby(range(ulysses_size), size)
    ]
    split = (
        any(after.start < before.stop for before, after in itertools.pairwise(spans))
        for spans in zip(*(group.spans for group in groups), strict=True)
    )
    return HeadShares(totals, tuple(groups), tuple(split))


def _group(shares: list[tuple[slice, ...]]) -> EqualShares:
    """Return the group of Ulysses ranks with the given shares, i.e. each rank's slice of heads for each tensor."""
    heads = tuple(head_slice.stop - head_slice.start for head_slice in shares[0])
    spans = tuple(slice(first.start, last.stop) for first, last in zip(shares[0], shares[-1], strict=True))
    sharers = (len(shares) * h // (span.stop - span.start) for h, span in zip(heads, spans, strict=True))
    return EqualShares(len(shares), heads, spans, tuple(sharers))


class MessageLayout(NamedTuple):
    """The messages that one Ulysses rank sends and receives in a head exchange.

    Each message has the shape (tokens, batch, elements). Inward messages carry the receiver's heads of every tensor;
    outward messages carry the sender's heads.
    """

    shares: HeadShares
    widths: tuple[int, ...]  # elements per head of each tensor
    heads: tuple[int, ...]  # number of heads of each tensor on this Ulysses rank
    batch: int
    tokens: tuple[int, ...]  # number of tokens on each Ulysses rank
    rank: int
    # per Ulysses rank: elements for this rank's tokens and the other rank's heads, sent inward and received outward
    of_local: tuple[int, ...]
    # per Ulysses rank: elements for the other rank's tokens and this rank's heads, received inward and sent outward
    of_inner: tuple[int, ...]

    def sizes(self, inward: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the number of elements sent to each Ulysses rank, and the number received from each."""
        return (self.of_local, self.of_inner) if inward else (self.of_inner, self.of_local)


@functools.lru_cache(maxsize=256)
def message_layout(
    totals: tuple[int, ...], widths: tuple[int, ...], kv_heads: int | None, batch: int, tokens: tuple[int, ...],
    ulysses_rank: int,
) -> MessageLayout:  # fmt: skip
    """Return the `MessageLayout` for tensors that are sent together.

    Args:
        totals: Number of heads of each tensor.
        widths: Elements per head of each tensor.
        kv_heads: Number of key/value heads or None, as in `tensor_share`.
        batch: Number of sequences.
        tokens: Number of tokens on each Ulysses rank.
        ulysses_rank: The Ulysses rank that sends and receives the messages.
    """
    shares = head_shares(totals, kv_heads, len(tokens))
    heads = [group.heads for group in shares.groups for _ in range(group.ranks)]
    rows = [batch * sum(h * width for h, width in zip(of_rank, widths, strict=True)) for of_rank in heads]
    of_local, of_inner = ([row * tokens[ulysses_rank] for row in rows], [rows[ulysses_rank] * n for n in tokens])
    return MessageLayout(
        shares, widths, heads[ulysses_rank], batch, tokens, ulysses_rank, tuple(of_local), tuple(of_inner)
    )
