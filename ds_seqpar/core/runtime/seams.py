"""Hooks through which add-ons observe and guard calls.

The observer for program executions is in `walk.py`, and the context manager for transfers is in `transport.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...base.errors import SeqParError
from ...base.fingerprint import Compared

ATTENTION = "attention"  # name of attention calls in error messages


class Inputs(NamedTuple):
    """A call's inputs, before anything is sent."""

    call: str  # name of the function that the user called
    compared: Compared  # fields that must be equal on all ranks that share the sequence; empty if inputs are invalid
    operands: Mapping[str, Any]  # tensors by name; arbitrary objects if inputs are invalid


class GuardedCall(NamedTuple):
    """The forward or backward pass of a call that communicates."""

    direction: str  # "forward" or "backward"
    name: str  # name of the function in error messages
    layer: int | None = None  # layer index in a patched model
    sends: bool = True  # False if a checkpoint replays the result
    operands: Mapping[str, Any] = {}  # for attention, tensors and numbers by name

    @property
    def title(self) -> str:
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"


class Guard:
    """An object that is notified of calls as long as it is in `Runtime.guards`."""

    def admit(self, inputs: Inputs, error: SeqParError | None) -> SeqParError | None:
        """Check a call's inputs. Guards run in list order.

        This method is collective if the call is collective.

        Args:
            error: Error from earlier checks if this rank cannot compute the call, otherwise None.

        Returns:
            The error to pass to the next guard, or to raise if this is the last guard.
        """
        return error

    def around(self, call: GuardedCall) -> contextlib.AbstractContextManager[None]:
        """Return a context manager within which all communication of a forward or backward pass happens."""
        return contextlib.nullcontext()
