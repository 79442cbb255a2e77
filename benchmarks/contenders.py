"""The notation for contenders of a benchmark.

    ring   mesh=4,1,4   attention2d=4,4+overlap   u4/attention2d=2,2   u8/ring+layout=contiguous   u16
    auto   deepspeed

Contenders of this library are written as `uN`, SCHEDULE or `uN/SCHEDULE`, with the schedule's shape after `=`, and any
`+KEY=VALUE` of the "sequence_parallel" section. With `auto`, the planner chooses all remaining settings, including
those that save memory. Peers have their own settings: `deepspeed` is DeepSpeed's Ulysses (in a training step with its
recipe for long sequences), and `plain` is DeepSpeed without sequence parallelism.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import tables
from ds_seqpar.core.compiler.schedules import SCHEDULES

PEERS = ("deepspeed", "plain")


class Spec(NamedTuple):
    """A parsed contender.

    Attributes:
        name: The original notation.
        peer: The name of the peer; None for a contender of this library.
        section: The "sequence_parallel" section without `size`; for a peer, its own settings.
    """

    name: str
    peer: str | None
    section: dict[str, Any]


def parse(text: str) -> Spec:
    """Parse a contender. Raises OptionError for invalid notation."""
    base, *words = text.split("+")
    extra = dict(setting(word) if "=" in word else (word, True) for word in words)
    if base in PEERS:
        return Spec(text, base, extra)
    if base == "auto":
        return Spec(text, None, {"memory": "auto"} | extra)
    match = re.fullmatch(r"(?:u(\d+)(?:/(?=.)|$))?(.*)", base)
    assert match
    schedule, _, shape = (match[2] or ("ring" if match[1] else "")).partition("=")
    settings = {"ulysses": int(match[1] or 1), "schedule": schedule, **_shape(text, schedule, shape), **extra}
    return Spec(text, None, settings)


def add(parser: argparse.ArgumentParser, *default: str, parse: Callable[[str], Spec] = parse) -> None:
    """Add the command-line argument `contenders`, a list of Spec. `parse` reads one."""
    parser.add_argument("contenders", nargs="*", metavar="CONTENDER", type=parse,
                        default=[*map(parse, default)], help=f"default: {' '.join(default)}")  # fmt: skip


def setting(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE, where the value is JSON or a word."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _shape(text: str, schedule: str, shape: str) -> dict[str, Any]:
    if schedule not in SCHEDULES:
        known = ", ".join((*SCHEDULES, "auto", *PEERS))
        raise tables.OptionError(f"a contender must be uN, SCHEDULE or uN/SCHEDULE; got {text!r}, use one of {known}")
    names = [one.name for one in SCHEDULES[schedule].settings]
    counts, lengths = shape.split(",") if shape else [], (0, 3) if schedule == "mesh" else range(len(names) + 1)
    if len(counts) not in lengths or not all(map(str.isdecimal, counts)):
        wanted = "a,b,R" if schedule == "mesh" else ",".join(names) or "nothing"
        raise tables.OptionError(f"{schedule}'s shape is {wanted} in whole numbers; got {text!r}")
    numbers = [*map(int, counts)]
    return {"mesh": numbers} if schedule == "mesh" and numbers else dict(zip(names, numbers, strict=False))
