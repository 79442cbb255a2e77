"""Times configurations on a cluster in a box where compute and links take equally long, beside max(compute, links).

    python -m benchmarks.cluster_balance -- ring attention2d=4,4+overlap wallfacer=2 u2/ring

The cluster, its configurations and most options are those of `benchmarks.cluster`. Ranks share a machine's few cores,
so products are sleeps: first each configuration is compared with dense attention as it is, then its products take, for
each visible pair of tokens and each head, as long as makes the rank with the most sleep for as long as the bytes of the
busiest node take at the link's rate (`--compute 0.5`: half as long; 0: no time); in backward 2.5 times as long as in
forward. All else is real: messages, copies, merging, comparing inputs. *critical path* is what the simulator says of
the same plans, products and rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from typing import Any

from benchmarks import cluster, cluster_net, cluster_plan, cluster_ranks, cluster_turns
from benchmarks.cluster_table import title
from ds_seqpar.errors import ConfigError

DEFAULT = ["ring", "attention2d=4,4+overlap", "wallfacer=2", "u2/ring"]
COLUMNS = ["configuration", "s", "spread", "links, s", "compute, s", "measured / max", "critical path / max"]


def main() -> None:
    parser = cluster.parser_of(__doc__)
    parser.add_argument(
        "--compute", type=float, default=1.0, help="seconds of products to those of links; 0: no products"
    )
    args = cluster.arguments(parser, DEFAULT)
    cluster_turns.ready()
    rows = measure(args, cluster.problem_of(args))
    print(f"\n{title(args)}; products are sleeps\n\n{table(rows)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def measure(args: argparse.Namespace, problem: cluster_plan.Problem) -> list[dict[str, Any]]:
    """A row for each configuration, with every figure of the table. Raises ConfigError for one that has no time, and
    RankFailure where a rank failed."""
    rate, rows = cluster_net.rate_of(args.link), []
    if problem.per_node > 1:
        raise ConfigError(f"the simulator knows a link for each rank; got {problem.per_node} ranks a node, use 1")
    for spec in args.configurations:
        if spec.peer or "kernel" in spec.section:
            raise ConfigError(f"only ours can sleep, whatever its kernel; got {spec.name}, leave it out")
    with cluster.set_up(args, problem) as (ranks, task):
        cluster_turns.call(ranks, cluster_ranks.fall_asleep)
        for spec in args.configurations:
            row = cluster.prepared(ranks, spec, task, problem, 2 * len(rows), 1)
            if "cannot" in row:
                raise ConfigError(f"a configuration must fit; got {spec.name}: {row['cannot']}")
            sleeping = dataclasses.replace(spec, settings=(*spec.settings, ("kernel", "reference")))
            cluster_turns.call(ranks, cluster_ranks.build, sleeping, task)
            most = max(done for _, done in turn(ranks, 2 * len(rows) + 1, 0.0))
            links = max(*row["out"], *row["in"]) / rate
            unit = args.compute * links / most
            path = cluster_plan.critical_path(spec, problem, rate, unit)
            rows.append({**row, "links": links, "compute": unit * most, "unit": unit, "critical_path": path})
            cluster_turns.say(f"{spec.name}: as dense attention")
        for number in range(args.rounds):
            for index in cluster_turns.order(len(rows), number):
                seconds = max(seconds for seconds, _ in turn(ranks, 2 * index + 1, rows[index]["unit"]))
                rows[index]["seconds"].append(seconds)
            cluster_turns.say(f"round {number + 1} of {args.rounds}")
    return rows


def turn(ranks: Any, index: int, unit: float) -> list[tuple[float, float]]:
    """By rank the seconds of one call, and the pairs that it slept for."""
    return cluster_turns.call(ranks, cluster_ranks.asleep, index, unit, cluster_turns.soon())


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        seconds, most = row["seconds"], max(row["links"], row["compute"])
        median = statistics.median(seconds)
        cells = [
            row["name"], f"{median:.3f}", f"{min(seconds):.3f}-{max(seconds):.3f}", f"{row['links']:.3f}",
            f"{row['compute']:.3f}", f"{median / most:.2f}", f"{row['critical_path'] / most:.2f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
