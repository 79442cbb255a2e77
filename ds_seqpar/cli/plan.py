"""Implementation of `python -m ds_seqpar plan`, which sorts the configurations that fit into memory by estimated time.

The output also lists the reasons for rejecting all other configurations.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.compiler.schedules.plan import columns
from ..planner.machine import DEFAULT, Machine, presets
from ..planner.plan import Planned, PlanResult, name_of, plan, rough, settings_in_words
from ..planner.request import Request
from . import packs
from .assumed import Answer
from .options import (
    GIB,
    UNITS_HELP,
    Inputs,
    add_images,
    add_lengths,
    add_options,
    add_ranks,
    count,
    lengths_in,
    tokens,
)

SUMMARY = "order the configurations that fit a machine by a plain estimate of their time; nothing is run"
HEAD = ["s a sequence", "tokens/s", "GiB a rank", "MiB in node", "MiB between", "messages", "configuration"]
REASONS = 16  # maximum number of "why not others" lines in the table
MIB = 2**20


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("plan", help=SUMMARY, description=f"{SUMMARY}; what --set says is not searched")
    add_ranks(parser)
    add_lengths(parser)
    add_images(parser)
    add_request(parser, f"the section's machine or {DEFAULT} by default; one of {', '.join(presets())}")


def add_request(parser: argparse.ArgumentParser, machine: str) -> None:
    """Add the options that `request_of` reads, except the options for ranks.

    `machine` is the help text for `--machine`.
    """
    parser.add_argument("--documents", metavar="FILE", help="lengths of the documents that a sequence is a pack of")
    parser.add_argument("--sequences", metavar="N", help="sequences of a step; default: as many as there are ranks for")
    parser.add_argument("--window", metavar="N", help=f"tokens of the attention's window, {UNITS_HELP}")
    add_options(parser, machine, "times are in seconds, sizes in bytes")


def run(args: argparse.Namespace) -> None:
    if args.lengths is not None:
        inputs = Inputs.of(args, machine=Machine.load(DEFAULT))
        inputs.require_machine(args)
        window = None if args.window is None else tokens("--window", args.window)
        packs.run_plan(inputs, window, args.json)
        return
    inputs, request = request_of(args, Machine.load(DEFAULT))
    inputs.require_machine(args)
    result = plan(request)
    answer = Answer(inputs, result.best.config, None if args.sequences is None else request.job.sequences)
    if args.json:
        rejected = [{"who": who, "why": why} for who, why in result.rejected]
        ranked = [numbers_of(request, planned) for planned in result.ranked]
        section = result.best.config.section()
        print(json.dumps({"section": section, "ranked": ranked, "rejected": rejected, **answer.for_json()}))
    else:
        print("\n".join(lines_of(result, answer)))


def request_of(args: argparse.Namespace, machine: Machine) -> tuple[Inputs, Request]:
    """Return (the inputs of the command, the planner's request).

    Args:
        machine: The machine to assume if none is named.

    Raises:
        ConfigError: The options or settings are invalid.
    """
    documents = lengths_in("--documents", args.documents) if args.documents is not None else ()
    inputs = Inputs.of(args, sum(documents) or None, machine)
    window = None if args.window is None else tokens("--window", args.window)
    job = dataclasses.replace(inputs.job, documents=documents, window=window)
    if args.sequences is not None:
        job = dataclasses.replace(job, sequences=count("--sequences", args.sequences), steps=None)
    return inputs, inputs.request(job)


def lines_of(result: PlanResult, answer: Answer) -> list[str]:
    request, hidden = result.request, len(result.rejected) - REASONS
    return [
        title(request),
        *answer.lines(),
        rates(request.machine, request.job.dtype),
        "estimated, and not run: `ds-seqpar tune`, with the same options, measures the first ones on ranks",
        "",
        *columns([HEAD, *_rows(request, result.ranked)]),
        "",
        "MiB, messages: what a rank receives in attention of a layer, forward and backward.",
        "",
        *answer.json_lines(),
        "",
        "why not others:",
        *(f"  {configurations}: {why}" for configurations, why in result.rejected[:REASONS]),
        *[f"  and {hidden} more reasons: --json lists all"][: hidden > 0],
    ]


def title(request: Request) -> str:
    documents = f" in {len(request.job.documents)} documents" if request.job.documents else ""
    machine = request.machine
    return f"{request.seq} tokens{documents} on {request.world} ranks of {machine.name} ({machine.about})"


def rates(machine: Machine, dtype: str) -> str:
    """Return a line with the rates used in the estimate."""
    attention, matrices = (rates.get(dtype, 0) / 1e12 for rates in (machine.attention, machine.matrices))
    links = f"{machine.inside.rate / 1e9:.3g} GB/s in a node and {machine.between.rate / 1e9:.3g} between nodes"
    return f"rates of a rank: attention {attention:.3g} TFLOP/s, matrix products {matrices:.3g}, links {links}"


def _rows(request: Request, ranked: Sequence[Planned]) -> Iterator[list[str]]:
    """Yield a table row for each distinct answer.

    Schedules with the same estimated time on the same number of ranks share one row.
    """
    answers: dict[tuple, list[Planned]] = {}
    for planned in ranked:
        config = planned.config
        key = config.size, config.ulysses, rough(planned.seconds), tuple(settings_in_words(planned.spared))
        answers.setdefault(key, []).append(planned)
    for planned, *others in answers.values():
        names = ", ".join(dict.fromkeys(other.config.schedule for other in others))
        answer = in_words(planned) + (f"; or {names}" if names else "")
        yield [
            f"{planned.seconds:.3g}", f"{request.seq / planned.seconds:,.0f}",
            f"{planned.memory.peak.total / GIB:.1f}", *traffic(planned), answer,
        ]  # fmt: skip


def traffic(planned: Planned) -> list[str]:
    """Return the table cells for the data that a rank receives per layer in attention, in forward and backward."""
    forward, backward = planned.estimate.forward, planned.estimate.backward
    sizes = forward.inside + backward.inside, forward.between + backward.between
    return [*(f"{size / MIB:,.1f}" for size in sizes), str(forward.messages + backward.messages)]


def in_words(planned: Planned) -> str:
    notes = settings_in_words(planned.spared)
    return name_of(planned.config) + (f" ({', '.join(notes)})" if notes else "")


def numbers_of(request: Request, planned: Planned) -> dict[str, Any]:
    """Return a configuration's entry for `--json`, with times in seconds and sizes in bytes."""
    memory, estimate = planned.memory, planned.estimate
    return {
        "section": planned.config.section(),
        "seconds_a_sequence": planned.seconds,
        "tokens_per_second": request.seq / planned.seconds,
        "memory": {
            "total": memory.peak.total, "parts": dict(memory.peak.bytes_by_item), "host": memory.host.total,
        },
        "attention": {"forward": estimate.forward._asdict(), "backward": estimate.backward._asdict()},
    }  # fmt: skip
