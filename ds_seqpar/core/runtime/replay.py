"""Hook for activation checkpoints, in which the second run of a function reuses results of the first run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .buffers import Tensors


class Replay:
    """The replay state of a call outside any checkpoint; `memory.checkpoints` subclasses it for calls inside a
    checkpoint.
    """

    which_run = "none"  # the current run of a checkpointed function; ranks compare this value
    checkpoint_saves = False  # whether a checkpoint saves attention's results

    @property
    def replays_next(self) -> bool:
        """Whether the next result is already saved."""
        return False

    def once(self, compute: Callable[[], Sequence[Tensor]], replays: Callable[[], object]) -> Tensors:
        """Return the result of `compute`, or call `replays` and return the result that the first run saved."""
        return tuple(compute())


NONE = Replay()
# functions that return the innermost checkpoint around the call, or None
finders: list[Callable[[], Replay | None]] = []


def current() -> Replay:
    """Return the innermost checkpoint around this call, or `NONE` outside a checkpoint."""
    return next((found for find in finders if (found := find()) is not None), NONE)
