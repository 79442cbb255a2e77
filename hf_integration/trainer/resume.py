"""Select the checkpoint from which a Trainer resumes. The checkpoint must be complete and the same on every rank."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ds_seqpar.base.errors import ConfigError
from ds_seqpar.core.runtime.groups import all_ranks
from ds_seqpar.deepspeed.config import DeepSpeedJson
from ds_seqpar.deepspeed.saving.atomic import is_whole, recover
from ds_seqpar.deepspeed.saving.resuming import EngineReport, LoadingRun, inspect_engine, report_of_all
from ds_seqpar.guards.agreement import all_gather_objects, together

LAST = True  # not a string, since every string could be a folder name
WORDS: dict[str, bool | None] = {"true": LAST, "last": LAST, "false": None, "none": None, "": None}


def checkpoint_of(
    group: dist.ProcessGroup, resume_from_checkpoint: object, args: TrainingArguments, content: Mapping[str, Any]
) -> tuple[str | None, int]:
    """Return (the folder to resume from, or None to start from scratch; the number of ranks that wrote the checkpoint).

    The call is collective across all ranks. Rank 0 warns about newer checkpoints that are incomplete.

    Args:
        group: The group of all ranks.
        resume_from_checkpoint: The argument of `Trainer.train`, which may be a string from the command line. True and
            "last" select the last complete checkpoint in the output folder.
        args: The Trainer's arguments.
        content: The Trainer's DeepSpeed configuration, with every "auto" filled in.

    Raises:
        ConfigError: On every rank, if no checkpoint is complete, if the requested checkpoint is incomplete, or if this
            run cannot resume from the checkpoint.
    """
    output = str(args.output_dir)
    with together(group, "reading a folder of checkpoints", "checkpoint to resume from") as agreed:
        target = parse_resume_argument(resume_from_checkpoint)
        described = "a folder" if isinstance(target, str) else {None: "none", LAST: "the last one"}[target]
        agreed.value = {"resume_from_checkpoint": described}
        if args.should_save:
            recover(Path(target).parent if isinstance(target, str) else Path(output), remove=False)
    if target is None:
        return None, all_ranks().size()
    if isinstance(target, str):
        folders = [target]
    else:
        gathered = all_gather_objects(group, ("the checkpoints of the output folder", _checkpoint_steps(output)))
        steps = sorted({step for _, steps in gathered for step in steps}, reverse=True)
        folders = [os.path.join(output, f"{PREFIX_CHECKPOINT_DIR}-{step}") for step in steps]
    passed_over: list[str] = []
    for folder in folders:
        fault, ranks = _inspected(group, folder, content)
        if not fault:
            if passed_over and dist.get_rank() == 0:
                newer = "; ".join(passed_over)
                warnings.warn(f"resuming from {folder}, the last checkpoint that is whole, not {newer}", stacklevel=2)
            return folder, ranks
        passed_over.append(f"{folder}, where {fault}")
    raise ConfigError(
        f"resume_from_checkpoint needs a whole checkpoint; got {'; '.join(passed_over) or f'none in {output}'}, name "
        "another, say True for the last whole one of the output folder, or leave it out to begin anew"
    )


def parse_resume_argument(value: object) -> str | bool | None:
    """Parse `resume_from_checkpoint` and return a folder, LAST, or None to start from scratch.

    If a folder has the name of a special value, such as "last", the folder takes precedence. Raises ConfigError for
    values of any other type.
    """
    if isinstance(value, bool) or value is None:
        return LAST if value else None
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f'resume_from_checkpoint must be True, "last" or a folder; got {value!r}')
    text = os.fspath(value)
    return WORDS[text.lower()] if text.lower() in WORDS and not os.path.isdir(text) else text


def _inspected(group: dist.ProcessGroup, folder: str, content: Mapping[str, Any]) -> tuple[str, int]:
    """Return (a checkpoint's fault and the affected ranks, or "" if complete; the number of ranks that wrote it).

    Raises ConfigError if another kind of run wrote the checkpoint.
    """
    settings = DeepSpeedJson.read(content).known
    run = LoadingRun(
        rank=dist.get_rank(),
        ranks=all_ranks().size(),
        stage=settings.zero_optimization.stage,
        dtype=settings.dtype,
        universal=bool(content.get("checkpoint", {}).get("load_universal")),
    )
    # if the JSON contains an optimizer or a scheduler, accelerate passes the scheduler to DeepSpeed
    scheduler = not content.keys() & {"optimizer", "scheduler"}
    report = report_of_all(group, lambda: inspect_checkpoint(Path(folder), run, scheduler))
    if report.mismatch:
        raise ConfigError(f"{report.mismatch}; got {folder}")
    return report.fault, report.ranks


def _checkpoint_steps(folder: str) -> list[int]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    matches = [re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", name, re.ASCII) for name in names]
    return [int(match[1]) for match in matches if match and os.path.isdir(os.path.join(folder, match[0]))]


def inspect_checkpoint(folder: Path, run: LoadingRun, scheduler: bool) -> EngineReport:
    """Return a report on the files of a checkpoint that this rank would read.

    Args:
        folder: The checkpoint.
        run: The run that will read the checkpoint.
        scheduler: Whether the Trainer, and not DeepSpeed, reads the state of the learning rate scheduler.
    """
    latest = folder / ("latest_universal" if run.universal else "latest")
    engine = folder / (latest.read_text(encoding="utf-8").strip() if is_whole(latest) else "")
    others = [folder / SCHEDULER_NAME] if scheduler else []
    return inspect_engine(engine, run, [folder, folder / TRAINER_STATE_NAME, *others, latest, engine])


def random_state(folder: Path, rank: int, ranks: int) -> Path:
    """Return the path of a rank's random state in a checkpoint written by `ranks` ranks."""
    return folder / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank % ranks}.pth")
