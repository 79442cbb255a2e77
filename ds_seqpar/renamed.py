"""Names of version 0.1 that have changed. Until 0.3 they are still read, with one warning each."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from .errors import SECTION, ConfigError

# old setting -> new; a schedule's own ones too
SETTINGS = {
    "forward": "rotate_forward",
    "backward": "rotate_backward",
    "placement": "rank_order",
    "travel_dtype": "comm_dtype",
    "head_stages": "head_chunks",
    "keep_attention": "recompute_attention",
    "keep_exchanged": "save_qkv_after_all_to_all",
    "window": "ring_size",
}
OPPOSITE = "keep_attention"  # true then is false now
AXES = {"window": "inner_ring", "windows": "outer_ring"}  # of double_ring, in a list for rank_order
RESERVE = "spare"  # in a machine's file, now reserve_fraction
_warned: set[str] = set()


def warn(kind: str, old: str, new: str) -> None:
    """Warn of an old name, once in each process, on the first rank only. kind: "setting", "argument", ..."""
    if (name := f"{kind} {old}") in _warned:
        return
    _warned.add(name)
    if os.environ.get("RANK", "0") == "0":
        text = f"ds_seqpar: {kind} {old!r} is called {new} since 0.2, and goes in 0.3"
        warnings.warn(text, FutureWarning, stacklevel=_caller_level())


def _caller_level() -> int:
    """Return the stacklevel, in the function that calls this, of the first frame outside of ds_seqpar."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("ds_seqpar."):
        frame, level = frame.f_back, level + 1
    return level


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under their new names.

    Raises:
        ConfigError: A setting is given by its old and its new name.
    """
    renamed = {}
    for name, value in given.items():
        if name in SETTINGS:
            old, new = f"{SECTION}.{name}", f"{SECTION}.{SETTINGS[name]}"
            if SETTINGS[name] in given:
                raise ConfigError(f"{new} is the new name of {old}; got both, leave out {old}")
            not_value = " with the opposite value" if name == OPPOSITE else ""
            warn("setting", name, f"{SETTINGS[name]!r}{not_value}")
            value = not value if name == OPPOSITE and isinstance(value, bool) else value
        if name in ("placement", "rank_order") and isinstance(value, (list, tuple)):
            value = [_axis(axis) for axis in value]
        renamed[SETTINGS.get(name, name)] = value
    return renamed


def _axis(name: Any) -> Any:
    if name in ("window", "windows"):
        warn("axis", name, repr(AXES[name]))
        return AXES[name]
    return name


def setting(config: Any, old: str) -> Any:
    """Return the value of a setting that is asked for by its old name."""
    value = getattr(config, SETTINGS[old])
    warn("setting", old, repr(SETTINGS[old]))
    return not value if old == OPPOSITE else value


def argument(call: str, old: str, new: str, given: dict[str, Any], value: Any, default: Any = None) -> Any:
    """Return an argument of a call, which may be among the keyword arguments without a parameter by its old name.

    Args:
        call: What the argument is of, for the sentence, such as "shard_batches".
        given: The call's keyword arguments that have no parameter.
        value: What was given by the new name.
        default: What `value` is where nothing was given.

    Raises:
        ConfigError: Both names are given.
        TypeError: Another argument is given, which the call does not have.
    """
    value = keyword(old, new, given, value, default, f"argument of {call}")
    for name in given:
        raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
    return value


def keyword(old: str, new: str, given: dict[str, Any], value: Any, default: Any, kind: str = "argument") -> Any:
    """Return `value`, or what is in `given` by the old name, which is taken out.

    Raises:
        ConfigError: Both names are given.
    """
    if old not in given:
        return value
    if value is not default:
        raise ConfigError(f"{new} is the new name of {old}; got both, leave out {old}")
    warn(kind, old, repr(new))
    return given.pop(old)


class Renamed:
    """An attribute's old name: a descriptor that warns and answers with the new one."""

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner, self.old = owner.__name__, name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        warn(f"attribute of {self.owner}", self.old, repr(self.new))
        return getattr(instance, self.new)
