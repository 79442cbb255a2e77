"""The seam for checkpoints: results are computed in the first run of a function and replayed in the second."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .buffers import Tensors


class Replay:
    """The context of a call outside any checkpoint. `memory.checkpoints` extends it."""

    which_run = "none"  # of the function, for ranks to compare: what they send differs by it
    checkpoint_saves = False  # whether a checkpoint saves results

    @property
    def replays_next(self) -> bool:
        """Whether the next result was saved."""
        return False

    def once(self, compute: Callable[[], Sequence[Tensor]], replays: Callable[[], object]) -> Tensors:
        """Return the result of `compute` or, once `replays` is called, the result that the first run saved."""
        return tuple(compute())


NONE = Replay()
finders: list[Callable[[], Replay | None]] = []  # each returns the innermost checkpoint around this call, if any


def current() -> Replay:
    """Return the innermost checkpoint around this call; `NONE` outside a checkpoint."""
    return next((found for find in finders if (found := find()) is not None), NONE)
