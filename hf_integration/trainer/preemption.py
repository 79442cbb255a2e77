"""Ends training with a checkpoint at SIGTERM, by which clusters announce that they stop a job, where
TrainingArguments(enable_jit_checkpoint=True) asks for it.

transformers' own callback waits three seconds on each rank and then saves. Ranks would save different steps, and a
launcher may signal one rank alone at first. Here ranks agree after every step whether one of them was signalled, and
save that step together.
"""

from __future__ import annotations

import signal
from typing import Any

from transformers import TrainerCallback

from ds_seqpar import SequenceParallel
from ds_seqpar.runtime.agreement import all_reduce_sum


class PreemptionCallback(TrainerCallback):
    """From the beginning to the end of training, a SIGTERM to any rank ends it after the step, with a checkpoint."""

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp, self.signalled = sp, False
        self.before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.signalled = False
        self.before = signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, *_: Any) -> None:
        self.signalled = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (ranks,) = all_reduce_sum(self.sp.control_world, [int(self.signalled)], "the end of a step")
        if ranks:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGTERM, self.before)


def take_over(trainer: Any) -> None:
    """Replaces transformers' own callback by PreemptionCallback, if the Trainer has it."""
    if not getattr(trainer.args, "enable_jit_checkpoint", False):
        return
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    theirs = trainer.pop_callback(JITCheckpointCallback)
    signal.signal(signal.SIGTERM, theirs.jit_manager._original_sigterm_handler)
    trainer.add_callback(PreemptionCallback(trainer.sp))
