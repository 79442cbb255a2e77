"""How well the planner's model predicts: seconds of attention by the model beside measured ones, on one machine.

    python -m benchmarks.predict --nodes 1 --ranks-per-node 8 --json loopback8.json
    python -m benchmarks.predict --nodes 8 --link 100mbit --json links8.json
    python -m benchmarks.predict --show loopback8.json links8.json --png predicted.png

The cluster, its options and configurations are those of `benchmarks.cluster`; of one node nothing goes over a link.
First the ranks calibrate their machine (`python -m ds_seqpar calibrate` does the same); from that file and the programs
alone comes each prediction, forward and backward, before anything is measured. Then configurations take turns. Every
other configuration is *held out*: whoever changes the model looks at the others only, and errors are told apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import cluster, cluster_plan, cluster_ranks, cluster_turns
from ds_seqpar.planner.machine import machine_of

DEFAULT = [
    "ring", "ring+layout=contiguous", "ring+layout=striped", "ring+backward=kv", "distflash", "double_ring",
    "attention2d", "attention2d+overlap", "mesh", "mesh+overlap", "wallfacer", "u2/ring", "u2/attention2d",
    "u2/mesh+overlap", "u4/ring", "u4/attention2d", "u8/ring",
]  # fmt: skip
COLUMNS = ["configuration", "measured, s", "spread", "predicted, s", "predicted / measured", "held out"]


def main() -> None:
    parser = cluster.parser_of(__doc__)
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="runs' --json: their errors; runs nothing")
    args = cluster.arguments(parser, DEFAULT)
    if args.show:
        runs = [json.loads(path.read_text()) for path in args.show]
    else:
        cluster_turns.ready()
        runs = [measure(args, cluster.problem_of(args))]
        if args.json:
            args.json.write_text(json.dumps(runs[0], indent=1))
    for run in runs:
        print(f"\n{run['title']}\n\n{table(run['rows'])}\n\n{summary(run['rows'])}", flush=True)
    if len(runs) > 1:
        print(f"\nall: {errors([row for run in runs for row in able(run['rows'])])}")
    if args.png:
        scatter(runs, args.png)


def measure(args: argparse.Namespace, problem: cluster_plan.Problem) -> dict[str, Any]:
    """Raises RankFailure where a rank failed."""
    with cluster.set_up(args, problem) as (ranks, task):
        machine = machine_of("calibrated", found := cluster_turns.call(ranks, cluster_ranks.calibrated)[0])
        rows, running = [], []
        for number, spec in enumerate(args.configurations):
            row = cluster.prepared(ranks, spec, task, problem, len(running), args.ranks_per_node)
            rows.append(row)
            if "cannot" not in row:
                row.update(predicted=cluster_plan.predicted(spec, problem, machine), held_out=number % 2 == 1)
                running.append(row)
            cluster_turns.say(f"{spec.name}: {row.get('cannot', 'as dense attention')}")
        for turn in range(args.rounds):
            for index in cluster_turns.order(len(running), turn):
                running[index]["seconds"].append(cluster.timed(ranks, index)[0])
            cluster_turns.say(f"round {turn + 1} of {args.rounds}")
    where = f"{args.link} a link each way, " if args.nodes > 1 else ""
    title = (
        f"{args.nodes} nodes x {args.ranks_per_node}, {where}{args.seq} tokens, {args.heads}/{args.kv_heads} heads of "
        f"{args.head_dim}, {args.dtype}; median of {args.rounds}"
    )
    return {"title": title, "machine": found, "rows": rows}


def able(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "cannot" not in row]


def ratio(row: dict[str, Any]) -> float:
    return row["predicted"] / statistics.median(row["seconds"])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown; what cannot run stands below with its reason."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in able(rows):
        seconds = row["seconds"]
        cells = [
            row["name"], f"{statistics.median(seconds):.4f}", f"{min(seconds):.4f}-{max(seconds):.4f}",
            f"{row['predicted']:.4f}", f"{ratio(row):.2f}", "yes" if row["held_out"] else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *(f"\n{row['name']}: {row['cannot']}" for row in rows if "cannot" in row)])


def errors(rows: Sequence[dict[str, Any]]) -> str:
    """Median error of all, and of those that were held out."""
    found = [abs(ratio(row) - 1) for row in rows]
    out = [error for error, row in zip(found, rows, strict=True) if row["held_out"]]
    return (
        f"median error {statistics.median(found):.1%}, greatest {max(found):.1%} ({len(found)} configurations); "
        f"held out: {statistics.median(out):.1%}, {max(out):.1%} ({len(out)})"
    )


def summary(rows: Sequence[dict[str, Any]]) -> str:
    rows = able(rows)
    measured = [statistics.median(row["seconds"]) for row in rows]
    order = correlation(measured, [row["predicted"] for row in rows])
    pick = min(range(len(rows)), key=lambda i: rows[i]["predicted"])
    best = min(range(len(rows)), key=lambda i: measured[i])
    return (
        f"{errors(rows)}\nrank correlation {order:.3f}; by prediction {rows[pick]['name']} is the fastest, which takes "
        f"{measured[pick] / measured[best]:.3f} of the fastest's measured time ({rows[best]['name']})"
    )


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Of ranks (Spearman); equal values share the mean of their ranks."""
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(x) + (ordered.count(x) - 1) / 2 for x in values]


def scatter(runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Measured against predicted seconds on logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 6))
    axes = figure.subplots()
    every = []
    for number, run in enumerate(runs):
        for held_out, marker in ((False, "o"), (True, "^")):
            rows = [row for row in able(run["rows"]) if row["held_out"] == held_out]
            x, y = [statistics.median(row["seconds"]) for row in rows], [row["predicted"] for row in rows]
            label = run["title"].split(" tokens")[0] if not held_out else None
            axes.scatter(x, y, marker=marker, color=f"C{number}", label=label, alpha=0.8)
            every += [*x, *y]
    ends = [min(every) / 1.2, max(every) * 1.2]
    axes.plot(ends, ends, color="gray", linewidth=1)
    for share in (0.85, 1.15):
        axes.plot(ends, [share * end for end in ends], color="gray", linewidth=0.6, linestyle="--")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, s", ylabel="predicted, s")
    axes.set_title("Attention, forward and backward (triangles: held out; dashed: 15 %)", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(file, bbox_inches="tight", dpi=120)


if __name__ == "__main__":
    main()
