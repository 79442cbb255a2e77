"""How well the planner's model predicts: seconds by the model beside measured ones, on a cluster in a box.

    python -m benchmarks.planner.predict calls --nodes 8 --link 50mbit
    python -m benchmarks.planner.predict calls --nodes 1 --ranks-per-node 4 --seq 4096 --rounds 3
    python -m benchmarks.planner.predict steps --nodes 4 --ranks-per-node 2 --link 100mbit --steps 2 -- u4/ring ring u8

`calls` are of attention, forward and backward, with the options of `benchmarks.cluster.attention`; `steps` are of
training, with the options of `benchmarks.cluster.training`. First the ranks calibrate their machine, as
`python -m ds_seqpar calibrate` does. Each prediction is made of that and of the contender alone, before it is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import tables
from benchmarks.cluster import attention, net, training
from benchmarks.cluster import ranks as on_ranks
from benchmarks.cluster.plan import DTYPES
from benchmarks.contenders import Spec
from benchmarks.memory.footprint import step_of
from benchmarks.memory.peers import Bench
from ds_seqpar.cli.calibrate import calibrate
from ds_seqpar.compiler.sharding import heads
from ds_seqpar.compiler.sharding.masks import CAUSAL, FULL
from ds_seqpar.compiler.sharding.shards import EvenShards
from ds_seqpar.config.settings import SequenceParallelConfig
from ds_seqpar.planner.machine import Machine, machine_of
from ds_seqpar.planner.price import DIRECTIONS, AttentionCall, call_of, price_of
from ds_seqpar.planner.steptime import attention_link_seconds, step_time
from tests.launch import PRELOAD, Ranks

CALLS = ["ring", "ring+layout=contiguous", "distflash", "attention2d", "mesh+overlap", "wallfacer", "u2/ring", "u4"]
COLUMNS = ["contender", "measured, s", "spread", "predicted, s", "predicted / measured"]
Row = tuple[str, list[float], float]  # name, seconds measured, seconds predicted


def main() -> None:
    title, rows = tables.mode(__doc__, {"calls": calls, "steps": steps})(sys.argv[2:])
    print(f"\n{title}\n\n{table(rows)}\n\n{summary(rows)}", flush=True)


def calls(given: list[str]) -> tuple[str, list[Row]]:
    args = attention.arguments(tables.parser(__doc__), CALLS, given)
    if args.step in attention.CACHED:
        raise SystemExit(f"training and prefill are predicted; got --step {args.step}")
    with attention.set_up(args) as (ranks, network):
        machine = calibrated(ranks)
        predicted = {spec.name: of_call(spec, args, machine) for spec in args.contenders if not spec.peer}
        rows = attention.prepare(ranks, network, args)
        able = [row for row in rows if "cannot" not in row and row["name"] in predicted]
        attention.take_turns(ranks, able, args.rounds)
    return attention.title(args), [(row["name"], row["seconds"], predicted[row["name"]]) for row in able]


def steps(given: list[str]) -> tuple[str, list[Row]]:
    args = training.arguments(given)
    bench, rows = Bench(args), []
    with net.Network(args.nodes, args.link[0]) as network:
        with on_ranks.started(args, network, PRELOAD) as ranks:
            machine = calibrated(ranks)
        for spec in (spec for spec in args.contenders if not spec.peer):
            predicted = of_step(spec, bench.model, args, machine)
            found = training.turns(network, args, bench, spec.name, training.kind_of(spec, args), args.seq)
            rows.append((spec.name, found[args.link[0]][0], predicted))
    return training.title(args, args.link[0]), rows


def calibrated(ranks: Ranks) -> Machine:
    return machine_of("calibrated", on_ranks.call(ranks, calibrate)[0])


def of_call(spec: Spec, args: argparse.Namespace, machine: Machine) -> float:
    """Seconds of one call, in training forward and backward, and of comparing its inputs."""
    config = SequenceParallelConfig.from_dict({"size": args.world, **spec.section})
    config = config.resolve(args.world, (args.heads, args.kv_heads))
    first = heads.head_chunks(args.heads, args.kv_heads, config.head_chunks)[0]
    call = AttentionCall(
        config=config, world=args.world, mask=CAUSAL if args.causal else FULL,
        shards=EvenShards(config.layout, args.seq, config.size // config.ulysses),
        heads=(*first.counts, args.head_dim), dtype=DTYPES[args.dtype], head_chunks=config.head_chunks,
        kept=config.kept(config.head_chunks, False, False),
    )  # fmt: skip
    wire, ways = machine.between if args.nodes > 1 else machine.inside, DIRECTIONS[: 1 + (args.step == "training")]
    return 2 * (args.world - 1) * wire.latency + sum(price_of(machine, call, way).seconds for way in ways)


def of_step(spec: Spec, model: Any, args: argparse.Namespace, machine: Machine) -> float:
    """Seconds of a training step."""
    step = step_of(model, training.kind_of(spec, args)[1], args.seq, args.world)
    prices = [price_of(machine, call_of(step), way) for way in DIRECTIONS]
    wire = machine.between if step.config.size > machine.per_node else machine.inside
    forward, backward = prices[0].seconds + 2 * (step.config.size - 1) * wire.latency, prices[1].seconds
    links = [attention_link_seconds(machine, step.world, price) for price in prices]
    return step_time(step, machine, forward, backward, (links[0], links[1])).seconds


def table(rows: Sequence[Row]) -> str:
    lines = []
    for name, seconds, predicted in rows:
        median = statistics.median(seconds)
        lines.append([name, f"{median:.3f}", tables.spread(seconds), f"{predicted:.3f}", f"{predicted / median:.2f}"])
    return tables.table(COLUMNS, lines)


def summary(rows: Sequence[Row]) -> str:
    """Errors, whether the order is right, and what the pick by prediction costs."""
    measured, predicted = [statistics.median(row[1]) for row in rows], [row[2] for row in rows]
    errors = [abs(a / b - 1) for a, b in zip(predicted, measured, strict=True)]
    pick = measured[predicted.index(min(predicted))] / min(measured)
    order = statistics.correlation(ranked(measured), ranked(predicted)) if len(rows) > 1 else 1.0
    return (
        f"median error {statistics.median(errors):.1%}, greatest {max(errors):.1%}; rank correlation {order:.2f}; "
        f"the fastest by prediction takes {pick:.3f} of the fastest's time"
    )


def ranked(values: Sequence[float]) -> list[float]:
    """Ranks; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(x) + (ordered.count(x) - 1) / 2 for x in values]


if __name__ == "__main__":
    main()
