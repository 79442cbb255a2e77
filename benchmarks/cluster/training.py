"""Times whole training steps on a cluster in a box: a LLaMA under ZeRO-3, over links of one rate after another.

    python -m benchmarks.cluster.training --link 50mbit 200mbit 1gbit -- u2/ring ring u8 deepspeed

Nodes and links are those of `cluster.net`. Contenders (`benchmarks.contenders`) train the same LLaMA (from a config) on
the same tokens with the same DeepSpeed settings; `memory.ranks` makes them. Every engine has processes of its own,
since DeepSpeed keeps one in each; contenders take turns, `--rounds` times over, in another order every round. In its
turn one makes a step to warm up, and then `--steps` at every rate. A step is timed from the moment at which all ranks
begin to the end of the slowest one.

All must do the same work: the first loss must be that of the whole model in one process, to 1e-4 (bf16: 2e-2), and all
losses and gradient norms those of the first contender, to 1e-3 (bf16: 2e-2).

tokens/s is of the median of all steps at this rate, the spread of the slowest and the fastest. MB: what the interface
of the busiest node carried in one step, headers included. ZeRO's MB: of those, what parameters and their gradients
take, measured: the same model on as many tokens a rank, none of which attends to another rank's. attention's: what is
left, beside the plan of all layers (which knows no step of a checkpoint that is run again). share of link: the time
that the busier direction takes at the rate of the link, of the step's. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from typing import Any, NamedTuple

from benchmarks import contenders, tables
from benchmarks.cluster import harness, net
from benchmarks.cluster import plan as plans
from benchmarks.cluster import ranks as on_rank
from benchmarks.cluster.harness import call, settled
from benchmarks.contenders import Spec
from benchmarks.memory import ranks as made
from benchmarks.memory.peers import Bench, model_options
from benchmarks.tables import say
from benchmarks.turns import order
from tests.launch import PRELOAD, RankFailure, Ranks

DEFAULT = ["u2/ring", "ring", "u8", "deepspeed"]
COLUMNS = ["contender", "tokens/s", "spread", "against first", "MB out", "MB in", "ZeRO's MB", "attention's MB",
           "plan MB", "share of link"]  # fmt: skip


def main() -> None:
    args = arguments()
    harness.ready()
    os.environ["PYTHONWARNINGS"] = "ignore"  # DeepSpeed's and transformers' of their own calls, of every rank
    rows = measure(args)
    for rate in args.link:
        print(f"\n{title(args, rate)}\n\n{table(rows, args, rate)}", flush=True)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """given: the words of the command line; None: those of this process."""
    parser = tables.parser(__doc__)
    contenders.add(parser, *DEFAULT)
    harness.network_options(parser, nodes=4, per_node=2)
    parser.add_argument("--link", nargs="+", type=harness.link, default=["200mbit"],
                        help="rates of every node, out and in, in kbit, mbit or gbit")  # fmt: skip
    parser.add_argument("--seq", type=int, default=4096, help="tokens of the whole sequence")
    model_options(parser, vocab=1024, hidden=256, intermediate=512, layers=4, heads=8, kv_heads=8)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="of all")
    parser.add_argument("--tiled-mlp", action=argparse.BooleanOptionalAction, default=True,
                        help="DeepSpeed's, of its recipe; parameters are fetched for each tile")  # fmt: skip
    parser.add_argument("--steps", type=int, default=2, help="at every rate, of one turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=int, default=900, help="seconds for the whole model's losses")
    args = parser.parse_args(given)
    args.world = args.nodes * args.ranks_per_node
    if args.seq % (2 * args.world):
        parser.error(f"--seq must be a multiple of twice the ranks, {2 * args.world}")
    # a layer's parameters stay from when a checkpoint is run again to its backward, as a large model's do
    args.zero = [("stage3_max_reuse_distance", 2**20), *args.zero]
    return args


def contender(spec: Spec, args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Kind and options, as `memory.ranks.made` takes them."""
    options = {"tiled_mlp": args.tiled_mlp} if spec.peer else {}
    return spec.peer or "ours", {"checkpointing": args.checkpointing, **options, **spec.section}


def alone(kind: str, args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The same, of what ZeRO does by itself in this kind: every rank attends to its own tokens."""
    options = {"checkpointing": args.checkpointing}
    return ("ours", {**options, "size": 1}) if kind == "ours" else ("plain", {**options, "tiled_mlp": args.tiled_mlp})


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each configuration, in the order given: what it carried and took at each rate, what ZeRO's part of that
    is, and what the plan says. Only `name` and `cannot` where a peer cannot run. Raises RankFailure where one of ours
    failed, SystemExit where losses differ."""
    bench = Bench(args)
    rows = [{"name": spec.name, "seconds": {rate: [] for rate in args.link}} for spec in args.contenders]
    zero: dict[str, dict[str, list[int]]] = {}  # kind -> bytes of a step
    with net.Network(args.nodes, args.link[0]) as network:
        for turn in range(args.rounds):
            for index in order(len(rows), turn):
                row, (kind, options) = rows[index], contender(args.contenders[index], args)
                if "cannot" in row:
                    continue
                try:
                    found = turns(network, args, bench, row["name"], (kind, options), args.seq)
                except RankFailure as failure:
                    if kind == "ours":
                        raise
                    row["cannot"] = min(failure.errors.items())[1][1].splitlines()[0]
                    continue
                for rate, (seconds, carried) in found.items():
                    row["seconds"][rate] += seconds
                    row |= carried
                if kind not in zero:
                    name = f"ZeRO alone ({kind})"
                    short = turns(network, args, bench, name, alone(kind, args), args.seq // args.world)
                    zero[kind] = short[args.link[0]][1]
                row["zero"] = zero[kind]
            say(f"round {turn + 1} of {args.rounds}")
    for row, spec in zip(rows, args.contenders, strict=True):
        row["plan"] = plan(spec, args)
    return rows


def turns(
    network: net.Network, args: argparse.Namespace, bench: Bench, name: str,
    kind: tuple[str, dict[str, Any]], seq: int,
) -> dict[str, tuple[list[float], dict[str, list[int]]]]:  # fmt: skip
    """Of a contender in fresh processes, by rate: seconds of each step; bytes of one out of and into every node."""
    found = {}
    with Ranks(args.world, None, PRELOAD) as ranks:
        call(ranks, on_rank.enter, network.names, args.ranks_per_node, ranks.folder.name, args.patience)
        network.limit(args.link[-1])
        call(ranks, build, bench.model, *kind, seq)
        done = [step(ranks)]
        for rate in args.link:
            network.limit(rate)
            before = settled(ranks, args.ranks_per_node)
            here = [step(ranks) for _ in range(args.steps)]
            out, into = harness.between(before, settled(ranks, args.ranks_per_node))
            carried = {"out": [n // args.steps for n in out], "in": [n // args.steps for n in into]}
            found[rate] = [one.seconds for one in here], carried
            done += here
    bench.check(name, seq, Told([one.loss for one in done], [one.norm for one in done]))
    say(f"{name}: {', '.join(f'{min(seconds):.2f} s at {rate}' for rate, (seconds, _) in found.items())}")
    return found


@dataclasses.dataclass(frozen=True)
class Told:
    """What `Bench.check` compares."""

    losses: list[float]
    norms: list[float]


class Turn(NamedTuple):
    """One step of a rank. seconds: from when all ranks began. loss, norm: of the whole batch, the same on all ranks."""

    seconds: float
    loss: float
    norm: float


STEP: list[made.Step] = []


def build(model: made.Model, kind: str, options: dict[str, Any], seq: int) -> None:
    """On a rank: makes its engine."""
    STEP[:] = [made.made(model, kind, options, seq)]


def turn(start: float) -> Turn:
    """On a rank: one step, begun by all ranks at `start` of the machine's clock."""
    time.sleep(max(0.0, start - time.monotonic()))
    loss = STEP[0](lambda _: None)
    return Turn(time.monotonic() - start, loss, made.NORM[0]())


def step(ranks: Ranks) -> Turn:
    """One step of all ranks; seconds: of the slowest."""
    found = call(ranks, turn, harness.soon())
    return found[0]._replace(seconds=max(one.seconds for one in found))


def plan(spec: Spec, args: argparse.Namespace) -> float:
    """Bytes of the busiest node in its busier direction, of the attention of all layers, each once forward and once
    backward."""
    problem = plans.Problem(
        nodes=args.nodes, per_node=args.ranks_per_node, seq=args.seq, heads=args.heads, kv_heads=args.kv_heads,
        head_dim=args.hidden // args.heads, dtype="bf16" if args.bf16 else "fp32", causal=True,
    )  # fmt: skip
    found = plans.figures(spec, problem)
    return args.layers * max(*found.out, *found.into)


def title(args: argparse.Namespace, rate: str) -> str:
    """What was run, in a line."""
    how = f"{'bf16' if args.bf16 else 'fp32'}, {'' if args.checkpointing else 'no '}checkpointing"
    return (
        f"{args.nodes} nodes x {args.ranks_per_node}, {rate} a link each way; {args.seq} tokens, {args.layers} "
        f"layers, hidden {args.hidden}, intermediate {args.intermediate}, vocabulary {args.vocab}, "
        f"{args.heads}/{args.kv_heads} heads, {how}; median of {args.rounds} x {args.steps} steps"
    )


def table(rows: list[dict[str, Any]], args: argparse.Namespace, rate: str) -> str:
    """The rows at one rate as Markdown; what cannot run stands below with its reason."""
    able, lines = [row for row in rows if "cannot" not in row], []
    for row in able:
        seconds, first = row["seconds"][rate], statistics.median(able[0]["seconds"][rate])
        median, most, own = statistics.median(seconds), max(*row["out"], *row["in"]), attention(row)
        lines.append([
            row["name"], f"{args.seq / median:.0f}",
            f"{args.seq / max(seconds):.0f}-{args.seq / min(seconds):.0f}", f"{first / median:.2f}",
            f"{max(row['out']) / 1e6:.1f}", f"{max(row['in']) / 1e6:.1f}", f"{max(row['zero']['out']) / 1e6:.1f}",
            f"{own / 1e6:.1f}", f"{row['plan'] / 1e6:.1f}",
            f"{most / net.rate_of(rate) / median:.2f}",
        ])  # fmt: skip
    reasons = (f"\n{row['name']}: {row['cannot']}" for row in rows if "cannot" in row)
    return "\n".join([tables.table(COLUMNS, lines), *reasons])


def attention(row: dict[str, Any]) -> int:
    """Bytes of a step that are not ZeRO's, of the busiest node in its busier direction."""
    sides = [(row[side], row["zero"][side]) for side in ("out", "in")]
    return max(mine - its for both in sides for mine, its in zip(*both, strict=True))


if __name__ == "__main__":
    main()
