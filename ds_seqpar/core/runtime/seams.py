"""Hooks for add-ons around a call. The observer of a walk is in `walk.py`, the context of a transfer in
`transport.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...base.errors import SeqParError
from ...base.fingerprint import Compared

ATTENTION = "attention"  # the name of its calls in errors


class Inputs(NamedTuple):
    """The inputs of a call, before it sends anything."""

    call: str  # the function that a user calls
    compared: Compared  # what must be the same on all ranks of the sequence; empty where inputs are wrong
    operands: Mapping[str, Any]  # the tensors by name; where inputs are wrong, anything


class GuardedCall(NamedTuple):
    """The forward or the backward of a call that communicates."""

    direction: str  # "forward" or "backward"
    name: str  # of the function, in errors
    layer: int | None = None  # of a patched model
    sends: bool = True  # False where a checkpoint replays its result
    operands: Mapping[str, Any] = {}  # of attention: tensors and numbers by name

    @property
    def title(self) -> str:
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"


class Guard:
    """An object that is notified of calls as long as it is in `Runtime.guards`."""

    def admit(self, inputs: Inputs, error: SeqParError | None) -> SeqParError | None:
        """Check the inputs of a call, in the order of guards. Collective if the call is.

        Args:
            error: Why this rank cannot compute the call, according to earlier checks.

        Returns:
            The error that this rank passes to the next guard, and raises after the last one.
        """
        return error

    def around(self, call: GuardedCall) -> contextlib.AbstractContextManager[None]:
        """Return a context for a forward or backward; everything is sent inside it."""
        return contextlib.nullcontext()
