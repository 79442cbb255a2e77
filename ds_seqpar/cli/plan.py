"""`python -m ds_seqpar plan`: the fastest configuration that fits, its time and memory, and why others lost."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from ..analysis.draw import draw_timelines
from ..compiler.overlap.timeline import Timeline
from ..compiler.schedules.plan import columns
from ..errors import ConfigError, ranks_in_words
from ..files import read_text
from ..planner.footprint import FOOTPRINT_ITEMS, HOST_ITEMS
from ..planner.machine import DEFAULT, presets
from ..planner.plan import ALIKE, SIMULATED, PlanResult, plan, received_over_least
from ..planner.request import Request
from ..planner.search import Prediction, settings_in_words, timelines
from ..planner.steptime import STEP_ITEMS
from .assumed import HALVES, Answer
from .options import DIGITS, GIB, UNITS_HELP, Told, add_options, count, tokens

SUMMARY = "find the fastest configuration that fits a machine; nothing is run"
DRAWN = 32  # kinds of ranks in a picture
COLUMNS = ["s a sequence", "tokens/s", "MFU", "forward ms", "backward ms", "GiB a rank", "bytes/least", "configuration"]
REASONS = 16  # lines of "why not others" in the table


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("plan", help=SUMMARY, description=f"{SUMMARY}; what --set says is not searched")
    parser.add_argument("--documents", metavar="FILE", help="lengths of the documents that a sequence is a pack of")
    parser.add_argument("--sequences", metavar="N", help="sequences of a step; default: as many as there are ranks for")
    parser.add_argument("--window", metavar="N", help=f"tokens of the attention's window, {UNITS_HELP}")
    machine = f"the section's machine or {DEFAULT} by default; one of {', '.join(presets())}"
    add_options(parser, machine, "times are in seconds, sizes in bytes")
    parser.add_argument("--png", metavar="FILE", help="also draw the best one's attention of a layer over time")
    parser.add_argument("--perfetto", metavar="FILE", help="also write it for ui.perfetto.dev")


def run(args: argparse.Namespace) -> None:
    told, request = request_of(args)
    result = plan(request)
    answer = Answer(told, result.best.config, None if args.sequences is None else request.sequences)
    print(json.dumps({**as_json(result), **answer.for_json()}) if args.json else table(result, answer))
    for name, file in (("png", args.png), ("perfetto", args.perfetto)):
        if file is not None:
            line = _timeline(result)
            if name == "png":
                _draw(result, line, file)
            else:
                line.save(file)
            if not args.json:
                print(f"wrote {file}")


def request_of(args: argparse.Namespace) -> tuple[Told, Request]:
    """(what the command was told, the planner's question). Raises ConfigError for options or settings that do not
    fit."""
    documents = _documents(args.documents) if args.documents is not None else ()
    told = Told.of(args, sum(documents) or None, DEFAULT)
    job, machine = told.job, told.machine
    assert machine is not None  # the default one
    if args.sequences is not None:
        job = dataclasses.replace(job, sequences=count("--sequences", args.sequences), steps=None)
    request = Request(
        model=told.model,
        machine=machine,
        world=told.world,
        seq=told.seq,
        documents=documents,
        window=None if args.window is None else tokens("--window", args.window),
        batch=job.batch or 1,
        dtype=job.dtype,
        zero=job.zero,
        checkpointing=job.checkpointing,
        given=told.section(),
        sequences=job.sequences,
        sizes=job.sizes(told.world) if told.config.size == "auto" and job.sequences is not None else (),
        memory=told.memory,
    )
    return told, request


def _documents(file: str) -> tuple[int, ...]:
    """The lengths in a file: whole numbers, separated by blanks or line ends."""
    words = read_text(file, "--documents").split()
    wrong = (word for word in words or ["nothing"] if not (word.isdecimal() and len(word) <= DIGITS and int(word)))
    if (word := next(wrong, None)) is not None:
        raise ConfigError(
            f"--documents must be a file of lengths, whole numbers from 1 of at most {DIGITS} digits; {file} has "
            f"{word!r:.60}"
        )
    return tuple(map(int, words))


def _timeline(result: PlanResult) -> Timeline:
    ranks, inner = result.best.candidate.size, result.best.candidate.cp_size
    if 12 * ranks * inner > SIMULATED:
        raise ConfigError(
            f"a time line is simulated for small jobs only; got {ranks} ranks a sequence, take fewer "
            "or draw a schedule by python -m ds_seqpar show"
        )
    found = timelines(result.request, result.best)
    return found["backward"].after(found["forward"])


def _draw(result: PlanResult, timeline: Timeline, file: str) -> None:
    """Draws a row for each kind of rank: most do the same at the same times, and differ in their blocks alone."""
    groups = timeline.alike()
    shown, most = groups[:DRAWN], f", {DRAWN} of {len(groups)} kinds of ranks" * (len(groups) > DRAWN)
    title = f"{result.best.candidate}: attention of a layer, forward and then backward{most}"
    rows = {ranks[0]: ranks_in_words(ranks) for ranks in shown}
    draw_timelines({title: timeline}, file, rows, unit="ms; blocks are those of a row's first rank")


def table(result: PlanResult, answer: Answer) -> str:
    request, best = result.request, result.best
    unlisted = len(result.rejected) - REASONS
    what = f"{request.seq} tokens" + (f" in {len(request.documents)} documents" if request.documents else "")
    head = f"{what} on {request.world} ranks of {request.machine.name} ({request.machine.about})"
    rows = [COLUMNS]
    rows += [_row(result, one) for one in result.ranked]
    return "\n".join(
        [
            head,
            *answer.lines(),
            f"compared {result.considered} configurations, predicted and not run ({result.legal} possible ones, of "
            "which many do the same)",
            "",
            *columns(rows),
            "",
            f"The first row is the plainest of those within {ALIKE - 1:.1%} of the fastest. It takes",
            f"{_rank_hours(result)} (a rank is a GPU, or a process on CPUs).",
            f"tokens/s: of all ranks. {_mfu_words(request)}",
            "forward, backward: attention of one layer. bytes/least: received in forward by the busiest rank, over the",
            "least that any schedule with as much Ulysses could receive under full attention.",
            "",
            *answer.json_lines(),
            "",
            *_link_lines(best, request.model.layers),
            "",
            *_part_lines(result),
            "",
            "why not others:",
            *(f"  {who}: {why}" for who, why in result.rejected[:REASONS]),
            *[f"  and {unlisted} more reasons: --json lists all"][: unlisted > 0],
        ]
    )


def _rank_hours(result: PlanResult) -> str:
    """The cost of the best configuration, in rank hours."""
    hours = result.best.seconds * result.request.world / 3600
    return f"{hours:.3g} rank hours a sequence, {hours * 1e9 / result.request.seq:,.0f} for a billion tokens"


def _mfu(request: Request, one: Prediction) -> float | None:
    """Model flops over the most that all ranks could do in that time; None where the machine's peak is not known."""
    peak = request.machine.peak if request.dtype in HALVES else None
    return request.flops / (one.seconds * request.world * peak) if peak else None


def _mfu_words(request: Request) -> str:
    if request.machine.peak is None or request.dtype not in HALVES:
        return f"No MFU: the peak of {request.machine.name} in {request.dtype} is not known."
    return f"MFU: model flops, without what checkpoints repeat, over {request.machine.peak / 1e12:,.0f} TFLOP/s a rank."


def _row(result: PlanResult, one: Prediction) -> list[str]:
    layers = result.request.model.layers
    over = received_over_least(result, one)
    mfu = _mfu(result.request, one)
    words = f"{one.candidate}{_notes(one)}{'' if one.simulated else '; not simulated: it takes at least this'}"
    attention = (one.time.seconds_by_item[name] / layers * 1e3 for name in ("attention forward", "attention backward"))
    return [
        f"{one.seconds:.3f}", f"{result.request.seq / one.seconds:,.0f}", "-" if mfu is None else f"{mfu:.1%}",
        *(f"{ms:.2f}" for ms in attention), f"{one.memory.peak.total / GIB:.1f}",
        f"{over:.2f}" if over is not None else "-", words,
    ]  # fmt: skip


def _notes(one: Prediction) -> str:
    words = [f"{way} q" for way, side in zip(("forward", "backward"), one.travels, strict=True) if side == "q"]
    words += ["overlap"] * one.config.overlap
    words += settings_in_words(one.spared)
    return f" ({', '.join(words)})" if words else ""


def _link_lines(best: Prediction, layers: int) -> list[str]:
    head_chunks = best.config.head_chunks
    lines = ["attention of one layer, on the busiest rank:"]
    for name, way in (("forward", best.forward), ("backward", best.backward)):
        took = best.time.seconds_by_item[f"attention {name}"]
        share = way.compute * head_chunks * layers / took if took else 1.0
        near, far = (f"{head_chunks * size / GIB:.3f} GiB" for size in (way.inside, way.between))
        lines.append(
            f"  {name:<9} receives {near} from its node and {far} from others, in "
            f"{head_chunks * way.messages} messages; computes {min(1.0, share):.0%} of the time"
        )
    return lines


def _part_lines(result: PlanResult) -> list[str]:
    best = result.best
    took, peak = best.time, best.memory.peak
    lines = [f"one step, of {took.sequences} sequence{'s'[: took.sequences > 1]}: {took.seconds:.3f} s"]
    lines += [
        f"  {seconds:10.3f} s  {name}: {STEP_ITEMS[name]}" for name, seconds in took.seconds_by_item.items() if seconds
    ]
    lines += ["", f"memory: {peak.total / GIB:.2f} GiB on each rank at the peak ({peak.name})"]
    sizes = sorted(peak.bytes_by_item.items(), key=lambda item: -item[1])
    lines += [f"  {size / GIB:10.3f} GiB  {name}: {FOOTPRINT_ITEMS[name]}" for name, size in sizes]
    if (host := best.memory.host).total:
        node = host.total * result.request.budget.ranks_per_node
        lines += [f"and {host.total / GIB:.2f} GiB of host memory, {node / GIB:.1f} GiB a node"]
        lines += [f"  {size / GIB:10.3f} GiB  {name}: {HOST_ITEMS[name]}" for name, size in host.bytes_by_item.items()]
    if best.memory.drives:
        lines.append(f"and {best.memory.drives / GIB:.2f} GiB on drives")
    return lines


def as_json(result: PlanResult) -> dict[str, Any]:
    """The result for --json, in seconds and bytes."""
    return {
        "section": result.section,
        "simulated": result.simulated,
        "legal": result.legal,
        "ranked": [_numbers(result, one) for one in result.ranked],
        "rejected": [{"who": who, "why": why} for who, why in result.rejected],
    }


def _numbers(result: PlanResult, one: Prediction) -> dict[str, Any]:
    ways = {"forward": one.forward, "backward": one.backward}
    return {
        "section": one.config.section(),
        "seconds_a_sequence": one.seconds,
        "tokens_per_second": result.request.seq / one.seconds,
        "mfu": _mfu(result.request, one),
        "step": {"seconds": one.time.seconds, "sequences": one.time.sequences, "parts": dict(one.time.seconds_by_item)},
        "simulated": one.simulated,
        "memory": {
            "total": one.memory.peak.total,
            "parts": dict(one.memory.peak.bytes_by_item),
            "host": one.memory.host.total,
        },
        "travels": one.travels,
        "bytes_over_floor": received_over_least(result, one),
        "attention": {way: dataclasses.asdict(its) for way, its in ways.items()},
    }
