"""`python -m ds_seqpar memory`: what a training step needs on each rank, before anything is launched."""

from __future__ import annotations

import argparse
import json
from typing import Any

from . import limits
from .config import SequenceParallelConfig, setting_names
from .deepspeed_json import SECTION, dtype_of, read_deepspeed, section_of
from .errors import ConfigError, nearest
from .models import numbers_of
from .planning.draw import draw_memory
from .planning.footprint import bytes_a_token, footprint, shortened
from .planning.needs import PARTS, Footprint, Step, Zero

DEFAULTS: dict[str, Any] = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
GIB, KIB = 2**30, 2**10


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "memory", help="predict the memory of a training step on each rank, part by part; nothing is run"
    )
    parser.add_argument("--model", required=True, metavar="PLACE", help="folder of a model, or its config.json")
    parser.add_argument("--seq-len", required=True, metavar="N", help="tokens of the whole sequence")
    parser.add_argument("--ranks", required=True, metavar="P", help="ranks of the job")
    parser.add_argument("--config", metavar="FILE", help="DeepSpeed JSON; without one bf16 and ZeRO-3")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help=f'a setting of "{SECTION}"; with a dot one of the DeepSpeed JSON, as zero_optimization.stage=2',
    )  # fmt: skip
    parser.add_argument("--no-checkpointing", action="store_true", help="layers keep all that they save")
    parser.add_argument("--json", action="store_true", help="print numbers, bytes, for a program to read")
    parser.add_argument("--png", metavar="FILE", help="also draw the moments of a step, part upon part")


def run(args: argparse.Namespace) -> None:
    step = step_of(args)
    found, slope = footprint(step), bytes_a_token(step)
    print(json.dumps(as_json(found, slope)) if args.json else table(found, slope, step))
    if args.png:
        draw_memory(found, args.png)
        if not args.json:
            print(f"wrote {args.png}")


def step_of(args: argparse.Namespace) -> Step:
    """Raises ConfigError for what does not fit."""
    seq, ranks = count("--seq-len", args.seq_len, limits.TOKENS), count("--ranks", args.ranks, limits.RANKS)
    content = content_of(args)
    config = SequenceParallelConfig.from_dict(section_of(content))
    sharing = ranks if config.size == "auto" else config.size
    limits.check("ranks that share a sequence", sharing, limits.SHARING, "say --set size=8, or what is meant")
    model = numbers_of(args.model)
    resolved = config.resolve(ranks, (model.heads, model.kv_heads))
    few = shortened(resolved)
    limits.check_followed(few.size // few.ulysses, few.overlap)
    micro = content.get("train_micro_batch_size_per_gpu", 1)
    if isinstance(micro, int):
        limits.check("train_micro_batch_size_per_gpu", micro, limits.COUNT)
    return Step(
        model=model,
        config=resolved,
        world=ranks,
        seq=seq,
        batch=micro if isinstance(micro, int) else 1,
        dtype=dtype_of(content),
        zero=Zero.of(content.get("zero_optimization", {})),
        checkpointing=not args.no_checkpointing,
    )


def count(name: str, text: str, most: int = limits.COUNT) -> int:
    """Raises ConfigError for what is no whole number from 1 to `most`."""
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name} must be a whole number from 1; got {text!r}")
    limits.check(name, int(text), most)
    return int(text)


def content_of(args: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed JSON with what --set says."""
    content = read_deepspeed(args.config) if args.config else {**DEFAULTS}
    content = {key: dict(value) if isinstance(value, dict) else value for key, value in content.items()}
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set must be KEY=VALUE; got {text!r}")
        key, dot, inner = name.rpartition(".")
        if not dot and inner not in setting_names():
            known = setting_names()
            raise ConfigError(f'--set knows the settings of "{SECTION}"; got {inner!r}{nearest(inner, known)}')
        content.setdefault(key or SECTION, {})[inner] = _value(value)
    return content


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def table(found: Footprint, slope: float, step: Step) -> str:
    peak = found.peak
    lines = [f"{'part':<16}{'GiB a rank':>12}{'share':>8}"]
    for name, size in sorted(peak.parts.items(), key=lambda item: -item[1]):
        lines.append(f"{name:<16}{size / GIB:>12.3f}{size / peak.total:>8.1%}  {PARTS[name]}")
    lines += [f"{'peak':<16}{peak.total / GIB:>12.3f}{'100.0%':>8}  {peak.name}", ""]
    lines += [f"{'moment':<40}{'GiB a rank':>12}"]
    lines += [f"{moment.name:<40}{moment.total / GIB:>12.3f}" for moment in (found.resting, *found.moments)]
    if found.host:
        lines.append(f"{'in host memory':<40}{found.host / GIB:>12.3f}")
    length = f"{step.seq} tokens on {step.world} ranks, {step.config.size} to a sequence"
    return "\n".join([length, "", *lines, "", f"a token more of a rank: {slope / KIB:.1f} KiB at the peak"])


def as_json(found: Footprint, slope: float) -> dict[str, Any]:
    def told(moment: Any) -> dict[str, Any]:
        return {"moment": moment.name, "total": moment.total, "parts": dict(moment.parts)}

    moments = [told(moment) for moment in found.moments]
    return {"peak": told(found.peak), "resting": told(found.resting), "moments": moments, "host": found.host,
            "bytes_a_token": slope}  # fmt: skip
