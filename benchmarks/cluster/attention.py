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
import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import contenders, tables
from benchmarks.attention import peers
from benchmarks.cluster import net
from benchmarks.cluster import ranks as on_ranks
from benchmarks.cluster.plan import DTYPES, bytes_between
from benchmarks.contenders import Spec
from benchmarks.turns import in_turns
from ds_seqpar.base.errors import SeqParError
from tests.launch import Ranks

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
DEFAULT = ["ring", "mesh=4,1,4", "attention2d=4,4", "u4/attention2d=2,2", "u8/ring", "u16", "deepspeed"]
COLUMNS = ["contender", "s", "spread", "against first", "MB out", "MB in", "plan MB", "measured / plan",
           "share of link"]  # fmt: skip
RESULTS = ("out", "dq", "dk", "dv")
CACHED = ("continue", "decode")


def main() -> None:
    on_ranks.end_by_exit()
    args = arguments(tables.parser(__doc__), DEFAULT)
    print(f"\n{title(args)}\n\n{table(measure(args), args)}", flush=True)


def arguments(
    parser: argparse.ArgumentParser, default: Sequence[str], given: list[str] | None = None
) -> argparse.Namespace:
    """Parse the command line, or the words in `given`. `default` lists the default contenders."""
    contenders.add(parser, *default)
    on_ranks.options(parser, nodes=16, per_node=1)
    parser.add_argument("--link", type=on_ranks.link, default="50mbit",
                        help="of every node, out and in, in kbit, mbit or gbit")  # fmt: skip
    tables.add(parser, step=("training", "prefill", *CACHED), kept=8192)
    tables.add(parser, seq=1024, heads=16, kv_heads=16, head_dim=64, dtype=(*TOLERANCE,), causal=True, rounds=5)
    args = on_ranks.checked(parser, given)
    if args.step in CACHED and args.kept % args.world:
        parser.error(f"--kept must be a multiple of the ranks, {args.world}")
    return args


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each contender, in the given order, with all figures of the table.

    The row of a contender that cannot run contains only `name` and `cannot`. Raises RankFailure if a rank fails.
    """
    with set_up(args) as (ranks, network):
        rows = prepare(ranks, network, args)
        take_turns(ranks, [row for row in rows if "cannot" not in row], args.rounds)
    return rows


@contextlib.contextmanager
def set_up(args: argparse.Namespace) -> Iterator[tuple[Ranks, net.Network]]:
    """Context manager that starts ranks in their nodes, with the input tensors in a file, and cleans up on exit."""
    with net.Network(args.nodes, args.link) as network, on_ranks.started(args, network) as ranks:
        torch.save(tensors(args), Path(ranks.folder.name, "tensors"))
        yield ranks, network


def prepare(ranks: Ranks, network: net.Network, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Create every contender that can run, compare its results with dense attention, and count the bytes of a call."""
    rows: list[dict[str, Any]] = []
    for spec in args.contenders:
        index = sum("cannot" not in row for row in rows)
        rows.append({"name": spec.name, **_prepared(ranks, network, args, spec, index)})
        tables.say(f"{spec.name}: {rows[-1].get('cannot', 'as dense attention')}")
    return rows


def _prepared(ranks: Ranks, network: net.Network, args: argparse.Namespace, spec: Spec, index: int) -> dict[str, Any]:
    try:
        directions = ("forward", "backward") if args.step == "training" else ("forward",)
        planned = None if args.step in CACHED else bytes_between(spec, args, None, directions)
    except (SeqParError, ValueError) as reason:
        return {"cannot": str(reason)}
    if reason := on_ranks.call(ranks, build, spec, args, ranks.folder.name)[0]:
        return {"cannot": reason}
    errors = [max(found) for found in zip(*on_ranks.call(ranks, differences, index, ranks.folder.name), strict=True)]
    most = TOLERANCE[args.dtype]
    wrong = [f"{name} by {error:.1e}" for name, error in zip(RESULTS, errors, strict=False) if not error <= most]
    if wrong:
        reason = f"must equal dense attention to {most:g}; differs in {', '.join(wrong)}"
        if not spec.peer:
            raise ArithmeticError(f"{spec.name} {reason}")
        on_ranks.call(ranks, on_ranks.STEPS.pop)
        return {"cannot": reason}
    _, out, into = on_ranks.carried(ranks, network, lambda: on_ranks.turn(ranks, index))
    return {"error": max(errors), "out": out, "in": into, "plan": planned}


def take_turns(ranks: Ranks, rows: list[dict[str, Any]], rounds: int) -> None:
    """Add the seconds of every round to the rows."""
    steps = {row["name"]: index for index, row in enumerate(rows)}
    found = in_turns(steps, rounds, lambda index: on_ranks.turn(ranks, index).seconds, warm=0)
    for row in rows:
        row["seconds"] = found[row["name"]]


def tensors(args: argparse.Namespace) -> dict[str, Tensor]:
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
    return whole | dict(zip(RESULTS, (x.float() for x in found), strict=False))


def results(args: argparse.Namespace, attend: peers.Attend, *inputs: Tensor) -> list[Tensor]:
    """Return the results of a call: out and, in training, dq, dk and dv."""
    if args.step == "training":
        return peers.step(attend, *inputs)
    with torch.no_grad():
        return [attend(*inputs[:3])]


# ---- on every rank


@dataclasses.dataclass
class Step:
    """A call that returns the results of this rank's tokens, which are at `positions` of the sequence."""

    run: Callable[[], list[Tensor]]
    positions: Tensor

    def __call__(self) -> None:
        self.run()


def build(spec: Spec, args: argparse.Namespace, folder: str) -> str | None:
    """Create the next step of a contender. Return None, or the reason why the contender cannot run.

    The reason is determined before any communication.
    """
    whole = torch.load(Path(folder, "tensors"), mmap=True)
    try:
        found = peers.made(spec, args.seq, (args.heads, args.kv_heads), args.causal)
        attend, new, kept = found.attend, found.positions, found.positions
        if args.step in CACHED:
            attend, new, kept = peers.of_cache(spec, found, args.step, args.seq, args.kept)
    except (ValueError, ImportError) as reason:
        return str(reason).splitlines()[0]
    inputs = [whole[name][:, new if name in ("q", "do") else kept].contiguous() for name in ("q", "k", "v", "do")]
    on_ranks.STEPS.append(Step(lambda: results(args, attend, *inputs), new))
    return None


def differences(index: int, folder: str) -> list[float]:
    """Return max|a - b| / max|b| of each result compared with dense attention, for this rank's tokens."""
    whole, its = torch.load(Path(folder, "tensors"), mmap=True), on_ranks.STEPS[index]
    assert isinstance(its, Step)
    found = zip(RESULTS, its.run(), strict=False)
    return [((x - whole[n][:, its.positions]).abs().max() / whole[n].abs().max()).item() for n, x in found]


# ---- the table


def title(args: argparse.Namespace) -> str:
    """Describe the run in one line."""
    kept = f" {args.kept} kept," * (args.step in CACHED)
    return (
        f"{on_ranks.places(args, args.link)}; {args.step}, {args.seq} tokens,{kept} "
        f"{args.heads}/{args.kv_heads} heads of {args.head_dim}, {args.dtype}, {'causal' if args.causal else 'full'}; "
        f"median of {args.rounds}"
    )


def table(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Format the rows as Markdown. Below the table, list contenders that cannot run, with reasons."""
    able, lines = [row for row in rows if row.get("seconds")], []
    for row in able:
        seconds, most = row["seconds"], max(*row["out"], *row["in"])
        median, first, ratio = statistics.median(seconds), statistics.median(able[0]["seconds"]), plan_ratio(row)
        carried = [f"{size / 1e6:.2f}" for size in (max(row["out"]), max(row["in"]))]
        carried.append(f"{max(map(max, row['plan'])) / 1e6:.2f}" if row["plan"] else "-")
        lines.append([row["name"], f"{median:.3f}", tables.spread(seconds), f"{first / median:.2f}", *carried,
                      f"{ratio:.3f}" if ratio else "-", f"{most / net.rate_of(args.link) / median:.2f}"])  # fmt: skip
    return on_ranks.report(COLUMNS, lines, rows, args)


def plan_ratio(row: dict[str, Any]) -> float | None:
    """Return measured bytes divided by planned bytes, for the node with the greatest deviation.

    Both directions are added up, since acknowledgements dominate if a node sends almost nothing else.
    """
    if row["plan"] is None:
        return None
    found, planned = (map(sum, zip(*both, strict=True)) for both in ((row["out"], row["in"]), row["plan"]))
    ratios = [mine / its for mine, its in zip(found, planned, strict=True) if its]
    return max(ratios, key=lambda ratio: abs(ratio - 1), default=None)


if __name__ == "__main__":
    main()
