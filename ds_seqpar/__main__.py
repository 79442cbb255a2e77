"""Command line: `python -m ds_seqpar show` prints what each rank does in each step, or draws it over time;
`python -m ds_seqpar prepare` compiles what DeepSpeed needs on this machine, before ranks start."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch

from . import cpu_op
from .config import LAYOUTS, PLACEMENTS, TRAVEL_DTYPES, TRAVELS, SequenceParallelConfig, setting_names
from .errors import SeqParError
from .planning.draw import draw
from .planning.layout import LAYOUTS as RUNS
from .planning.layout import Runs, multiple, visible
from .planning.schedules import SCHEDULES, build, settings
from .planning.simulate import Costs, communication, computation, simulate
from .running.work import bytes_per_token, travel_dtype


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for settings that do not fit."""
    parser = argparse.ArgumentParser(prog="ds-seqpar", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser(
        "show",
        help="print a plan as a table of ranks and steps; nothing is run",
        epilog="\n".join(["schedules:", *(f"  {name:14}{its.summary}" for name, its in sorted(SCHEDULES.items()))]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument("--size", type=int, default=4, help="ranks that share a sequence")
    show.add_argument("--ulysses", type=int, default=1, help="ranks that trade heads; the schedule runs on the others")
    show.add_argument("--schedule", default="auto", help=f"one of {', '.join(sorted(SCHEDULES))}")
    show.add_argument("--layout", default="auto", help=f"one of {', '.join(LAYOUTS)}")
    for name, (setting, schedule) in settings().items():
        help = f"for schedule {schedule.name}: {setting.help}"
        show.add_argument(f"--{name.replace('_', '-')}", help=help, **setting.option)
    for direction in ("forward", "backward"):
        show.add_argument(f"--{direction}", default="auto", help=f"what travels: one of {', '.join(TRAVELS)}")
    show.add_argument("--overlap", action="store_true", help="order products as operands arrive")
    show.add_argument("--placement", nargs="+", default=["auto"], help=f"one of {', '.join(PLACEMENTS)}, or axes")
    show.add_argument("--travel-dtype", default="fp32", help=f"one of {', '.join(TRAVEL_DTYPES)}")
    show.add_argument("--heads", type=int, nargs=2, default=(8, 8), metavar=("HQ", "HKV"), help="for bytes; 8 8")
    show.add_argument("--full", action="store_true", help="without a causal mask")
    show.add_argument("--direction", choices=("forward", "backward", "both"), default="both")
    show.add_argument("--png", metavar="FILE", help="also draw the time line of the (first) direction")
    commands.add_parser("prepare", help="compile what DeepSpeed needs on this machine, before ranks start")
    args = parser.parse_args(argv)
    try:
        _show(args) if args.command == "show" else _prepare()
    except SeqParError as error:
        print(f"ds-seqpar: {error}", file=sys.stderr)
        return 2
    return 0


def _show(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name, None) for name in setting_names()}
    chosen = {name: value for name, value in given.items() if value is not None}
    if len(args.placement) == 1:
        chosen["placement"] = args.placement[0]
    config = SequenceParallelConfig(**chosen).resolve(args.size, heads=tuple(args.heads))
    topology = config.topology(args.size)
    heads = args.heads[0] // config.ulysses, max(1, args.heads[1] // config.ulysses)  # of a Ulysses member
    seq = 4 * multiple(config.layout, config.size, config.ulysses)
    directions = ("forward", "backward") if args.direction == "both" else (args.direction,)
    for index, direction in enumerate(directions):
        sizes = _sizes(direction, *heads, args.travel_dtype)
        settings = config.schedule, topology, config.layout, seq, not args.full, direction
        travels = config.forward if direction == "forward" else config.backward
        plan = build(*settings, travels=travels, overlap=config.overlap, sizes=tuple(sizes.items()))
        blocks = [RUNS[config.layout](seq, plan.size, rank) for rank in range(plan.size)]
        costs = Costs(transfer=sizes, product=1.0, weight=_weight(blocks, not args.full))
        if communication(plan, costs):
            costs = costs.balanced(plan)
        bound = max(communication(plan, costs), computation(plan, costs))
        print(plan.table())
        print(f"critical path {simulate(plan, costs).seconds / bound:.2f} x max(compute, links), the two being equal\n")
        if args.png and index == 0:
            draw(plan, costs, args.png)
            print(f"wrote {args.png}\n")


def _prepare() -> None:
    print("DeepSpeed's CPU op is compiled" if cpu_op.prepare() else "DeepSpeed compiles nothing on this machine")


def _sizes(direction: str, q_heads: int, kv_heads: int, travel: str, head_dim: int = 128) -> dict[str, int]:
    """Bytes a token of bf16 attention."""
    q = torch.empty(1, 1, q_heads, head_dim, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(1, 1, 2, kv_heads, head_dim, dtype=torch.bfloat16, device="meta")
    return bytes_per_token(direction, q, kv, travel_dtype(travel, q.dtype))


def _weight(blocks: list[Runs], causal: bool) -> Callable[[int, int], float]:
    """The share of a product of two blocks that the mask leaves."""

    def weight(q: int, kv: int) -> float:
        whole = sum(run.length for run in blocks[q]) * sum(run.length for run in blocks[kv])
        return sum(tile.products for tile in visible(blocks[q], blocks[kv], causal)) / whole

    return weight


if __name__ == "__main__":
    sys.exit(main())
