"""Examine a job before it trains: measure ranks, links and kernels, and compare each with its expected behavior. The
outcome is a table, JSON, or the error that ends the job.
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

# what needs no model, by name
OF_RANKS = ranks.environment, ranks.agreement, attention.kernels, attention.sums, ranks.links, attention.attention
CHECKS: tuple[tuple[str, Check], ...] = tuple((x.__name__, x) for x in (*OF_RANKS, data.batches, data.loaders))
# status -> (how a line of the table begins, how such findings are counted)
WORDS: dict[Status, tuple[str, str]] = {
    "fail": ("FAIL", "failed"),
    "pass": ("pass", "passed"),
    "not tried": ("-", "not tried"),
}


def examined(job: Job, progress: Callable[[str], object]) -> list[Finding]:
    """Run every check on a job; see `examine`."""
    knows_model = job.model is not None and patcher_of_class(job.model) is not None
    return examine(job, [*CHECKS, *(doctor_of_models().CHECKS if knows_model else ())], progress)


def require_sound(sp: SequenceParallel, model: Any, content: Mapping[str, Any], loader: Any = None) -> None:
    """Run the quick part before training; rank 0 prints its table. Collective over the world.

    Args:
        sp: The SequenceParallel that is to train.
        model: The model.
        content: The DeepSpeed configuration.
        loader: The data loader, if there is one.

    Raises:
        ConfigError: A check failed; on all ranks.
    """
    few = sp.config.ulysses * (1 if sp.config.head_chunks == "auto" else sp.config.head_chunks)
    known = patcher_of_class(model) is not None  # heads of a model of one's own are not
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
