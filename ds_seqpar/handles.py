"""A custom op takes no objects, so it takes a number; this is the one place that turns it back into an object."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from typing import Any

from .errors import ConfigError

HELD = 256  # more than a run attends with between a forward and its backward
_held: OrderedDict[int, Any] = OrderedDict()
_OBJECTS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def handle_of(thing: Any) -> int:
    """A number for `thing`, good while something else holds it."""
    handle = next(_numbers)
    _OBJECTS[handle] = thing
    return handle


def hold(*handles: int) -> None:
    """Keeps what these stand for, a while: a compiled graph has the numbers only when its backward comes."""
    for handle in handles:
        _held[handle] = of_handle(handle)
        _held.move_to_end(handle)
    while len(_held) > HELD:
        _held.popitem(last=False)


def held(*handles: int) -> list[Any]:
    """What a backward needs even where the caller has let go of it; a compiler has symbols for numbers that change, and
    a number below 0 stands for nothing."""
    return [of_handle(handle) for handle in handles if type(handle) is int and handle >= 0]


def of_handle(handle: int) -> Any:
    """Raises ConfigError where it is gone."""
    if (thing := _OBJECTS.get(handle)) is None:
        raise ConfigError(
            "attention needs the SequenceParallel, model, mask and shards that it was made with; got a call after one "
            "of them was dropped, keep them as long as what was compiled with them"
        )
    return thing
