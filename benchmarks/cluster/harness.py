"""What the benchmarks of a cluster in a box share: options of their network, and calls of all ranks."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from typing import Any, NoReturn

from benchmarks.cluster import net
from benchmarks.cluster import ranks as on_rank
from tests.launch import RankFailure, Ranks


def network_options(parser: argparse.ArgumentParser, *, nodes: int, per_node: int) -> None:
    """--nodes, --ranks-per-node and --patience."""
    parser.add_argument("--nodes", type=int, default=nodes)
    parser.add_argument("--ranks-per-node", type=int, default=per_node)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds that a transfer may take")


def link(text: str) -> str:
    """The type of an option that is a link's rate."""
    try:
        net.rate_of(text)
    except ValueError as reason:
        raise argparse.ArgumentTypeError(str(reason)) from None
    return text


def ready() -> None:
    """Ends this process with a sentence where no cluster can be made here. From now on a signal that ends it is raised,
    so that the cluster is taken down."""
    if reason := net.refusal():
        print(reason, file=sys.stderr)
        sys.exit(2)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ended)


def _ended(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def call(ranks: Ranks, function: Any, *arguments: Any) -> list[Any]:
    """What the function returns, by rank. Raises RankFailure where a rank failed."""
    results, errors = ranks.call(function, *arguments, timeout=3600)
    if errors:
        raise RankFailure(errors)
    return [results[rank] for rank in sorted(results)]


def soon() -> float:
    """A moment of the machine's clock at which all ranks can begin."""
    return time.monotonic() + 0.05


def settled(ranks: Ranks, per_node: int) -> list[tuple[int, int]]:
    """Every node's (bytes out, bytes in), once nothing is on its way any more."""
    last = None
    while True:
        found = call(ranks, on_rank.counters)[::per_node]
        if found == last:
            return found
        last = found
        time.sleep(0.2)


def between(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """What every node's interface carried meanwhile: (bytes out, bytes in), each by node."""
    out, into = ([b - a for a, b in zip(*both, strict=True)] for both in zip(
        *(zip(*found, strict=True) for found in (before, after)), strict=True))  # fmt: skip
    return out, into
