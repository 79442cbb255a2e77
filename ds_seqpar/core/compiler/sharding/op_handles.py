"""Integer handles for Python objects, because torch custom ops accept only tensors and scalars."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from ....base.errors import ConfigError

_OBJECTS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def handle_of(obj: Any) -> int:
    """Return a handle for an object. The handle is valid as long as the object is referenced elsewhere."""
    handle = next(_numbers)
    _OBJECTS[handle] = obj
    return handle


def objects_of(*handles: int) -> list[Any]:
    """Return the objects for the given handles, so that a backward pass can keep the objects alive after the caller
    drops them.

    Symbolic integers (torch.compile's placeholders for changing numbers) and negative numbers are not handles and are
    skipped.
    """
    return [object_of(handle) for handle in handles if type(handle) is int and handle >= 0]


def object_of(handle: int) -> Any:
    """Return the object for a handle.

    Raises:
        ConfigError: The object no longer exists.
    """
    if (obj := _OBJECTS.get(handle)) is None:
        raise ConfigError(
            "attention needs the SequenceParallel, model, mask and shards that it was made with; got a call after one "
            "of them was dropped, keep them as long as what was compiled with them"
        )
    return obj
