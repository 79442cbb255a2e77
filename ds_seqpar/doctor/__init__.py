"""Examine a job before training.

The doctor measures ranks, links and kernels, and compares the results with expectations. The outcome is a table, JSON,
or an error that stops the job.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..base.errors import ConfigError
from ..deepspeed.config import DeepSpeedJson, without_auto
from ..models import doctor_of_models, patcher_of_class, unwrapped
from . import attention, data, ranks
from .findings import Check, Finding, Job, Status, examine

if TYPE_CHECKING:
    from ..parallel import SequenceParallel

# checks that need no model, by name
OF_RANKS = ranks.environment, ranks.agreement, attention.kernels, attention.sums, ranks.links, attention.attention
CHECKS: tuple[tuple[str, Check], ...] = tuple((x.__name__, x) for x in (*OF_RANKS, data.batches, data.loaders))
# by status: (beginning of a table line, word in the summary)
WORDS: dict[Status, tuple[str, str]] = {
    "fail": ("FAIL", "failed"),
    "pass": ("pass", "passed"),
    "not tried": ("-", "not tried"),
}


def examined(job: Job, progress: Callable[[str], object]) -> list[Finding]:
    """Run all checks on a job. See `examine`."""
    knows_model = job.model is not None and patcher_of_class(job.model) is not None
    return examine(job, [*CHECKS, *(doctor_of_models().CHECKS if knows_model else ())], progress)


def require_sound(sp: SequenceParallel, model: Any, content: Mapping[str, Any], loader: Any = None) -> None:
    """Run the quick checks before training, and print a table of the results on rank 0.

    The call is collective across all ranks.

    Args:
        sp: The SequenceParallel for training.
        model: The model.
        content: The DeepSpeed configuration.
        loader: The data loader, or None.

    Raises:
        ConfigError: A check failed. Raised on all ranks.
    """
    few = sp.config.ulysses * (1 if sp.config.head_chunks == "auto" else sp.config.head_chunks)
    known = patcher_of_class(model) is not None  # the heads of a custom model are unknown
    shape = doctor_of_models().shape_of(unwrapped(model)) if known else {"heads": (2 * few, few)}
    dtype = getattr(torch, DeepSpeedJson.read(without_auto(content)).known.dtype)
    job = Job(sp=sp, model=model, dtype=dtype, quick=True, content=dict(content), loader=loader, **shape)
    findings = examined(job, lambda name: None)
    if dist.get_rank() == 0:
        print(f"sequence_parallel: what the doctor found\n{table(findings)}", file=sys.stderr, flush=True)
    if failed := [finding for finding in findings if finding.status == "fail"]:
        wrong = f"{failed[0].check}: {', '.join(filter(None, (failed[0].detail, failed[0].advice)))}"
        raise ConfigError(f"the doctor must find no fault before training; got {wrong}")


def table(findings: Sequence[Finding]) -> str:
    """Return a line for each check, followed by advice if the check failed."""
    widest, lines = max(len(finding.check) for finding in findings), list[str]()
    for x in findings:
        lines.append(f"{WORDS[x.status][0]:<5} {x.check:<{widest}} {x.seconds:6.1f} s  {x.detail}".rstrip())
        lines += [f"      {'':<{widest}}           what to do: {x.advice}"] if x.advice else []
    counts = collections.Counter(finding.status for finding in findings)
    return "\n".join([*lines, "", ", ".join(f"{counts[status]} {word}" for status, (_, word) in WORDS.items())])
