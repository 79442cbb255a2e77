"""The random state of ranks: make it equal on all of them where it must be, and restore it where it must not change."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from ds_seqpar import SequenceParallel
from ds_seqpar.runtime.comm import explaining_failure


def share(group: dist.ProcessGroup | None) -> None:
    """Set the random state of all ranks of a group to that of its first rank. Collective; None is a group of one rank.

    ZeRO-3 initializes models on one rank only, and a checkpoint may have been written with other groups. Samplers need
    an equal state on all ranks when training starts; data sets and collators need it on the ranks of a sequence.
    """
    if group is None:
        return
    state = [_state()]
    with explaining_failure("sharing the random state of the first rank", group):
        dist.broadcast_object_list(state, src=dist.get_global_rank(group, 0), group=group)
    _set_state(state[0])


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Restore the random state at the end of a context."""
    state = _state()
    try:
        yield
    finally:
        _set_state(state)


def _state() -> tuple:
    on_device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device


def _set_state(state: tuple) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state(state[3])


class SharedDraws(TrainerCallback):
    """Make the random state equal on all ranks when training begins, and when a sampler that draws from it begins an
    epoch: data sets may have advanced it by different amounts.

    Args:
        sp: The `SequenceParallel` of the model.
        by_group: Whether training begins with other numbers in each group, the same on its ranks.
    """

    def __init__(self, sp: SequenceParallel, by_group: bool = False) -> None:
        self.sp, self.by_group = sp, by_group

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        share(self.sp.groups.control if self.by_group else self.sp.control_world)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.train_sampling_strategy == "group_by_length" and not self.by_group:
            share(self.sp.control_world)
