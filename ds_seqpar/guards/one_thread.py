"""Restrict communication to one thread per process, for all SequenceParallel objects.

With two threads, a call in one thread could be paired with a call in the other thread on another rank, because the
order of threads differs between ranks.
"""

from __future__ import annotations

import threading

from ..base import compat
from ..base.errors import ConfigError

_bound: threading.Thread | None = None  # the only thread that may communicate, for all objects in the process


def bind_thread() -> None:
    """Restrict communication to the current thread."""
    global _bound
    _bound = threading.current_thread()


def bound_thread() -> threading.Thread | None:
    return _bound


def check_thread() -> None:
    """Raise ConfigError outside the bound thread, except in autograd threads, which run the backward pass on a
    device.
    """
    current = threading.current_thread()
    if _bound not in (None, current) and not compat.is_autograd_thread(current):
        raise ConfigError(
            "sequence parallelism needs all its calls in one thread, backward too, which is the one that made the last "
            f"SequenceParallel; got a call in {current.name!r} after {_bound.name!r}, to go on there call "
            "sp.bind_to_thread() in it first, on every rank, and nothing more in the other"
        )
