"""Implementation of `python -m ds_seqpar memory`, which predicts a training step's memory on each rank."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..analysis.draw import new_figure, save
from ..base.errors import SECTION, ConfigError
from ..core.settings import SequenceParallelConfig
from ..planner import limits
from ..planner.attention_memory import on_fewer_ranks
from ..planner.auto import line_of, resolve_with_plan, what_would_fit
from ..planner.footprint import (
    FOOTPRINT_ITEMS,
    HOST_ITEMS,
    Footprint,
    Longest,
    Moment,
    bytes_a_token,
    cache_bytes,
    fits,
    footprint,
    longest,
    rank_bytes,
)
from ..planner.machine import presets
from ..planner.plan import PlanResult
from ..planner.request import TRAINERS, MemoryBudget, TrainingStep
from . import packs
from .assumed import Answer
from .options import GIB, Inputs, add_images, add_lengths, add_options, add_ranks, count, tokens

KIB = 2**10
NODE = 8  # default number of ranks per node
FAR = 4  # multiple of the peak beyond which a rank's memory limit is not drawn
# colors of FOOTPRINT_ITEMS, in the same order
SHADES = ("#2f4b6e", "#14273f", "#4878a8", "#86a9cb", "#bccfe2", "#c8c8c8", "#3f7d58", "#8cbf9f", "#e1a13c", "#c8562e",
          "#f0cf8e", "#8e5a97", "#6b4a2b", "#b8a0c8", "#5f9ea0")  # fmt: skip
LIMIT = "#b00020"  # color of the rank's memory


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "memory", help="predict the memory of a training step on each rank, part by part; nothing is run"
    )
    machine = f"say also what a node needs and which length fits: {', '.join(presets())}"
    add_ranks(parser)
    add_lengths(parser)
    add_images(parser)
    add_options(parser, machine, "sizes are in bytes")
    parser.add_argument("--prompt", metavar="N", help="tokens of a prompt: say also what its cache takes")
    parser.add_argument("--trainer", choices=TRAINERS, help="trl's trainer of the step, for rows of --seq-len tokens")
    parser.add_argument(
        "--reference", action=argparse.BooleanOptionalAction, help="whether there is a reference model; default: trl's"
    )
    parser.add_argument("--lora", metavar="R", help="train adapters of rank R of all matrices; they are the reference")
    parser.add_argument("--completions", metavar="N", help="that share each prompt, which then is computed once")
    parser.add_argument("--png", metavar="FILE", help="also draw memory at each moment of a step, as stacked bars")


def run(args: argparse.Namespace) -> None:
    inputs = with_trainer(Inputs.of(args), args)
    budget = machine_budget(inputs)
    config, planned, packed = *config_of(inputs), list[str]()
    if inputs.lengths:
        config, packed = packs.config_of(inputs)
    on_gpu = inputs.machine is None or inputs.machine.gpus
    step, answer = inputs.job.step(config, inputs.world, on_gpu), Answer(inputs, config, len(inputs.lengths) or None)
    memory, slope = footprint(step), bytes_a_token(step)
    longest_fit = longest(step, budget) if budget else None
    next_step = None if budget is None or fits(memory, budget) else advice(inputs, config)
    prompt = None if args.prompt is None else tokens("--prompt", args.prompt)
    cache = None if prompt is None else cache_bytes(step, prompt)
    if args.json:
        numbers = {**as_json(memory, slope), **answer.for_json(), "cache": cache}
        if budget and longest_fit:
            numbers["room"] = {
                "limit": budget.limit,
                "host": budget.host,
                "together": budget.ranks_per_node,
                "apart": budget.apart,
                "longest": longest_fit._asdict(),
                "next": next_step,
            }
        print(json.dumps(numbers))
    else:
        head, *rest = table(memory, slope, step)
        chosen = [line_of(planned)] if planned else packed or unplanned_lines(inputs, config)
        fitting = fit_lines(memory, budget, longest_fit) if budget and longest_fit else []
        if cache is not None:
            fitting += ["", f"a prompt of {prompt:,} tokens keeps {cache / GIB:.3f} GiB of keys and values on a rank"]
        rows = step.objective.completions
        alone = rows * step.objective.row(step.seq)
        text = f"a prompt with {rows} completions is a sequence: {step.seq / alone:.1%} of {alone:,} tokens"
        shared = [text] if rows > 1 else []
        last = [f"next: {next_step}"] if next_step else answer.json_lines()
        print("\n".join([head, *answer.lines(), *shared, *chosen, *rest, *fitting, "", *last]))
    if args.png is not None:
        draw(memory, args.png, budget, inputs)
        if not args.json:
            print(f"wrote {args.png}")


def with_trainer(inputs: Inputs, args: argparse.Namespace) -> Inputs:
    """Return the inputs as modified by `--trainer`, `--reference`, `--lora` and `--completions`."""
    model, job = inputs.model, inputs.job
    if args.lora is not None:
        trained = count("--lora", args.lora) * model.lora
        model = dataclasses.replace(model, trained=trained, parameters=model.parameters + trained)
    if args.trainer is not None and inputs.lengths:
        raise ConfigError(f"--lengths is of a loss of next tokens; got --trainer {args.trainer}, leave one of them out")
    objective, batch = TRAINERS.get(args.trainer, job.objective), job.batch or 1
    if args.trainer is None and (args.reference or args.completions):
        raise ConfigError("--reference and --completions are of a step of trl's; got no --trainer, say it too")
    if objective.head == "score" and not model.tied:
        model = dataclasses.replace(model, parameters=model.parameters - model.embedding)
    prompt = 0 if args.prompt is None or args.trainer is None else tokens("--prompt", args.prompt)
    if not prompt and (objective.generated or args.completions):
        raise ConfigError("--trainer grpo and rloo, and --completions, need --prompt, the tokens of a prompt; got none")
    if prompt >= inputs.seq:
        raise ConfigError(f"--prompt must be less than --seq-len, a row with its completion; got {prompt:,}")
    if args.completions and objective.head == "score":
        raise ConfigError(f"--completions are of trainers whose rows share prompts; got {args.trainer}, leave it out")
    completions = 1 if args.completions is None else count("--completions", args.completions)
    generates, default = objective.generated, objective.reference and args.lora is None
    if generates:
        batch = -(-batch // completions) * completions
    elif batch * objective.rows % completions:
        raise ConfigError(
            f"--completions must divide the rows of a micro-batch, {batch * objective.rows}; got {completions}"
        )
    objective = dataclasses.replace(
        objective, reference=default if args.reference is None else args.reference, completions=completions,
        completion=inputs.seq - prompt if prompt else 0, generated=generates * batch * (job.steps or 1),
        triton=inputs.machine is None or inputs.machine.gpus,
    )  # fmt: skip
    seq = objective.sequence(inputs.seq)
    job = dataclasses.replace(job, model=model, batch=batch, seq=seq, objective=objective)
    content = {**inputs.content, "train_micro_batch_size_per_gpu": batch} if args.completions else inputs.content
    return dataclasses.replace(inputs, content=content, model=model, seq=seq, job=job)


def machine_budget(inputs: Inputs) -> MemoryBudget | None:
    """Return the machine's memory, or None if no machine is named."""
    if inputs.machine is not None:
        return MemoryBudget.of(inputs.machine, inputs.world, inputs.memory)
    if inputs.memory is not None:
        raise ConfigError("--memory is of a machine's rank; got no machine, say --machine too")
    return None


def advice(inputs: Inputs, config: SequenceParallelConfig) -> str:
    """Return advice for a step that does not fit into the machine's memory."""
    try:
        request = inputs.request()
    except ConfigError as reason:  # planning is not possible, for example for a dtype without rates
        return f"take more ranks, a higher ZeRO stage or a shorter sequence (nothing can be planned: {reason})"
    return what_would_fit(config, request)


def config_of(inputs: Inputs) -> tuple[SequenceParallelConfig, PlanResult | None]:
    """Return (the resolved configuration, the plan that determined the configuration or None).

    If the ranks would choose settings by planning, the function plans for the named machine.
    """
    config, machine, heads = inputs.config, inputs.machine, (inputs.model.heads, inputs.model.kv_heads)
    if machine is not None and config.asks_for_plan:
        if inputs.memory is not None:
            machine = dataclasses.replace(machine, memory=float(inputs.memory), reserve_fraction=0.0)
        asked = dataclasses.replace(config, machine="auto", seq_len=inputs.seq)
        return resolve_with_plan(asked, inputs.job, inputs.world, lambda: machine)
    if config.auto_fields:
        raise ConfigError(
            f'{SECTION}.memory "auto" chooses for a machine; got none, say --machine, or say '
            f"{', '.join(config.auto_fields)}"
        )
    sharing = inputs.world if config.size == "auto" else config.size
    limits.check("ranks that share a sequence", sharing, limits.MAX_SHARING_RANKS, "say --set size=8, or what is meant")
    resolved = config.resolve(inputs.world, heads, inputs.per_node or NODE)
    smaller = on_fewer_ranks(resolved)
    limits.check_followed(smaller.size // smaller.ulysses, smaller.overlap)
    return resolved, None


def unplanned_lines(inputs: Inputs, config: SequenceParallelConfig) -> list[str]:
    """Return lines about settings that the ranks would choose differently than the `memory` command."""
    text = (
        f'{SECTION}: ranks would plan what is "auto"; here it is all ranks, the most Ulysses and the default schedule'
    )
    lines = [f"{text}: say --machine to plan"] if inputs.config.asks_for_plan else []
    most = inputs.config.resolve(inputs.world, (inputs.model.heads, inputs.model.kv_heads)).ulysses
    if most != config.ulysses:
        node = f"a node of {inputs.per_node or NODE}"
        lines += [f'{SECTION}: Ulysses {config.ulysses} stays in {node}; "auto" alone would be {most}, over nodes']
    return lines


def table(memory: Footprint, slope: float, step: TrainingStep) -> list[str]:
    peak = memory.peak
    lines = [f"{step.seq} tokens on {step.world} ranks, {step.config.size} to a sequence", ""]
    lines += [f"{'part':<16}{'GiB a rank':>12}{'share':>8}", *part_lines(peak, FOOTPRINT_ITEMS)]
    lines += [f"{'peak':<16}{peak.total / GIB:>12.3f}{'100.0%':>8}  {peak.name}", ""]
    lines += [f"{'moment':<40}{'GiB a rank':>12}"]
    lines += [f"{moment.name:<40}{moment.total / GIB:>12.3f}" for moment in (memory.resting, *memory.moments)]
    if memory.host.total:
        lines += ["", f"{'in host memory':<16}{'GiB a rank':>12}{'share':>8}", *part_lines(memory.host, HOST_ITEMS)]
        lines += [f"{'together':<16}{memory.host.total / GIB:>12.3f}{'100.0%':>8}  beside the device's peak"]
    if memory.drives:
        lines += ["", f"{'on drives':<16}{memory.drives / GIB:>12.3f}"]
    return [*lines, "", f"one more token on a rank adds {slope / KIB:.1f} KiB to the peak"]


def part_lines(moment: Moment, description_of: Mapping[str, str]) -> list[str]:
    """Return a line for each part of the memory at one moment, largest part first."""
    items = sorted(moment.bytes_by_item.items(), key=lambda item: -item[1])
    return [f"{name:<16}{size / GIB:>12.3f}{size / moment.total:>8.1%}  {description_of[name]}" for name, size in items]


def fit_lines(memory: Footprint, budget: MemoryBudget, longest_fit: Longest) -> list[str]:
    """Return lines about a rank's and a node's required and available memory, and the longest sequence that fits."""
    lines = [f"a rank needs {rank_bytes(memory, budget) / GIB:.1f} GiB of {budget.limit / GIB:.1f}"]
    if budget.apart:
        node = memory.host.total * budget.ranks_per_node / GIB
        lines += [f"the host of a node's {budget.ranks_per_node} ranks needs {node:.1f} GiB of {budget.host / GIB:.1f}"]
    verdict = "this fits" if fits(memory, budget) else "this does not fit"
    beyond = {"rank": ", then a rank is full", "host": ", then the host is full", "": ""}[longest_fit.full]
    return ["", *lines, f"{verdict}; the longest sequence that does has {longest_fit.tokens:,} tokens{beyond}"]


def as_json(memory: Footprint, slope: float) -> dict[str, Any]:
    """Return the footprint in bytes for `--json`."""

    def numbers(moment: Any) -> dict[str, Any]:
        return {"moment": moment.name, "total": moment.total, "parts": dict(moment.bytes_by_item)}

    moments = [numbers(moment) for moment in memory.moments]
    return {"peak": numbers(memory.peak), "resting": numbers(memory.resting), "moments": moments,
            "host": numbers(memory.host), "drives": memory.drives, "bytes_a_token": slope}  # fmt: skip


def draw(memory: Footprint, file: str | Path, budget: MemoryBudget | None, inputs: Inputs) -> None:
    """Draw the memory at each moment of a step as stacked bars, together with the device's memory.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    moments = (memory.resting, *memory.moments)
    figure = new_figure(11, 1.4 + 0.38 * len(moments))
    axes = figure.add_subplot()
    starts = [0.0] * len(moments)
    for index, name in enumerate(FOOTPRINT_ITEMS):
        sizes = [moment.bytes_by_item.get(name, 0) / GIB for moment in moments]
        if any(sizes):
            axes.barh(range(len(moments)), sizes, left=starts, label=name, color=SHADES[index])
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    title, widest = f"peak {memory.peak.total / GIB:.2f} GiB: {memory.peak.name}", max(starts)
    if budget is not None and inputs.machine is not None:
        limit = budget.limit / GIB
        title += f"; {inputs.machine.name} has {limit:.1f} GiB for tensors"
        if limit < FAR * widest:  # beyond this limit, the bars would be too short to see
            axes.axvline(limit, color=LIMIT, linestyle="--", linewidth=2.5, label="what the rank has")
            widest = max(widest, limit)
    axes.set_xlim(0, 1.03 * widest)
    axes.set_yticks(range(len(moments)), [moment.name for moment in moments])
    axes.invert_yaxis()
    axes.set_xlabel("GiB of tensors on a rank")
    axes.set_title(title, fontsize=11)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    save(figure, file)
