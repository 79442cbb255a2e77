"""A first hour on GPUs: tests, kernels, the node and the longest sequences, with all results in one file to submit.

    python -m benchmarks.gpu.first_hour                 # same as `make gpu`: 1 to 8 GPUs of one node, at most an hour
    python -m benchmarks.gpu.first_hour --minutes 15    # same as `make gpu MINUTES=15`
    python -m benchmarks.gpu.first_hour --stand-in      # small sizes on the CPU, only to test the script

Each part runs as a process with a share of --minutes, and is stopped when its time is over. Time that a part does not
use is available to later parts. Tests for silent errors run first, followed by the node's ratios. If a part fails, the
failure is reported and the next part runs. The results file is written before and after every part. A folder next to
the file contains the output and figures of each part. The exit status is 0 if every part ran to its end, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks import tables
from benchmarks.gpu import tables as gpu_tables
from benchmarks.gpu.bench import OUT, about_apart
from examples.demo import HIDDEN

STATE = "index,name,driver_version,memory.total,memory.used,power.limit,clocks.max.sm,pcie.link.gen.max,compute_mode"
PROBE = 10.0  # seconds between checks of device memory
PATIENCE = 15.0  # seconds for a stopped part to write its results
EXACT = ("kernels", "attention", "recurrent")  # tests for silent errors
TAIL = 6000  # characters of a failed part's output to keep


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the hour: a command with a share of the time.

    Args:
        weight: The share of time.
        command: The command line, with the placeholders {seconds}, {folder} and {gpus}. The command writes JSON files
            with figures, or pytest's tests.xml, to the folder.
        gpus: The number of GPUs that the command needs.
    """

    name: str
    weight: float
    command: str
    gpus: int = 1


def parts(stand_in: bool, memory: int) -> list[Part]:
    """Return the commands to run during the hour. `memory` is the number of bytes of a device."""
    more = " --stand-in" * stand_in
    one = f"python -m benchmarks.gpu{more} --out {{folder}} --seconds {{seconds}}"
    # a stand-in runs the tests that CPUs support; the timeout keeps a hanging test from blocking the others
    tests = f"python -m pytest -v -rs --timeout 300 --junitxml {{folder}}/tests.xml -m '{'not ' * stand_in}gpu'"
    first = [f"tests/gpu/test_{name}_gpu.py" for name in EXACT]
    return [
        Part("exact", 0.2, f"{tests} {' '.join(first)}"),
        Part("tests", 0.15, f"{tests} tests/gpu {' '.join(f'--ignore {file}' for file in first)}"),
        Part("node", 0.25, f"python -m benchmarks.gpu.node{more} --out {{folder}} --ranks {{gpus}}", gpus=2),
        Part("kernels", 0.15, f"{one} --sections kernels"),
        Part("layers", 0.12, f"{one} --sections ranks checkpoints host"),
        Part("longest", 0.13, f"{one} --sections longest --room {memory >> 20}"),
    ]


def unmet() -> str | None:
    """Return the missing requirement for GPUs with its remedy, or None."""
    include = Path(sysconfig.get_paths()["include"], "Python.h")
    python, torch_version = f"{sys.version_info.major}.{sys.version_info.minor}", torch.__version__.partition("+")[0]
    drivers = ", ".join(dict.fromkeys(smi("driver_version")))
    install = f'pip install "torch=={torch_version}" --index-url ... with the index of pytorch.org/get-started/locally'
    if not torch.cuda.is_available():
        if not drivers:
            return "a GPU and its driver; nvidia-smi lists none, see that it does (--stand-in tries the CPU)"
        if torch.version.cuda is None:
            return f"a torch for CUDA; got {torch.__version__} beside driver {drivers}, run .venv/bin/{install}"
        return (
            f"a driver for CUDA {torch.version.cuda}, which torch {torch.__version__} was built for; got {drivers}, "
            f"update it, or run .venv/bin/{install} for an older CUDA (CUDA 13 needs driver 580, CUDA 12.6 driver 560)"
        )
    if not include.exists():  # Triton compiles its kernel launchers
        return f"Python's headers for Triton; got no {include}, run: sudo apt install python{python}-dev"
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))):
        return "a C compiler for Triton and DeepSpeed; got none, run: sudo apt install build-essential"
    return None


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = tables.parser(__doc__, stand_in=False, out=OUT)
    parser.add_argument("--minutes", type=float, default=None, help="for all parts; default: 60, of a stand-in 10")
    args = parser.parse_args(given)
    if not args.stand_in and (need := unmet()):
        parser.error(f"the hour needs {need}")
    args.minutes = args.minutes if args.minutes is not None else 10.0 if args.stand_in else 60.0
    if not 0 < args.minutes < 1440:
        parser.error(f"--minutes must be above 0 and below a day; got {args.minutes:g}")
    return args


def hour(parts: Sequence[Part], about: dict[str, Any], seconds: float, out: Path) -> bool:
    """Run the parts for which there are enough GPUs, and return whether all of them completed.

    `about` describes the machine.
    """
    folder = out / time.strftime("parts-%Y-%m-%d-%H%M%S")
    rows: list[dict[str, Any]] = [{"part": part.name, "result": "not begun", "seconds": 0.0} for part in parts]
    found = {"about": about, "parts": rows, "records": [], "left_out": []}
    began, weight = time.perf_counter(), sum(part.weight for part in parts if part.gpus <= about["ranks"])
    for number, (part, row) in enumerate(zip(parts, rows, strict=True), 1):
        title, place = f"{number} of {len(parts)}: {part.name}", folder / part.name
        if part.gpus > about["ranks"]:
            row["result"] = f"left out: needs {part.gpus} GPUs; got {about['ranks']}"
        else:
            limit = (began + seconds - time.perf_counter()) * part.weight / weight
            weight -= part.weight
            place.mkdir(parents=True)
            values = {"seconds": f"{0.75 * limit:.0f}", "folder": place, "gpus": about["ranks"]}
            command = [word.format(**values) for word in shlex.split(part.command)]
            row |= {"result": "not ended", "command": shlex.join(command), "limit": limit}
            gpu_tables.write(found, out)  # so that nothing is lost if this process ends
            print(f"{title}, at most {limit / 60:.1f} min; its output: {place}.log", flush=True)
            row |= run(command, limit, Path(f"{place}.log"), not about["stand_in"])
            collect(place, row, found)
            about["seconds"] = round(time.perf_counter() - began, 1)
        print(f"{title}, {row['result']} after {row['seconds'] / 60:.1f} min", flush=True)
    file = gpu_tables.write(found, out)
    print(f"\n{gpu_tables.parts(rows)}\n\nwrote {file}: the one file to send in; its page and chart lie beside it")
    return all(row["result"].startswith(("done", "left out")) for row in rows)


def run(command: list[str], limit: float, log: Path, on_gpus: bool) -> dict[str, Any]:
    """Run a command in its own process group, and kill the group at the time limit. Return the outcome."""
    command = [sys.executable if command[0] == "python" else command[0], *command[1:]]
    environment = os.environ | ({"GPU_TESTS": "1"} if on_gpus else HIDDEN)
    began, most = time.perf_counter(), dict[int, int]()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True, env=environment)  # fmt: skip
        try:
            while process.poll() is None and (left := began + limit - time.perf_counter()) > 0:
                for device, used in enumerate(smi("memory.used") if on_gpus else []):
                    most[device] = max(most.get(device, 0), int(used) if used.isdigit() else 0)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(left, PROBE))
        finally:
            code = process.poll()
            end(process)
    row: dict[str, Any] = {"result": "done", "exit": code, "seconds": round(time.perf_counter() - began, 1)}
    row["memory_mib"] = [*most.values()]
    if code != 0:
        row["result"] = (f"not done after {limit:.0f} s" if code is None else
                         f"failed with exit status {code}" if code > 0 else f"ended by signal {-code}")  # fmt: skip
        row["log"] = log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
    return row


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process group, first with SIGINT so that pytest can write its results."""
    for word in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, word)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a device may survive SIGKILL
            process.wait(PATIENCE)


def collect(place: Path, row: dict[str, Any], found: dict[str, Any]) -> None:
    """Add the results that a part has written to the file, even if the part failed."""
    try:
        if (place / "tests.xml").exists():
            row["tests"] = outcomes(place / "tests.xml")
            return
        files = [gpu_tables.load(file) for file in place.glob("*.json")]
    except (ValueError, ElementTree.ParseError) as reason:  # stopped while writing
        found["left_out"].append(f"{row['part']}: {reason}")
        return
    row["figures"] = sum(len(one["records"]) for one in files)
    for one in files:
        found["records"] += one["records"]
        found["left_out"] += one["left_out"]
    if row["result"] == "done" and not row["figures"]:
        row["result"] = "failed: it wrote no figures"


def outcomes(file: Path) -> dict[str, Any]:
    """Summarize pytest's XML: the number of passed tests, and the names of all others."""
    found: dict[str, Any] = {"passed": 0, "failed": [], "skipped": []}
    for case in ElementTree.parse(file).iter("testcase"):
        kinds, name = {child.tag for child in case}, f"{case.get('classname')}.{case.get('name')}"
        if kinds & {"failure", "error"}:
            found["failed"].append(name)
        elif "skipped" in kinds:
            found["skipped"].append(name)
        else:
            found["passed"] += 1
    return found


def smi(query: str) -> list[str]:
    """Return nvidia-smi's lines, one per device; empty if nvidia-smi is missing or does not answer."""
    words = ["nvidia-smi", "--format=csv,noheader,nounits", f"--query-gpu={query}"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def main() -> None:
    args = arguments()
    for word in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # so that the running part is stopped too
        if word == signal.SIGINT or signal.getsignal(word) != signal.SIG_IGN:  # keep the handler of nohup
            signal.signal(word, lambda *_: sys.exit("ended by a signal; the file has what was found before"))
    about = about_apart(args.stand_in, 2 if args.stand_in else min(8, torch.cuda.device_count()))
    about["devices"] = {"fields": STATE, "lines": [] if args.stand_in else smi(STATE)}
    sys.exit(not hour(parts(args.stand_in, about.get("memory", 2**24)), about, 60 * args.minutes, args.out))


if __name__ == "__main__":
    main()
