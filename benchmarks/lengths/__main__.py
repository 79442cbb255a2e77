"""Time optimizer steps with samples of many lengths: packs by length, a fixed group, fixed Ulysses, and data
parallelism.

    python -m benchmarks.lengths
    python -m benchmarks.lengths --real

The lengths of a step's samples follow the assumed quantiles in `KINDS`, including the longest sample of each kind. The
contenders are:

- a: one sample per group of fixed size, padded to a multiple of the group, with Ulysses on all ranks. The longest
  sample determines the number of ranks.
- b: our packs with the same Ulysses size.
- c: data parallelism balanced by cost, if the longest sample fits on one rank.
- ours: whole samples on each rank, except the longest samples.

A step is forward and backward of one layer of `MODEL`, on a simulated cluster of 8 nodes with one rank each
(`cluster.net`). Instead of computing, a rank sleeps for --slower times as long as the machine `--machine` would compute
for the pairs of attention and the tokens. Tensors are sent over links slowed down by --slower and --thinner, with a
head size divided by --thinner. A call's own processor time of 10 to 50 ms would be --slower times shorter on the real
machine. Ranks compare nothing, since hosts run ahead of accelerators. The communication of parameters is left out: as a
barrier per sample, it would only slow down contender a.

--real: a LLaMA on 2 ranks of this machine, forward and backward, with `sp.packs` and with plain loops; lengths are
divided by --scale.

Columns of the table:

- ratio: tokens per second relative to contender a.
- work: maximum work of a rank, divided by the mean over ranks.
- groups: maximum work of a group, divided by the mean, for 4 groups with four times as many samples.
- MB: megabytes sent by the busiest node.
- cut: number of documents that are split over several ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import tables
from benchmarks.cluster import net
from benchmarks.cluster import ranks as on_ranks
from benchmarks.lengths.ranks import Pack, build, real
from benchmarks.memory.ranks import Model as Small
from benchmarks.turns import order
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.data import placing
from ds_seqpar.data.dealing import deal, most
from ds_seqpar.planner.estimate import Work
from ds_seqpar.planner.lengths import Costs
from ds_seqpar.planner.machine import Machine
from ds_seqpar.planner.request import Job, Model
from tests.launch import on_ranks as launched

# (quantile -> maximum tokens; number of samples in a step)
KINDS: dict[str, tuple[dict[float, int], int]] = {
    "chat": ({0: 32, 0.5: 350, 0.87: 1024, 0.993: 4096, 0.999: 8192, 1: 32768}, 512),
    "code": ({0: 64, 0.5: 2000, 0.8: 6000, 0.95: 16384, 1: 32768}, 48),
    "uniform": ({0: 1, 1: 4096}, 96),
}
RANKS, CAP = 8, 4096  # maximum tokens per rank
MODEL = Model(
    hidden=2048, intermediate=8192, layers=1, heads=32, kv_heads=8, head_dim=64, vocab=1, parameters=1,
    layer_parameters=1,
)  # fmt: skip
LINKS = {"400 Gb/s": 45e9, "100 Gb/s": 11e9}  # bytes/s per rank
COLUMNS = ["samples", "link", "contender", "ratio", "s", "work", "groups", "MB", "cut", "Ulysses"]


def main() -> None:
    on_ranks.end_by_exit()
    parser = tables.parser(__doc__, kinds=list(KINDS), links=list(LINKS), machine="h100-ib", slower=1000, thinner=8,
                           rounds=1, real=False, scale=16, patience=300.0)  # fmt: skip
    args = parser.parse_args()
    tables.head(*COLUMNS)
    for cells in really(args) if args.real else emulated(args):
        tables.row(*cells)


def samples(kind: str, times: int = 1, scale: int = 1, count: int = 0) -> list[int]:
    """Return the lengths of a step's samples in random order.

    Between quantiles, lengths grow geometrically, or linearly for the kind "uniform".

    Args:
        times: Multiple of the number of samples.
        scale: Divisor of the lengths.
        count: Number of samples; 0 for the kind's own number.
    """
    quantiles, of_step = KINDS[kind]
    count = (count or of_step) * times
    places, found = sorted(quantiles), []
    for number in range(count):
        at = number / (count - 1)
        right = next(place for place in places if place >= at)
        left = max([place for place in places if place < at], default=0)
        part, (low, high) = (at - left) / (right - left or 1), (quantiles[left], quantiles[right])
        n = low + (high - low) * part if kind == "uniform" else low * math.exp(part * math.log(high / low))
        found.append(max(1, round(n / scale)))
    random.Random(0).shuffle(found)
    return found


def contenders(lengths: Sequence[int], costs: Costs) -> dict[str, list[Pack]]:
    """Return the micro-batches of each contender."""
    of = [costs.seconds([n]) for n in lengths]
    packs = [tuple(lengths[x] for x in pack) for pack in deal(lengths, of, 1, RANKS * CAP)[0]]
    found = {}
    if max(lengths) > CAP:
        found["a: one sample a group"] = [Pack((-(-n // RANKS) * RANKS,), RANKS) for n in lengths]
    else:
        found["a, of one rank"] = [
            Pack(tuple((n,) for n in lengths[at : at + RANKS])) for at in range(0, len(lengths), RANKS)
        ]
        dealt = deal(lengths, of, RANKS, CAP)
        found["c: data parallel"] = [
            Pack(tuple(tuple(lengths[x] for x in pack) for pack in row)) for row in zip(*dealt, strict=True)
        ]
    found["b: packs, Ulysses 8"] = [Pack(pack, RANKS) for pack in packs]
    found["ours"] = [as_sent(pack) for pack in costs.packed(lengths, 1).packs[0]]
    return found


def as_sent(pack: placing.Pack) -> Pack:
    if pack.cut or pack.ulysses > 1:
        return Pack(pack.documents, pack.ulysses)
    return Pack(tuple(tuple(pack.documents[part.document] for part in parts) or (1,) for parts in pack.parts), 1)


def emulated(args: argparse.Namespace) -> Iterator[list[object]]:
    args.nodes, args.ranks_per_node, args.world = RANKS, 1, RANKS
    machine = dataclasses.replace(Machine.load(args.machine), per_node=1)
    rates = {link: f"{LINKS[link] * 8 / args.slower / args.thinner / 1e3:.0f}kbit" for link in args.links}
    config = SequenceParallelConfig(size=RANKS, tokens_per_rank=CAP).resolve(RANKS, (MODEL.heads, MODEL.kv_heads))
    heads = MODEL.heads, MODEL.kv_heads, MODEL.head_dim // args.thinner
    with net.Network(RANKS, rates[args.links[0]]) as network, on_ranks.started(args, network) as ranks:
        for kind, link in itertools.product(args.kinds, args.links):
            network.limit(rates[link])
            wire = dataclasses.replace(machine.between, rate=LINKS[link])
            costs = Costs.of(config, Job(model=MODEL), RANKS, dataclasses.replace(machine, between=wire))
            lengths, work = samples(kind), Work(*(args.slower * x for x in costs.work))
            rows = contenders(lengths, costs)
            sizes = {pack.ulysses for packs in rows.values() for pack in packs} - {0}
            on_ranks.call(ranks, build, [*rows.values()], work, heads, sorted(sizes))
            seconds: dict[str, list[float]] = {name: [] for name in rows}
            others: dict[str, list[object]] = {}
            for turn in range(args.rounds):
                for index in order(len(rows), turn):
                    name = [*rows][index]
                    found, out, _ = on_ranks.carried(
                        ranks, network, lambda i=index: on_ranks.call(ranks, on_ranks.one_turn, i, time.monotonic())
                    )
                    took, slept = zip(*found, strict=True)
                    seconds[name].append(max(took))
                    others[name] = [f"{most(slept):.3f}", f"{max(out) / 1e6:.1f}"]
                    tables.say(f"{kind}, {link}, {name}: {max(took):.2f} s, of which {max(slept):.2f} computing")
            yield from cells(kind, link, rows, seconds, others, costs.packed(samples(kind, 4), 4).of_groups)


def cells(kind: str, link: str, rows: Any, seconds: Any, others: Any, groups: float) -> Iterator[list[object]]:
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    first = next(iter(middle.values()))
    for name, packs in rows.items():
        work, sent = others[name]
        sizes = Counter(pack.ulysses for pack in packs)
        by_size = ", ".join(f"{size}: {count}" for size, count in sorted(sizes.items()) if size)
        of_groups = f"{groups:.3f}" if name == "ours" else ""
        cut = sum(cuts(pack) for pack in packs)
        yield [
            kind,
            link,
            name,
            f"{first / middle[name]:.2f}",
            f"{middle[name]:.2f}",
            work,
            of_groups,
            sent,
            cut,
            by_size,
        ]


def cuts(pack: Pack) -> int:
    """Return the number of documents in a pack that are split over several CP ranks."""
    is_shared = pack.ulysses > 0 and not isinstance(pack.lengths[0], tuple)
    return len(placing.Pack.shared(pack.lengths, "balanced", RANKS, pack.ulysses).cut) if is_shared else 0


def really(args: argparse.Namespace) -> Iterator[list[object]]:
    model = Small(vocab=256, hidden=256, intermediate=1024, layers=2, heads=8, kv_heads=4)
    for kind in args.kinds:
        lengths, cap = samples(kind, 1, args.scale), CAP * RANKS // 2 // args.scale
        if kind == "uniform":
            cap = CAP // args.scale
        costs = Costs.of(
            SequenceParallelConfig(size=1).resolve(1, (8, 4)),
            Job(
                model=Model(
                    hidden=256,
                    intermediate=1024,
                    layers=2,
                    heads=8,
                    kv_heads=4,
                    head_dim=32,
                    vocab=256,
                    parameters=1,
                    layer_parameters=1,
                ),
                dtype="float32",
            ),
            2,
            Machine.load("cpu"),
        )
        dealt = deal(lengths, [costs.seconds([n]) for n in lengths], 2, cap) if max(lengths) <= cap else [[], []]
        flat = [[x for pack in packs for x in pack] for packs in dealt]
        found = launched(2, real, model, lengths, cap, flat, args.rounds, timeout=1800)[0]
        middle = {name: statistics.median(seconds) for name, seconds in found.items()}
        first = next(iter(middle.values()))
        for name, seconds in middle.items():
            yield [kind, "2 ranks", name, f"{first / seconds:.2f}", f"{seconds:.2f}", "", "", "", "", ""]


if __name__ == "__main__":
    main()
