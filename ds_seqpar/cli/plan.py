"""`python -m ds_seqpar plan`: the fastest configuration that fits, its time and memory, and why others are rejected."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from ..analysis.draw import draw_timeline
from ..compiler.overlap.timeline import Timeline
from ..compiler.schedules.plan import columns
from ..errors import ConfigError, ranks_in_words
from ..files import read_text
from ..planner.footprint import FOOTPRINT_ITEMS, HOST_ITEMS
from ..planner.machine import DEFAULT, presets
from ..planner.plan import ALIKE, PlanResult, plan, received_over_least, timelines
from ..planner.predict import Prediction, settings_in_words
from ..planner.price import DIRECTIONS
from ..planner.prompt import PROMPT_ITEMS, cache_bytes, prompt_seconds
from ..planner.request import Request
from ..planner.steptime import STEP_ITEMS
from .assumed import HALVES, Answer
from .options import DIGITS, GIB, UNITS_HELP, Inputs, add_options, count, tokens

SUMMARY = "find the fastest configuration that fits a machine; nothing is run"
DRAWN = 32  # most groups of equal ranks in a picture
SIMULATED = 15_000  # instructions up to which a time line is simulated
COLUMNS = ["s a sequence", "tokens/s", "MFU", "forward ms", "backward ms", "GiB a rank", "bytes/least", "configuration"]
REASONS = 16  # most lines of "why not others" in the table


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
    inputs, request = request_of(args)
    result = plan(request)
    answer = Answer(inputs, result.best.config, None if args.sequences is None else request.sequences)
    prompt = None if args.prompt is None else prompts(result, tokens("--prompt", args.prompt))
    if args.json:
        print(json.dumps({**as_json(result), **answer.for_json(), "prompt": prompt}))
    else:
        print("\n".join([table(result, answer), *(prompt_lines(result, prompt) if prompt else [])]))
    for name, file in (("png", args.png), ("perfetto", args.perfetto)):
        if file is not None:
            timeline = _timeline(result)
            if name == "png":
                _draw(result, timeline, file)
            else:
                timeline.save(file)
            if not args.json:
                print(f"wrote {file}")


def request_of(args: argparse.Namespace) -> tuple[Inputs, Request]:
    """Return (the inputs of the command, the planner's request). Raise ConfigError for options or settings that do not
    fit."""
    documents = _documents(args.documents) if args.documents is not None else ()
    inputs = Inputs.of(args, sum(documents) or None, DEFAULT)
    window = None if args.window is None else tokens("--window", args.window)
    job = dataclasses.replace(inputs.job, documents=documents, window=window)
    if args.sequences is not None:
        job = dataclasses.replace(job, sequences=count("--sequences", args.sequences), steps=None)
    sizes = job.sizes(inputs.world) if inputs.config.size == "auto" and job.sequences is not None else ()
    assert inputs.machine is not None  # the default one
    return inputs, job.request(inputs.machine, inputs.world, inputs.section(), sizes, inputs.memory)


def _documents(file: str) -> tuple[int, ...]:
    """Return the lengths in a file: whole numbers, separated by blanks or line ends."""
    words = read_text(file, "--documents").split()
    invalid = (word for word in words or ["nothing"] if not (word.isdecimal() and len(word) <= DIGITS and int(word)))
    if (word := next(invalid, None)) is not None:
        raise ConfigError(
            f"--documents must be a file of lengths, whole numbers from 1 of at most {DIGITS} digits; {file} has "
            f"{word!r:.60}"
        )
    return tuple(map(int, words))


def _timeline(result: PlanResult) -> Timeline:
    ranks, cp_size = result.best.candidate.size, result.best.candidate.cp_size
    if 12 * ranks * cp_size > SIMULATED:
        raise ConfigError(
            f"a time line is simulated for small jobs only; got {ranks} ranks a sequence, take fewer "
            "or draw a schedule by python -m ds_seqpar show"
        )
    timeline_of = timelines(result.request, result.best)
    return timeline_of["backward"].after(timeline_of["forward"])


def _draw(result: PlanResult, timeline: Timeline, file: str) -> None:
    """Draw a row for each group of equal ranks: most do the same at the same times, and differ only in their
    blocks."""
    groups = timeline.alike()
    shown, omitted = groups[:DRAWN], f", {DRAWN} of {len(groups)} kinds of ranks" * (len(groups) > DRAWN)
    title = f"{result.best.candidate}: attention of a layer, forward and then backward{omitted}"
    rows = {ranks[0]: ranks_in_words(ranks) for ranks in shown}
    draw_timeline(timeline, title, file, rows, unit="ms; blocks are those of a row's first rank")


def table(result: PlanResult, answer: Answer) -> str:
    request, best = result.request, result.best
    unlisted = len(result.rejected) - REASONS
    data = f"{request.seq} tokens" + (f" in {len(request.documents)} documents" if request.documents else "")
    head = f"{data} on {request.world} ranks of {request.machine.name} ({request.machine.about})"
    rows = [COLUMNS]
    rows += [_row(result, prediction) for prediction in result.ranked]
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
            *_link_lines(best, request.model.attending),
            "",
            *_part_lines(result),
            "",
            "why not others:",
            *(f"  {configurations}: {why}" for configurations, why in result.rejected[:REASONS]),
            *[f"  and {unlisted} more reasons: --json lists all"][: unlisted > 0],
        ]
    )


def _rank_hours(result: PlanResult) -> str:
    hours = result.best.seconds * result.request.world / 3600
    return f"{hours:.3g} rank hours a sequence, {hours * 1e9 / result.request.seq:,.0f} for a billion tokens"


def _mfu(request: Request, prediction: Prediction) -> float | None:
    """Return model flops over the most that all ranks could do in that time; None if the machine's peak is not
    known."""
    peak = request.machine.peak if request.dtype in HALVES else None
    return request.flops / (prediction.seconds * request.world * peak) if peak else None


def _mfu_words(request: Request) -> str:
    if request.machine.peak is None or request.dtype not in HALVES:
        return f"No MFU: the peak of {request.machine.name} in {request.dtype} is not known."
    return f"MFU: model flops, without what checkpoints repeat, over {request.machine.peak / 1e12:,.0f} TFLOP/s a rank."


def _row(result: PlanResult, prediction: Prediction) -> list[str]:
    over, mfu = received_over_least(result, prediction), _mfu(result.request, prediction)
    seconds, layers = prediction.time.seconds_by_item, max(1, result.request.model.attending)
    notes = [
        f"{direction} q"
        for direction, side in zip(DIRECTIONS, prediction.travels, strict=True)
        if side == "q"
    ]  # fmt: skip
    notes += ["overlap"] * prediction.config.overlap + settings_in_words(prediction.spared)
    return [
        f"{prediction.seconds:.3f}",
        f"{result.request.seq / prediction.seconds:,.0f}",
        "-" if mfu is None else f"{mfu:.1%}",
        *(f"{seconds[f'attention {direction}'] / layers * 1e3:.2f}" for direction in DIRECTIONS),
        f"{prediction.memory.peak.total / GIB:.1f}",
        "-" if over is None else f"{over:.2f}",
        f"{prediction.candidate}" + (f" ({', '.join(notes)})" if notes else ""),
    ]


def _link_lines(best: Prediction, layers: int) -> list[str]:
    lines = ["attention of one layer, on the busiest rank:"]
    for direction, price in zip(DIRECTIONS, (best.forward, best.backward), strict=True):
        seconds = best.time.seconds_by_item[f"attention {direction}"]
        share = min(1.0, price.compute * layers / seconds) if seconds else 1.0
        lines.append(
            f"  {direction:<9} receives {price.inside / GIB:.3f} GiB from its node and {price.between / GIB:.3f} GiB "
            f"from others, in {price.messages} messages; computes {share:.0%} of the time"
        )
    return lines


def _part_lines(result: PlanResult) -> list[str]:
    best = result.best
    time, peak = best.time, best.memory.peak
    lines = [f"one step, of {time.sequences} sequence{'s'[: time.sequences > 1]}: {time.seconds:.3f} s"]
    lines += [
        f"  {seconds:10.3f} s  {name}: {STEP_ITEMS[name]}" for name, seconds in time.seconds_by_item.items() if seconds
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


def prompts(result: PlanResult, length: int) -> dict[str, Any]:
    """Return what a prompt of one sequence takes with each configuration, in seconds and bytes of a rank."""
    steps = [result.request.step(prediction.config) for prediction in result.ranked]
    costs = [
        {"parts": prompt_seconds(step, result.request.machine, length), "cache": cache_bytes(step, length)}
        for step in steps
    ]
    return {"tokens": length, "ranked": costs}


def prompt_lines(result: PlanResult, prompt: dict[str, Any]) -> list[str]:
    costs = prompt["ranked"]
    rows = [["first token s", "cache GiB a rank", "configuration"]]
    rows += [
        [f"{sum(cost['parts'].values()):.3f}", f"{cost['cache'] / GIB:.3f}", str(prediction.candidate)]
        for prediction, cost in zip(result.ranked, costs, strict=True)
    ]
    parts = costs[0]["parts"].items()
    return [
        "",
        f"a prompt of {prompt['tokens']:,} tokens, on the ranks of one sequence (forward alone, whole parameters):",
        *columns(rows),
        "the first token of the first row:",
        *(f"  {seconds:10.3f} s  {name}: {PROMPT_ITEMS[name]}" for name, seconds in parts if seconds),
    ]


def as_json(result: PlanResult) -> dict[str, Any]:
    """Return the result for --json, in seconds and bytes."""
    return {
        "section": result.section,
        "simulated": result.best.simulated,
        "legal": result.legal,
        "ranked": [_numbers(result, prediction) for prediction in result.ranked],
        "rejected": [{"who": configurations, "why": why} for configurations, why in result.rejected],
    }


def _numbers(result: PlanResult, prediction: Prediction) -> dict[str, Any]:
    time, memory = prediction.time, prediction.memory
    prices = {"forward": prediction.forward, "backward": prediction.backward}
    return {
        "section": prediction.config.section(),
        "seconds_a_sequence": prediction.seconds,
        "tokens_per_second": result.request.seq / prediction.seconds,
        "mfu": _mfu(result.request, prediction),
        "step": {"seconds": time.seconds, "sequences": time.sequences, "parts": dict(time.seconds_by_item)},
        "simulated": prediction.simulated,
        "memory": {
            "total": memory.peak.total, "parts": dict(memory.peak.bytes_by_item), "host": memory.host.total,
        },
        "travels": prediction.travels,
        "bytes_over_floor": received_over_least(result, prediction),
        "attention": {
            direction: {**dataclasses.asdict(price), "overlapped": price.overlapped}
            for direction, price in prices.items()
        },
    }  # fmt: skip
