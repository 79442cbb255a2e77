"""Synchronize random states between ranks, and restore random states from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_pt_utils import safe_globals

from ds_seqpar import SequenceParallel
from ds_seqpar.data.random_states import random_state, set_random_state
from ds_seqpar.guards.waits import explaining_failure


def share(group: dist.ProcessGroup | None) -> None:
    """Set the random state of all ranks in a group to the first rank's state.

    The call is collective across the group. None means a group of one rank. Samplers need the same state on all ranks
    when training starts. Data sets and collators need the same state on all ranks that share a sequence. States may
    differ because ZeRO-3 initializes models on one rank only, or because a checkpoint was written with different
    groups.
    """
    if group is None:
        return
    state = [random_state()]
    with explaining_failure("sharing the random state of the first rank", group):
        dist.broadcast_object_list(state, src=dist.get_global_rank(group, 0), group=group)
    set_random_state(state[0])


def load(path: Path) -> None:
    """Restore the random state, except for devices, from a checkpoint written by a different number of ranks."""
    with safe_globals():
        state = torch.load(path, weights_only=True)
    set_random_state((state["python"], state["numpy"], state["cpu"], None))


class SharedDraws(TrainerCallback):
    """A callback that makes the random state equal on all ranks when training begins.

    If a sampler draws random numbers at each epoch, the state is made equal again before each epoch, since data sets
    may have advanced the states by different amounts.

    Args:
        sp: The `SequenceParallel` of the model.
        by_group: Whether to make the state equal only within each group of ranks.
    """

    def __init__(self, sp: SequenceParallel, by_group: bool = False) -> None:
        self.sp, self.by_group = sp, by_group

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        share(self.sp.groups.control if self.by_group else self.sp.control_world)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.train_sampling_strategy == "group_by_length" and not self.by_group:
            share(self.sp.control_world)
