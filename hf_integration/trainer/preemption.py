"""Save a checkpoint and end training on SIGTERM, with `TrainingArguments(enable_jit_checkpoint=True)`.

Clusters send SIGTERM before they stop a job. transformers' callback waits three seconds on each rank and then saves.
Ranks would thus save different steps, and a launcher may initially signal only one rank. With this module, all ranks
check after every step whether any rank was signaled, and then save the same step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from multiprocessing.sharedctypes import RawValue
from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainerCallback

from ds_seqpar import SequenceParallel
from ds_seqpar.guards.agreement import all_reduce_sum

from ..compat import sigterm_handler_before


@dataclasses.dataclass
class _GuardedStart:
    """A worker_init_fn that makes a loader's workers ignore SIGTERM while their rank handles it."""

    start: Any  # the user's worker_init_fn
    listens: Any

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        if self.start is not None:
            self.start(worker)

    def _on_signal(self, *_: Any) -> None:
        if not self.listens.value:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)


class PreemptionCallback(TrainerCallback):
    """A callback that saves a checkpoint and stops training after the step in which any rank received SIGTERM."""

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp, self.signalled = sp, False
        self._listens = RawValue("b", False)  # shared with worker processes

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Context manager in which the callback handles SIGTERM."""
        self.signalled, self._listens.value = False, True
        previous_handler = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            yield
        finally:
            self._listens.value = False
            signal.signal(signal.SIGTERM, previous_handler)

    def guard(self, loader: DataLoader) -> None:
        """Make the workers of a loader ignore SIGTERM while the callback handles the signal.

        A launcher signals all of a rank's processes. If a worker exited, training would end without a checkpoint.
        """
        if not isinstance(loader.worker_init_fn, _GuardedStart):
            loader.worker_init_fn = _GuardedStart(loader.worker_init_fn, self._listens)

    def _on_signal(self, *_: Any) -> None:
        self.signalled = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (signalled_ranks,) = all_reduce_sum(self.sp.control_world, [int(self.signalled)], "the end of a step")
        if signalled_ranks:
            control.should_save = control.should_training_stop = True


def take_over(trainer: Any) -> PreemptionCallback | None:
    """Replace a Trainer's JIT checkpoint callback with a PreemptionCallback.

    Return the new callback, or None if the Trainer has no JIT checkpoint callback.
    """
    if not getattr(trainer.args, "enable_jit_checkpoint", False):
        return None
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    jit_callback = trainer.pop_callback(JITCheckpointCallback)
    signal.signal(signal.SIGTERM, sigterm_handler_before(jit_callback))
    callback = PreemptionCallback(trainer.sp)
    trainer.add_callback(callback)
    return callback
