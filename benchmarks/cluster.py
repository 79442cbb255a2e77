"""Times configurations of attention, forward and backward, on a cluster in a box: nodes are network namespaces.

    python -m benchmarks.cluster --nodes 16 --link 50mbit -- ring mesh=4,1,4 attention2d=4,4+overlap u8/ring u16

Every node has a link of the given rate, out and in (`cluster_net`). All configurations run in the same processes on the
same inputs, each rank's dealt in the configuration's own layout, and take turns, in another order every round; each is
compared with dense attention first. A time is from the moment at which all ranks begin to the end of the slowest one.
Configurations are spelled as in `cluster_spec`. Needs root and iproute2; takes down what it has set up however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import cluster_net, cluster_plan, cluster_ranks, cluster_turns
from benchmarks.cluster_spec import Spec, parse
from benchmarks.cluster_table import table, title
from benchmarks.cluster_turns import call, say, settled
from ds_seqpar.errors import SeqParError
from tests.launch import Ranks

PRELOAD = ["tests.preloading", "torch.distributed", "deepspeed", "benchmarks.cluster_ranks"]
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
DEFAULT = ["ring", "mesh=4,1,4", "attention2d=4,4", "u4/attention2d=2,2", "u8/ring", "u16", "deepspeed"]


def main() -> None:
    args = arguments(parser_of(__doc__))
    cluster_turns.ready()
    problem = problem_of(args)
    found = measure(args, problem)
    head = {**dataclasses.asdict(problem), "link": args.link, "latency_s": args.latency, "rounds": args.rounds,
            "lower_bound": cluster_plan.floor(problem)}  # fmt: skip
    print(f"\n{title(args)}\n\n{table(found, problem, args.link)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"run": head, "rows": found}, indent=1))
    if args.png:
        from benchmarks.cluster_chart import chart

        chart(found, title(args), cluster_net.rate_of(args.link), args.png)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """One that shows the description as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def arguments(parser: argparse.ArgumentParser, default: Sequence[str] = DEFAULT) -> argparse.Namespace:
    """Of the command line, with what the parser has already. default: configurations, where none is given."""
    parser.add_argument("configurations", nargs="*", metavar="CONFIG", type=cluster_turns.spec,
                        help=f"default: {' '.join(default)}")  # fmt: skip
    cluster_turns.network_options(parser, nodes=16, per_node=1)
    parser.add_argument("--link", type=cluster_turns.link, default="50mbit",
                        help="of every node, out and in, in kbit, mbit or gbit")  # fmt: skip
    parser.add_argument("--seq", type=int, default=1024, help="tokens of the whole sequence")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="fp32")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--png", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.configurations = args.configurations or [parse(text) for text in default]
    if args.seq % (2 * args.nodes * args.ranks_per_node):
        parser.error(f"--seq must be a multiple of twice the ranks, {2 * args.nodes * args.ranks_per_node}")
    return args


def problem_of(args: argparse.Namespace) -> cluster_plan.Problem:
    """What the command line asks to be measured."""
    return cluster_plan.Problem(
        nodes=args.nodes, per_node=args.ranks_per_node, seq=args.seq, heads=args.heads, kv_heads=args.kv_heads,
        head_dim=args.head_dim, dtype=args.dtype, causal=args.causal,
    )  # fmt: skip


def measure(args: argparse.Namespace, problem: cluster_plan.Problem) -> list[dict[str, Any]]:
    """A row for each configuration, in the order given, with every figure of the table; only `name` and `cannot` where
    it cannot run. Raises RankFailure where a rank failed."""
    with set_up(args, problem) as (ranks, task):
        rows, running = [], []
        for spec in args.configurations:
            row = prepared(ranks, spec, task, problem, len(running), args.ranks_per_node)
            rows.append(row)
            if "cannot" not in row:
                running.append(row)
            say(f"{spec.name}: {row.get('cannot', 'as dense attention')}")
        for turn in range(args.rounds):
            for index in cluster_turns.order(len(running), turn):
                seconds, worked = timed(ranks, index)
                running[index]["seconds"].append(seconds)
                running[index]["worked"].append(worked)
            say(f"round {turn + 1} of {args.rounds}")
    return rows


@contextlib.contextmanager
def set_up(args: argparse.Namespace, problem: cluster_plan.Problem) -> Iterator[tuple[Ranks, cluster_ranks.Task]]:
    """Ranks, each in its node, and the tensors that they work on; all of it is taken down at the end."""
    with (
        cluster_net.Network(args.nodes, args.link, args.latency) as network,
        Ranks(problem.world, None, PRELOAD) as ranks,
    ):
        file = str(Path(ranks.folder.name, "tensors"))
        task = cluster_ranks.Task(
            seq=problem.seq, heads=problem.heads, kv_heads=problem.kv_heads, head_dim=problem.head_dim,
            dtype=problem.dtype, causal=problem.causal, file=file,
        )  # fmt: skip
        torch.save(tensors(task), file)
        call(ranks, cluster_ranks.enter, network.names, args.ranks_per_node, ranks.folder.name, args.patience)
        yield ranks, task


def prepared(
    ranks: Ranks, spec: Spec, task: cluster_ranks.Task, problem: cluster_plan.Problem, index: int, per_node: int
) -> dict[str, Any]:
    """Makes a configuration on all ranks, compares it with dense attention, and counts the bytes of one call."""
    try:
        planned = cluster_plan.figures(spec, problem)
    except (SeqParError, ValueError) as reason:
        return {"name": spec.name, "cannot": str(reason)}
    if reason := call(ranks, cluster_ranks.build, spec, task)[0]:
        return {"name": spec.name, "cannot": reason}
    errors = [max(found) for found in zip(*call(ranks, cluster_ranks.errors, index, task), strict=True)]
    wrong = [f"{name} by {error:.1e}" for name, error in zip(("out", "dq", "dk", "dv"), errors, strict=True)
             if not error <= TOLERANCE[task.dtype]]  # fmt: skip
    if wrong:
        reason = f"must equal dense attention to {TOLERANCE[task.dtype]:g}; differs in {', '.join(wrong)}"
        if not spec.peer:
            raise ArithmeticError(f"{spec.name} {reason}")
        call(ranks, cluster_ranks.drop)
        return {"name": spec.name, "cannot": reason}
    before = settled(ranks, per_node)
    timed(ranks, index)
    out, into = cluster_turns.between(before, settled(ranks, per_node))
    return {"name": spec.name, "error": max(errors), "out": out, "in": into, "seconds": [],
            "worked": [], "plan": planned and dataclasses.asdict(planned)}  # fmt: skip


def timed(ranks: Ranks, index: int) -> tuple[float, float]:
    """Seconds of one call, from the moment at which all ranks begin to the end of the last one, and those that
    processors worked for all ranks together."""
    seconds, worked = zip(*call(ranks, cluster_ranks.turn, index, cluster_turns.soon()), strict=True)
    return max(seconds), sum(worked)


def tensors(task: cluster_ranks.Task) -> dict[str, Tensor]:
    """The inputs in their dtype, and dense attention's out and gradients of them in fp64, head by head."""
    generator = torch.Generator().manual_seed(0)
    heads = {"q": task.heads, "k": task.kv_heads, "v": task.kv_heads, "do": task.heads}
    dtype = cluster_ranks.DTYPES[task.dtype]
    whole = {
        name: torch.randn(1, task.seq, count, task.head_dim, generator=generator).to(dtype)
        for name, count in heads.items()
    }
    parts: dict[str, list[Tensor]] = {"out": [], "dq": [], "dk": [], "dv": []}
    group, hidden = task.heads // task.kv_heads, torch.ones(task.seq, task.seq, dtype=torch.bool).triu(1)
    for head in range(task.kv_heads):
        mine = slice(head * group, (head + 1) * group)
        cut = {"q": mine, "k": slice(head, head + 1), "v": slice(head, head + 1), "do": mine}
        q, k, v, do = (whole[name][0, :, span].double().transpose(0, 1) for name, span in cut.items())
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        scores = leaves[0] @ leaves[1].mT * task.head_dim**-0.5
        scores = scores.masked_fill(hidden, float("-inf")) if task.causal else scores
        out = scores.softmax(-1) @ leaves[2]
        for name, x in zip(parts, (out.detach(), *torch.autograd.grad(out, leaves, do)), strict=True):
            parts[name].append(x.transpose(0, 1))
    return {**whole, **{name: torch.cat(found, 1)[None].float() for name, found in parts.items()}}


if __name__ == "__main__":
    main()
