"""The command line.

`python -m ds_seqpar show` prints the work of each rank in each step, or draws the work over time. `python -m ds_seqpar
memory` predicts the memory of a training step on each rank. `python -m ds_seqpar plan` sorts the configurations that
fit into memory by estimated time, before anything is launched. `python -m ds_seqpar schema` prints the JSON schema of
the settings, for editors. `deepspeed --module ds_seqpar tune` measures a training step of each of the best
configurations on the available ranks. `deepspeed --module ds_seqpar doctor` examines ranks, links, kernels and a small
copy of a model before training. `python -m ds_seqpar trace` joins the torch.profiler traces of all ranks into one file.
`python -m ds_seqpar prepare` compiles DeepSpeed's op on this machine, before ranks start. `python -m ds_seqpar
examples` copies the examples into a folder. `python -m ds_seqpar env` prints versions and devices, to paste into a bug
report.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys

from .. import __version__
from ..base.errors import ConfigError, SeqParError
from ..base.files import LARGEST, shown
from ..deepspeed.cpu_launch import op_lock
from . import examples, memory, options, plan, schema, show, trace

MODULES = (examples, memory, plan, schema, show, trace)  # commands that need no torch


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit code: 0, 1 if the doctor finds a problem, or 2 for invalid settings."""
    parser = argparse.ArgumentParser(prog="ds-seqpar", description=__doc__)
    parser.add_argument("--version", action="version", version=f"ds_seqpar {__version__}")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # passed to all ranks by DeepSpeed's launcher
    commands = parser.add_subparsers(dest="command", required=True)
    show.add_parser(commands)
    commands.add_parser("prepare", help="compile what DeepSpeed needs on this machine, before ranks start")
    memory.add_parser(commands)
    plan.add_parser(commands)
    commands.add_parser("schema", help="print the JSON schema of the settings, for editors")
    tune = commands.add_parser(
        "tune", help="measure a training step of the best plans, on all ranks: deepspeed --module ds_seqpar tune"
    )
    plan.add_request(tune, "default: what ranks see of their devices and hosts; else as of plan")
    tune.add_argument("--top", default="4", metavar="N", help="how many plans to measure; default: 4")
    tune.add_argument("--steps", default="1", metavar="N", help="timed steps of each, after one to warm up; default: 1")
    doctor = commands.add_parser(
        "doctor", help="examine a job before it trains, on all ranks: deepspeed --module ds_seqpar doctor"
    )
    doctor.add_argument(
        "--model", metavar="PLACE", help="folder of a model, or its config.json; default: a small Llama"
    )
    doctor.add_argument(
        "--quick", action="store_true", help='only what `"doctor": true` looks at before the first step'
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    options.add_settings(doctor)
    trace.add_parser(commands)
    examples.add_parser(commands)
    commands.add_parser("env", help="print versions and devices, to paste into a bug report")
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # file contents may include characters that the terminal cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    runs = {"prepare": _prepare, **{x.__name__.rsplit(".")[-1]: x.run for x in MODULES}}
    try:
        _check_numbers(args)
        code = runs.get(args.command, _run_later)(args) or 0
        sys.stdout.flush()
    except SeqParError as error:
        print(f"ds-seqpar: {error}", file=sys.stderr)
        return 2
    except options.Told:
        return 2
    except OSError as error:  # raised for stdout, which the interpreter flushes again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # for example, with `| head`
            print(
                f"ds-seqpar: stdout must be a place with room; got {error.strerror}, print elsewhere", file=sys.stderr
            )
            return 2
        return 0
    return code


def _check_numbers(args: argparse.Namespace) -> None:
    # arithmetic with integers above 64 bits may take forever
    for name, value in vars(args).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and abs(number) > LARGEST:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} must be a whole number of at most 64 bits; got {shown(number)}")


def _run_later(args: argparse.Namespace) -> int | None:
    """Import and run a command that needs torch."""
    return importlib.import_module(f".{args.command}", __package__).run(args)


def _prepare(args: argparse.Namespace) -> None:
    print("DeepSpeed's CPU op is compiled" if op_lock.compile_op() else "DeepSpeed compiles nothing on this machine")
