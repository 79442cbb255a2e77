"""Check that all ranks run the same software with the same settings, and share tokens and products without a gap."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import platform
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from ..compiler.schedules.validate import validate
from ..compiler.sharding.masks import CAUSAL
from ..compiler.sharding.shards import runs_of_sp_rank
from ..config.deepspeed_json import DeepSpeedJson
from ..errors import PlanError
from ..fingerprint import Fingerprint
from ..runtime.agreement import Fields, differences, fields_of
from ..runtime.devices import device_name
from .findings import Finding, Job

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "flash-attn", "liger-kernel", "triton")
PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "CUBLAS_", "DS_", "CUDA_DEVICE_MAX_CONNECTIONS")
# what such variables name may differ between hosts or ranks, as paths and what is logged may
OF_A_HOST = ("IFNAME", "HCA", "GID_INDEX", "PLACES", "NCCL_DEBUG", "_LOGS", "_TRACEBACK")
DIRECTIONS = ("forward", "backward")
MOST_RANKS = 64  # of a plan that is looked at whole
ADVICE = "see which part of ds_seqpar, or which schedule or layout of your own, is not as it was"
Gathering = Generator[Any, list[Any], list[Finding]]  # see `findings.Check`


def check_environment(job: Job) -> Gathering:
    """Compare versions, devices and the variables that change how ranks communicate or compute."""
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES) and not name.endswith(OF_A_HOST) and "/" not in value
    }
    versions, of_ranks = zip(*(yield _versions(job.sp.device), variables), strict=True)
    return [
        _alike("versions", versions, "install the same on all hosts, and start all ranks in it"),
        _alike("variables", of_ranks, "let the launcher set them, so that all ranks have them"),
    ]


def _versions(device: torch.device) -> Fields:
    # installed by a link, one version may have another text on each host
    source = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
    found = {"ds_seqpar": str(Fingerprint.of_bytes(source)), "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if device.type == "cuda":
        found |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return found | {"device": device_name(device)}


def _alike(check: str, by_rank: Any, advice: str, passed: str = "") -> Finding:
    """Return whether all ranks have the same fields."""
    difference = differences({rank: (check, fields) for rank, fields in enumerate(by_rank)})
    shown = ", ".join(f"{name} {value}" for name, value in by_rank[0].items()) or "none set"
    return Finding.of(check, difference and f"all ranks need the same {difference}", advice, passed or shown)


def check_agreement(job: Job) -> Gathering:
    """Compare what the ranks have resolved, and whether tokens and products are shared without a gap."""
    sp, runtime, tokens = job.sp, job.sp.runtime, 4 * job.sp.multiple
    config, recipe, shards = runtime.config, runtime.compiler.recipe, runtime.shards(tokens // runtime.size)
    held = [runs_of_sp_rank(shards, "q", runtime.ulysses.size, rank) for rank in range(sp.size)]
    positions = sorted(itertools.chain.from_iterable(run.positions for runs in held for run in runs))
    fields = fields_of(config.settings()) | {"topology": str(runtime.topology.axes), "heads": str(job.heads)}
    fields |= fields_of(DeepSpeedJson.read(job.content).resolved) if job.content else {}
    for rank, runs in enumerate(held):
        spans = (f"{run.start}-{run.last}" + f" by {run.step}" * (run.step > 1) for run in runs)
        fields[f"tokens of SP rank {rank}"] = " ".join(spans)
    block_mask, digests = runtime.compiler.block_mask(CAUSAL, shards), []
    wrong = "" if config == sp.config else "the SequenceParallel and its runtime have different settings"
    if positions != list(range(tokens)):
        wrong = f"{tokens} tokens must be held once; got {len(positions)}, of which {len({*positions})} are different"
    for direction in DIRECTIONS if recipe.size <= MOST_RANKS else ():
        q = torch.empty(1, tokens // sp.size, job.heads[0], job.head_dim, dtype=job.dtype, device=sp.device)
        program, _ = runtime.bound(direction, q, job.heads[1], CAUSAL, shards)
        plan = recipe.plan(direction, block_mask, program.shape)
        digests.append(str(Fingerprint.of(plan.table())))
        try:
            validate(plan, block_mask.pairs())
        except PlanError as error:
            wrong = wrong or str(error)
    planned = runtime.ulysses.rank, tuple(digests)  # Ulysses ranks with other numbers of heads may have other plans
    by_rank, numbers, plans = zip(*(yield fields, (sp.data_rank, sp.rank), planned), strict=True)
    if len({*numbers}) < len(numbers):
        wrong = f"each rank needs an own (group, SP rank); got {numbers}"
    elif len({*plans}) > len({ulysses_rank for ulysses_rank, _ in plans}):
        wrong = f"ranks with the same Ulysses rank need one plan; got (Ulysses rank, digests of plans) {plans}"
    passed = f'size {config.size}, ulysses {config.ulysses}, schedule "{config.schedule}", layout "{config.layout}"'
    products = f"each of {tokens} tokens is held once, each of {len(list(block_mask.pairs()))} products computed once"
    return [
        _alike("settings", by_rank, "give all ranks the same configuration", passed),
        Finding.of("shares", wrong, ADVICE, products),
    ]
