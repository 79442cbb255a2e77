"""One thread of a process calls what communicates. In two threads at once ranks could pair one thread's call with the
other's, since which thread comes first differs between ranks."""

from __future__ import annotations

import threading

import torch

from ..errors import ConfigError

_bound: threading.Thread | None = None


def bind() -> None:
    """Makes the current thread the one that may communicate."""
    global _bound
    _bound = threading.current_thread()


def check() -> None:
    """Raises ConfigError in any other thread, but not in those of autograd's own that run a backward on a device."""
    current = threading.current_thread()
    if current is _bound:
        return
    if isinstance(current, threading._DummyThread) and torch._C._current_graph_task_id() >= 0:
        return  # one that Python did not start
    raise ConfigError(
        "sequence parallelism needs all its calls, backward too, in the thread that made the last SequenceParallel; "
        f"got one in {current.name!r} for {_bound and _bound.name!r}, call sp.bind_to_thread() there first, on every "
        "rank, and no more in the other"
    )
