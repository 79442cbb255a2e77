"""Time whole training steps of a LLaMA under ZeRO-3 on a simulated cluster, at one or more link rates.

    python -m benchmarks.cluster.training --link 50mbit 200mbit 1gbit -- u2/ring ring u8 deepspeed
    python -m benchmarks.cluster.training --nodes 1 --ranks-per-node 4 -- u4 deepspeed

Nodes and links are the same as in `cluster.attention`. Contenders (`benchmarks.contenders`) train the same LLaMA on the
same tokens with the same DeepSpeed settings (`memory.ranks`). Every engine runs in its own processes, since DeepSpeed
supports one engine per process. In each turn, a contender runs a warm-up step, and then `--steps` steps at every rate.
Times start when all ranks begin a step, and end when the slowest rank is done. Losses and norms must agree between
contenders, as in `memory.peers`.

Columns of the table:

- tokens/s: median of all steps at this rate; the spread ranges from the slowest to the fastest step.
- MB out, MB in: bytes at the network interface of the busiest node in one step, including headers.
- ZeRO's MB: bytes for parameters and gradients, measured with the same model and as many tokens per rank, but without
  attention between ranks.
- attention's MB: bytes of a step minus ZeRO's bytes.
- plan MB: planned bytes for the attention of all layers, without the repeated forward of a checkpoint.
- share of link: the time of the busier direction at the link's rate, divided by the time of the step.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks import runner, tables
from benchmarks.cluster import net
from benchmarks.cluster.plan import bytes_between
from benchmarks.contenders import Spec
from benchmarks.memory import ranks as made
from benchmarks.memory.footprint import step_of
from benchmarks.memory.peers import Bench, kind_of, model_options
from benchmarks.runner import Columns, Row
from benchmarks.turns import order
from ds_seqpar.base.errors import SeqParError
from tests.launch import PRELOAD, RankFailure

DEFAULT = ("u2/ring", "ring", "u8", "deepspeed")
Kind = tuple[str, dict[str, Any]]  # (name, options), the arguments of `memory.ranks.made`
Found = dict[str, tuple[list[float], dict[str, list[int]]]]  # rate -> (seconds of steps, bytes of one step by node)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or the words in `given`."""
    parser = runner.parser(__doc__, *DEFAULT, nodes=4, per_node=2, link=["200mbit"], seq=4096, steps=2, rounds=3)
    model_options(parser, vocab=1024, hidden=256, intermediate=512, layers=4, heads=8, kv_heads=8)
    args = runner.checked(parser, given)
    # keep a layer's parameters between recomputation and backward, as in a large model
    args.zero = [("stage3_max_reuse_distance", 2**20), *args.zero]
    return args


def alone(spec: Spec) -> Kind:
    """Return the same kind of contender without attention between ranks, to measure ZeRO alone."""
    return ("plain", {"tiled_mlp": True}) if spec.peer else ("ours", {"size": 1})


def measure(args: argparse.Namespace) -> list[Row]:
    """Return a row for each contender, in the given order: seconds and bytes by rate, ZeRO's bytes and planned bytes.

    If a peer cannot run, or settings are invalid, the row contains only `name` and `cannot`. Raises RankFailure if one
    of our contenders fails, and SystemExit if losses differ.
    """
    bench = Bench(args)
    rows = [{"name": spec.name, "seconds": {rate: [] for rate in args.link}, **planned(spec, bench, args)}
            for spec in args.contenders]  # fmt: skip
    zero: dict[str | None, dict[str, list[int]]] = {}  # peer -> bytes of a step
    with net.Network(args.nodes, args.link[0]) as network:
        for turn in range(args.rounds):
            for index in order(len(rows), turn):
                row, spec = rows[index], args.contenders[index]
                if "cannot" in row:
                    continue
                try:
                    found = turns(network, args, bench, spec.name, kind_of(spec), args.seq)
                except RankFailure as failure:
                    if not spec.peer:
                        raise
                    row["cannot"] = min(failure.errors.items())[1][1].splitlines()[0]
                    continue
                for rate, (seconds, carried) in found.items():
                    row["seconds"][rate] += seconds
                    row |= carried
                if network.names and spec.peer not in zero:
                    name, short = f"ZeRO alone, of {spec.name}", args.seq // args.world
                    zero[spec.peer] = turns(network, args, bench, name, alone(spec), short)[args.link[0]][1]
                row["zero"] = zero.get(spec.peer)
            tables.say(f"round {turn + 1} of {args.rounds}")
    return rows


def turns(network: net.Network, args: argparse.Namespace, bench: Bench, name: str, kind: Kind, seq: int) -> Found:
    """Run one turn of a contender in new processes."""
    found: Found = {}
    with runner.started(args, network, PRELOAD) as ranks:
        runner.call(ranks, build, bench.model, *kind, seq)
        done = [runner.together(ranks)]
        for rate in args.link:
            network.limit(rate)
            here, *both = runner.carried(ranks, network, lambda: [runner.together(ranks) for _ in range(args.steps)])
            carried = {side: [n // args.steps for n in nodes] for side, nodes in zip(("out", "in"), both, strict=True)}
            found[rate] = [took for took, _ in here], carried
            done += here
    bench.check(name, seq, *zip(*(by_rank[0] for _, by_rank in done), strict=True))
    tables.say(f"{name}: {', '.join(f'{min(seconds):.2f} s at {rate}' for rate, (seconds, _) in found.items())}")
    return found


def build(model: made.Model, kind: str, options: dict[str, Any], seq: int) -> None:
    """Create the engine on a rank."""
    runner.STEPS[:] = [made.made(model, kind, options, seq)]


def planned(spec: Spec, bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Return {"plan": planned bytes of the busiest node in its busier direction}.

    The bytes cover the attention of all layers, forward and backward once each. If no plan exists, return the reason as
    `cannot`.
    """
    dtype = "bf16" if args.bf16 else "fp32"
    given = argparse.Namespace(**vars(args), head_dim=args.hidden // args.heads, dtype=dtype, causal=True)
    try:
        config = None if spec.peer else step_of(bench.model, kind_of(spec)[1], args.seq, args.world).config
        return {"plan": args.layers * max(map(max, bytes_between(spec, given, config)))}
    except (SeqParError, ValueError) as reason:
        return {"cannot": str(reason)}


def title(args: argparse.Namespace) -> str:
    """Describe the run in one line."""
    return (
        f"{args.seq} tokens, {args.layers} layers, hidden {args.hidden}, intermediate {args.intermediate}, vocabulary "
        f"{args.vocab}, {args.heads}/{args.kv_heads} heads, "
        f"{'bf16' if args.bf16 else 'fp32'}, checkpointing; median of {args.rounds} x {args.steps} steps"
    )


def table(rows: list[Row], args: argparse.Namespace, link: str) -> str:
    """Format the rows at one rate as Markdown."""
    speeds: Columns = {
        "contender": runner.TIMES["contender"], "tokens/s": lambda row: f"{args.seq / row['median']:.0f}",
        "spread": lambda row: f"{args.seq / max(row['seconds']):.0f}-{args.seq / min(row['seconds']):.0f}",
        "against first": runner.TIMES["against first"],
    }  # fmt: skip
    sizes = {"MB out": lambda row: max(row["out"]), "MB in": lambda row: max(row["in"]),
             "ZeRO's MB": lambda row: max(row["zero"]["out"]), "attention's MB": attention,
             "plan MB": lambda row: row["plan"]}  # fmt: skip
    carried: Columns = {name: lambda row, size=size: f"{size(row) / 1e6:.1f}" for name, size in sizes.items()}
    at_rate = [{**row, "seconds": row["seconds"][link]} if "seconds" in row else row for row in rows]
    return runner.report(at_rate, args, link, speeds, {**carried, **runner.SHARE})


def attention(row: Row) -> int:
    """Return the bytes of a step minus ZeRO's bytes, for the busiest node in its busier direction."""
    sides = [(row[side], row["zero"][side]) for side in ("out", "in")]
    return max(mine - its for both in sides for mine, its in zip(*both, strict=True))


def main() -> None:
    os.environ["PYTHONWARNINGS"] = "ignore"  # hide warnings of DeepSpeed and transformers about their own calls
    runner.main(arguments, measure, title, table)


if __name__ == "__main__":
    main()
