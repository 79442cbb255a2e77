"""What torch.profiler shows of this library. It costs nothing while no profiler is on."""

from __future__ import annotations

import contextlib

from torch.autograd import profiler

_NO_SPAN = contextlib.nullcontext()


def is_on() -> bool:
    """Return whether a profiler of torch is on."""
    return profiler._is_profiler_enabled  # record_function itself costs 17 us, also where none is


def span(label: str) -> contextlib.AbstractContextManager[object]:
    """Return a context that a profiler shows under this label, if one is on."""
    return profiler.record_function(f"ds_seqpar {label}") if is_on() else _NO_SPAN
