"""Run contenders in turns on ranks, which are processes of this machine or of a simulated cluster, and print a table.

A benchmark is its options, the function that creates a contender's call on a rank, and the columns of its table:

    main(arguments, lambda args: measure(args, whole(args), build), title, table)

`arguments` ends with `checked`, `whole` returns the inputs and results of one process, `build` returns a `Step`, and
`table` calls `report` with columns. Benchmarks whose ranks time themselves call `in_turns` (`benchmarks.turns`) on each
rank instead.

Control traffic does not use the links: ranks find one another through a file, and receive commands by pipes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import contenders, tables
from benchmarks.cluster import net
from benchmarks.contenders import Spec
from benchmarks.turns import in_turns
from ds_seqpar import SequenceParallel
from ds_seqpar.base.errors import SeqParError
from tests.launch import RankFailure, Ranks
from tests.live import Live

PRELOAD = ["tests.preloading", "torch.distributed", "deepspeed", "benchmarks.runner"]
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
FAILED = SeqParError, ValueError, ImportError  # a contender cannot run, for a reason that all ranks know
Row = dict[str, Any]  # the figures of a contender, or `name` and `cannot`
Columns = Mapping[str, Callable[[Row], object]]  # title -> cell of a row


# ---- options


def parser(
    description: str | None, *default: str, nodes: int, per_node: int, link: str | list[str],
    parse: Callable[[str], Spec] = contenders.parse, **options: object,
) -> argparse.ArgumentParser:  # fmt: skip
    """Create a parser for contenders (`default`; `parse` reads one) on nodes with links, and for more options.

    `patience` is the timeout of a transfer in seconds. If `link` is a list, several rates can be given.
    """
    its = tables.parser(description)
    contenders.add(its, *default, parse=parse)
    tables.add(its, nodes=nodes, ranks_per_node=per_node, patience=300.0)
    several = {"nargs": "+"} if isinstance(link, list) else {}
    its.add_argument("--link", type=rate, default=link, **several,
                     help="of every node, out and in, in kbit, mbit or gbit")  # fmt: skip
    tables.add(its, **options)
    return its


def rate(text: str) -> str:
    net.rate_of(text)  # raises an error
    return text


def checked(parser: argparse.ArgumentParser, given: list[str] | None) -> argparse.Namespace:
    """Parse the arguments, and add `world`. Exit if the sequence length is unsuitable or no cluster can be created."""
    args = parser.parse_args(given)
    args.world = args.nodes * args.ranks_per_node
    if args.seq % (2 * args.world):
        parser.error(f"--seq must be a multiple of twice the ranks, {2 * args.world}")
    if args.nodes > 1 and (reason := net.refusal()):
        print(reason, file=sys.stderr)
        sys.exit(2)
    return args


def main(
    arguments: Callable[[], argparse.Namespace], measure: Callable[[argparse.Namespace], list[Row]],
    title: Callable[[argparse.Namespace], str], table: Callable[[list[Row], argparse.Namespace, str], str],
) -> None:  # fmt: skip
    """Run a benchmark, and print its title and its table for each rate of the links."""
    end_by_exit()
    args = arguments()
    rows, machines = measure(args), f"{args.nodes} nodes x {args.ranks_per_node}"
    for link in [args.link] if isinstance(args.link, str) else args.link:
        place = f"{machines}, {link} a link each way" if args.nodes > 1 else f"{args.world} ranks of one machine"
        print(f"\n{place}; {title(args)}\n\n{table(rows, args, link)}", flush=True)


def end_by_exit() -> None:
    """Convert signals that end this process to exceptions, so that the cluster is removed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


# ---- contenders in turns


def measure(
    args: argparse.Namespace, whole: dict[str, Any], build: Callable[..., Step], tolerance: float = 1e-4,
    plan: Callable[[Spec], object] = lambda spec: None, error: Callable[[Tensor, Tensor], float] | None = None,
) -> list[Row]:  # fmt: skip
    """Return a row for each contender, in the given order, with all figures.

    The row of a contender that cannot run has no seconds, and the reason as `cannot`.

    Args:
        args: The result of `checked`.
        whole: The tensors that ranks read from a file, including the "results" of one process by name.
        build: Called on each rank with a contender, `args` and `whole`; returns the contender's `Step`.
        tolerance: The largest error of a result.
        plan: Returns what the row has as "plan", or raises the reason why the contender cannot run.
        error: The error of a result, compared with one process; `largest` by default.

    Raises:
        ArithmeticError: Results of one of our contenders differ from those of one process.
        RankFailure: A rank fails.
    """
    rows, built = list[Row](), 0
    with net.Network(args.nodes, args.link) as network, started(args, network) as ranks:
        torch.save(whole, Path(ranks.folder.name, "tensors"))
        for spec in args.contenders:
            rows.append(row := {"name": spec.name})
            try:
                row |= {"plan": plan(spec), "step": built}
                if reason := call(ranks, add, build, spec, args, ranks.folder.name)[0]:
                    raise ValueError(reason)
                built += 1
                by_rank = call(ranks, errors, row["step"], ranks.folder.name, error or largest)
                wrong = [f"{name} by {max(found):.1e}" for name, *found in zip(whole["results"], *by_rank, strict=True)
                         if not max(found) <= tolerance]  # fmt: skip
                if wrong:
                    kind = ValueError if spec.peer else ArithmeticError
                    raise kind(f"{spec.name} must equal one process to {tolerance:g}; differs in {', '.join(wrong)}")
            except FAILED as reason:
                row["cannot"] = str(reason)
            else:
                found, out, into = carried(ranks, network, lambda i=row["step"]: call(ranks, followed, i))
                counted, peaks = zip(*found, strict=True)
                row |= {"error": max(map(max, by_rank)), "out": out, "in": into, "counted": max(counted),
                        "peak": max(peaks)}  # fmt: skip
            tables.say(f"{spec.name}: {row.get('cannot', 'as in one process')}")
        steps = {place: row["step"] for place, row in enumerate(rows) if "cannot" not in row}
        for place, seconds in in_turns(steps, args.rounds, lambda index: together(ranks, index)[0], warm=0).items():
            rows[place]["seconds"] = seconds
    return rows


# ---- tables

TIMES: Columns = {
    "contender": lambda row: row["name"], "s": lambda row: f"{row['median']:.3f}",
    "spread": lambda row: tables.spread(row["seconds"]), "against first": lambda row: f"{row['ratio']:.2f}",
}  # fmt: skip
SENT: Columns = {f"MB {side}": lambda row, side=side: f"{max(row[side]) / 1e6:.2f}" for side in ("out", "in")}
SHARE: Columns = {"share of link": lambda row: f"{row['share']:.2f}"}


def report(rows: list[Row], args: argparse.Namespace, link: str, columns: Columns, linked: Columns) -> str:
    """Format the rows as Markdown, followed by the reasons of contenders that cannot run.

    `linked` are columns about links, which are omitted for a single node.
    """
    able = [{**row, "median": statistics.median(row["seconds"])} for row in rows if "cannot" not in row]
    for row in able:
        row["ratio"] = able[0]["median"] / row["median"]
        row["share"] = max(*row["out"], *row["in"]) / net.rate_of(link) / row["median"]
    shown = {**columns, **(linked if args.nodes > 1 else {})}
    reasons = (f"\n{row['name']}: {row['cannot']}" for row in rows if "cannot" in row)
    lines = ([cell(row) for cell in shown.values()] for row in able)
    return "\n".join([tables.table([*shown], lines), *reasons])


# ---- ranks


@contextlib.contextmanager
def started(args: argparse.Namespace, network: net.Network, preload: list[str] | None = None) -> Iterator[Ranks]:
    """Context manager that starts all ranks in their nodes, and initializes torch.distributed."""
    with Ranks(args.world, None, preload or PRELOAD) as ranks:
        call(ranks, enter, network.names, args.ranks_per_node, ranks.folder.name, args.patience)
        yield ranks


def call(ranks: Ranks, function: Any, *arguments: Any) -> list[Any]:
    """Call a function on all ranks, and return the results by rank. Raises RankFailure if a rank fails."""
    results, errors = ranks.call(function, *arguments, timeout=3600)
    if errors:
        raise RankFailure(errors)
    return [results[rank] for rank in sorted(results)]


def together(ranks: Ranks, index: int = 0) -> tuple[float, Sequence[Any]]:
    """Run a step on all ranks, starting at the same time. Return the slowest rank's seconds, and results by rank."""
    seconds, found = zip(*call(ranks, one_turn, index, time.monotonic() + 0.05), strict=True)
    return max(seconds), found


def carried(ranks: Ranks, network: net.Network, run: Callable[[], Any]) -> tuple[Any, list[int], list[int]]:
    """Return the result of `run`, and the bytes that every node has sent and received meanwhile."""
    before = settled(ranks, network)
    found = run()
    change = [[b - a for a, b in zip(*node, strict=True)] for node in zip(before, settled(ranks, network), strict=True)]
    return found, [out for out, _ in change], [into for _, into in change]


def settled(ranks: Ranks, network: net.Network) -> list[tuple[int, int]]:
    """Return (bytes out, bytes in) of every node after all transfers are complete; zeros for a single node."""
    last, found = None, [(0, 0)]
    while network.names and found != last:
        time.sleep(0.2 if last else 0)
        last, found = found, call(ranks, net.counters)[:: len(ranks.pipes) // network.nodes]
    return found


# ---- on every rank


@dataclasses.dataclass
class Step:
    """A contender's call.

    Attributes:
        run: Returns the results of this rank's tokens, which are at `positions` of the sequence.
        sp: Counts the bytes that the call receives; None for peers.
        held: The inputs, which do not count as allocated by the call.
    """

    run: Callable[[], list[Tensor]]
    positions: Tensor
    sp: SequenceParallel | None
    held: Sequence[Tensor]

    def __call__(self) -> None:
        self.run()


STEPS: list[Any] = []  # the steps that this rank can be told to run


def enter(names: list[str], per_node: int, folder: str, patience: float) -> None:
    """Move this process into its node, before it has sockets or other threads, and initialize torch.distributed."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no process remains in a node after its run was killed
    if names:
        with Path(net.FOLDER, names[rank // per_node]).open() as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                number = ctypes.get_errno()
                raise OSError(number, f"entering a network namespace failed: {os.strerror(number)}")
        os.environ["GLOO_SOCKET_IFNAME"] = net.PORT
    os.environ.update(LOCAL_RANK=str(rank % per_node), LOCAL_WORLD_SIZE=str(per_node))
    store = dist.FileStore(str(Path(folder, "cluster")), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=patience))


def one_turn(index: int, start: float) -> tuple[float, Any]:
    """Start a step at `start` on the machine's clock. Return the seconds until the step ends on this rank, and the
    step's result.
    """
    time.sleep(max(0.0, start - time.monotonic()))
    found = STEPS[index]()
    return time.monotonic() - start, found


def add(build: Callable[..., Step], spec: Spec, args: argparse.Namespace, folder: str) -> str | None:
    """Create a contender's step. Return None, or the reason why the contender cannot run."""
    try:
        STEPS.append(build(spec, args, torch.load(Path(folder, "tensors"), mmap=True)))
    except FAILED as reason:
        return str(reason).splitlines()[0]
    return None


def errors(index: int, folder: str, error: Callable[[Tensor, Tensor], float]) -> list[float]:
    """Return the error of each result of this rank's tokens, compared with one process."""
    whole, step = torch.load(Path(folder, "tensors"), mmap=True)["results"].values(), STEPS[index]
    return [error(found, wanted[:, step.positions]) for found, wanted in zip(step.run(), whole, strict=True)]


def largest(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def followed(index: int) -> tuple[int, int]:
    """Run a step, and return (bytes that this rank has received, peak bytes of tensors that the step allocates)."""
    step = STEPS[index]
    before = step.sp.comm.received_bytes if step.sp else 0
    with Live(*step.held) as live:
        step.run()
    return (step.sp.comm.received_bytes if step.sp else 0) - before, live.peak
