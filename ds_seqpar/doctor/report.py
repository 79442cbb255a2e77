"""Examine a job by all checks that there are, and say what was found: in a table, or in the error that ends the job."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..config.deepspeed_json import DeepSpeedJson, without_auto
from ..data.first_use import FirstUse
from ..errors import ConfigError
from ..models import doctor_of_models, patcher_of_class, unwrapped
from ..runtime.process_exit import printed_by
from ..runtime.random_states import unchanged
from . import RANKS_CHECKS, data
from .findings import Finding, Job, Status, examine

if TYPE_CHECKING:
    from ..parallel import SequenceParallel

MARKS = {"pass": "pass", "fail": "FAIL", "not tried": "-"}
WORDS: dict[Status, str] = {"fail": "failed", "pass": "passed", "not tried": "not tried"}


def examined(job: Job, progress: Callable[[str], object]) -> list[Finding]:
    """Run every check on a job, and return what all ranks found, the same on each. Collective over the world.

    Args:
        job: What is examined.
        progress: Called with the name of the check that begins.
    """
    knows_model = job.model is not None and patcher_of_class(job.model) is not None
    checks = [*RANKS_CHECKS, *data.CHECKS, *(doctor_of_models().CHECKS if knows_model else ())]
    sp, first_use = job.sp, job.sp.first_use
    sp.first_use = FirstUse(sp.calls)  # what the doctor computes says nothing of the loop that comes
    sp.first_use.is_met = True
    try:
        with unchanged():
            return examine(job, checks, progress)
    finally:
        sp.journal.settle(last=True)
        sp.first_use = first_use


def require_sound(sp: SequenceParallel, model: Any, content: Mapping[str, Any], loader: Any = None) -> None:
    """Run the quick part before training; rank 0 prints its table. Collective over the world.

    Args:
        sp: What is to train.
        model: The model.
        content: The DeepSpeed configuration.
        loader: The data loader, where there is one.

    Raises:
        ConfigError: A check failed; on all ranks.
    """
    dtype = getattr(torch, DeepSpeedJson.read(without_auto(content)).known.dtype)
    if patcher_of_class(model) is not None:
        shape = doctor_of_models().shape_of(unwrapped(model))
    else:  # heads of a model of one's own are not known
        few = sp.config.ulysses * (1 if sp.config.head_chunks == "auto" else sp.config.head_chunks)
        shape = {"heads": (2 * few, few)}
    job = Job(sp=sp, model=model, dtype=dtype, quick=True, content=dict(content), loader=loader, **shape)
    findings = examined(job, lambda name: None)
    if dist.get_rank() == 0:
        print(f"sequence_parallel: what the doctor found\n{table(findings)}", file=sys.stderr, flush=True)
    for finding in findings:
        if finding.status == "fail":
            sentence = f"the doctor must find no fault before training; got {finding.check}: {finding.detail}"
            error = ConfigError(f"{sentence}, {finding.advice}" if finding.advice else sentence)
            raise printed_by(error, 0, f"doctor/{finding.check}")


def table(findings: Sequence[Finding]) -> str:
    """Return a line for each check, and one with what to do below each that failed."""
    widest = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(
            f"{MARKS[finding.status]:<5} {finding.check:<{widest}} {finding.seconds:6.1f} s  {finding.detail}".rstrip()
        )
        lines += [f"      {'':<{widest}}           what to do: {finding.advice}"] if finding.advice else []
    counts = collections.Counter(finding.status for finding in findings)
    return "\n".join([*lines, "", ", ".join(f"{counts[status]} {word}" for status, word in WORDS.items())])
