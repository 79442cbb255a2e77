"""`python -m ds_seqpar memory`: the memory of a training step on each rank, before anything is launched."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import limits
from ..compiler.draw import new_figure, save
from ..config import SequenceParallelConfig, setting_names
from ..deepspeed_checks import check_deepspeed
from ..deepspeed_json import SECTION, Zero, dtype_of, read_deepspeed, section_of
from ..errors import ConfigError, did_you_mean
from ..files import parse_json, shown
from ..planner.attention_memory import on_fewer_ranks
from ..planner.footprint import (
    HOST_PARTS,
    PARTS,
    Footprint,
    Longest,
    Moment,
    bytes_a_token,
    fits,
    footprint,
    longest,
    rank_bytes,
)
from ..planner.machine import Machine, presets
from ..planner.request import Room, TrainingStep
from .numbers import numbers_of

DEFAULTS: dict[str, Any] = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
GIB, KIB = 2**30, 2**10
MOST_GIB = 2**40  # of --memory
DIGITS = 18  # of a number on the command line: products of three such numbers are finite
# colours of `PARTS`, in their order
SHADES = ("#2f4b6e", "#4878a8", "#86a9cb", "#bccfe2", "#c8c8c8", "#3f7d58", "#8cbf9f", "#e1a13c", "#c8562e", "#f0cf8e",
          "#8e5a97")  # fmt: skip


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "memory", help="predict the memory of a training step on each rank, part by part; nothing is run"
    )
    parser.add_argument("--seq-len", required=True, metavar="N", help="tokens of the whole sequence")
    parser.add_argument("--ranks", required=True, metavar="P", help="ranks of the job")
    machine = f"say also what a node needs and which length fits: {', '.join(presets())}"
    add_options(parser, machine, "sizes are in bytes")
    parser.add_argument("--png", metavar="FILE", help="also draw memory at each moment of a step, as stacked bars")


def add_options(parser: argparse.ArgumentParser, machine: str, units: str) -> None:
    """Adds the options that `memory` and `plan` share. machine: the help of --machine. units: those of --json."""
    parser.add_argument("--model", required=True, metavar="PLACE", help="folder of a model, or its config.json")
    parser.add_argument("--config", metavar="FILE", help="DeepSpeed JSON; without one bf16 and ZeRO-3")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help=f'a setting of "{SECTION}"; with a dot one of the DeepSpeed JSON, as zero_optimization.stage=2',
    )  # fmt: skip
    parser.add_argument("--no-checkpointing", action="store_true", help="without gradient checkpointing")
    parser.add_argument("--machine", metavar="NAME", help=f"{machine}, or a file of calibrate")
    parser.add_argument("--memory", metavar="GIB", help="of a rank, for tensors; default: the machine's")
    parser.add_argument("--json", action="store_true", help=f"print JSON; {units}")


def run(args: argparse.Namespace) -> None:
    step, filled = step_of(args)
    room = machine_room(args, step.world)
    found, slope = footprint(step), bytes_a_token(step)
    most = longest(step, room) if room else None
    if args.json:
        numbers = as_json(found, slope, filled)
        if room and most:
            numbers["room"] = {**room._asdict(), "longest": most._asdict()}
        print(json.dumps(numbers))
    else:
        fitting = fit_lines(found, room, most) if room and most else []
        print("\n".join([*table(found, slope, step), *fitting, *auto_lines(filled)]))
    if args.png is not None:
        draw(found, args.png)
        if not args.json:
            print(f"wrote {args.png}")


def machine_room(args: argparse.Namespace, world: int) -> Room | None:
    """The memory of the machine; None where no machine is named."""
    memory = None if args.memory is None else gibibytes("--memory", args.memory)
    if args.machine is not None:
        return Room.of(Machine.load(args.machine), world, memory)
    if memory is not None:
        raise ConfigError("--memory is of a machine's rank; got no machine, say --machine too")
    return None


def step_of(args: argparse.Namespace) -> tuple[TrainingStep, dict[str, Any]]:
    """(the step, key -> value that an "auto" of the configuration counts as). Raises ConfigError for options or
    settings that do not fit."""
    seq, ranks = count("--seq-len", args.seq_len, limits.MAX_TOKENS), count("--ranks", args.ranks, limits.MAX_RANKS)
    content = content_of(args)
    config = SequenceParallelConfig.from_dict(section_of(content))
    if config.unsaid:
        raise ConfigError(
            f'{SECTION}.memory "auto" leaves open what is to be counted; got it without {", ".join(config.unsaid)}, '
            "ask plan --machine, which chooses them, or say them"
        )
    sharing = ranks if config.size == "auto" else config.size
    limits.check("ranks that share a sequence", sharing, limits.MAX_SHARING_RANKS, "say --set size=8, or what is meant")
    model = numbers_of(args.model)
    filled = fill_in(content, model.hidden)
    resolved = config.resolve(ranks, (model.heads, model.kv_heads))
    smaller = on_fewer_ranks(resolved)
    limits.check_followed(smaller.size // smaller.ulysses, smaller.overlap)
    return TrainingStep(model=model, config=resolved, world=ranks, seq=seq, **training_arguments(args, content)), filled


def training_arguments(args: argparse.Namespace, content: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that TrainingStep and Request share, from the options and the DeepSpeed JSON."""
    batch = content.get("train_micro_batch_size_per_gpu") or 1
    limits.check("train_micro_batch_size_per_gpu", batch, limits.MAX_COUNT)
    zero = Zero.of(content.get("zero_optimization", {}))
    return {"batch": batch, "dtype": dtype_of(content), "zero": zero, "checkpointing": not args.no_checkpointing}


def count(name: str, text: str, most: int = limits.MAX_COUNT) -> int:
    """The number in an option. Raises ConfigError unless it is a whole number from 1 to `most`."""
    if not text.isdecimal() or len(text) > DIGITS or int(text) < 1:
        raise ConfigError(f"{name} must be a whole number from 1, of at most {DIGITS} digits; got {text!r:.60}")
    limits.check(name, int(text), most)
    return int(text)


def gibibytes(name: str, text: str) -> int:
    """The bytes in an option that gives GiB. Raises ConfigError unless it is a number above 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= MOST_GIB:
        raise ConfigError(f"{name} must be a number above 0, at most {MOST_GIB}; got {text!r:.60}")
    return int(found * GIB)


def content_of(args: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed JSON with the values of --set. Raises ConfigError where DeepSpeed refuses it."""
    content = read_deepspeed(args.config) if args.config is not None else copy.deepcopy(DEFAULTS)
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set must be KEY=VALUE; got {text!r}")
        *sections, key = name.split(".")
        if not sections and key not in setting_names():
            known = setting_names()
            raise ConfigError(f'--set knows the settings of "{SECTION}"; got {key!r}{did_you_mean(key, known)}')
        inside = content
        for section in sections or [SECTION]:
            inside = inside.setdefault(section, {})
            if not isinstance(inside, dict):
                raise ConfigError(f"--set {name} needs an object {section!r}; the configuration has {shown(inside)}")
        inside[key] = parse_json(value, "a value", f"--set {name}", or_text=True)
    if args.config is not None or any("." in text.partition("=")[0] for text in args.set):
        check_deepspeed(content, args.config)  # imports DeepSpeed, which takes seconds
    if Zero.of(content.get("zero_optimization", {})).offload_optimizer.super_offload:
        raise ConfigError(
            "memory and plan know offload_optimizer without super_offload; got super_offload true, leave it out"
        )
    return content


def fill_in(content: dict[str, Any], hidden: int) -> dict[str, Any]:
    """Replaces each "auto" of a configuration that memory depends on, and returns key -> the new value. Sizes of
    buckets are those that the Trainer takes from the model; for what it takes from its arguments usual values stand."""
    assumed = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16.enabled": content.get("fp16", {}).get("enabled") is not True,
        "fp16.enabled": not content.get("bf16", {}).get("enabled"),
        "zero_optimization.reduce_bucket_size": hidden * hidden,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
    }
    filled = {}
    for name, value in assumed.items():
        section, _, key = name.rpartition(".")
        inside = content.get(section, {}) if section else content
        if inside.get(key) == "auto":
            inside[key] = filled[name] = value
    if content.get("zero_optimization", {}).get("stage") == "auto":
        raise ConfigError('memory depends on zero_optimization.stage, 0 to 3; got "auto", write the stage')
    return filled


def auto_lines(filled: dict[str, Any]) -> list[str]:
    """Lines for the user: the value that each "auto" counts as."""
    values = ", ".join(f"{key} {shown(value)}" for key, value in filled.items())
    return ["", f'what the configuration leaves "auto" counts as {values}'] if filled else []


def table(found: Footprint, slope: float, step: TrainingStep) -> list[str]:
    peak = found.peak
    lines = [f"{step.seq} tokens on {step.world} ranks, {step.config.size} to a sequence", ""]
    lines += [f"{'part':<16}{'GiB a rank':>12}{'share':>8}", *part_lines(peak, PARTS)]
    lines += [f"{'peak':<16}{peak.total / GIB:>12.3f}{'100.0%':>8}  {peak.name}", ""]
    lines += [f"{'moment':<40}{'GiB a rank':>12}"]
    lines += [f"{moment.name:<40}{moment.total / GIB:>12.3f}" for moment in (found.resting, *found.moments)]
    if found.host.total:
        lines += ["", f"{'in host memory':<16}{'GiB a rank':>12}{'share':>8}", *part_lines(found.host, HOST_PARTS)]
        lines += [f"{'together':<16}{found.host.total / GIB:>12.3f}{'100.0%':>8}  beside the device's peak"]
    if found.drives:
        lines += ["", f"{'on drives':<16}{found.drives / GIB:>12.3f}"]
    return [*lines, "", f"one more token on a rank adds {slope / KIB:.1f} KiB to the peak"]


def part_lines(moment: Moment, words: Mapping[str, str]) -> list[str]:
    """A line for each part of a moment, the largest first."""
    parts = sorted(moment.parts.items(), key=lambda item: -item[1])
    return [f"{name:<16}{size / GIB:>12.3f}{size / moment.total:>8.1%}  {words[name]}" for name, size in parts]


def fit_lines(found: Footprint, room: Room, most: Longest) -> list[str]:
    """Lines for the user: what a rank and its node need and have, and the longest sequence that fits."""
    lines = [f"a rank needs {rank_bytes(found, room) / GIB:.1f} GiB of {room.limit / GIB:.1f}"]
    if room.apart:
        node = found.host.total * room.together / GIB
        lines += [f"the host of a node's {room.together} ranks needs {node:.1f} GiB of {room.host / GIB:.1f}"]
    verdict = "this fits" if fits(found, room) else "this does not fit"
    beyond = {"rank": ", then a rank is full", "host": ", then the host is full", "": ""}[most.full]
    return ["", *lines, f"{verdict}; the longest sequence that does has {most.tokens:,} tokens{beyond}"]


def as_json(found: Footprint, slope: float, filled: dict[str, Any]) -> dict[str, Any]:
    """The footprint for --json, in bytes. "auto": the values that each "auto" of the configuration counts as."""

    def numbers(moment: Any) -> dict[str, Any]:
        return {"moment": moment.name, "total": moment.total, "parts": dict(moment.parts)}

    moments = [numbers(moment) for moment in found.moments]
    return {"peak": numbers(found.peak), "resting": numbers(found.resting), "moments": moments,
            "host": numbers(found.host), "drives": found.drives, "bytes_a_token": slope, "auto": filled}  # fmt: skip


def draw(found: Footprint, file: str | Path) -> None:
    """Draws the moments of a step as stacked bars. Raises ConfigError without matplotlib, and for a file that cannot be
    written."""
    moments = (found.resting, *found.moments)
    figure = new_figure(11, 1.4 + 0.38 * len(moments))
    axes = figure.add_subplot()
    starts = [0.0] * len(moments)
    for index, name in enumerate(PARTS):
        sizes = [moment.parts.get(name, 0) / 2**30 for moment in moments]
        if any(sizes):
            axes.barh(range(len(moments)), sizes, left=starts, label=name, color=SHADES[index])
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axes.set_yticks(range(len(moments)), [moment.name for moment in moments])
    axes.invert_yaxis()
    axes.set_xlabel("GiB of tensors on a rank")
    axes.set_title(f"peak {found.peak.total / 2**30:.2f} GiB: {found.peak.name}", fontsize=11)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    save(figure, file)
