"""A first hour on GPUs: tests, kernels, the node and the longest sequences, in one file to send in.

    python -m benchmarks.gpu.first_hour                 # what `make gpu` does: 1 to 8 GPUs of one node, at most an hour
    python -m benchmarks.gpu.first_hour --minutes 15    # what `make gpu MINUTES=15` does
    python -m benchmarks.gpu.first_hour --stand-in      # small sizes on the CPU: shows that it runs to its end

Each part is a process with a share of --minutes, and is ended when that is over; later parts have what it leaves. What
could be wrong without a word comes first, then the node's ratios. A part that fails is named, and the next one runs.
The file is written before and after every part. Beside it a folder has each part's output and figures. Exit status: 0
if every part ran to its end, else 1.
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
from benchmarks.gpu.bench import about_apart
from examples.demo import HIDDEN

STATE = "index,name,driver_version,memory.total,memory.used,power.limit,clocks.max.sm,pcie.link.gen.max,compute_mode"
PROBE = 10.0  # seconds between two looks at the memory of devices
PATIENCE = 15.0  # seconds in which a part that was asked to end may write what it found
EXACT = ("kernels", "attention", "recurrent")  # tests of what could be wrong without a word
TAIL = 6000  # characters of the output of a part that failed


@dataclasses.dataclass(frozen=True)
class Part:
    """A command of the hour.

    Args:
        weight: Its share of the time.
        command: Its words may have {seconds}, {folder} and {gpus}, which are filled in. In the folder it writes files
            of figures, or pytest's tests.xml.
        gpus: How many it needs.
    """

    name: str
    weight: float
    command: str
    gpus: int = 1


def parts(stand_in: bool, memory: int) -> list[Part]:
    """memory: bytes of a device."""
    more = " --stand-in" * stand_in
    one = f"python -m benchmarks.gpu{more} --out {{folder}} --seconds {{seconds}}"
    # of a stand-in the bodies that CPUs can run too; a test that hangs leaves time for the others
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
    """Return what this machine lacks for GPUs, and the line to run; None where it lacks nothing."""
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
    if not include.exists():  # Triton compiles what launches its kernels
        return f"Python's headers for Triton; got no {include}, run: sudo apt install python{python}-dev"
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))):
        return "a C compiler for Triton and DeepSpeed; got none, run: sudo apt install build-essential"
    return None


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = tables.parser(__doc__, stand_in=False)
    parser.add_argument("--minutes", type=float, default=None, help="for all parts; default: 60, of a stand-in 10")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="the folder of the file")
    args = parser.parse_args(given)
    if not args.stand_in and (need := unmet()):
        parser.error(f"the hour needs {need}")
    args.minutes = args.minutes if args.minutes is not None else 10.0 if args.stand_in else 60.0
    if not 0 < args.minutes < 1440:
        parser.error(f"--minutes must be above 0 and below a day; got {args.minutes:g}")
    return args


def hour(parts: Sequence[Part], about: dict[str, Any], seconds: float, out: Path) -> bool:
    """Runs the parts that there are GPUs for; returns whether each ran to its end. about: of the machine."""
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
            gpu_tables.write(found, out)  # what ends this process takes nothing away
            print(f"{title}, at most {limit / 60:.1f} min; its output: {place}.log", flush=True)
            row |= run(command, limit, Path(f"{place}.log"), not about["stand_in"])
            collect(place, row, found)
            about["seconds"] = round(time.perf_counter() - began, 1)
        print(f"{title}, {row['result']} after {row['seconds'] / 60:.1f} min", flush=True)
    file = gpu_tables.write(found, out)
    print(f"\n{gpu_tables.parts(rows)}\n\nwrote {file}: the one file to send in; its page and chart lie beside it")
    return all(row["result"].startswith(("done", "left out")) for row in rows)


def run(command: list[str], limit: float, log: Path, on_gpus: bool) -> dict[str, Any]:
    """Runs a command in a process group of its own, and ends all of it at the limit; returns how it ended."""
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
    """Ends the process and all that it started: it is asked first, for then pytest writes what it found."""
    for word in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, word)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a device may outlive it
            process.wait(PATIENCE)


def collect(place: Path, row: dict[str, Any], found: dict[str, Any]) -> None:
    """Adds to the file what a part has written, however it ended."""
    try:
        if (place / "tests.xml").exists():
            row["tests"] = outcomes(place / "tests.xml")
            return
        files = [gpu_tables.load(file) for file in place.glob("*.json")]
    except (ValueError, ElementTree.ParseError) as reason:  # it was ended while it wrote
        found["left_out"].append(f"{row['part']}: {reason}")
        return
    row["figures"] = sum(len(one["records"]) for one in files)
    for one in files:
        found["records"] += one["records"]
        found["left_out"] += one["left_out"]
    if row["result"] == "done" and not row["figures"]:
        row["result"] = "failed: it wrote no figures"


def outcomes(file: Path) -> dict[str, Any]:
    """What became of tests, of pytest's XML: names of all that did not pass."""
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
    """Lines of nvidia-smi, one a device; none where it is missing or does not answer."""
    words = ["nvidia-smi", "--format=csv,noheader,nounits", f"--query-gpu={query}"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def main() -> None:
    args = arguments()
    for word in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # so that the part that runs is ended too
        if word == signal.SIGINT or signal.getsignal(word) != signal.SIG_IGN:  # nohup's stays
            signal.signal(word, lambda *_: sys.exit("ended by a signal; the file has what was found before"))
    about = about_apart(args.stand_in, 2 if args.stand_in else min(8, torch.cuda.device_count()))
    about["devices"] = {"fields": STATE, "lines": [] if args.stand_in else smi(STATE)}
    sys.exit(not hour(parts(args.stand_in, about.get("memory", 2**24)), about, 60 * args.minutes, args.out))


if __name__ == "__main__":
    main()
