"""One thread of a process communicates, for all its SequenceParallels.

With two threads, ranks could pair a call in one with a call in the other, since their order differs between ranks.
"""

from __future__ import annotations

import threading

from ..base import compat
from ..base.errors import ConfigError

_bound: threading.Thread | None = None  # the thread that may communicate, of all objects of the process


def bind_thread() -> None:
    """Make the current thread the only one that may communicate."""
    global _bound
    _bound = threading.current_thread()


def bound_thread() -> threading.Thread | None:
    return _bound


def check_thread() -> None:
    """Raise ConfigError in any other thread, except autograd's threads, which run backward on a device."""
    current = threading.current_thread()
    if _bound not in (None, current) and not compat.is_autograd_thread(current):
        raise ConfigError(
            "sequence parallelism needs all its calls in one thread, backward too, which is the one that made the last "
            f"SequenceParallel; got a call in {current.name!r} after {_bound.name!r}, to go on there call "
            "sp.bind_to_thread() in it first, on every rank, and nothing more in the other"
        )
