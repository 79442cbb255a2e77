"""Run checks on every rank, and join what the ranks found."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..errors import MOST_SHOWN, SeqParError, as_seqpar_error, ranks_in_words
from ..runtime.agreement import all_gather_objects

if TYPE_CHECKING:
    from ..parallel import SequenceParallel

Status = Literal["pass", "fail", "not tried"]
AGREEMENT = "agreement"  # the check without which ranks cannot communicate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is examined.

    Attributes:
        sp: The SequenceParallel that is to train.
        model: The model; None: attention alone is examined.
        heads: The model's (query heads, key/value heads).
        head_dim: Of the model's attention.
        dtype: In which the model computes.
        window: The keys that a query of the model's windowed layers sees; None: it has none.
        softcap: The bound of the model's scores; None: it has none.
        quick: Whether to look only at what takes few seconds.
        content: The DeepSpeed configuration, {} without one.
        loader: The data loader of the job, where there is one.
    """

    sp: SequenceParallel
    model: Any = None
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
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
        seconds: How long the function took that looked; 0 for all but the first of its findings.
    """

    check: str
    status: Status
    detail: str = ""
    advice: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, check: str, detail: str, wrong: str = "", advice: str = "") -> Finding:
        """Return that a check passed, with figures, or else failed by what is wrong."""
        return (
            cls(check=check, status="fail", detail=wrong, advice=advice)
            if wrong
            else cls(check=check, status="pass", detail=detail)
        )


# Called on all ranks at once. A plain function returns this rank's findings, as many as on all other ranks. A generator
# yields what this rank has found, is sent what each rank has yielded, by rank, and returns its findings in the end. If
# it raises between two yields, the check fails on all ranks, and none waits for another one.
Check = Callable[[Job], Sequence[Finding] | Generator[Any, list[Any], Sequence[Finding]]]


def examine(job: Job, checks: Iterable[tuple[str, Check]], progress: Callable[[str], object] = print) -> list[Finding]:
    """Run checks, and return what all ranks found, the same on each of them. Collective over the world.

    Args:
        job: What is examined.
        checks: Each with a name for what it raises.
        progress: Called with the name of the check that begins.
    """
    found: list[Finding] = []
    received, received_bytes = dict(job.sp.comm.received), job.sp.comm.received_bytes
    apart = ""  # the check after which ranks may no longer be in step
    for name, check in checks:
        if apart:
            found.append(Finding(check=name, status="not tried", detail=f"{apart} failed"))
            continue
        progress(name)
        by_rank, seconds = _results(job, name, check)
        of_check = [_joined(of_ranks) for of_ranks in _by_check(name, by_rank)]
        some_raised = any(map(_raised, by_rank)) and not all(map(_raised, by_rank))
        if some_raised or (name == AGREEMENT and any(one.status == "fail" for one in of_check)):
            apart = name
        of_check[:1] = [dataclasses.replace(one, seconds=seconds) for one in of_check[:1]]
        found += of_check
    job.sp.comm.received.clear()  # in place, since others refer to it
    job.sp.comm.received.update(received)
    job.sp.comm.received_bytes = received_bytes
    return found


def _results(job: Job, name: str, check: Check) -> tuple[list[Any], float]:
    """Return what a check returned or raised on each rank, and how long it took on the slowest."""
    begun: Any = None
    sent, began = list[Any](), time.monotonic()
    while True:
        done, local = True, None
        try:
            if begun is None:
                begun = check(job)
            if isinstance(begun, Generator):
                done, local = False, begun.send(sent or None)
            else:
                local = list(begun)
        except StopIteration as end:
            local = end.value
        except Exception as error:
            local = SeqParError(str(as_seqpar_error(f"{name} raised", error)))  # itself it may not be one to be sent
        local = f"what {name} found", local, done, time.monotonic() - began
        _, results, ended, seconds = zip(*all_gather_objects(job.sp.groups.world, local), strict=True)
        sent = list(results)
        if any(ended):
            return sent, max(seconds)


def _raised(result: object) -> bool:
    return isinstance(result, Exception)


def _by_check(name: str, by_rank: Sequence[Any]) -> list[dict[int, Finding]]:
    """Return the findings of each check by rank; where ranks raised, what they raised alone."""
    if any(map(_raised, by_rank)):
        errors = {rank: error for rank, error in enumerate(by_rank) if _raised(error)}
        return [{rank: Finding(check=name, status="fail", detail=str(x)) for rank, x in errors.items()}]
    names = {finding.check: None for findings in by_rank for finding in findings}
    return [
        {rank: finding for rank, findings in enumerate(by_rank) for finding in findings if finding.check == name}
        for name in names
    ]


def _joined(of_ranks: dict[int, Finding]) -> Finding:
    """Return the worst finding of any rank, which says of which ranks where not all have it."""
    status = next(x for x in ("fail", "not tried", "pass") if any(one.status == x for one in of_ranks.values()))
    ranks_of: dict[str, list[int]] = {}
    for rank, finding in of_ranks.items():
        if finding.status == status:
            ranks_of.setdefault(finding.detail, []).append(rank)
    worst = next(finding for finding in of_ranks.values() if finding.status == status)
    if status != "fail" or len(ranks_of[worst.detail]) == len(of_ranks):
        return worst
    parts = [f"{ranks_in_words(ranks)}: {detail}" for detail, ranks in ranks_of.items()]
    return dataclasses.replace(worst, detail="; ".join(parts[:MOST_SHOWN]))
