"""Every "auto" of a configuration replaced, by each rank for itself, and agreed on."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import torch
import torch.distributed as dist

from .config import SequenceParallelConfig
from .errors import ConfigError, SeqParError, as_error
from .planning.job import Job, line_of, planned
from .planning.machine import Machine
from .running.agreement import agree
from .running.devices import ranks_a_node


def agreed(
    world: dist.ProcessGroup,
    given: object,
    heads: tuple[int, int] | None,
    job: Job | None,
    error: SeqParError | None,
) -> SequenceParallelConfig:
    """The configuration with every "auto" replaced. Raises on every rank where one rank's does not fit, or where one
    has an error already. Each rank plans for itself; rank 0 says what is chosen."""
    settings: dict[str, Any] = {}
    choice = None
    try:
        config, ranks = _config(given), dist.get_world_size()
        resolved, choice = planned(config, job, heads, ranks, functools.partial(seen, world=ranks))
        settings = {**config.settings(), "heads": heads}
        if choice:  # by what each rank has read and seen
            settings |= {"tokens": choice.question.seq, "ranks a node": choice.question.machine.per_node}
            settings |= {f"planned {name}": value for name, value in resolved.settings().items()}
    except Exception as reason:  # a schedule of one's own may raise anything
        error = error or as_error("SequenceParallel needs a configuration that can be read; reading it failed", reason)
    agree(world, "sequence parallel configuration", settings, error=error, call="SequenceParallel")
    if choice and dist.get_rank() == 0:
        print(line_of(choice), file=sys.stderr, flush=True)
    return resolved


def _config(given: object) -> SequenceParallelConfig:
    if given is None:
        return SequenceParallelConfig()
    if not isinstance(given, SequenceParallelConfig):
        raise ConfigError(
            f"SequenceParallel needs a SequenceParallelConfig; got {type(given).__name__}, "
            "make one by SequenceParallelConfig.from_dict or from_deepspeed"
        )
    return given


def seen(dtype: str, world: int) -> Machine:
    """The machine that is supposed for the planner where nobody says which, with the ranks a node that were
    launched."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return dataclasses.replace(Machine.supposed(name, dtype), per_node=min(ranks_a_node(world), world))
