"""Ranks of a cluster in a box: how they are started and told what to do, and what they then do.

No byte of this goes over a link: ranks find one another by a file, and are told by pipes when to begin.
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
STEPS: list[Callable[[], Any]] = []  # on a rank: what it can be told to do


class Turn(NamedTuple):
    """A step of all ranks. seconds: until the slowest one is done. found: what it gave the first rank."""

    seconds: float
    found: Any


def options(parser: argparse.ArgumentParser, *, nodes: int, per_node: int) -> None:
    """Those of the network. patience: seconds that a transfer may take."""
    tables.add(parser, nodes=nodes, ranks_per_node=per_node, patience=300.0)


def link(text: str) -> str:
    """The type of an option that is a link's rate."""
    try:
        net.rate_of(text)
    except ValueError as reason:
        raise argparse.ArgumentTypeError(str(reason)) from None
    return text


def checked(parser: argparse.ArgumentParser, given: list[str] | None) -> argparse.Namespace:
    """The arguments, with `world`. Ends this process where the sequence does not fit, or where no cluster can be."""
    args = parser.parse_args(given)
    args.world = args.nodes * args.ranks_per_node
    if args.seq % (2 * args.world):
        parser.error(f"--seq must be a multiple of twice the ranks, {2 * args.world}")
    if args.nodes > 1 and (reason := net.refusal()):
        print(reason, file=sys.stderr)
        sys.exit(2)
    return args


def end_by_exit() -> None:
    """From now on a signal that ends this process is raised, so that the cluster is taken down."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def places(args: argparse.Namespace, rate: str) -> str:
    """For titles."""
    if args.nodes == 1:
        return f"{args.world} ranks of one machine"
    return f"{args.nodes} nodes x {args.ranks_per_node}, {rate} a link each way"


def report(columns: list[str], lines: list[list[str]], rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """The lines as Markdown, without columns of links where there are none; below, why other rows cannot run."""
    shown = len(columns) if args.nodes > 1 else columns.index("MB out")
    reasons = (f"\n{row['name']}: {row['cannot']}" for row in rows if "cannot" in row)
    return "\n".join([tables.table(columns[:shown], (cells[:shown] for cells in lines)), *reasons])


@contextlib.contextmanager
def started(args: argparse.Namespace, network: net.Network, preload: list[str] | None = None) -> Iterator[Ranks]:
    """All ranks, each in its node, with torch.distributed up."""
    with Ranks(args.world, None, preload or PRELOAD) as ranks:
        call(ranks, enter, network.names, args.ranks_per_node, ranks.folder.name, args.patience)
        yield ranks


def call(ranks: Ranks, function: Any, *arguments: Any) -> list[Any]:
    """What the function returns, by rank. Raises RankFailure where a rank failed."""
    results, errors = ranks.call(function, *arguments, timeout=3600)
    if errors:
        raise RankFailure(errors)
    return [results[rank] for rank in sorted(results)]


def turn(ranks: Ranks, index: int = 0) -> Turn:
    """All ranks begin a step together."""
    seconds, found = zip(*call(ranks, one_turn, index, time.monotonic() + 0.05), strict=True)
    return Turn(max(seconds), found[0])


def carried(ranks: Ranks, network: net.Network, run: Callable[[], Any]) -> tuple[Any, list[int], list[int]]:
    """What `run` returns, and the bytes that went out of and came into every node meanwhile."""
    before = settled(ranks, network)
    found = run()
    change = [[b - a for a, b in zip(*node, strict=True)] for node in zip(before, settled(ranks, network), strict=True)]
    return found, [out for out, _ in change], [into for _, into in change]


def settled(ranks: Ranks, network: net.Network) -> list[tuple[int, int]]:
    """Every node's (bytes out, bytes in), once nothing is on its way any more; of one node alone none are counted."""
    last, found = None, [(0, 0)]
    while network.names and found != last:
        time.sleep(0.2 if last else 0)
        last, found = found, call(ranks, net.counters)[:: len(ranks.pipes) // network.nodes]
    return found


# ---- on every rank


def enter(names: list[str], per_node: int, folder: str, patience: float) -> None:
    """Puts this process into its node before it has a socket or a second thread, and brings torch.distributed up."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody is left in a node whose run was killed
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
    """A step, begun by all ranks at `start` of the machine's clock: seconds from then to its end here, and what it
    gives."""
    time.sleep(max(0.0, start - time.monotonic()))
    found = STEPS[index]()
    return time.monotonic() - start, found
