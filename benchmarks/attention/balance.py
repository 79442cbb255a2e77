"""How evenly packed documents are dealt to ranks, and what that costs in bytes: python -m benchmarks.attention.balance

Without processes, for 8 and 16 ranks: causal products of the busiest rank beside the mean of those that the documents
need; how far a rank's tokens are from the mean, at most; k/v tokens that a rank receives in a ring's forward; and a
ring's critical path by the simulator.

A pack has 32K, 64K or 128K tokens. Of ten, five have documents of lognormal length (sigma 1, median 500, 1,000 or
2,000) and two of sigma 1.5 (median 300 or 1,000), one after the other, the last one cut off; one has a document of 20
to 95 % and others of 16 to 512 tokens; one has 1 to 64 equal documents; one is cut into 1 to P documents anywhere.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks import tables
from ds_seqpar import Mask, SequenceParallelConfig, UnevenShards
from ds_seqpar.compiler.balance import balanced
from ds_seqpar.compiler.compile import Recipe, pattern_of
from ds_seqpar.compiler.layout import LAYOUTS, Run, Runs
from ds_seqpar.compiler.shape import Shape
from ds_seqpar.compiler.shards import length as tokens_of
from ds_seqpar.compiler.simulate import Costs, programs_of, simulate
from ds_seqpar.compiler.tiles import tiles

PACKS, SIMULATED = 1000, 40
SHAPE = Shape(batch=1, q_heads=8, kv_heads=8, head_dim=64, dtype="bfloat16", travel="float32")


class Dealt(NamedTuple):
    """Lengths of documents, maybe padded, and what each rank holds of them."""

    lengths: Sequence[int]
    blocks: tuple[Runs, ...]

    @property
    def mask(self) -> Mask:
        return Mask(documents=Mask.documents_of(self.lengths))


Deal = Callable[[Sequence[int], int], Dealt]


def by_balance(lengths: Sequence[int], ranks: int) -> Dealt:
    return Dealt(lengths, balanced(lengths, ranks))


def by_layout(layout: str, lengths: Sequence[int], ranks: int) -> Dealt:
    """The whole pack as one sequence, its end padded to what the layout divides by."""
    left = -sum(lengths) % (2 * ranks)
    lengths = [*lengths[:-1], lengths[-1] + left]
    return Dealt(lengths, tuple(LAYOUTS[layout].runs(sum(lengths), ranks, rank) for rank in range(ranks)))


def in_each(lengths: Sequence[int], ranks: int) -> Dealt:
    """Every document padded to a multiple of 2 * ranks, and dealt by zigzag for itself."""
    padded = [length + -length % (2 * ranks) for length in lengths]
    held: list[list[Run]] = [[] for _ in range(ranks)]
    start = 0
    for length in padded:
        for rank in range(ranks):
            held[rank] += [
                Run(start + at, step, size) for at, step, size in LAYOUTS["zigzag"].runs(length, ranks, rank)
            ]
        start += length
    return Dealt(padded, tuple(map(tuple, held)))


DEALS: dict[str, Deal] = {
    "balanced": by_balance,
    "zigzag, whole pack": functools.partial(by_layout, "zigzag"),
    "zigzag in each document, padded": in_each,
    "contiguous": functools.partial(by_layout, "contiguous"),
}


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--packs", type=int, default=PACKS)
    args = parser.parse_args()
    for ranks in (8, 16):
        spread(ranks, args.packs)


# ---- packs


def packs(count: int, ranks: int, seed: int = 0) -> Iterator[tuple[int, ...]]:
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


def lognormal(dice: random.Random, tokens: int, median: int, sigma: float) -> tuple[int, ...]:
    return filled(tokens, lambda: max(1, int(dice.lognormvariate(math.log(median), sigma))))


def filled(tokens: int, draw: Callable[[], int]) -> tuple[int, ...]:
    lengths: list[int] = []
    while tokens:
        lengths.append(min(tokens, draw()))
        tokens -= lengths[-1]
    return tuple(lengths)


def cut_anywhere(dice: random.Random, tokens: int, documents: int) -> tuple[int, ...]:
    cuts = [0, *sorted(dice.sample(range(1, tokens), documents - 1)), tokens]
    return tuple(b - a for a, b in itertools.pairwise(cuts))


# ---- what ranks have to do


def spread(ranks: int, count: int) -> None:
    print(f"\n### {count} packs, {ranks} ranks\n")
    print(tables.head("dealt", "products, busiest to mean: mean", "worst", "tokens from the mean, worst",
                      "k/v tokens received a rank", "of the pack", "runs a rank"))  # fmt: skip
    for name, deal in DEALS.items():
        rows = [figures(deal, lengths, ranks) for lengths in packs(count, ranks)]
        busiest, apart, received, share, runs = zip(*rows, strict=True)
        means = statistics.mean(received), statistics.mean(share), statistics.mean(runs)
        tables.row(name, f"{statistics.mean(busiest):.3f}", f"{max(busiest):.3f}", f"{max(apart):.2%}",
                   f"{means[0]:,.0f}", f"{means[1]:.2f}", f"{means[2]:.1f}")  # fmt: skip
    print(f"\nA ring's critical path in forward to the mean products, {SIMULATED} of the packs\n")
    print(tables.head("dealt", "links that take no time: mean", "worst",
                      "a block as long as the products of a step: mean", "worst"))  # fmt: skip
    few = list(packs(SIMULATED, ranks, seed=1))
    for name, deal in DEALS.items():
        columns = zip(*(critical(deal, lengths, ranks) for lengths in few), strict=True)
        tables.row(name, *(f"{value:.2f}" for x in columns for value in (statistics.mean(x), max(x))))


def figures(deal: Deal, lengths: Sequence[int], ranks: int) -> tuple[float, float, float, float, float]:
    """(busiest rank's products to the mean of what is needed, greatest distance of tokens from their mean, k/v tokens
    received by the mean rank, the same to the pack's tokens, runs of the mean rank)."""
    dealt = deal(lengths, ranks)
    needed, tokens = sum(n * (n + 1) // 2 for n in lengths) / ranks, sum(lengths) / ranks
    starts = dealt.mask.documents or (0,)
    busiest = max(products(runs, starts) for runs in dealt.blocks) / needed
    apart = max(abs(tokens_of(runs) - tokens) for runs in dealt.blocks) / tokens
    received = sum(travelling(dealt)) / ranks
    return busiest, apart, received, received / sum(lengths), sum(map(len, dealt.blocks)) / ranks


def products(runs: Runs, documents: Sequence[int]) -> int:
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


def travelling(dealt: Dealt) -> list[int]:
    """Tokens of k/v that each rank receives on a ring: a block goes on to the last rank that reads it."""
    rows, ranks = pattern_of(dealt.mask, UnevenShards(dealt.blocks)).rows, len(dealt.blocks)
    received = [0] * ranks
    for block, runs in enumerate(dealt.blocks):
        last = max((hop for hop in range(ranks) if rows[(block + hop) % ranks] >> block & 1), default=0)
        for hop in range(1, last + 1):
            received[(block + hop) % ranks] += tokens_of(runs)
    return received


def critical(deal: Deal, lengths: Sequence[int], ranks: int) -> tuple[float, float]:
    """The critical path of a ring's forward to the mean products, on links that take no time, and on some over which a
    block takes a ranks-th of the mean products."""
    dealt, needed = deal(lengths, ranks), sum(n * (n + 1) // 2 for n in lengths) / ranks
    shards, mask = UnevenShards(dealt.blocks), dealt.mask
    plan = recipe(ranks).plan("forward", pattern_of(mask, shards), SHAPE)
    work = {
        (q, kv): sum(tile.products for tile in tiles(shards.q[q], shards.kv[kv], mask))
        for q, kv in {(c.q[0], c.kv[0]) for steps in plan.ranks for step in steps for c in step.computes}
    }
    lowered = programs_of(plan)

    def seconds(block: float) -> float:
        costs = Costs(transfer={"kv": block}, product=1.0, weight=lambda q, kv: work[q, kv])
        return simulate(lowered, costs).seconds / needed

    return seconds(0.0), seconds(needed / ranks)


@functools.cache
def recipe(ranks: int) -> Recipe:
    config = SequenceParallelConfig(size=ranks, ulysses=1, schedule="ring").resolve(ranks)
    return config.recipe(config.topology(ranks))


if __name__ == "__main__":
    main()
