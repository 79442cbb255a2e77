"""A custom op takes no objects, so it takes handles, which are numbers. Here a handle becomes its object again."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from typing import Any

from ...errors import ConfigError

MOST_ALIVE = 256  # more objects than attention is called with between a forward and its backward
_alive: OrderedDict[int, Any] = OrderedDict()
_OBJECTS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def handle_of(thing: Any) -> int:
    """A handle of an object, good as long as something else refers to the object."""
    handle = next(_numbers)
    _OBJECTS[handle] = thing
    return handle


def keep_alive(*handles: int) -> None:
    """Refers to the last `MOST_ALIVE` objects that it was given: a compiled graph has only handles until its backward
    comes."""
    for handle in handles:
        _alive[handle] = object_of(handle)
        _alive.move_to_end(handle)
    while len(_alive) > MOST_ALIVE:
        _alive.popitem(last=False)


def objects_of(*handles: int) -> list[Any]:
    """The objects, for a backward to refer to even if the caller drops them. Left out are a compiler's symbols, which
    stand for numbers that change, and numbers below 0, which are handles of nothing."""
    return [object_of(handle) for handle in handles if type(handle) is int and handle >= 0]


def object_of(handle: int) -> Any:
    """The object. Raises ConfigError where nothing refers to it any more."""
    if (thing := _OBJECTS.get(handle)) is None:
        raise ConfigError(
            "attention needs the SequenceParallel, model, mask and shards that it was made with; got a call after one "
            "of them was dropped, keep them as long as what was compiled with them"
        )
    return thing
