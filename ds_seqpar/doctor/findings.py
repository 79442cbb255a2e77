"""Run checks on every rank, and join what the ranks found."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..errors import SeqParError, as_seqpar_error, ranks_in_words
from ..runtime.agreement import all_gather_objects

if TYPE_CHECKING:
    from ..parallel import SequenceParallel

Status = Literal["pass", "fail", "not tried"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is examined.

    Attributes:
        sp: The SequenceParallel that is to train.
        model: The model; None: attention alone is examined.
        heads: The model's (query heads, key/value heads).
        head_dim: Of the model's attention.
        dtype: In which the model computes.
        quick: Whether to look only at what takes few seconds.
        content: The DeepSpeed configuration, {} without one.
        loader: The data loader of the job, where there is one.
    """

    sp: SequenceParallel
    model: Any = None
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    quick: bool = False
    content: dict[str, Any] = dataclasses.field(default_factory=dict)
    loader: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: What was looked at, a few words.
        status: Whether it is as it must be.
        detail: Figures of what passed; what is wrong; why it was not tried.
        advice: What to do, where it is wrong.
        seconds: How long it took.
    """

    check: str
    status: Status
    detail: str = ""
    advice: str = ""
    seconds: float = 0.0


# On every rank, all at once. It returns this rank's findings, as many on all ranks. What it raises is a failure.
Check = Callable[[Job], Sequence[Finding]]


def examine(job: Job, checks: Iterable[tuple[str, Check]], progress: Callable[[str], object] = print) -> list[Finding]:
    """Run checks, and return what all ranks found, the same on each of them. Collective over the world.

    Args:
        job: What is examined.
        checks: Each with a name for what it raises.
        progress: Called with the name of the check that begins.
    """
    found: list[Finding] = []
    for name, check in checks:
        progress(name)
        began = time.monotonic()
        try:
            local = list(check(job))
        except Exception as error:
            local = [Finding(check=name, status="fail", detail=str(_sentence(name, error)))]
        seconds = time.monotonic() - began
        by_rank = all_gather_objects(job.sp.groups.world, ("findings of the doctor", local))
        for of_ranks in _by_check([findings for _, findings in by_rank]):
            found.append(dataclasses.replace(_joined(of_ranks), seconds=seconds))
    return found


def _sentence(name: str, error: Exception) -> SeqParError:
    return as_seqpar_error(f"{name} raised", error)


def _by_check(by_rank: Sequence[Sequence[Finding]]) -> list[dict[int, Finding]]:
    """Return for each check that any rank has a finding of, the findings by rank."""
    names = {finding.check: None for findings in by_rank for finding in findings}
    return [
        {rank: finding for rank, findings in enumerate(by_rank) for finding in findings if finding.check == name}
        for name in names
    ]


def _joined(of_ranks: dict[int, Finding]) -> Finding:
    """Return the worst finding of any rank, which names the ranks that have it where not all do."""
    for status in ("fail", "not tried", "pass"):
        ranks = [rank for rank, finding in of_ranks.items() if finding.status == status]
        if ranks:
            worst = of_ranks[ranks[0]]
            alike = [rank for rank in ranks if of_ranks[rank].detail == worst.detail]
            if status == "fail" and len(alike) < len(of_ranks):
                return dataclasses.replace(worst, detail=f"{ranks_in_words(alike)}: {worst.detail}")
            return worst
    raise AssertionError("a finding has one of three states")
