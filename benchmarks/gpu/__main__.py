"""Measure one GPU: kernels, one rank's share of a sequence, checkpoints, the longest sequence, and host overhead.

    python -m benchmarks.gpu                  # about 8 minutes
    python -m benchmarks.gpu --stand-in       # small sizes on the CPU, only to test the script

The command prints tables, and writes tables and figures to NAME.md and NAME.json in the folder --out. The JSON can be
submitted (see docs/benchmarks.md). Without a GPU, --stand-in is implied. Every section receives a share of --seconds. A
section that fails or runs out of time is reported at the end, and the remaining sections continue. GPU times are
measured with events.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import tables
from benchmarks.gpu import tables as gpu_tables
from benchmarks.gpu.bench import OUT, Bench, about
from benchmarks.gpu.kernels import kernels
from benchmarks.gpu.layers import checkpoints, host, longest
from benchmarks.gpu.shares import ranks
from ds_seqpar.engine import start

# section -> function, share of the seconds
SECTIONS = {
    "kernels": (kernels, 0.42), "ranks": (ranks, 0.12), "checkpoints": (checkpoints, 0.12), "host": (host, 0.06),
    "longest": (longest, 0.28),
}  # fmt: skip


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = tables.parser(__doc__, stand_in=False, out=OUT)
    parser.add_argument("--seconds", type=float, default=None, help="for all sections; default: 480, of a stand-in 60")
    parser.add_argument("--sections", nargs="+", choices=[*SECTIONS], default=[*SECTIONS])
    parser.add_argument(
        "--room", type=int, default=None,
        help="MiB that the longest sequence may take beside parameters and gradients; default: 8192, of a stand-in 8",
    )  # fmt: skip
    args = parser.parse_args(given)
    args.stand_in = args.stand_in or not torch.cuda.is_available()
    args.seconds = args.seconds if args.seconds is not None else 60.0 if args.stand_in else 480.0
    if not 0 < args.seconds < 86400:
        parser.error(f"--seconds must be above 0 and below a day; got {args.seconds:g}")
    if args.room is not None and args.room < 1:
        parser.error(f"--room must be at least 1 MiB; got {args.room}")
    return args


def measure(args: argparse.Namespace) -> Path:
    """Measure all sections, and return the path of the JSON file."""
    start()
    bench = Bench(args.stand_in, args.room and args.room << 20)
    found: dict[str, Any] = {"about": about(args.stand_in), "records": bench.records, "left_out": bench.left_out}
    began, share = time.perf_counter(), args.seconds / sum(SECTIONS[name][1] for name in args.sections)
    for name in args.sections:
        function, weight = SECTIONS[name]
        bench.enter(name, weight * share)
        bench.tried("all of it", lambda function=function: function(bench))
        bench.free()
        found["about"]["seconds"] = round(time.perf_counter() - began, 1)
        file = gpu_tables.write(found, args.out)  # after every section, so that no figures are lost if the process ends
    print(f"\n{gpu_tables.page(found)}\nwrote {file}, and beside it the page and the chart")
    return file


def main() -> None:
    measure(arguments())


if __name__ == "__main__":
    main()
