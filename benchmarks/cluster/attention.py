"""Times attention, forward and backward, on a cluster in a box: nodes are network namespaces with links of one rate.

    python -m benchmarks.cluster.attention --nodes 16 --link 20mbit -- ring mesh=4,1,4 u4/attention2d=2,2 u16 deepspeed

Every node has a link of the given rate, out and in (`cluster.net`). All contenders (`benchmarks.contenders`) run in
the same processes on the same inputs, each rank's dealt in the contender's own layout, and take turns. Each is compared
with dense attention first. A time is from the moment at which all ranks begin to the end of the slowest one.

MB out, in: what the interface of the busiest node carried in one call, headers and acknowledgements included. plan MB:
of its busiest direction, by the plan. measured / plan: of the node where they differ most, out and in together. share
of link: the seconds that those bytes take at the link's rate, over the seconds of the call. busy: cores that ranks kept
busy, on average. Needs root and iproute2; takes down what it has set up, however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import contenders, tables
from benchmarks.cluster import harness, net, plan
from benchmarks.cluster import ranks as on_rank
from benchmarks.cluster.harness import call, settled
from benchmarks.contenders import Spec
from benchmarks.tables import say
from benchmarks.turns import order
from ds_seqpar.errors import SeqParError
from tests.launch import Ranks

PRELOAD = ["tests.preloading", "torch.distributed", "deepspeed", "benchmarks.cluster.ranks"]
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
DEFAULT = ["ring", "mesh=4,1,4", "attention2d=4,4", "u4/attention2d=2,2", "u8/ring", "u16", "deepspeed"]
COLUMNS = ["contender", "s", "spread", "against first", "MB out", "MB in", "plan MB", "measured / plan",
           "share of link", "busy"]  # fmt: skip


def main() -> None:
    args = arguments(tables.parser(__doc__), DEFAULT)
    harness.ready()
    print(f"\n{title(args)}\n\n{table(measure(args, problem_of(args)), args.link)}", flush=True)


def arguments(
    parser: argparse.ArgumentParser, default: Sequence[str], given: list[str] | None = None
) -> argparse.Namespace:
    """default: contenders, where none is given. given: the words of the command line; None: those of this process."""
    contenders.add(parser, *default)
    harness.network_options(parser, nodes=16, per_node=1)
    parser.add_argument("--link", type=harness.link, default="50mbit",
                        help="of every node, out and in, in kbit, mbit or gbit")  # fmt: skip
    parser.add_argument("--seq", type=int, default=1024, help="tokens of the whole sequence")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="fp32")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(given)
    if args.seq % (2 * args.nodes * args.ranks_per_node):
        parser.error(f"--seq must be a multiple of twice the ranks, {2 * args.nodes * args.ranks_per_node}")
    return args


def problem_of(args: argparse.Namespace) -> plan.Problem:
    """What the command line asks to be measured."""
    return plan.Problem(
        nodes=args.nodes, per_node=args.ranks_per_node, seq=args.seq, heads=args.heads, kv_heads=args.kv_heads,
        head_dim=args.head_dim, dtype=args.dtype, causal=args.causal,
    )  # fmt: skip


def measure(args: argparse.Namespace, problem: plan.Problem) -> list[dict[str, Any]]:
    """A row for each contender, in the order given, with every figure of the table; only `name` and `cannot` where
    it cannot run. Raises RankFailure where a rank failed."""
    with set_up(args, problem) as (ranks, file):
        rows = prepare(ranks, args, file, problem)
        take_turns(ranks, [row for row in rows if "cannot" not in row], args.rounds)
    return rows


def prepare(ranks: Ranks, args: argparse.Namespace, file: str, problem: plan.Problem) -> list[dict[str, Any]]:
    """Makes every contender that can run, and compares it with dense attention."""
    rows: list[dict[str, Any]] = []
    for spec in args.contenders:
        row = prepared(ranks, spec, file, problem, sum("cannot" not in row for row in rows), args.ranks_per_node)
        rows.append(row)
        say(f"{spec.name}: {row.get('cannot', 'as dense attention')}")
    return rows


def take_turns(ranks: Ranks, rows: list[dict[str, Any]], rounds: int) -> None:
    """Adds the seconds of every round to the rows."""
    for turn in range(rounds):
        for index in order(len(rows), turn):
            seconds, worked = timed(ranks, index)
            rows[index]["seconds"].append(seconds)
            rows[index]["worked"].append(worked)
        say(f"round {turn + 1} of {rounds}")


@contextlib.contextmanager
def set_up(args: argparse.Namespace, problem: plan.Problem) -> Iterator[tuple[Ranks, str]]:
    """Ranks, each in its node, and the file of the tensors that they work on; all of it is taken down at the end."""
    with (
        net.Network(args.nodes, args.link) as network,
        Ranks(problem.world, None, PRELOAD) as ranks,
    ):
        file = str(Path(ranks.folder.name, "tensors"))
        torch.save(tensors(problem), file)
        call(ranks, on_rank.enter, network.names, args.ranks_per_node, ranks.folder.name, args.patience)
        yield ranks, file


def prepared(ranks: Ranks, spec: Spec, file: str, problem: plan.Problem, index: int, per_node: int) -> dict[str, Any]:
    """Makes a configuration on all ranks, compares it with dense attention, and counts the bytes of one call."""
    try:
        planned = plan.figures(spec, problem)
    except (SeqParError, ValueError) as reason:
        return {"name": spec.name, "cannot": str(reason)}
    if reason := call(ranks, on_rank.build, spec, problem, file)[0]:
        return {"name": spec.name, "cannot": reason}
    errors = [max(found) for found in zip(*call(ranks, on_rank.errors, index, file), strict=True)]
    wrong = [f"{name} by {error:.1e}" for name, error in zip(("out", "dq", "dk", "dv"), errors, strict=True)
             if not error <= TOLERANCE[problem.dtype]]  # fmt: skip
    if wrong:
        reason = f"must equal dense attention to {TOLERANCE[problem.dtype]:g}; differs in {', '.join(wrong)}"
        if not spec.peer:
            raise ArithmeticError(f"{spec.name} {reason}")
        call(ranks, on_rank.drop)
        return {"name": spec.name, "cannot": reason}
    before = settled(ranks, per_node)
    timed(ranks, index)
    out, into = harness.between(before, settled(ranks, per_node))
    return {"name": spec.name, "error": max(errors), "out": out, "in": into, "seconds": [],
            "worked": [], "plan": planned}  # fmt: skip


def timed(ranks: Ranks, index: int) -> tuple[float, float]:
    """Seconds of one call, from the moment at which all ranks begin to the end of the last one, and those that
    processors worked for all ranks together."""
    seconds, worked = zip(*call(ranks, on_rank.turn, index, harness.soon()), strict=True)
    return max(seconds), sum(worked)


def tensors(problem: plan.Problem) -> dict[str, Tensor]:
    """The inputs in their dtype, and dense attention's out and gradients of them in fp64, head by head."""
    generator = torch.Generator().manual_seed(0)
    heads = {"q": problem.heads, "k": problem.kv_heads, "v": problem.kv_heads, "do": problem.heads}
    dtype = on_rank.DTYPES[problem.dtype]
    whole = {
        name: torch.randn(1, problem.seq, count, problem.head_dim, generator=generator).to(dtype)
        for name, count in heads.items()
    }
    parts: dict[str, list[Tensor]] = {"out": [], "dq": [], "dk": [], "dv": []}
    group, hidden = problem.heads // problem.kv_heads, torch.ones(problem.seq, problem.seq, dtype=torch.bool).triu(1)
    for head in range(problem.kv_heads):
        mine = slice(head * group, (head + 1) * group)
        cut = {"q": mine, "k": slice(head, head + 1), "v": slice(head, head + 1), "do": mine}
        q, k, v, do = (whole[name][0, :, span].double().transpose(0, 1) for name, span in cut.items())
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        scores = leaves[0] @ leaves[1].mT * problem.head_dim**-0.5
        scores = scores.masked_fill(hidden, float("-inf")) if problem.causal else scores
        out = scores.softmax(-1) @ leaves[2]
        for name, x in zip(parts, (out.detach(), *torch.autograd.grad(out, leaves, do)), strict=True):
            parts[name].append(x.transpose(0, 1))
    return {**whole, **{name: torch.cat(found, 1)[None].float() for name, found in parts.items()}}


def title(args: argparse.Namespace) -> str:
    """What was run, in a line."""
    return (
        f"{args.nodes} nodes x {args.ranks_per_node}, {args.link} a link each way; {args.seq} tokens, "
        f"{args.heads}/{args.kv_heads} heads of {args.head_dim}, {args.dtype}, {'causal' if args.causal else 'full'}; "
        f"median of {args.rounds}"
    )


def table(rows: list[dict[str, Any]], link: str) -> str:
    """The rows as Markdown; what cannot run stands below with its reason."""
    able, lines = [row for row in rows if row.get("seconds")], []
    for row in able:
        seconds, most = row["seconds"], max(*row["out"], *row["in"])
        median, first, ratio = statistics.median(seconds), statistics.median(able[0]["seconds"]), plan_ratio(row)
        lines.append([
            row["name"], f"{median:.3f}", tables.spread(seconds), f"{first / median:.2f}",
            f"{max(row['out']) / 1e6:.2f}", f"{max(row['in']) / 1e6:.2f}",
            f"{max(*row['plan'].out, *row['plan'].into) / 1e6:.2f}", f"{ratio:.3f}" if ratio else "-",
            f"{most / net.rate_of(link) / median:.2f}", f"{statistics.median(row['worked']) / median:.2f}",
        ])  # fmt: skip
    reasons = (f"\n{row['name']}: {row['cannot']}" for row in rows if "cannot" in row)
    return "\n".join([tables.table(COLUMNS, lines), *reasons])


def plan_ratio(row: dict[str, Any]) -> float | None:
    """Bytes that a node's interface carried, out and in, over the plan's, of the node where they differ most. Both ways
    together: what a node receives it acknowledges, which shows where the plan lets it send next to nothing."""
    found = map(sum, zip(row["out"], row["in"], strict=True))
    planned = map(sum, zip(row["plan"].out, row["plan"].into, strict=True))
    ratios = [mine / its for mine, its in zip(found, planned, strict=True) if its]
    return max(ratios, key=lambda ratio: abs(ratio - 1), default=None)


if __name__ == "__main__":
    main()
