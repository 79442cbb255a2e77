"""Choose the checkpoint that a Trainer resumes from: completely written, and the same on every rank."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerState, TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ds_seqpar.base.errors import ConfigError, as_seqpar_error
from ds_seqpar.deepspeed.config import DeepSpeedJson
from ds_seqpar.deepspeed.saving import LoadingRun, fault_of, inspect_engine, is_whole, recover
from ds_seqpar.guards.agreement import all_gather_objects, assert_ranks_agree, ranks_in_words

LAST = True  # not a string: a folder may have any name
WORDS: dict[str, bool | None] = {"true": LAST, "last": LAST, "false": None, "none": None, "": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumingRun(LoadingRun):
    """The Trainer's run that is to read a checkpoint."""

    leads: bool  # whether this rank writes what belongs to all
    scheduler: bool  # whether the Trainer, and not DeepSpeed, reads the state of the learning rate scheduler
    universal: bool  # whether DeepSpeed reads its universal format, which fits any number of ranks

    @staticmethod
    def of(args: TrainingArguments, content: Mapping[str, Any]) -> ResumingRun:
        """Return the run of a Trainer. `content` is its DeepSpeed configuration, with every "auto" filled in."""
        settings = DeepSpeedJson.read(content).known
        return ResumingRun(
            rank=dist.get_rank(),
            leads=args.should_save,
            ranks=dist.get_world_size(),
            stage=settings.zero_optimization.stage,
            dtype=settings.dtype,
            # if the JSON has either of them, accelerate passes the scheduler to DeepSpeed
            scheduler=not content.keys() & {"optimizer", "scheduler"},
            universal=bool(content.get("checkpoint", {}).get("load_universal")),
        )


@dataclasses.dataclass(kw_only=True)
class CheckpointReport:
    """One rank's findings about a checkpoint. The texts are "" if nothing is wrong."""

    step: int = 0  # the optimizer step after which it was written
    ranks: int  # that wrote it
    fault: str = ""  # what is missing or damaged
    mismatch: str = ""  # why it belongs to another kind of run
    random: str = ""  # name of the rank's file of random states, if that is missing or damaged


def checkpoint_of(
    group: dist.ProcessGroup, resume_from_checkpoint: object, output: str, run: ResumingRun
) -> tuple[str | None, int]:
    """Return (the folder to resume from, or None to start anew; how many ranks wrote it).

    Collective over the group of all ranks.

    Rank 0 warns of newer checkpoints that are incomplete, and of random states that cannot be restored.

    Args:
        group: The group of all ranks.
        resume_from_checkpoint: The argument of `train`, which may be a string from a command line. True and "last" mean
            the last complete checkpoint in the folder `output`.
        output: The output folder.
        run: The run that is to read the checkpoint.

    Raises:
        ConfigError: On every rank, if no checkpoint is complete, the requested one is incomplete, or this run cannot
            continue the one that wrote it.
    """
    target, error = None, None
    try:
        target = parse_resume_argument(resume_from_checkpoint)
        if run.leads:
            recover(Path(target).parent if isinstance(target, str) else Path(output), remove=False)
    except (ConfigError, OSError) as reason:
        error = as_seqpar_error("reading a folder of checkpoints failed", reason)
    description = "a folder" if isinstance(target, str) else {None: "none", LAST: "the last one"}[target]
    assert_ranks_agree(group, "checkpoint to resume from", {"resume_from_checkpoint": description}, error=error)
    if target is None:
        return None, run.ranks
    if isinstance(target, str):
        folders = [target]
    else:
        gathered = all_gather_objects(group, ("the checkpoints of the output folder", _checkpoint_steps(output)))
        steps = sorted({step for _, steps in gathered for step in steps}, reverse=True)
        folders = [os.path.join(output, f"{PREFIX_CHECKPOINT_DIR}-{step}") for step in steps]
    passed_over: dict[str, str] = {}
    for folder in folders:
        reports = _reports(group, folder, run)
        if not (fault := _fault_of(reports)):
            if run.rank == 0:
                _warn(folder, passed_over, [report.random for report in reports if report.random])
            return folder, reports[0].ranks
        passed_over[os.path.basename(folder)] = fault
    if isinstance(target, str):
        raise ConfigError(
            f"resume_from_checkpoint needs a whole checkpoint; got {target}, where {fault}, "
            "resume_from_checkpoint=True takes the last whole one of the output folder"
        )
    got = "; ".join(f"{name}, where {fault}" for name, fault in passed_over.items()) or "none"
    raise ConfigError(
        f"resuming from the last checkpoint needs a whole one in {output}; got {got}, leave "
        "resume_from_checkpoint out to begin anew"
    )


def parse_resume_argument(value: object) -> str | bool | None:
    """Parse `resume_from_checkpoint`: return a folder, LAST, or None to start anew.

    A word such as "last" that is also a folder means the folder. Raises ConfigError for any other type.
    """
    if isinstance(value, bool) or value is None:
        return LAST if value else None
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f'resume_from_checkpoint must be True, "last" or a folder; got {value!r}')
    text = os.fspath(value)
    return WORDS[text.lower()] if text.lower() in WORDS and not os.path.isdir(text) else text


def _reports(group: dist.ProcessGroup, folder: str, run: ResumingRun) -> list[CheckpointReport]:
    """Return the reports of all ranks on a checkpoint. Raise ConfigError for one of another kind of run."""
    try:
        local_report = inspect_checkpoint(Path(folder), run)
    except Exception as reason:  # a damaged file may raise anything
        local_report = CheckpointReport(ranks=run.ranks, fault=f"reading it failed ({type(reason).__name__})")
    reports = [report for _, report in all_gather_objects(group, ("the checkpoint", local_report))]
    if mismatch := next((report.mismatch for report in reports if report.mismatch), ""):
        raise ConfigError(f"{mismatch}; got {folder}")
    return reports


def _fault_of(reports: list[CheckpointReport]) -> str:
    """Return what is wrong with a checkpoint, and on which ranks; "" where it is complete on all."""
    if len({report.step for report in reports if not report.fault}) > 1:
        return "ranks see different steps in it"
    ranks_by_fault: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if report.fault:
            ranks_by_fault.setdefault(report.fault, []).append(rank)
    return ", ".join(
        fault if len(ranks) == len(reports) else f"{fault} ({ranks_in_words(ranks)})"
        for fault, ranks in ranks_by_fault.items()
    )


def _warn(folder: str, passed_over: Mapping[str, str], random: list[str]) -> None:
    if passed_over:
        newer = "; ".join(f"{name} is not ({fault})" for name, fault in passed_over.items())
        warnings.warn(f"resuming from {folder}, the last checkpoint that is whole: {newer}", stacklevel=2)
    if random:
        warnings.warn(
            f"resuming from {folder} without random states, since {', '.join(random)} cannot be read: what those ranks "
            "draw (dropout, random changes of examples) may be other numbers than without the interruption",
            stacklevel=2,
        )


def _checkpoint_steps(folder: str) -> list[int]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    matches = [re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", name, re.ASCII) for name in names]
    return [int(match[1]) for match in matches if match and os.path.isdir(os.path.join(folder, match[0]))]


def inspect_checkpoint(folder: Path, run: ResumingRun) -> CheckpointReport:
    """Return a report on the files of a checkpoint that this rank would read."""
    report = CheckpointReport(ranks=run.ranks)
    report.fault = next(filter(None, _faults(folder, run, report)), "")
    random = random_state(folder, run.rank, report.ranks)
    report.random = "" if is_whole(random) else random.name
    return report


def _faults(folder: Path, run: ResumingRun, report: CheckpointReport) -> Iterator[str]:
    """Check file by file, and yield what is missing or damaged, or "" for an intact file.

    The caller stops at the first fault, so later checks may rely on earlier files. Sets the report's step and mismatch.
    """
    if not folder.is_dir():
        yield "there is no such folder"
    try:
        report.step = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).global_step
    except FileNotFoundError:
        yield f"{TRAINER_STATE_NAME} is missing"
    except (OSError, ValueError, TypeError) as reason:
        yield f"{TRAINER_STATE_NAME} is damaged ({type(reason).__name__})"
    if type(report.step) is not int or report.step < 1:
        yield f"{TRAINER_STATE_NAME} is damaged (global_step {report.step!r})"
    if run.scheduler:
        yield fault_of(folder / SCHEDULER_NAME)
    # DeepSpeed reads the files that follow
    latest, tag = folder / ("latest_universal" if run.universal else "latest"), ""
    try:
        tag = latest.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        yield f"{latest.name} is missing or damaged"
    if not tag or not (folder / tag).is_dir():
        yield f"the folder that {latest.name} names is missing"
    if run.universal:
        return
    engine = inspect_engine(folder / tag, run)
    yield engine.fault
    report.mismatch, report.ranks = engine.mismatch, engine.ranks


def random_state(folder: Path, rank: int, ranks: int) -> Path:
    """Return the file from which a rank restores its random generators, in a checkpoint of so many ranks."""
    return folder / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank % ranks}.pth")
