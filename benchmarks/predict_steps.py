"""How well the planner predicts whole training steps: seconds by its model beside measured ones, on one machine.

    python -m benchmarks.predict_steps --nodes 1 --ranks-per-node 4 --json steps_loopback.json
    python -m benchmarks.predict_steps --nodes 4 --ranks-per-node 2 --link 100mbit --json steps_links.json
    python -m benchmarks.predict_steps --show steps_loopback.json steps_links.json

Nodes, links and steps are those of `benchmarks.train`: a LLaMA under ZeRO with AdamW and clipping, whose losses must be
the whole model's. A configuration is spelled as in `cluster_spec`, and beside settings of the section takes `seq`,
`stage` (of ZeRO), `checkpointing` and the numbers of the model (`u2/ring+seq=2048+stage=1+hidden=512`). First the ranks
calibrate their machine; a prediction is made of that and of the configuration alone. Every configuration has fresh
processes, which make a step to warm up and then `--steps`; after those one more with clocks inside, for the parts.

Every other configuration is *held out*: whoever changes the model looks at the others only, and errors are told apart.
What is predicted is `planner.steptime`'s, by the model as it is now: `--show` predicts anew, from the files' machines.
The greatest part, predicted and measured, of attention (with what it sends), ZeRO (what it waits for, and the
optimiser's step) and the rest (matrices, norms, logits, copies, the host's work) is set side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks import cluster_net, cluster_ranks, cluster_turns, footprint, train, train_ranks
from benchmarks.cluster import parser_of
from benchmarks.cluster_spec import Spec, parse
from benchmarks.cluster_turns import call
from benchmarks.memory import Bench, model_options
from benchmarks.predict import able, errors, ratio, summary
from ds_seqpar.planner.closed import closed
from ds_seqpar.planner.machine import Machine, machine_of
from ds_seqpar.planner.prices import call_seconds
from ds_seqpar.planner.search import DIRECTIONS
from ds_seqpar.planner.steptime import StepTime, call_of, carried_seconds, step_time
from ds_seqpar.runtime.comm import distances
from tests.launch import PRELOAD, Ranks

DEFAULT = [
    "u4", "ring", "u2/ring+seq=4096", "u4+seq=4096+stage=1", "ring+checkpointing=false",
    "attention2d=2,2+checkpointing=false", "u4+hidden=512+intermediate=1024", "ring+hidden=512+intermediate=1024",
    "u2/ring+vocab=16384+seq=1024", "u4+vocab=16384+seq=1024+stage=1", "u2+size=2", "ring+size=2+seq=4096",
]  # fmt: skip
NUMBERS = ("vocab", "hidden", "intermediate", "layers", "heads", "kv_heads")
COLUMNS = ["configuration", "measured, s", "spread", "predicted, s", "predicted / measured", "attention", "ZeRO",
           "rest", "most", "held out"]  # fmt: skip
GROUPS = {"attention": ("attention forward", "attention backward"), "ZeRO": ("ZeRO", "optimiser")}


def main() -> None:
    args = arguments()
    os.environ["PYTHONWARNINGS"] = "ignore"  # DeepSpeed's and transformers' of their own calls, of every rank
    if args.show:
        runs = [json.loads(path.read_text()) for path in args.show]
    else:
        cluster_turns.ready()
        runs = [measure(args)]
        if args.json:
            args.json.write_text(json.dumps(runs[0], indent=1))
    for run in runs:
        predict(run)
        print(f"\n{run['title']}\n\n{table(run['rows'])}\n\n{summary(run['rows'])}\n{named(run['rows'])}", flush=True)
    if len(runs) > 1:
        rows = [row for run in runs for row in run["rows"]]
        print(f"\nall: {errors(rows)}; {named(rows)}")


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("configurations", nargs="*", metavar="CONFIG", type=cluster_turns.spec,
                        help=f"default: {' '.join(DEFAULT)}")  # fmt: skip
    cluster_turns.network_options(parser, nodes=1, per_node=4)
    parser.add_argument("--link", type=cluster_turns.link, default="100mbit", help="of every node, out and in")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of the whole sequence")
    model_options(parser, vocab=1024, hidden=256, intermediate=512, layers=4, heads=4, kv_heads=4)
    parser.add_argument("--steps", type=int, default=4, help="with a clock")
    parser.add_argument("--timeout", type=int, default=900, help="seconds for the whole model's losses")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="runs' --json; runs nothing")
    args = parser.parse_args()
    args.configurations = args.configurations or [parse(text) for text in DEFAULT]
    args.world = args.nodes * args.ranks_per_node
    return args


def split(spec: Spec, args: argparse.Namespace) -> tuple[argparse.Namespace, dict[str, Any]]:
    """What a configuration changes of the run's arguments, and its options as `memory_peers.made` takes them."""
    section = dict(spec.section)
    changed = {name: section.pop(name) for name in ("seq", *NUMBERS) if name in section}
    # a layer's parameters stay from when a checkpoint is run again to its backward, as a large model's do
    zero = [("stage3_max_reuse_distance", 2**20), *args.zero, ("stage", section.pop("stage", 3))]
    return argparse.Namespace(**{**vars(args), **changed, "zero": zero, "link": [args.link]}), section


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Raises RankFailure where a rank failed, SystemExit where losses differ."""
    rows: list[dict[str, Any]] = []
    with cluster_net.Network(args.nodes, args.link, args.latency) as network:
        with Ranks(args.world, None, PRELOAD) as ranks:
            call(ranks, cluster_ranks.enter, network.names, args.ranks_per_node, ranks.folder.name, args.patience)
            machine = call(ranks, cluster_ranks.calibrated)[0]
        benches: dict[str, Bench] = {}
        for number, spec in enumerate(args.configurations):
            its, options = split(spec, args)
            bench = benches.setdefault(str([getattr(its, name) for name in NUMBERS]), Bench(its))
            bench.model = Bench(its).model  # stages differ
            clocks: list[dict[str, float]] = []

            def look(ranks: Ranks, clocks: list[dict[str, float]] = clocks) -> None:
                clocks += call(ranks, train_ranks.spent, cluster_turns.soon())

            found = train.turns(network, its, bench, spec.name, ("ours", options), its.seq, look)
            ((seconds, carried),) = found.values()
            mean = {name: statistics.mean(one.get(name, 0.0) for one in clocks) for name in clocks[0]}
            rows.append({"name": spec.name, "held_out": number % 2 == 1, "seconds": seconds, "inside": mean, **carried})
    run = {name: getattr(args, name) for name in ("nodes", "ranks_per_node", "link", "seq", "bf16", "zero", *NUMBERS)}
    return {"title": title(args), "run": run, "machine": machine, "rows": rows}


def predict(run: dict[str, Any]) -> None:
    """Adds to each row what its step takes, and its parts."""
    args, machine = argparse.Namespace(**run["run"]), machine_of("calibrated", run["machine"])
    args.zero = [tuple(one) for one in args.zero]
    for row in run["rows"]:
        found = predicted(parse(row["name"]), args, machine)
        row["predicted"], row["parts"] = found.seconds, dict(found.parts)


def predicted(spec: Spec, args: argparse.Namespace, machine: Machine) -> StepTime:
    """By the model, from the machine and the configuration alone."""
    its, options = split(spec, args)
    step = footprint.step_of(Bench(its).model, options, its.seq, args.nodes * args.ranks_per_node)
    stages = step.config.head_stages
    one = call_of(step, stages)
    forward, backward = (call_seconds(machine, one, way) for way in DIRECTIONS)
    wire = machine.between if step.config.size > machine.per_node else machine.inside
    forward += len(distances(step.config.size)) * wire.latency  # inputs are compared, once a call
    carried = [stages * carried_seconds(machine, step.world, closed(machine, one, way)) for way in DIRECTIONS]
    return step_time(step, machine, forward, backward, carried=(carried[0], carried[1]))


def grouped(parts: dict[str, float]) -> dict[str, float]:
    """Seconds of `StepTime.parts` as `inside` has them too."""
    found = {name: sum(parts.get(part, 0.0) for part in its) for name, its in GROUPS.items()}
    return {**found, "rest": sum(parts.values()) - sum(found.values())}


def inside(row: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step by what took them, as measured by clocks inside of it: the mean of ranks, brought to what steps
    without those clocks took."""
    its = row["inside"]
    zero = its["ZeRO"] + its["step"] - its["step: ZeRO"]
    share = statistics.median(row["seconds"]) / its["all"]
    found = {"attention": its["attention"], "ZeRO": zero, "rest": its["all"] - its["attention"] - zero}
    return {name: seconds * share for name, seconds in found.items()}


def most(groups: dict[str, float]) -> str:
    return max(groups, key=lambda name: groups[name])


def title(args: argparse.Namespace) -> str:
    where = f"{args.link} a link each way, " if args.nodes > 1 else ""
    heads = f"{args.heads}/{args.kv_heads} heads of {args.hidden // args.heads}"
    return (
        f"{args.nodes} nodes x {args.ranks_per_node}, {where}{args.seq} tokens, {args.layers} layers, hidden "
        f"{args.hidden}, intermediate {args.intermediate}, vocabulary {args.vocab}, {heads}, "
        f"{'bf16' if args.bf16 else 'fp32'}, ZeRO-3 and checkpointing where nothing else is said; median of "
        f"{args.steps} steps; parts: predicted / measured seconds"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in able(rows):
        seconds, said, seen = row["seconds"], grouped(row["parts"]), inside(row)
        agreed = most(said) if most(said) == most(seen) else f"{most(said)}, was {most(seen)}"
        cells = [
            row["name"], f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}-{max(seconds):.2f}",
            f"{row['predicted']:.2f}", f"{ratio(row):.2f}",
            *(f"{said[name]:.2f} / {seen[name]:.2f}" for name in ("attention", "ZeRO", "rest")),
            agreed, "yes" if row["held_out"] else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def named(rows: list[dict[str, Any]]) -> str:
    """How often what takes most is named rightly."""
    right = sum(most(grouped(row["parts"])) == most(inside(row)) for row in rows)
    return f"what takes most is named rightly in {right} of {len(rows)}"


if __name__ == "__main__":
    main()
