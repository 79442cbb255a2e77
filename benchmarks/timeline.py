"""Records one attention on gloo ranks of this machine and prints it beside the simulation of its plan.

    python -m benchmarks.timeline ring --ranks 4 --png ring.png --trace ring.json
    python -m benchmarks.timeline mesh --ranks 8 --mesh 2 1 2 --ulysses 2 --direction both

fp32, causal; after a warm-up. The simulation is given what products took, as a mean over all ranks, and the rate of the
links: what a rank receives while all send to the next one at once, or --rate. It takes nothing for agreement, merging,
copying and posting. "receiving" is the time in which something is under way to a rank: measured, from when its receive
is posted to when a wait has seen its end (with --watch to its end), so it holds what peers are late. The picture has
the same rows for both; the trace, for ui.perfetto.dev, has both too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.blocks import block_bytes
from ds_seqpar import SequenceParallel, SequenceParallelConfig
from ds_seqpar.compiler.compile import pattern_of, weight
from ds_seqpar.compiler.draw import draw_timelines
from ds_seqpar.compiler.exchange import Around, exchanged
from ds_seqpar.compiler.heads import most
from ds_seqpar.compiler.layout import LAYOUTS
from ds_seqpar.compiler.masks import CAUSAL
from ds_seqpar.compiler.schedules import SCHEDULES, settings
from ds_seqpar.compiler.shape import shape_of
from ds_seqpar.compiler.shards import EvenShards
from ds_seqpar.compiler.simulate import Costs, programs_of, simulate
from ds_seqpar.compiler.timeline import Event, Timeline, save_trace
from ds_seqpar.config import TRAVEL_DTYPES, setting_names
from ds_seqpar.runtime.comm import Message
from tests.launch import on_ranks

# title -> kinds, and whether a simulation has them
COLUMNS = {
    "products": (("product",), True),
    "merging, copying": (("merge", "copy"), False),
    "posting": (("post",), False),
    "waiting": (("wait",), True),
    "Ulysses": (("exchange",), True),
    "receiving": (("move", "exchange"), True),
}


def main() -> None:
    args = parser().parse_args()
    named = {name: getattr(args, name, None) for name in setting_names()}
    chosen = {name: value for name, value in named.items() if value is not None} | {"size": args.ranks}
    config = SequenceParallelConfig(**chosen).resolve(args.ranks, heads=tuple(args.heads))
    directions = ("forward", "backward") if args.direction == "both" else (args.direction,)
    # the same on every rank
    found, rate = on_ranks(
        args.ranks, record, chosen, args.seq, args.heads, args.head_dim, args.watch, timeout=args.timeout
    )[0]
    rate = args.rate * 2**20 if args.rate else rate
    measured = Timeline(tuple(e for e in found.events if belongs(e, found, directions)))
    simulated = simulation(config, measured, rate, args)
    what = f"{args.schedule}, {args.ranks} ranks, ulysses {config.ulysses}, {args.seq} tokens, {args.direction}"
    print(f"\n{what}; links of {rate / 2**20:.1f} MiB/s; milliseconds, measured / simulated\n")
    print_table(measured, simulated)
    timelines = {"measured": measured, "simulated": simulated}
    if args.trace:
        save_trace(timelines, args.trace)
        print(f"wrote {args.trace}")
    if args.png:
        draw_timelines(titled(timelines, args), args.png, range(args.ranks))
        print(f"wrote {args.png}")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("schedule", choices=sorted(SCHEDULES))
    found.add_argument("--ranks", type=int, default=4)
    found.add_argument("--ulysses", type=int, default=1)
    found.add_argument("--layout", default="auto", help=f"one of {', '.join(LAYOUTS)}")
    for name, (setting, schedule) in settings().items():
        help = f"for schedule {schedule.name}: {setting.help}"
        found.add_argument(f"--{name.replace('_', '-')}", help=help, **setting.option)
    found.add_argument("--overlap", action="store_true")
    found.add_argument("--travel-dtype", default="fp32", choices=TRAVEL_DTYPES)
    found.add_argument("--seq", type=int, default=2048, help="tokens of the whole sequence")
    found.add_argument("--heads", type=int, nargs=2, default=(16, 16), metavar=("HQ", "HKV"))
    found.add_argument("--head-dim", type=int, default=64)
    found.add_argument("--direction", choices=("forward", "backward", "both"), default="both")
    found.add_argument("--rate", type=float, metavar="MIB", help="of a link, a second, in place of a measured one")
    found.add_argument("--watch", action="store_true", help="a thread for each message sees when it ends")
    found.add_argument("--png", metavar="FILE")
    found.add_argument("--trace", metavar="FILE")
    found.add_argument("--timeout", type=float, default=600, help="seconds for all of it")
    return found


def record(chosen: dict, seq: int, heads: list[int], dim: int, watch: bool) -> tuple[Timeline, float]:
    """All ranks' time line of forward and backward, and the bytes a second that a rank receives."""
    sp = SequenceParallel(SequenceParallelConfig(**chosen), heads=tuple(heads))
    torch.manual_seed(sp.rank)
    local = [torch.randn(1, seq // sp.size, h, dim, requires_grad=True) for h in (heads[0], heads[1], heads[1])]
    step(sp, local)
    rate = link_rate(sp, local[1].nbytes * 2)
    with sp.record(watch=watch) as found:
        step(sp, local)
    return found.gather(), rate


def step(sp: SequenceParallel, local: list[torch.Tensor]) -> None:
    dist.barrier()
    out = sp.attention(*local)
    dist.barrier()
    out.backward(torch.ones_like(out))


def link_rate(sp: SequenceParallel, size: int, repeats: int = 5) -> float:
    """Bytes a second: the slowest rank's, by a median over repeats, while each sends to the next one."""
    group, rank, ranks = sp.groups.inner, sp.runtime.rank, sp.runtime.size
    took = []
    for _ in range(repeats if group else 0):
        sent, received = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        dist.barrier()
        began = time.perf_counter()
        going, coming = (Message((rank + far) % ranks, "kv", 0, x, 1) for far, x in ((1, sent), (-1, received)))
        sp.comm.post([going], [coming]).wait()
        took.append(time.perf_counter() - began)
    slowest = torch.tensor(statistics.median(took) if took else 0.0, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return size / slowest.item() if took else float("inf")


def belongs(event: Event, whole: Timeline, directions: tuple[str, ...]) -> bool:
    """Whether an event is of these directions: what is outside a walk comes before one."""
    if event.direction:
        return event.direction in directions
    backward = min(e.start for e in whole.of(event.rank, "walk") if e.direction == "backward")
    return ("forward" if event.start < backward else "backward") in directions


def simulation(config: SequenceParallelConfig, measured: Timeline, rate: float, args: argparse.Namespace) -> Timeline:
    """The walks that were measured, in their order."""
    whole = Timeline(())
    for walk in measured.of(0, "walk"):
        whole = simulated_walk(config, walk.direction, measured, rate, args).after(whole)
    return whole


def simulated_walk(
    config: SequenceParallelConfig, direction: str, measured: Timeline, rate: float, args: argparse.Namespace
) -> Timeline:
    """The simulation of one direction's plan, for every Ulysses member."""
    recipe, members = config.recipe(config.topology(args.ranks)), config.ulysses
    shards = EvenShards(config.layout, args.seq, recipe.size)
    shape = shape_of(config.travel_dtype, "float32", 1, (*most(*args.heads, members), args.head_dim))
    plan = recipe.plan(direction, pattern_of(CAUSAL, shards), shape)
    transfer = {kind: size / rate for kind, size in block_bytes(shape, direction, shards).items()}
    costs = Costs(transfer=transfer, product=1.0, weight=weight(CAUSAL, shards))
    took = sum(e.end - e.start for e in measured.events if e.kind == "product" and e.direction == direction)
    work = sum(costs.compute(c.q, c.kv) for steps in plan.ranks for one in steps for c in one.computes) * members
    tokens = shards.tokens("q", (0,))
    costs = Costs(
        transfer=transfer,
        product=took / work,
        weight=costs.weight,
        exchange=lambda trade: exchanged(shape, members, trade) * tokens / rate,
    )
    return Timeline(tuple(members_of(simulate(programs_of(plan, Around(members)), costs).events, members)))


def members_of(events: tuple[Event, ...], members: int) -> Iterator[Event]:
    """By SP rank, of which neighbours have one inner rank."""
    for event in events:
        for member in range(members):
            yield Event(event.rank * members + member, event.kind, event.start, event.end, event.label)


def print_table(measured: Timeline, simulated: Timeline) -> None:
    """A line a rank; the last column is from the first start of all to its own last end."""
    print("| rank | " + " | ".join(COLUMNS) + " | to its end | MiB received |\n" + "|---" * (len(COLUMNS) + 3) + "|")
    for rank in measured.ranks:
        cells = []
        for kinds, both in COLUMNS.values():
            cells.append(f"{measured.busy(rank, *kinds) * 1e3:.1f}")
            if both:
                cells[-1] += f" / {simulated.busy(rank, *kinds) * 1e3:.1f}"
        ends = [max(e.end for e in t.events if e.rank == rank) - t.start for t in (measured, simulated)]
        cells.append(" / ".join(f"{end * 1e3:.1f}" for end in ends))
        received = sum(e.bytes for e in measured.of(rank, "move", "exchange"))
        print(f"| {rank} | {' | '.join(cells)} | {received / 2**20:.2f} |")
    print()


def titled(timelines: dict[str, Timeline], args: argparse.Namespace) -> dict[str, Timeline]:
    return {f"{args.schedule}, {args.direction}, {name}: {its.seconds * 1e3:.1f} ms": its
            for name, its in timelines.items()}  # fmt: skip


if __name__ == "__main__":
    main()
