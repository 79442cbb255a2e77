"""Which checkpoint a Trainer goes on from: one that was written to its end, the same on every rank."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerState, TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ds_seqpar.errors import ConfigError
from ds_seqpar.runtime.agreement import agree, gathered, ranks_in_words
from ds_seqpar.runtime.telling import told_once

LAST = True  # no text: a folder may have any name
WORDS: dict[str, bool | None] = {"true": LAST, "last": LAST, "false": None, "none": None, "": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What reads a checkpoint. stage: of ZeRO. scheduler: whether the Trainer reads the learning rates' state itself.
    universal: whether DeepSpeed reads its universal format, which fits any number of ranks."""

    rank: int
    ranks: int
    stage: int
    bf16: bool
    scheduler: bool
    universal: bool

    @staticmethod
    def of(args: TrainingArguments, content: Mapping[str, Any]) -> Run:
        """content: the DeepSpeed configuration, as the Trainer has filled it in."""
        bf16 = content.get("bf16", {}).get("enabled", False)
        return Run(
            rank=dist.get_rank(),
            ranks=dist.get_world_size(),
            stage=content.get("zero_optimization", {}).get("stage", 0),
            bf16=bf16 if isinstance(bf16, bool) else args.bf16,
            scheduler="scheduler" not in content,
            universal=bool(content.get("checkpoint", {}).get("load_universal")),
        )


@dataclasses.dataclass(kw_only=True)
class Finding:
    """What one rank sees of a checkpoint. fault: what is missing or damaged. other: why it is another run's. random:
    the file of its random state, where that is missing or damaged; each "" where all is well."""

    step: int = 0
    fault: str = ""
    other: str = ""
    random: str = ""


@told_once
def checkpoint_of(group: dist.ProcessGroup, given: object, output: str, run: Run) -> str | None:
    """The folder to resume from; None: to begin anew. Collective over the group of all ranks.

    given: `resume_from_checkpoint` of `train`, also as text, as a command line brings it: True or "last" take the last
    whole checkpoint in the folder `output`. Rank 0 warns of newer ones that are not whole, and of random states that
    cannot be restored. Raises ConfigError on every rank where there is no whole one, or the one asked for is not
    whole. So it does for one that was written by other ranks, or under another ZeRO stage or dtype.
    """
    asked, error = None, None
    try:
        asked = meant(given)
    except ConfigError as reason:
        error = reason
    kind = "a folder" if isinstance(asked, str) else {None: "none", LAST: "the last one"}[asked]
    agree(group, "checkpoint to resume from", {"resume_from_checkpoint": kind}, error=error)
    if asked is None:
        return None
    if isinstance(asked, str):
        return _resumed(group, asked, run, {})
    everyones = gathered(group, ("the checkpoints of the output folder", _steps(output)))
    passed_over: dict[str, str] = {}
    for step in sorted({step for _, steps in everyones for step in steps}, reverse=True):
        folder = os.path.join(output, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        if (found := _resumed(group, folder, run, passed_over, must=False)) is not None:
            return found
    got = "; ".join(f"{name}, where {fault}" for name, fault in passed_over.items()) or "none"
    raise ConfigError(
        f"resuming from the last checkpoint needs a whole one in {output}; got {got}, leave "
        "resume_from_checkpoint out to begin anew"
    )


def meant(given: object) -> str | bool | None:
    """A folder, LAST, or None to begin anew. A word that is also a folder means the folder. Raises ConfigError."""
    if isinstance(given, bool) or given is None:
        return LAST if given else None
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f'resume_from_checkpoint must be True, "last" or a folder; got {given!r}')
    text = os.fspath(given)
    return WORDS[text.lower()] if text.lower() in WORDS and not os.path.isdir(text) else text


def _resumed(
    group: dist.ProcessGroup,
    folder: str,
    run: Run,
    passed_over: dict[str, str],
    must: bool = True,
) -> str | None:
    """The folder, if it is whole on all ranks; else, unless it must be, None, and what is wrong in passed_over."""
    try:
        mine = look(Path(folder), run)
    except Exception as reason:  # out of a damaged file
        mine = Finding(fault=f"reading it failed ({type(reason).__name__})")
    seen = [found for _, found in gathered(group, ("the checkpoint", mine))]
    if other := next((found.other for found in seen if found.other), ""):
        raise ConfigError(f"{other}; got {folder}")
    faults: dict[str, list[int]] = {}
    for rank, found in enumerate(seen):
        faults.setdefault(found.fault, []).append(rank)
    if len({found.step for found in seen if not found.fault}) > 1:
        faults = {"ranks see different steps in it": []}
    said = ", ".join(f"{x} ({ranks_in_words(r)})" if 0 < len(r) < len(seen) else x for x, r in faults.items() if x)
    if said and must:
        raise ConfigError(
            f"resume_from_checkpoint needs a whole checkpoint; got {folder}, where {said}, resume_from_checkpoint=True "
            "takes the last whole one of the output folder"
        )
    if said:
        passed_over[os.path.basename(folder)] = said
        return None
    if run.rank == 0:
        _warn(folder, passed_over, [found.random for found in seen if found.random])
    return folder


def _warn(folder: str, passed_over: Mapping[str, str], random: list[str]) -> None:
    if passed_over:
        said = "; ".join(f"{name} is not ({fault})" for name, fault in passed_over.items())
        warnings.warn(f"resuming from {folder}, the last checkpoint that is whole: {said}", stacklevel=2)
    if random:
        warnings.warn(
            f"resuming from {folder} without random states, since {', '.join(random)} cannot be read: what those ranks "
            "draw (dropout, random changes of examples) may be other numbers than without the interruption",
            stacklevel=2,
        )


def _steps(folder: str) -> list[int]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = [re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", name, re.ASCII) for name in names]
    return [int(match[1]) for match in found if match and os.path.isdir(os.path.join(folder, match[0]))]


def look(folder: Path, run: Run) -> Finding:
    """What this rank would read of a checkpoint, and whether it is there and whole."""
    random = random_state(folder, run.rank, run.ranks)
    found = Finding(random="" if is_whole(random) else random.name)
    found.fault = next(filter(None, _faults(folder, run, found)), "")
    return found


def _faults(folder: Path, run: Run, found: Finding) -> Iterator[str]:
    """What is missing or damaged, or "" for what is well, file by file: nobody asks further once there is a fault.
    found: takes the step, and why it is another run's."""
    if not folder.is_dir():
        yield "there is no such folder"
    try:
        found.step = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).global_step
    except FileNotFoundError:
        yield f"{TRAINER_STATE_NAME} is missing"
    except (OSError, ValueError, TypeError) as reason:
        yield f"{TRAINER_STATE_NAME} is damaged ({type(reason).__name__})"
    if type(found.step) is not int or found.step < 1:
        yield f"{TRAINER_STATE_NAME} is damaged (global_step {found.step!r})"
    if run.scheduler:
        yield _fault(folder / SCHEDULER_NAME)
    # the rest is what DeepSpeed reads
    latest, tag = folder / ("latest_universal" if run.universal else "latest"), ""
    try:
        tag = latest.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        yield f"{latest.name} is missing or damaged"
    if not tag or not (folder / tag).is_dir():
        yield f"the folder that {latest.name} names is missing"
    if run.universal:
        return
    models = sorted((folder / tag).glob("*mp_rank_00_model_states.pt"))
    if not models:
        yield f"{tag} has no model_states.pt"
    read = next((path for path in models if path.name.startswith(f"zero_pp_rank_{run.rank}_")), models[0])
    yield _fault(read)
    found.other = _other(read, run)
    shard = f"zero_pp_rank_{run.rank}_mp_rank_00"
    if run.stage == 3 and not found.other:
        yield _fault(folder / tag / f"{shard}_model_states.pt")
    if run.stage and not found.other:
        yield _fault(folder / tag / f"{'bf16_' if run.bf16 else ''}{shard}_optim_states.pt")


def _other(model_states: Path, run: Run) -> str:
    """What a run must have as the one that wrote the file had, and has not; "" where nothing is."""
    # as DeepSpeed reads it, but for the tensors, which are left where they are
    written = torch.load(model_states, map_location="cpu", weights_only=False, mmap=True)
    settings = written.get("ds_config", {})
    stage, bf16 = settings.get("zero_optimization", {}).get("stage", 0), settings.get("bf16", {}).get("enabled", False)
    kinds = [{0: "0", 3: "3"}.get(x, "1 or 2") for x in (stage, run.stage)]
    if kinds[0] != kinds[1]:
        return f"the checkpoint was written under ZeRO stage {kinds[0]}, and this run has {kinds[1]}: set that stage"
    if run.stage and written.get("dp_world_size", run.ranks) != run.ranks:
        return (
            f"the checkpoint's optimizer is cut for {written['dp_world_size']} ranks, and this run has {run.ranks}: "
            f'start {written["dp_world_size"]} (another "size" of the sequence_parallel section is fine)'
        )
    if run.stage and bool(bf16) != run.bf16:
        return f"the checkpoint was written with bf16={bool(bf16)}, and this run has bf16={run.bf16}: set it alike"
    return ""


def random_state(folder: Path, rank: int, ranks: int) -> Path:
    """Where the Trainer keeps the state of a rank's random generators."""
    return folder / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth")


def _fault(path: Path) -> str:
    return "" if is_whole(path) else f"{path.name} is {'damaged' if path.exists() else 'missing'}"


def is_whole(path: Path) -> bool:
    """Whether a file that torch saved was written to its end, where the archive has its list of contents."""
    return path.is_file() and zipfile.is_zipfile(path)
