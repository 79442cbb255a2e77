"""Attention of a layer on the planner's machines: the triangle beside the fastest mesh and the ring, simulated.

    python -m benchmarks.triangle_simulated [--machines NAME ...] [--ranks N ...] [--ulysses N ...]

A row for each machine, number of inner ranks and degree of Ulysses. MHA, heads of 128, bf16, causal. Milliseconds
forward / backward, of the shape and placement that are fastest together; of many the closed form, a bound, says which
few are simulated. One member of Ulysses stands for all unless a node's ranks share an uplink; "-" where too many would
have to be followed, or the schedule does not fit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from ds_seqpar.compiler.masks import CAUSAL
from ds_seqpar.compiler.shards import EvenShards
from ds_seqpar.planner.calls import Call
from ds_seqpar.planner.candidates import Candidate, candidates
from ds_seqpar.planner.closed import closed
from ds_seqpar.planner.machine import Machine
from ds_seqpar.planner.prices import call_seconds, followed_ranks

WAYS = ("forward", "backward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", nargs="+", default=["h100-ib", "modest"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[28, 120], help="inner ones; 496 take minutes a cell")
    parser.add_argument("--ulysses", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--schedules", nargs="+", default=["triangle", "mesh", "ring"])
    parser.add_argument("--follow", type=int, default=600, metavar="RANKS")
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank")
    parser.add_argument("--heads", type=int, default=8, help="of a member of Ulysses")
    parser.add_argument("--simulated", type=int, default=3, metavar="N", help="those with the best bounds")
    args = parser.parse_args()
    print(f"| machine | inner ranks x Ulysses | {' | '.join(args.schedules)} |")
    print("|---" * (2 + len(args.schedules)) + "|")
    for name in args.machines:
        machine = Machine.load(name)
        for ulysses in args.ulysses:
            for ranks in args.ranks:
                cells = [best(machine, schedule, ranks, ulysses, args) for schedule in args.schedules]
                print(f"| {name} | {ranks} x {ulysses} | {' | '.join(cells)} |", flush=True)


def best(machine: Machine, schedule: str, ranks: int, ulysses: int, args: argparse.Namespace) -> str:
    """Milliseconds, and the shape where there are several."""
    found = list(calls(schedule, ranks, ulysses, args))
    if not found or followed_ranks(machine, found[0][1]) > args.follow:
        return "-"
    found.sort(key=lambda one: sum(closed(machine, one[1], way).seconds for way in WAYS))
    timed = []
    for candidate, call in found[: args.simulated]:
        took = [call_seconds(machine, call, way) for way in WAYS]
        timed.append((sum(took), " / ".join(f"{1e3 * seconds:.2f}" for seconds in took), candidate))
    _, cell, candidate = min(timed, key=lambda one: one[0])
    own = [str(value) for value in candidate.own.values()]
    return " ".join([cell, *own])


def calls(schedule: str, ranks: int, ulysses: int, args: argparse.Namespace) -> Iterator[tuple[Candidate, Call]]:
    """Of every shape and placement of a schedule, with the layout that it has by itself; of equal plans one."""
    heads, seen = args.heads * ulysses, set()
    given = {"size": ranks * ulysses, "ulysses": ulysses, "schedule": schedule}
    for candidate in candidates(ranks * ulysses, (heads, heads), given):
        if candidate.plain and (key := candidate.same(False)) not in seen:
            seen.add(key)
            config = candidate.config((heads, heads), travel_dtype="bf16")
            shards = EvenShards(config.layout, args.tokens * config.size, ranks)
            yield (
                candidate,
                Call(config=config, world=config.size, mask=CAUSAL, shards=shards, heads=(heads, heads, 128)),
            )


if __name__ == "__main__":
    main()
