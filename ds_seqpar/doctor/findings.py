"""Run checks on every rank, and combine the findings of all ranks."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist

from ..base.errors import MOST_SHOWN, as_seqpar_error, ranks_in_words
from ..data.random_states import random_state, set_random_state
from ..data.unused_sharding import UnusedSharding
from ..guards.agreement import all_gather_objects

if TYPE_CHECKING:
    from ..parallel import SequenceParallel

Status = Literal["fail", "not tried", "pass"]  # worst first
AGREEMENT = "agreement"  # if this check fails, ranks cannot communicate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The job to examine.

    Attributes:
        sp: The SequenceParallel to train with.
        model: The model, or None to examine only attention.
        heads: The model's (query heads, key/value heads).
        head_dim: The head dimension of the model's attention.
        dtype: The model's dtype.
        window: The number of keys visible to each query in the model's windowed layers, or None without windows.
        softcap: The bound on the model's scores, or None without a bound.
        quick: Whether to run only checks that take a few seconds.
        content: The DeepSpeed configuration, or {} without DeepSpeed.
        loader: The job's data loader, or None.
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
        check: The name of the check, in a few words.
        status: Whether the check passed, failed or was not tried.
        detail: Figures if the check passed, otherwise the problem or the reason for skipping the check.
        advice: The remedy if the check failed.
        seconds: The duration of the function that ran the check, set only on the function's first finding.
    """

    check: str
    status: Status
    detail: str = ""
    advice: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, check: str, wrong: str, advice: str, passed: str) -> Finding:
        """Return a failed Finding with advice or, if `wrong` is empty, a passed Finding with figures."""
        return cls(check=check, status="fail" if wrong else "pass", detail=wrong or passed, advice=advice * bool(wrong))


# A check is called on all ranks at once. It is a plain function that returns findings, or a generator. A generator
# yields this rank's results, receives a list of all ranks' results, and returns the same number of findings on every
# rank. An error before a yield fails the check on all ranks. A check that communicates must therefore yield first, so
# that no rank waits for a rank that has failed.
Check = Callable[[Job], Sequence[Finding] | Generator[Any, list[Any], Sequence[Finding]]]


def examine(job: Job, checks: Iterable[tuple[str, Check]], progress: Callable[[str], object]) -> list[Finding]:
    """Run checks and return the combined findings of all ranks, the same on each rank.

    The call is collective across all ranks.

    Args:
        job: The job.
        checks: (name for errors, check) pairs.
        progress: A function that is called with each check's name before the check runs.
    """
    found, sp, random = list[Finding](), job.sp, random_state()
    unused, received, received_bytes = sp.sharding.unused, dict(sp.comm.received), sp.comm.received_bytes
    sp.sharding.unused = UnusedSharding(sp.calls)  # excludes the doctor's calls from the training loop's statistics
    sp.sharding.unused.is_met, apart = True, ""  # apart: the name of the check after which ranks may be out of step
    try:
        for name, check in checks:
            if apart:
                found.append(Finding(check=name, status="not tried", detail=f"{apart} failed"))
                continue
            progress(name)
            by_rank, raised, seconds = _results(job, name, check)
            joined = _joined(by_rank)
            if any(raised) > all(raised) or (name == AGREEMENT and any(one.status == "fail" for one in joined)):
                apart = name
            found += [dataclasses.replace(one, seconds=seconds * (one is joined[0])) for one in joined]
    finally:
        set_random_state(random)
        sp.checker.flush(last=True)
        sp.sharding.unused = unused
        sp.comm.received.clear()  # cleared in place, since other objects refer to the counter
        sp.comm.received.update(received)
        sp.comm.received_bytes = received_bytes
    return found


def _results(job: Job, name: str, check: Check) -> tuple[list[Sequence[Finding]], tuple[bool, ...], float]:
    """Return each rank's findings, whether each rank raised an error, and the time of the slowest rank in seconds."""
    begun: Any = None
    sent, began = list[Any](), time.monotonic()
    while True:
        done, raised = True, False
        try:
            begun = check(job) if begun is None else begun
            done = not isinstance(begun, Generator)
            local = list(begun) if done else begun.send(sent or None)
        except StopIteration as end:
            done, local = True, end.value
        except Exception as error:
            done, raised = True, True
            local = [Finding(check=name, status="fail", detail=str(as_seqpar_error(f"{name} raised", error)))]
            # printed now, since other ranks may hang inside the check and never reach the table
            print(f"ds_seqpar: rank {dist.get_rank()}: {local[0].detail}", file=sys.stderr, flush=True)
        local = f"what {name} found", local, done, raised, time.monotonic() - began
        _, results, ended, failed, seconds = zip(*all_gather_objects(job.sp.groups.world, local), strict=True)
        sent = list(results)
        if any(ended):
            return [x if end else [] for x, end in zip(results, ended, strict=True)], failed, max(seconds)


def _joined(by_rank: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the worst finding for each check, and the affected ranks unless the finding is the same on all ranks."""
    joined = []
    for check in dict.fromkeys(finding.check for findings in by_rank for finding in findings):
        of_check = {rank: x for rank, findings in enumerate(by_rank) for x in findings if x.check == check}
        worst = min(of_check.values(), key=lambda x: get_args(Status).index(x.status))
        details = {rank: x.detail for rank, x in of_check.items() if x.status == worst.status}
        if worst.status == "fail" and [*details.values()] != [worst.detail] * len(by_rank):
            ranks_of = {one: [rank for rank in details if details[rank] == one] for one in details.values()}
            parts = [f"{ranks_in_words(ranks)}: {detail}" for detail, ranks in ranks_of.items()]
            worst = dataclasses.replace(worst, detail="; ".join(parts[:MOST_SHOWN]))
        joined.append(worst)
    return joined
