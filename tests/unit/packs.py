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

from ds_seqpar.core.compiler.compile import block_mask_of
from ds_seqpar.core.compiler.sharding.layout import LAYOUTS
from ds_seqpar.core.compiler.sharding.masks import Mask
from ds_seqpar.core.compiler.sharding.shards import UnevenShards
from ds_seqpar.core.compiler.sharding.shards import length as tokens_of
from ds_seqpar.data.balance import balanced


class Dealt(NamedTuple):
    """Lengths of documents, maybe padded, and what each rank holds of them."""

    lengths: tuple
    blocks: tuple

    @property
    def mask(self):
        return Mask(documents=Mask.documents_of(self.lengths))


class Tree(NamedTuple):
    """Documents with parents, and what each rank holds of them."""

    lengths: tuple
    parents: tuple = ()
    blocks: tuple = ()

    @property
    def mask(self):
        return Mask(documents=Mask.documents_of(self.lengths), parents=self.parents)

    @property
    def before(self):
        """Of each document how many tokens it sees before its first one."""
        found = []
        for parent in self.parents or (-1,) * len(self.lengths):
            found.append(0 if parent < 0 else found[parent] + self.lengths[parent])
        return found

    @property
    def pairs(self):
        return sum(n * seen + n * (n + 1) // 2 for n, seen in zip(self.lengths, self.before, strict=True))

    def pairs_of(self, runs):
        """Causal (query, key) pairs of the queries in some runs."""
        starts, found = Mask.documents_of(self.lengths), causal_pairs(runs, Mask.documents_of(self.lengths))
        for (lo, hi), seen in zip(itertools.pairwise((*starts, sum(self.lengths))), self.before, strict=True):
            found += seen * sum(max(0, min(hi, run.last + 1) - max(lo, run.start)) for run in runs)
        return found


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


def parents_of(documents, choose):
    """Parents of so many documents in depth-first order. choose(n): how many of the n documents on the path to the last
    one, it included, the next one sees."""
    path, parents = [], []
    for number in range(documents):
        del path[choose(len(path)) :]
        parents.append(path[-1] if path else -1)
        path.append(number)
    return tuple(parents)


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


def traveling(dealt):
    """Tokens of k/v that each rank receives on a ring: a block goes on to the last rank that reads it."""
    rows, ranks = block_mask_of(dealt.mask, UnevenShards(dealt.blocks)).rows, len(dealt.blocks)
    received = [0] * ranks
    for block, runs in enumerate(dealt.blocks):
        last = max((hop for hop in range(ranks) if rows[(block + hop) % ranks] >> block & 1), default=0)
        for hop in range(1, last + 1):
            received[(block + hop) % ranks] += tokens_of(runs)
    return received
