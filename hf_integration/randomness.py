"""The random state of ranks: what may not change it, and where they must have one and the same."""

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


def share(group: dist.ProcessGroup | None) -> None:
    """All ranks of the group draw what its first one would have drawn, whatever they drew before. Collective; None is
    the group of this rank alone.

    ZeRO-3 initialises models on one rank alone, and a checkpoint may have been written with other groups. Samplers
    need one state on all ranks when training starts; data sets and collators need it on those of a sequence.
    """
    if group is None:
        return
    state = [_state()]
    dist.broadcast_object_list(state, src=dist.get_global_rank(group, 0), group=group)
    _set_state(state[0])


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """What is drawn inside is drawn again after it."""
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
    """All ranks have one random state when training begins, and when a sampler that draws from it begins an epoch: data
    sets may have moved it by other amounts."""

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp = sp

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        share(self.sp.control_world)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.train_sampling_strategy == "group_by_length":
            share(self.sp.control_world)
