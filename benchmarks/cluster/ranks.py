"""Start the ranks of a simulated cluster, send them commands, and execute the commands on ranks.

Control traffic does not use the links: ranks find one another through a file, and receive commands by pipes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from benchmarks import tables
from benchmarks.cluster import net
from tests.launch import RankFailure, Ranks

PRELOAD = ["tests.preloading", "torch.distributed", "deepspeed", "benchmarks.cluster.ranks"]
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
STEPS: list[Callable[[], Any]] = []  # on a rank: the steps that it can be told to run


class Turn(NamedTuple):
    """The outcome of a step on all ranks.

    Attributes:
        seconds: The time until the slowest rank was done.
        found: The first rank's result.
    """

    seconds: float
    found: Any


def options(parser: argparse.ArgumentParser, *, nodes: int, per_node: int) -> None:
    """Add the options of the network. `patience` is the timeout of a transfer in seconds."""
    tables.add(parser, nodes=nodes, ranks_per_node=per_node, patience=300.0)


def link(text: str) -> str:
    """Validate a link's rate, as the type of a command-line option."""
    try:
        net.rate_of(text)
    except ValueError as reason:
        raise argparse.ArgumentTypeError(str(reason)) from None
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


def end_by_exit() -> None:
    """Convert signals that end this process to exceptions, so that the cluster is removed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def places(args: argparse.Namespace, rate: str) -> str:
    """Describe ranks and nodes, for titles."""
    if args.nodes == 1:
        return f"{args.world} ranks of one machine"
    return f"{args.nodes} nodes x {args.ranks_per_node}, {rate} a link each way"


def report(columns: list[str], lines: list[list[str]], rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Format the lines as Markdown, followed by the reasons of contenders that cannot run.

    Columns about links are omitted for a single node.
    """
    shown = len(columns) if args.nodes > 1 else columns.index("MB out")
    reasons = (f"\n{row['name']}: {row['cannot']}" for row in rows if "cannot" in row)
    return "\n".join([tables.table(columns[:shown], (cells[:shown] for cells in lines)), *reasons])


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


def turn(ranks: Ranks, index: int = 0) -> Turn:
    """Run a step on all ranks, starting at the same time."""
    seconds, found = zip(*call(ranks, one_turn, index, time.monotonic() + 0.05), strict=True)
    return Turn(max(seconds), found[0])


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
