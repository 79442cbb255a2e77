"""Packs of documents of many kinds, ways to deal them to ranks, and what ranks then have to do.

A pack has 32K, 64K or 128K tokens. Of ten, five have documents of lognormal length (sigma 1, median 500, 1,000 or
2,000) and two of sigma 1.5 (median 300 or 1,000), one after the other, the last one cut off; one has a document of 20
to 95 % and others of 16 to 512 tokens; one has 1 to 64 equal documents; one is cut into 1 to P documents anywhere.
"""

import itertools
import math
import random
from bisect import bisect_right
from typing import NamedTuple

from ds_seqpar.compiler.compile import block_mask_of
from ds_seqpar.compiler.sharding.balance import balanced
from ds_seqpar.compiler.sharding.layout import LAYOUTS
from ds_seqpar.compiler.sharding.masks import Mask
from ds_seqpar.compiler.sharding.shards import UnevenShards
from ds_seqpar.compiler.sharding.shards import length as tokens_of


class Dealt(NamedTuple):
    """Lengths of documents, maybe padded, and what each rank holds of them."""

    lengths: tuple
    blocks: tuple

    @property
    def mask(self):
        return Mask(documents=Mask.documents_of(self.lengths))


def by_balance(lengths, ranks):
    return Dealt(lengths, balanced(lengths, ranks))


def by_layout(layout, lengths, ranks):
    """The whole pack as one sequence, its end padded to what the layout divides by."""
    left = -sum(lengths) % (2 * ranks)
    lengths = [*lengths[:-1], lengths[-1] + left]
    return Dealt(lengths, tuple(LAYOUTS[layout].runs(sum(lengths), ranks, rank) for rank in range(ranks)))


def packs(count, ranks, seed=0):
    """Lengths of documents, as the head of this file says."""
    dice = random.Random(seed)
    for number in range(count):
        tokens, kind = dice.choice((32, 64, 128)) * 1024, number % 10
        if kind < 5:
            yield lognormal(dice, tokens, dice.choice((500, 1000, 2000)), 1.0)
        elif kind < 7:
            yield lognormal(dice, tokens, dice.choice((300, 1000)), 1.5)
        elif kind == 7:
            long = int(tokens * dice.uniform(0.2, 0.95))
            lengths = [long, *filled(tokens - long, lambda: dice.randint(16, 512))]
            dice.shuffle(lengths)
            yield tuple(lengths)
        elif kind == 8:
            documents = dice.choice((1, 2, 3, 5, 7, ranks - 1, ranks, ranks + 1, 24, 40, 64))
            yield (tokens // documents,) * documents
        else:
            yield cut_anywhere(dice, tokens, dice.randint(1, ranks))


def lognormal(dice, tokens, median, sigma):
    return filled(tokens, lambda: max(1, int(dice.lognormvariate(math.log(median), sigma))))


def filled(tokens, draw):
    lengths = []
    while tokens:
        lengths.append(min(tokens, draw()))
        tokens -= lengths[-1]
    return tuple(lengths)


def cut_anywhere(dice, tokens, documents):
    cuts = [0, *sorted(dice.sample(range(1, tokens), documents - 1)), tokens]
    return tuple(b - a for a, b in itertools.pairwise(cuts))


def causal_pairs(runs, documents):
    """Causal (query, key) pairs of the queries in some runs."""
    found = 0
    for start, _, length in runs:
        at = bisect_right(documents, start) - 1
        while at < len(documents) and documents[at] < start + length:
            end = min([start + length, *documents[at + 1 : at + 2]])
            lo, hi = max(start, documents[at]) - documents[at], end - documents[at]
            found += (hi * (hi + 1) - lo * (lo + 1)) // 2
            at += 1
    return found


def travelling(dealt):
    """Tokens of k/v that each rank receives on a ring: a block goes on to the last rank that reads it."""
    rows, ranks = block_mask_of(dealt.mask, UnevenShards(dealt.blocks)).rows, len(dealt.blocks)
    received = [0] * ranks
    for block, runs in enumerate(dealt.blocks):
        last = max((hop for hop in range(ranks) if rows[(block + hop) % ranks] >> block & 1), default=0)
        for hop in range(1, last + 1):
            received[(block + hop) % ranks] += tokens_of(runs)
    return received
