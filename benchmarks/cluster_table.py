"""What `benchmarks.cluster` found, as a table.

MB out, in: what the interface of the busiest node carried in one call, headers and acknowledgements included. plan MB:
of its busiest direction, by the plan. measured / plan: of the node where they differ most, out and in together. lower
bound: `cluster_plan.floor`. share of link: those bytes at the link's rate, of the time. busy: cores that ranks kept
busy, on the average of a call, of those that there are. messages: that leave a node by
its busiest rank; rounds: the longest chain of messages of which each waits for the one before.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks import cluster_net, cluster_plan

COLUMNS = [
    "configuration", "s", "spread", "against first", "MB out", "MB in", "plan MB", "measured / plan", "/ lower bound",
    "share of link", "busy", "messages", "rounds",
]  # fmt: skip


def title(args: argparse.Namespace) -> str:
    """What was run, in a line."""
    late = f" and {args.latency * 1e3:g} ms" if args.latency else ""
    mask = "causal" if args.causal else "full"
    return (
        f"{args.nodes} nodes x {args.ranks_per_node}, {args.link} a link each way{late}; {args.seq} tokens, "
        f"{args.heads}/{args.kv_heads} heads of {args.head_dim}, {args.dtype}, {mask}; median of {args.rounds}"
    )


def table(rows: list[dict[str, Any]], problem: cluster_plan.Problem, link: str) -> str:
    """The rows as Markdown; what cannot run stands below with its reason."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    able, least = [row for row in rows if row.get("seconds")], cluster_plan.floor(problem)
    for row in able:
        median, most = statistics.median(row["seconds"]), max(*row["out"], *row["in"])
        plan, first = row["plan"], statistics.median(able[0]["seconds"])
        row.update(median=median, ratio=first / median, share=most / cluster_net.rate_of(link) / median)
        row["busy"] = statistics.median(row["worked"]) / median
        row["lower_bound_ratio"] = most / least if least else None
        row["plan_ratio"] = plan_ratio(row)
        cells = [
            row["name"], f"{median:.3f}", f"{min(row['seconds']):.3f}-{max(row['seconds']):.3f}",
            f"{row['ratio']:.2f}",
            f"{max(row['out']) / 1e6:.2f}", f"{max(row['in']) / 1e6:.2f}",
            f"{max(*plan['out'], *plan['into']) / 1e6:.2f}" if plan else "-",
            f"{row['plan_ratio']:.3f}" if row["plan_ratio"] else "-", f"{most / least:.2f}" if least else "-",
            f"{row['share']:.2f}", f"{row['busy']:.2f}",
            *([str(plan["messages"]), str(plan["rounds"])] if plan else "--"),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *(f"\n{row['name']}: {row['cannot']}" for row in rows if "cannot" in row)])


def plan_ratio(row: dict[str, Any]) -> float | None:
    """Bytes that a node's interface carried, out and in, over the plan's, of the node where they differ most. Both ways
    together: what a node receives it acknowledges, which shows where the plan lets it send next to nothing."""
    if not row["plan"]:
        return None
    found = map(sum, zip(row["out"], row["in"], strict=True))
    planned = map(sum, zip(row["plan"]["out"], row["plan"]["into"], strict=True))
    ratios = [mine / its for mine, its in zip(found, planned, strict=True) if its]
    return max(ratios, key=lambda ratio: abs(ratio - 1), default=None)
