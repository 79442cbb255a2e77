"""Implementation of `python -m ds_seqpar trace`, which joins the ranks' torch.profiler traces for ui.perfetto.dev."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Mapping
from typing import Any

from ..base.errors import ConfigError, ranks_in_words
from ..base.files import write_text

Trace = Mapping[str, Any]  # in Chrome's trace event format, as written by torch.profiler
# events that are replaced, since each rank's processes get new names and numbers
PROCESS = ("process_name", "process_labels", "process_sort_index")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("trace", help="join the traces that torch.profiler wrote, one a rank, into one file")
    files = "of export_chrome_trace or tensorboard_trace_handler, one of each rank; may end with .gz"
    parser.add_argument("files", nargs="+", metavar="FILE", help=files)
    parser.add_argument("-o", "--output", default="trace.json", metavar="FILE", help="default: trace.json")


def run(args: argparse.Namespace) -> None:
    by_rank: dict[int, Trace] = {}
    for path in args.files:
        trace = _read(path)
        rank = trace["distributedInfo"]["rank"]
        if rank in by_rank:
            raise ConfigError(f"joining needs one trace of each rank; got a second one of rank {rank}, {path}")
        by_rank[rank] = trace
    write_text(args.output, json.dumps(joined(by_rank)) + "\n", "a trace")
    print(f"wrote {args.output}, with {ranks_in_words(sorted(by_rank))}, for ui.perfetto.dev")
    if len({trace.get("host_name") for trace in by_rank.values()}) > 1:
        print("times are those of each host's clock: nothing corrects what the clocks of several hosts differ by")


def joined(by_rank: Mapping[int, Trace]) -> dict[str, Any]:
    """Return a single trace in which rank 3 has a process "rank 3", and its GPU has a process "rank 3 GPU 0"."""
    events: list[dict[str, Any]] = []
    pids: dict[tuple[int, int], int] = {}
    arrows: dict[tuple[int, Any], int] = {}
    start = min(trace.get("baseTimeNanoseconds", 0) for trace in by_rank.values())
    for rank, trace in sorted(by_rank.items()):
        later = (trace.get("baseTimeNanoseconds", 0) - start) / 1e3  # us
        labels = {e["pid"]: e["args"]["labels"] for e in trace["traceEvents"] if e["name"] == "process_labels"}
        # the profiler lists all of a host's GPUs, and lists itself under pids that are strings
        shown = {e["pid"] for e in trace["traceEvents"] if e["ph"] == "X" and isinstance(e["pid"], int)}
        for pid in sorted(shown, key=lambda pid: labels.get(pid) != "CPU"):
            number = pids[rank, pid] = len(pids)
            name = f"rank {rank} {labels.get(pid, '')}".removesuffix(" CPU").rstrip()
            events += [
                {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}},
                {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}},
            ]
        for event in trace["traceEvents"]:
            if event["pid"] in shown and event["name"] not in PROCESS:
                moved = {**event, "pid": pids[rank, event["pid"]], "ts": event.get("ts", 0) + later}
                if "id" in event:  # both ends of an arrow have the same id
                    moved["id"] = arrows.setdefault((rank, event["id"]), len(arrows))
                events.append(moved)
    return {"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": start}


def _read(path: str) -> Trace:
    """Return the trace in a file. Raise ConfigError unless the file contains a rank's trace."""
    needs = "joining needs traces that torch.profiler wrote on ranks, after init_process_group; got"
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            trace = json.load(file)
    except (OSError, EOFError, ValueError, RecursionError) as error:  # ValueError: not UTF-8 or not JSON
        raise ConfigError(f"{needs} {path}: {error}") from None
    if not isinstance(trace, dict) or "traceEvents" not in trace or "rank" not in trace.get("distributedInfo", ()):
        raise ConfigError(f"{needs} {path}, which names no rank")
    return trace
