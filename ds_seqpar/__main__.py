"""Command line: `python -m ds_seqpar show` prints what each rank does in each step."""

from __future__ import annotations

import argparse
import sys

from .config import LAYOUTS, SCHEDULES, SequenceParallelConfig
from .errors import SeqParError
from .layout import multiple
from .schedules import build
from .topology import Topology


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for settings that do not fit."""
    parser = argparse.ArgumentParser(prog="ds-seqpar", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print a plan as a table of ranks and steps; nothing is run")
    show.add_argument("--schedule", default="ring", help=f"one of {', '.join(SCHEDULES)}")
    show.add_argument("--layout", default="zigzag", help=f"one of {', '.join(LAYOUTS)}")
    show.add_argument("--size", type=int, default=4, help="ranks that share a sequence")
    show.add_argument("--ulysses", type=int, default=1, help="ranks that trade heads; the schedule runs on the others")
    show.add_argument("--full", action="store_true", help="without a causal mask")
    args = parser.parse_args(argv)
    try:
        _show(args)
    except SeqParError as error:
        print(f"ds-seqpar: {error}", file=sys.stderr)
        return 2
    return 0


def _show(args: argparse.Namespace) -> None:
    chosen = {name: getattr(args, name) for name in ("size", "ulysses", "schedule", "layout")}
    config = SequenceParallelConfig(**chosen).resolve(args.size)
    topology = Topology.of(config, args.size)
    seq = 4 * multiple(config.layout, config.size, config.ulysses)
    for direction in ("forward", "backward"):
        print(build(config.schedule, topology, config.layout, seq, not args.full, direction).table(), end="\n\n")


if __name__ == "__main__":
    sys.exit(main())
