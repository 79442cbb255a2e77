"""Time attention of several contenders, in training or generation, on a simulated cluster or on this machine.

    python -m benchmarks.cluster.attention --nodes 16 --link 20mbit -- ring mesh=4,1,4 u4/attention2d=2,2 u16 deepspeed
    python -m benchmarks.cluster.attention --nodes 1 --ranks-per-node 4 --seq 2048 --rounds 41 -- deepspeed u4
    python -m benchmarks.cluster.attention --nodes 8 --step continue --kept 8192 -- ring+rotate_forward=q \
        ring+rotate_forward=kv

A node is a network namespace with a link of the given rate in each direction (`cluster.net`), which requires root and
iproute2. Ranks of one node communicate over loopback, so --nodes 1 requires neither root nor iproute2. All contenders
(`benchmarks.contenders`) take turns in the same processes. Contenders receive the same inputs, each in the contender's
own layout. Each contender is first compared with dense attention. Times start when all ranks begin, and end when the
slowest rank is done.

--step selects the call:

- training: forward and backward.
- prefill: forward only, for a prompt.
- continue: --seq new tokens attend to --kept earlier tokens. Either queries (+rotate_forward=q) or keys and values
  (+rotate_forward=kv) travel around the ring.
- decode: one new token attends to the earlier tokens. With +rotate_forward=kv, every rank gathers all keys and values.

Columns of the table:

- MB out, MB in: bytes at the network interface of the busiest node in one call, including headers and acknowledgements.
- plan MB: planned bytes of the busiest node in its busier direction, if the call has a plan.
- measured / plan: measured bytes divided by planned bytes, for the node with the greatest deviation.
- share of link: the time to send the measured bytes at the link's rate, divided by the time of the call.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from benchmarks import runner
from benchmarks.attention import peers
from benchmarks.cluster.plan import DTYPES, bytes_between
from benchmarks.contenders import Spec
from benchmarks.runner import Row, Step

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
DEFAULT = ("ring", "mesh=4,1,4", "attention2d=4,4", "u4/attention2d=2,2", "u8/ring", "u16", "deepspeed")
RESULTS = ("out", "dq", "dk", "dv")
CACHED = ("continue", "decode")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or the words in `given`."""
    parser = runner.parser(
        __doc__, *DEFAULT, nodes=16, per_node=1, link="50mbit", step=("training", "prefill", *CACHED), kept=8192,
        seq=1024, heads=16, kv_heads=16, head_dim=64, dtype=(*TOLERANCE,), causal=True, rounds=5,
    )  # fmt: skip
    args = runner.checked(parser, given)
    if args.step in CACHED and args.kept % args.world:
        parser.error(f"--kept must be a multiple of the ranks, {args.world}")
    return args


def measure(args: argparse.Namespace) -> list[Row]:
    directions = ("forward", "backward") if args.step == "training" else ("forward",)
    plan = lambda spec: None if args.step in CACHED else bytes_between(spec, args, None, directions)  # noqa: E731
    return runner.measure(args, tensors(args), build, TOLERANCE[args.dtype], plan)


def tensors(args: argparse.Namespace) -> dict[str, Any]:
    """Return q, k, v and the output's gradient in their dtype, and the results of dense attention, computed in fp64."""
    generator = torch.Generator().manual_seed(0)
    queries = 1 if args.step == "decode" else args.seq
    keys = args.kept if args.step in CACHED else args.seq
    shapes = {"q": (queries, args.heads), "k": (keys, args.kv_heads), "v": (keys, args.kv_heads),
              "do": (queries, args.heads)}  # fmt: skip
    whole = {name: torch.randn((1, *shape, args.head_dim), generator=generator) for name, shape in shapes.items()}
    whole = {name: x.to(getattr(torch, DTYPES[args.dtype])) for name, x in whole.items()}
    causal = args.causal and args.step not in CACHED  # new tokens see all cached tokens
    found = results(args, lambda q, k, v: peers.dense(q, k, v, causal), *(x.double() for x in whole.values()))
    return whole | {"results": dict(zip(RESULTS, (x.float() for x in found), strict=False))}


def results(args: argparse.Namespace, attend: peers.Attend, *inputs: Tensor) -> list[Tensor]:
    """Return the results of a call: out and, in training, dq, dk and dv."""
    if args.step == "training":
        return peers.step(attend, *inputs)
    with torch.no_grad():
        return [attend(*inputs[:3])]


def build(spec: Spec, args: argparse.Namespace, whole: dict[str, Tensor]) -> Step:
    found = peers.made(spec, args.seq, (args.heads, args.kv_heads), args.causal)
    attend, new, kept = found.attend, found.positions, found.positions
    if args.step in CACHED:
        attend, new, kept = peers.of_cache(spec, found, args.step, args.seq, args.kept)
    inputs = [whole[name][:, new if name in ("q", "do") else kept].contiguous() for name in ("q", "k", "v", "do")]
    return Step(lambda: results(args, attend, *inputs), new, found.sp, inputs)


def title(args: argparse.Namespace) -> str:
    """Describe the run in one line."""
    kept = f" {args.kept} kept," * (args.step in CACHED)
    return (
        f"{args.step}, {args.seq} tokens,{kept} "
        f"{args.heads}/{args.kv_heads} heads of {args.head_dim}, {args.dtype}, {'causal' if args.causal else 'full'}; "
        f"median of {args.rounds}"
    )


def table(rows: list[Row], args: argparse.Namespace, link: str) -> str:
    plans: runner.Columns = {
        "plan MB": lambda row: f"{max(map(max, row['plan'])) / 1e6:.2f}" if row["plan"] else "-",
        "measured / plan": lambda row: f"{ratio:.3f}" if (ratio := plan_ratio(row)) else "-",
    }
    return runner.report(rows, args, link, runner.TIMES, {**runner.SENT, **plans, **runner.SHARE})


def plan_ratio(row: Row) -> float | None:
    """Return measured bytes divided by planned bytes, for the node with the greatest deviation.

    Both directions are added up, since acknowledgements dominate if a node sends almost nothing else.
    """
    if row["plan"] is None:
        return None
    found, planned = (map(sum, zip(*both, strict=True)) for both in ((row["out"], row["in"]), row["plan"]))
    ratios = [mine / its for mine, its in zip(found, planned, strict=True) if its]
    return max(ratios, key=lambda ratio: abs(ratio - 1), default=None)


def main() -> None:
    runner.main(arguments, measure, title, table)


if __name__ == "__main__":
    main()
