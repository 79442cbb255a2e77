"""How evenly packed documents are dealt to ranks, and what that costs in bytes and in time.

    python -m benchmarks.balance
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 benchmarks/balance.py --time

The first, without processes, over 1,000 packs for 8 and 16 ranks: causal products of the busiest rank beside the mean
of those that the documents need; how far a rank's tokens are from the mean, at most; k/v tokens that a rank receives in
a ring's forward; a ring's critical path by the simulator; and what dealing and compiling a new pack takes.
The second: forward and backward of a few packs, dealt in three ways that take turns; the slowest rank's medians.

A pack has 32K, 64K or 128K tokens. Of ten, five have documents of lognormal length (sigma 1, median 500, 1,000 or
2,000) and two of sigma 1.5 (median 300 or 1,000), one after the other, the last one cut off; one has a document of 20
to 95 % and others of 16 to 512 tokens; one has 1 to 64 equal documents; one is cut into 1 to P documents anywhere.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_seqpar import Mask, SequenceParallel, SequenceParallelConfig, UnevenShards
from ds_seqpar.compiler.balance import balanced
from ds_seqpar.compiler.compile import Compiler, Recipe, pattern_of
from ds_seqpar.compiler.layout import LAYOUTS, Run, Runs
from ds_seqpar.compiler.program import Product
from ds_seqpar.compiler.shape import Shape
from ds_seqpar.compiler.shards import length as tokens_of
from ds_seqpar.compiler.simulate import Costs, programs_of, simulate
from ds_seqpar.compiler.tiles import tiles

PACKS, SIMULATED = 1000, 40
SHAPE = Shape(batch=1, q_heads=8, kv_heads=8, head_dim=64, dtype="bfloat16", travel="float32")
TIME_SHAPES = (4, 64), (2, 64), (2, 64)  # heads of q, k and v


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true", help="on ranks that torchrun started")
    parser.add_argument("--packs", type=int, default=PACKS)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.time:
        timed(args.rounds)
        return
    for ranks in (8, 16):
        spread(ranks, args.packs)
    compiling(64, 16, 50)
    compiling(600, 16, 9)


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
    print(
        "| dealt | products, busiest to mean: mean | worst | tokens from the mean, worst "
        "| k/v tokens received a rank | of the pack | runs a rank |\n|---|---|---|---|---|---|---|"
    )
    for name, deal in DEALS.items():
        rows = [figures(deal, lengths, ranks) for lengths in packs(count, ranks)]
        busiest, apart, received, share, runs = zip(*rows, strict=True)
        print(
            f"| {name} | {statistics.mean(busiest):.3f} | {max(busiest):.3f} | {max(apart):.2%} | "
            f"{statistics.mean(received):,.0f} | {statistics.mean(share):.2f} | {statistics.mean(runs):.1f} |",
            flush=True,
        )
    print(f"\nA ring's critical path in forward to the mean products, {SIMULATED} of the packs\n")
    print("| dealt | links that take no time: mean | worst | a block as long as the products of a step: mean | worst |")
    print("|---|---|---|---|---|")
    few = list(packs(SIMULATED, ranks, seed=1))
    for name, deal in DEALS.items():
        columns = zip(*(critical(deal, lengths, ranks) for lengths in few), strict=True)
        print(f"| {name} | {' | '.join(f'{statistics.mean(x):.2f} | {max(x):.2f}' for x in columns)} |", flush=True)


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


def compiling(documents: int, ranks: int, count: int) -> None:
    print(f"\n### Milliseconds for a new pack of {documents} documents, {ranks} ranks, {count} packs\n")
    print("| dealt | dealing: median | worst | both programs and all tiles: median | worst | kernel calls |")
    print("|---|---|---|---|---|---|")
    for name, deal in DEALS.items():
        compilers = [Compiler(recipe(ranks), rank) for rank in range(ranks)]
        rows = []
        for seed in range(count):
            lengths = cut_anywhere(random.Random(seed), ranks * 4096, documents)
            began = time.perf_counter()
            dealt = deal(lengths, ranks)
            between = time.perf_counter()
            calls = compiled(compilers[seed % ranks], dealt)
            rows.append((between - began, time.perf_counter() - between, calls))
        dealing, making, counts = zip(*rows, strict=True)
        cells = [f"{f(x) * 1e3:.2f}" for x in (dealing, making) for f in (statistics.median, max)]
        print(f"| {name} | {' | '.join(cells)} | {statistics.mean(counts):.0f} |", flush=True)


def compiled(compiler: Compiler, dealt: Dealt) -> int:
    """Makes a rank's programs of both directions with their tiles. Returns how many kernel calls they have."""
    mask, shards, calls = dealt.mask, UnevenShards(dealt.blocks), 0
    for direction in ("forward", "backward"):
        bound = compiler.bound(direction, mask, shards, SHAPE)
        calls += sum(len(bound.tiles(one.q, one.kv)) for one in bound.program.code if isinstance(one, Product))
    return calls


# ---- time


def timed(rounds: int) -> None:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    sp = SequenceParallel(SequenceParallelConfig(size=size, ulysses=1, schedule="ring"))
    dice = random.Random(0)
    examples = {
        "16,384 tokens, lognormal, median 500": lognormal(dice, 16384, 500, 1.0),
        "16,384 tokens, lognormal, median 2,000": lognormal(dice, 16384, 2000, 1.0),
        "8,192 tokens, one of 4,096, others of 16 to 256": (4096, *filled(4096, lambda: dice.randint(16, 256))),
        "8,192 tokens, 3 documents": (1500, 600, 6092),
    }
    names = [name for name in DEALS if name != "contiguous"]
    if dist.get_rank() == 0:
        heads = f"{TIME_SHAPES[0][0]}/{TIME_SHAPES[1][0]} heads of {TIME_SHAPES[0][1]}"
        print(f"\n{size} ranks, a ring, {heads}, fp32, forward and backward, {rounds} rounds\n")
        print(f"| pack | documents | {' | '.join(f'{name}, s | ratio' for name in names)} |")
        print("|---|---|" + "---|---|" * len(names))
    for title, lengths in examples.items():
        steps = [step_of(sp, DEALS[name](lengths, size)) for name in names]
        found: list[list[float]] = [[] for _ in names]
        for turn in range(-1, rounds):
            for row in sorted(range(len(names)), key=lambda row: (row + turn) % len(names)):
                dist.barrier()
                began = time.perf_counter()
                steps[row]()
                took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                if turn >= 0:
                    found[row].append(took.item())
        if dist.get_rank() == 0:
            medians = [statistics.median(seconds) for seconds in found]
            cells = " | ".join(f"{seconds:.3f} | {seconds / medians[0]:.2f}" for seconds in medians)
            print(f"| {title} | {len(lengths)} | {cells} |", flush=True)
    sp.close()
    dist.destroy_process_group()


def step_of(sp: SequenceParallel, dealt: Dealt) -> Callable[[], None]:
    mask, shards = dealt.mask, UnevenShards(dealt.blocks)
    local: list[Tensor] = [torch.randn(1, shards.tokens("q", (sp.rank,)), *heads) for heads in TIME_SHAPES]

    def step() -> None:
        out = sp.attention(*(x.detach().requires_grad_() for x in local), mask=mask, shards=shards)
        out.backward(torch.ones_like(out))

    return step


if __name__ == "__main__":
    main()
