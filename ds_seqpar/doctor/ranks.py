"""Check that all ranks run the same software with the same settings, and share tokens and products without a gap."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..compiler.compile import Recipe
from ..compiler.schedules.actions import Steps
from ..compiler.schedules.plan import Plan
from ..compiler.schedules.validate import validate
from ..compiler.sharding.layout import Run, Runs
from ..compiler.sharding.masks import CAUSAL
from ..compiler.sharding.shards import runs_of_sp_rank
from ..errors import PlanError, ranks_in_words
from ..runtime.agreement import Fields, differences, fields_of
from ..runtime.devices import device_name
from .findings import Finding, Job

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "flash-attn", "liger-kernel", "triton")
PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "CUBLAS_", "DS_", "CUDA_DEVICE_MAX_CONNECTIONS")
OF_A_HOST = ("IFNAME", "HCA")  # what such variables name differs between hosts, and so do paths


Gathering = Generator[Any, list[Any], list[Finding]]  # see `findings.Check`


def check_environment(job: Job) -> Gathering:
    """Compare versions, devices and the variables that change how ranks communicate or compute."""
    versions = _versions(job.sp.device)
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES) and not name.endswith(OF_A_HOST) and "/" not in value
    }
    by_rank = yield versions, variables
    return [
        _alike("versions", [of_rank[0] for of_rank in by_rank], "install the same on all hosts, and start ranks in it"),
        _alike(
            "variables", [of_rank[1] for of_rank in by_rank], "let the launcher set them, so that all ranks have them"
        ),
    ]


def _versions(device: torch.device) -> Fields:
    source = hashlib.blake2b(digest_size=4)  # installed by a link, one version may have another text on each host
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        source.update(path.read_bytes())
    found = {"ds_seqpar": source.hexdigest(), "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if device.type == "cuda":
        found |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return found | {"device": device_name(device)}


def _alike(check: str, by_rank: list[Fields], advice: str, passed: str = "") -> Finding:
    """Return whether all ranks have the same fields."""
    difference = differences({rank: (check, fields) for rank, fields in enumerate(by_rank)})
    if difference:
        return Finding(check=check, status="fail", detail=f"all ranks need the same {difference}", advice=advice)
    shown = ", ".join(f"{name} {value}" for name, value in by_rank[0].items())
    return Finding(check=check, status="pass", detail=passed or shown or "none set")


class _Holding(NamedTuple):
    """What a rank holds and does, by its own settings."""

    group: int  # of the ranks that share a sequence
    sp_rank: int
    ulysses_rank: int
    cp_rank: int
    fields: Fields
    runs: Runs
    steps: dict[str, Steps]  # by direction


def check_agreement(job: Job) -> Gathering:
    """Compare what the ranks have resolved, and what each of them holds and computes by its own settings."""
    sp, runtime, tokens = job.sp, job.sp.runtime, 4 * job.sp.multiple
    config, recipe, shards = runtime.config, runtime.compiler.recipe, runtime.shards(tokens // runtime.size)
    fields = fields_of({**config.settings(), "schedule's digest": recipe.schedule.digest})
    fields |= {"topology": str(runtime.topology.axes), "heads": str(job.heads)}
    held = [runs_of_sp_rank(shards, "q", runtime.ulysses.size, rank) for rank in range(sp.size)]
    fields |= {f"tokens of SP rank {rank}": " ".join(map(_span, runs)) for rank, runs in enumerate(held)}
    block_mask, steps = runtime.compiler.block_mask(CAUSAL, shards), {}
    for direction in DIRECTIONS:
        q = torch.empty(1, tokens // sp.size, job.heads[0], job.head_dim, dtype=job.dtype, device=sp.device)
        program, _ = runtime.bound(direction, q, job.heads[1], CAUSAL, shards)
        steps[direction] = recipe.steps(direction, block_mask, program.shapes[0], runtime.rank)
    numbers = sp.data_rank, sp.rank, runtime.ulysses.rank, runtime.rank
    by_rank = yield _Holding(*numbers, fields, held[sp.rank], steps)
    passed = f'size {config.size}, ulysses {config.ulysses}, schedule "{config.schedule}", layout "{config.layout}"'
    alike = [of_rank.fields for of_rank in by_rank]
    return [
        _alike("settings", alike, "give all ranks the same configuration", passed),
        _tokens(by_rank, sp.size, tokens),
        _plans(by_rank, recipe, list(block_mask.pairs())),
    ]


DIRECTIONS = ("forward", "backward")


def _span(run: Run) -> str:
    return f"{run.start}-{run.last}" + f" by {run.step}" * (run.step > 1)


def _tokens(by_rank: list[_Holding], size: int, tokens: int) -> Finding:
    """Return whether the ranks of each sequence hold every token once, each by its own settings."""
    wrong = []
    for group in sorted({of_rank.group for of_rank in by_rank}):
        holders: list[list[int]] = [[] for _ in range(tokens)]
        for rank, of_rank in enumerate(by_rank):
            for run in of_rank.runs if of_rank.group == group else ():
                for position in run.positions:
                    holders[position].append(rank)
        wrong += [(position, ranks) for position, ranks in enumerate(holders) if len(ranks) != 1]
    if not wrong:
        return Finding(check="tokens", status="pass", detail=f"each of {tokens} is held by one of {size} ranks")
    position, ranks = wrong[0]
    detail = f"token {position} of {tokens} is held by {ranks_in_words(ranks) if ranks else 'no rank'}"
    detail += f", and {len(wrong) - 1} more are not held once" * (len(wrong) > 1)
    advice = "see in which settings or which code these ranks differ from the others"
    return Finding(check="tokens", status="fail", detail=detail, advice=advice)


def _plans(by_rank: list[_Holding], recipe: Recipe, needed: list[tuple[int, int]]) -> Finding:
    """Return whether the steps of the ranks, each by its own settings, make a plan that is right."""
    schedule = recipe.schedule
    for group, ulysses_rank in sorted({(of_rank.group, of_rank.ulysses_rank) for of_rank in by_rank}):
        in_plan = [of_rank for of_rank in by_rank if (of_rank.group, of_rank.ulysses_rank) == (group, ulysses_rank)]
        in_plan.sort(key=lambda of_rank: of_rank.cp_rank)
        try:
            if [of_rank.cp_rank for of_rank in in_plan] != list(range(recipe.size)):
                raise PlanError(f"CP ranks must be 0 to {recipe.size - 1}; got {[x.cp_rank for x in in_plan]}")
            for direction in DIRECTIONS:
                steps = [of_rank.steps[direction] for of_rank in in_plan]
                options = schedule.blocks_per_rank, schedule.shares_queries
                validate(Plan.of(schedule.name, direction, recipe.size, steps.__getitem__, *options), needed)
        except PlanError as error:
            return Finding(check="plan", status="fail", detail=str(error), advice="give all ranks the same schedule")
    detail = f"every product of two blocks ({len(needed)}) is computed once, every message has its receiver"
    return Finding(check="plan", status="pass", detail=detail)
