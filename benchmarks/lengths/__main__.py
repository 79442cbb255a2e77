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
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks import runner, tables
from benchmarks.cluster import net
from benchmarks.lengths.ranks import Pack, build, real
from benchmarks.memory.ranks import Model as Small
from benchmarks.turns import in_turns
from ds_seqpar.core.settings import SequenceParallelConfig
from ds_seqpar.data import placing
from ds_seqpar.data.dealing import deal, most
from ds_seqpar.planner.estimate import Work
from ds_seqpar.planner.lengths import Costs
from ds_seqpar.planner.machine import Machine
from ds_seqpar.planner.request import Job, Model
from tests.launch import Ranks, on_ranks

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
SMALL = dataclasses.replace(MODEL, hidden=256, intermediate=1024, layers=2, heads=8, kv_heads=4, head_dim=32, vocab=256)
LINKS = {"400 Gb/s": 45e9, "100 Gb/s": 11e9}  # bytes/s per rank
COLUMNS = ["samples", "link", "contender", "ratio", "s", "work", "groups", "MB", "cut", "Ulysses"]


def main() -> None:
    runner.end_by_exit()
    parser = tables.parser(__doc__, kinds=list(KINDS), links=list(LINKS), machine="h100-ib", slower=1000, thinner=8,
                           rounds=1, real=False, scale=16, patience=300.0)  # fmt: skip
    args = parser.parse_args()
    tables.stream(COLUMNS, really(args) if args.real else emulated(args))


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
        dealt = zip(*deal(lengths, of, RANKS, CAP), strict=True)
        every = (lengths[at : at + RANKS] for at in range(0, len(lengths), RANKS))
        found["a, of one rank"] = [Pack(tuple((n,) for n in some)) for some in every]
        found["c: data parallel"] = [Pack(tuple(tuple(lengths[x] for x in pack) for pack in row)) for row in dealt]
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
    with net.Network(RANKS, rates[args.links[0]]) as network, runner.started(args, network) as ranks:
        for kind, link in itertools.product(args.kinds, args.links):
            network.limit(rates[link])
            wire = dataclasses.replace(machine.between, rate=LINKS[link])
            costs = Costs.of(config, Job(model=MODEL), RANKS, dataclasses.replace(machine, between=wire))
            lengths, work = samples(kind), Work(*(args.slower * x for x in costs.work))
            rows = contenders(lengths, costs)
            sizes = {pack.ulysses for packs in rows.values() for pack in packs} - {0}
            runner.call(ranks, build, [*rows.values()], work, heads, sorted(sizes))
            seconds, measured = take_turns(ranks, network, f"{kind}, {link}", [*rows], args.rounds)
            groups = f"{costs.packed(samples(kind, 4), 4).of_groups:.3f}"
            for (name, packs), times in zip(rows.items(), ratios(seconds), strict=True):
                sizes = Counter(pack.ulysses for pack in packs)
                by_size = ", ".join(f"{size}: {count}" for size, count in sorted(sizes.items()) if size)
                (spread, sent), of_groups = measured[name], groups if name == "ours" else ""
                yield [kind, link, name, *times, spread, of_groups, sent, sum(map(cuts, packs)), by_size]


def take_turns(
    ranks: Ranks, network: net.Network, what: str, names: Sequence[str], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Return, by contender, the seconds of each round, and the last round's two cells about work and bytes."""
    cells: dict[str, list[str]] = {}

    def clock(name: str) -> float:
        (took, slept), out, _ = runner.carried(ranks, network, lambda: runner.together(ranks, names.index(name)))
        cells[name] = [f"{most(slept):.3f}", f"{max(out) / 1e6:.1f}"]
        tables.say(f"{what}, {name}: {took:.2f} s, of which {max(slept):.2f} computing")
        return took

    return in_turns({name: name for name in names}, rounds, clock, warm=0), cells


def ratios(seconds: dict[str, list[float]]) -> list[list[str]]:
    """Return two cells for each contender: the first contender's median relative to its own, and its own median."""
    medians = [*map(statistics.median, seconds.values())]
    return [[f"{medians[0] / one:.2f}", f"{one:.2f}"] for one in medians]


def cuts(pack: Pack) -> int:
    """Return the number of documents in a pack that are split over several CP ranks."""
    is_shared = pack.ulysses > 0 and not isinstance(pack.lengths[0], tuple)
    return len(placing.Pack.shared(pack.lengths, "balanced", RANKS, pack.ulysses).cut) if is_shared else 0


def really(args: argparse.Namespace) -> Iterator[list[object]]:
    model = Small(vocab=256, hidden=256, intermediate=1024, layers=2, heads=8, kv_heads=4)
    for kind in args.kinds:
        lengths, cap = samples(kind, 1, args.scale), CAP * (1 if kind == "uniform" else RANKS // 2) // args.scale
        config, job = SequenceParallelConfig(size=1).resolve(1, (8, 4)), Job(model=SMALL, dtype="float32")
        costs = Costs.of(config, job, 2, Machine.load("cpu"))
        dealt = deal(lengths, [costs.seconds([n]) for n in lengths], 2, cap) if max(lengths) <= cap else [[], []]
        flat = [[x for pack in packs for x in pack] for packs in dealt]
        found = on_ranks(2, real, model, lengths, cap, flat, args.rounds, timeout=1800)[0]
        for name, times in zip(found, ratios(found), strict=True):
            yield [kind, "2 ranks", name, *times, *[""] * 5]


if __name__ == "__main__":
    main()
