"""What a mask leaves out is neither computed nor sent: kernel calls, products and received bytes of every schedule,
from all ranks' programs, without a process. The tables and the picture of docs/masks.md.

    python -m benchmarks.skipping [--ranks 8 16] [--heads 32 32] [--packs 20] [--brief]
    python -m benchmarks.skipping --ranks 16 --brief --picture docs/pictures/skipping.svg

65,536 tokens; 32 heads of 128 unless told, bf16, partial results in fp32. The masks: causal; causal with a window of
4,096; 64 packed documents, their lengths proportional to numbers drawn from a log-normal distribution (sigma 1).

calls: of kernels that take full and square causal blocks (CUDA's); equal ones are one call, as a batch.
products: (query, key) pairs that tiles compute, of all ranks, to those that are visible: the ideal is 1.
in blocks: the same as a kernel computes them, by whole blocks of 128 x 128: every block that a call touches.
balance: products of the busiest rank, to the mean.
received: bytes of the busiest rank, and the mean, in a rank's mean block of q in bf16 (tokens / ranks, all heads).
of the ring's: the mean, to what a ring receives under the causal mask on its zigzag layout, in this direction.
keys read: k/v of other ranks that a rank's queries see, in the same unit: what is received comes in whole blocks.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_seqpar.compiler.balance import balanced
from ds_seqpar.compiler.compile import Bound, Compiler, pattern_of
from ds_seqpar.compiler.cuts import Takes, calls
from ds_seqpar.compiler.layout import Run, Runs
from ds_seqpar.compiler.masks import CAUSAL, Mask
from ds_seqpar.compiler.program import GatherStart, Post, Product, ScatterStart
from ds_seqpar.compiler.schedules import SCHEDULES
from ds_seqpar.compiler.shape import Shape, shape_of
from ds_seqpar.compiler.shards import EvenShards, Shards, UnevenShards
from ds_seqpar.compiler.tiles import Tile, tiles
from ds_seqpar.config import SequenceParallelConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOKENS, DOCUMENTS, HEAD_DIM = 65536, 64, 128
BLOCK = 128  # rows and columns that a kernel computes at once
DIRECTIONS = ("forward", "backward")
CUDA = Takes(square=True)  # what the kernels take
WANTED = 1.15  # products, to the visible pairs


# ---- counting


@dataclasses.dataclass(frozen=True)
class Count:
    """Of a rank's program. products: pairs in tiles; blocks: pairs in the blocks that calls touch; received: bytes."""

    calls: int
    products: int
    blocks: int
    received: int


def count(bound: Bound) -> Count:
    found = [call for one in bound.program.code if isinstance(one, Product) for call in bound.calls(one.q, one.kv)]
    return Count(
        calls=len(found),
        products=sum(call.products for call in found),
        blocks=sum(map(in_blocks, found)),
        received=received(bound),
    )


def in_blocks(call: Tile) -> int:
    """Pairs that a kernel of whole blocks computes for a call. Of upper as of causal: that is it in reverse order."""
    rows, columns = call.q1 - call.q0, call.k1 - call.k0
    across = -(-columns // BLOCK)
    firsts = range(0, rows, BLOCK)
    touched = sum(across if call.kind == "full" else min(across, first // BLOCK + 1) for first in firsts)
    return call.groups * touched * BLOCK**2


def received(bound: Bound) -> int:
    """Bytes that arrive at the rank."""
    sizes, rank = bound.shape.bytes_per_token(bound.program.direction), bound.program.rank
    total = 0
    for one in bound.program.code:
        if isinstance(one, Post):
            total += sum(sizes[t.unit[0]] * bound.tokens(*t.unit) for t in one.receives)
        elif isinstance(one, GatherStart):
            kind, part = one.collective.kind, one.collective.part(rank)
            total += sizes[kind] * (bound.tokens(kind, one.collective.whole) - bound.tokens(kind, part))
        elif isinstance(one, ScatterStart):
            kind, part = one.collective.kind, one.collective.part(rank)
            total += sizes[kind] * bound.tokens(kind, part) * (len(one.collective.ranks) - 1)
    return total


def counts(setting: dict, direction: str, mask: Mask, shards: Shards, shape: Shape) -> list[Count]:
    """Those of all ranks. setting: of SequenceParallelConfig, without size."""
    config = SequenceParallelConfig(**{"size": shards.size, "ulysses": 1, **setting})
    config = config.resolve(shards.size, heads=(shape.q_heads, shape.kv_heads))
    recipe = config.recipe(config.topology(shards.size))
    return [count(Compiler(recipe, rank).bound(direction, mask, shards, shape, CUDA)) for rank in range(shards.size)]


def visible(mask: Mask, tokens: int) -> int:
    """Pairs of a query and a key that it sees: the fewest that can be computed."""
    bounds = (mask.bounds(p) for p in range(tokens))
    return sum(min(hi, tokens) - lo for lo, hi in bounds)


def read(mask: Mask, shards: Shards, rank: int) -> int:
    """Keys of other ranks that a rank's queries see: the fewest tokens of k/v that it could do with. The runs must have
    steps of 1."""
    held, seen = shards.runs("kv", (rank,)), bytearray(sum(shards.tokens("kv", (b,)) for b in range(shards.size)))
    for run in shards.runs("q", (rank,)):
        if run.length:
            lo, hi = mask.bounds(run.start)[0], min(mask.bounds(run.last)[1], len(seen))
            seen[lo:hi] = b"\1" * (hi - lo)
    for run in held:
        seen[run.start : run.start + run.length] = bytes(run.length)
    return sum(seen)


# ---- packs, and who holds what of them


def lengths_of(documents: int, tokens: int, seed: int) -> list[int]:
    """A long-tailed pack: each document has one token, and a share of the others by what was drawn for it."""
    draw = random.Random(seed)
    drawn = [draw.lognormvariate(0, 1) for _ in range(documents)]
    cuts = [int((tokens - documents) * sum(drawn[:i]) / sum(drawn)) for i in range(documents)] + [tokens - documents]
    return [1 + cuts[i + 1] - cuts[i] for i in range(documents)]


def dealt(lengths: Sequence[int], ranks: int) -> tuple[Runs, ...]:
    """Whole documents, those with most products first, each to the rank with the fewest so far; a rank's runs by
    position. Nothing is cut: a document that is longer than a rank's part of the work stays so, and ranks hold
    different numbers of tokens."""
    starts = Mask.documents_of(lengths)
    held: list[list[Run]] = [[] for _ in range(ranks)]
    work = [(0, rank) for rank in range(ranks)]
    for length, start in sorted(zip(lengths, starts, strict=True), reverse=True):
        least = min(range(ranks), key=work.__getitem__)
        held[least].append(Run(start, 1, length))
        work[least] = work[least][0] + length * (length + 1) // 2, least
    return tuple(tuple(sorted(runs)) for runs in held)


def cut(lengths: Sequence[int], ranks: int) -> tuple[Runs, ...]:
    """Each document in 2 * ranks chunks, of which rank r holds chunks r and 2 * ranks - 1 - r."""
    held: list[list[Run]] = [[] for _ in range(ranks)]
    for start, length in zip(Mask.documents_of(lengths), lengths, strict=True):
        cuts = [start + length * chunk // (2 * ranks) for chunk in range(2 * ranks + 1)]
        for chunk in range(2 * ranks):
            rank = min(chunk, 2 * ranks - 1 - chunk)
            held[rank].append(Run(cuts[chunk], 1, cuts[chunk + 1] - cuts[chunk]))
    return tuple(tuple(run for run in runs if run.length) for runs in held)


@dataclasses.dataclass(frozen=True)
class Case:
    """A mask on shards. kind: of mask. layout: in words; named: the layout's name, where it has one."""

    kind: str
    mask: Mask
    layout: str
    shards: Shards
    named: str = "auto"

    def settings(self) -> Iterator[tuple[str, dict]]:
        """(name, setting) of the schedules that can compute it."""
        pattern = pattern_of(self.mask, self.shards)
        for name, setting in settings():
            schedule = SCHEDULES[setting["schedule"]]
            fits = list(schedule.shapes(self.shards.size)) and schedule.parts == self.shards.parts
            named = self.named in ("auto", *schedule.layouts)
            if fits and named and all(schedule.takes(*pair) for pair in pattern.pairs()):
                yield name, {**setting, "layout": self.named}


def settings() -> list[tuple[str, dict]]:
    """(name, setting). What is not set is as users get it."""
    names = sorted(SCHEDULES, key=lambda name: (name != "ring", name))
    return [(name, {"schedule": name, **({"team": 2} if name == "wallfacer" else {})}) for name in names]


def cases(ranks: int, seed: int = 0, tokens: int = TOKENS) -> list[Case]:
    masks = {"causal": CAUSAL, "window": Mask(window=tokens // 16)}
    return [*_named(masks, ranks, tokens), *packs(ranks, seed, tokens)]


def packs(ranks: int, seed: int, tokens: int = TOKENS) -> list[Case]:
    """Documents in every layout."""
    lengths = lengths_of(DOCUMENTS, tokens, seed)
    mask = Mask(documents=Mask.documents_of(lengths))
    return [
        *_named({"documents": mask}, ranks, tokens),
        Case("documents", mask, "zigzag in each", UnevenShards(cut(lengths, ranks))),
        Case("documents", mask, "balanced", UnevenShards(balanced(lengths, ranks))),
        Case("documents", mask, "whole documents", UnevenShards(dealt(lengths, ranks))),
    ]


def _named(masks: dict[str, Mask], ranks: int, tokens: int) -> Iterator[Case]:
    for (kind, mask), layout in itertools.product(masks.items(), ("contiguous", "zigzag")):
        yield Case(kind, mask, layout, EvenShards(layout, tokens, ranks), layout)


# ---- tables


@dataclasses.dataclass(frozen=True)
class Row:
    """What the tables say of a schedule for one case; see the head of this file."""

    case: Case
    direction: str
    schedule: str
    visible: float  # of causal pairs
    calls: tuple[int, int]  # of the busiest rank, of all
    products: float
    blocks: float
    balance: float
    received: tuple[float, float]  # the busiest rank's, the mean
    fraction: float  # of the ring's


def rows(cases: Sequence[Case], direction: str, shape: Shape, tokens: int = TOKENS) -> Iterator[Row]:
    ranks = cases[0].shards.size
    ring = counts({"schedule": "ring"}, direction, CAUSAL, EvenShards("zigzag", tokens, ranks), shape)
    unit = tokens // ranks * shape.q_heads * shape.head_dim * 2
    for case in cases:
        ideal = visible(case.mask, tokens)
        for name, setting in case.settings():
            found = counts(setting, direction, case.mask, case.shards, shape)
            products, arrived = [one.products for one in found], [one.received for one in found]
            yield Row(
                case=case,
                direction=direction,
                schedule=name,
                visible=ideal / visible(CAUSAL, tokens),
                calls=(max(one.calls for one in found), sum(one.calls for one in found)),
                products=sum(products) / ideal,
                blocks=sum(one.blocks for one in found) / ideal,
                balance=max(products) * ranks / sum(products),
                received=(max(arrived) / unit, sum(arrived) / ranks / unit),
                fraction=sum(arrived) / sum(one.received for one in ring),
            )


def alone(mask: Mask, tokens: int = TOKENS) -> float:
    """`blocks` of one device that holds all."""
    whole = (Run(0, 1, tokens),)
    return sum(map(in_blocks, calls(tiles(whole, whole, mask, CUDA.square), CUDA))) / visible(mask, tokens)


def span(found: Iterable[float], digits: int = 2) -> str:
    """From the least to the greatest."""
    low, high = (f"{edge(found):.{digits}f}" for found in [[*found]] for edge in (min, max))
    return low if low == high else f"{low} - {high}"


def print_table(*lines: Sequence[object]) -> None:
    """The first is the head."""
    head, *others = ("| " + " | ".join(map(str, line)) + " |" for line in lines)
    print("\n".join([head, f"|{'---|' * len(lines[0])}", *others]))


def of_masks(cases: Sequence[Case], found: Sequence[Row], shape: Shape) -> None:
    """What depends on the schedule little or not at all; spans are over schedules and directions."""
    lines = [["mask", "layout", "visible, of causal", "calls of the busiest rank", "products", "in blocks",
              "in blocks, one device", "balance", "tokens of a rank", "keys read"]]  # fmt: skip
    unit = 2 * shape.kv_heads / shape.q_heads / TOKENS
    for case in cases:
        mine, ranks = [row for row in found if row.case is case], case.shards.size
        held = [case.shards.tokens("q", (rank,)) for rank in range(ranks)]
        keys = [read(case.mask, case.shards, rank) * unit * ranks for rank in range(ranks)]
        lines.append([
            case.mask, case.layout, f"{mine[0].visible:.3f}", span((row.calls[0] for row in mine), 0),
            span((row.products for row in mine), 3), span((row.blocks for row in mine), 3), f"{alone(case.mask):.3f}",
            span(row.balance for row in mine), span(held, 0), most_and_mean(max(keys), sum(keys) / ranks),
        ])  # fmt: skip
    print_table(*lines)


def of_bytes(cases: Sequence[Case], found: Sequence[Row]) -> None:
    """Received, of every schedule; found: of one direction."""
    names = [*dict.fromkeys(row.schedule for row in found)]
    lines = [["mask", "layout", *names]]
    for case in cases:
        mine = {row.schedule: most_and_mean(*row.received) for row in found if row.case is case}
        lines.append([case.mask, case.layout, *(mine.get(name, "-") for name in names)])
    print_table(*lines)


def most_and_mean(most: float, mean: float) -> str:
    return f"{most:.2f}" + (f" ({mean:.2f})" if most > 1.001 * mean else "")


def of_all(found: Sequence[Row]) -> None:
    lines = [["mask", "layout", "schedule", "calls: busiest", "all", "products", "in blocks", "balance",
              "received: busiest", "mean", "visible, of causal", "of the ring's"]]  # fmt: skip
    for row in found:
        cells = [f"{x:,}" for x in row.calls] + [f"{x:.3f}" for x in (row.products, row.blocks)]
        cells += [f"{x:.2f}" for x in (row.balance, *row.received)] + [f"{x:.3f}" for x in (row.visible, row.fraction)]
        lines.append([row.case.mask, row.case.layout, row.schedule, *cells])
    print_table(*lines)


def of_packs(ranks: int, seeds: range, shape: Shape) -> None:
    """The same over many packs, from the least to the greatest of all packs and schedules."""
    found: dict[str, list[Row]] = defaultdict(list)
    for seed in seeds:
        some = [case for case in packs(ranks, seed) if case.layout != "zigzag in each"]
        for direction in DIRECTIONS:
            for row in rows(some, direction, shape):
                found[row.case.layout].append(row)
    lines = [["layout", "products", "in blocks", f"packs within {WANTED}", "to one device's", "balance",
              "of the ring's, forward", "backward"]]  # fmt: skip
    ones = {row.case.mask: alone(row.case.mask) for mine in found.values() for row in mine}
    for layout, mine in found.items():
        over = {row.case.mask for row in mine if row.blocks > WANTED}
        lines.append([
            layout, span((row.products for row in mine), 3), span((row.blocks for row in mine), 3),
            f"{len(seeds) - len(over)} of {len(seeds)}",
            span((row.blocks / ones[row.case.mask] for row in mine), 3), span(row.balance for row in mine),
            *(span((row.fraction for row in mine if row.direction == way), 3) for way in DIRECTIONS),
        ])  # fmt: skip
    print_table(*lines)


# ---- picture

COLORS = {"products": "#4878a8", "in blocks": "#9dbbd8", "received, forward": "#e1a13c", "backward": "#b5651d"}
SHOWN = (
    ("causal", "zigzag"),
    ("window", "contiguous"),
    *(("documents", layout) for layout in ("contiguous", "zigzag", "balanced", "whole documents")),
)


def draw(found: Sequence[Row], file: Path) -> None:
    """found: of one number of ranks, both directions. Products as parts of the causal pairs, bytes of the ring's under
    the causal mask."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "skipping"})  # the same file every time
    figure = Figure(figsize=(13, 10), layout="constrained")
    panels = figure.subplots(3, 2, sharey=True).flat
    for axes, (kind, layout) in zip(panels, SHOWN, strict=True):
        _draw_case(axes, [row for row in found if (row.case.kind, row.case.layout) == (kind, layout)])
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=len(labels))
    figure.savefig(file, metadata={"Date": None})


def _draw_case(axes: Axes, found: Sequence[Row]) -> None:
    forward = [row for row in found if row.direction == "forward"]
    backward = {row.schedule: row.fraction for row in found if row.direction == "backward"}
    bars = {
        "products": [row.products * row.visible for row in forward],
        "in blocks": [row.blocks * row.visible for row in forward],
        "received, forward": [row.fraction for row in forward],
        "backward": [backward[row.schedule] for row in forward],
    }
    for index, (name, heights) in enumerate(bars.items()):
        at = [x + 0.2 * (index - 1.5) for x in range(len(heights))]
        held = axes.bar(at, heights, width=0.2, color=COLORS[name], edgecolor="white", linewidth=0.6, label=name)
        axes.bar_label(held, fmt=lambda x: f"{x:.2f}".lstrip("0") if x else "0", fontsize=6.5, padding=1)
    axes.axhline(forward[0].visible, color="#404040", linewidth=0.8, linestyle="--", label="ideal: visible pairs")
    axes.set_xticks(range(len(forward)), [row.schedule for row in forward])
    axes.set_title(f"{forward[0].case.mask}; {forward[0].case.layout}", fontsize=11)
    axes.set_ylabel("of causal pairs, of the ring's bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 32], metavar=("Q", "KV"))
    parser.add_argument("--packs", type=int, default=0, help="how many packs to judge in one more table")
    parser.add_argument("--brief", action="store_true", help="leave out the tables of every schedule")
    parser.add_argument("--picture", type=Path, help="draws the last number of ranks")
    chosen = parser.parse_args()
    shape = shape_of("fp32", "bfloat16", 1, (*chosen.heads, HEAD_DIM))
    lengths = lengths_of(DOCUMENTS, TOKENS, 0)
    part = max(lengths) * (max(lengths) + 1) // 2 / visible(Mask(documents=Mask.documents_of(lengths)), TOKENS)
    print(f"{len(lengths)} documents: {' '.join(map(str, lengths))}; the longest has {part:.3f} of all products")
    for ranks in chosen.ranks:
        made = cases(ranks)
        found = [row for direction in DIRECTIONS for row in rows(made, direction, shape)]
        print(f"\n### {ranks} ranks\n")
        of_masks(made, found, shape)
        for direction in DIRECTIONS:
            mine = [row for row in found if row.direction == direction]
            print(f"\n### {ranks} ranks, received in {direction}\n")
            of_bytes(made, mine)
            if not chosen.brief:
                print(f"\n### {ranks} ranks, {direction}, all\n")
                of_all(mine)
        if chosen.packs:
            print(f"\n### {ranks} ranks, {chosen.packs} packs, all schedules\n")
            of_packs(ranks, range(chosen.packs), shape)
    if chosen.picture:
        draw(found, chosen.picture)


if __name__ == "__main__":
    main()
