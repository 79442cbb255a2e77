"""Handles: a custom op takes no objects, so it takes numbers, which are mapped back to the objects here."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from typing import Any

from ...errors import ConfigError

MOST_ALIVE = 256  # more than the objects that attention is called with between a forward and its backward
_alive: OrderedDict[int, Any] = OrderedDict()
_OBJECTS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def handle_of(obj: Any) -> int:
    """Return a handle of an object, valid as long as something else refers to the object."""
    handle = next(_numbers)
    _OBJECTS[handle] = obj
    return handle


def keep_alive(*handles: int) -> None:
    """Keep references to the last `MOST_ALIVE` objects that were given.

    A compiled graph has only handles until its backward.
    """
    for handle in handles:
        _alive[handle] = object_of(handle)
        _alive.move_to_end(handle)
    while len(_alive) > MOST_ALIVE:
        _alive.popitem(last=False)


def objects_of(*handles: int) -> list[Any]:
    """Return the objects, so that a backward refers to them even if the caller drops them.

    Skip a compiler's symbols, which are placeholders of numbers that change, and numbers below 0, which are handles of
    nothing.
    """
    return [object_of(handle) for handle in handles if type(handle) is int and handle >= 0]


def object_of(handle: int) -> Any:
    """Return the object of a handle.

    Raises:
        ConfigError: Nothing refers to the object any more.
    """
    if (obj := _OBJECTS.get(handle)) is None:
        raise ConfigError(
            "attention needs the SequenceParallel, model, mask and shards that it was made with; got a call after one "
            "of them was dropped, keep them as long as what was compiled with them"
        )
    return obj
