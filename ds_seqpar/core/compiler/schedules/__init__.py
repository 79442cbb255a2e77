"""The registry of schedules.

Each module in this package defines one `Schedule` or a family of schedules and is imported automatically. Call
`register` to add schedules from elsewhere, such as the add-ons in `ds_seqpar.schedules`. To handle schedule names with
its own prefix, an add-on adds a function to `READERS`. Everything specific to a schedule, including its layouts, is in
the `Schedule` object. No other module mentions a schedule by name.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from types import ModuleType

from ....base.errors import SECTION, ConfigError, check_choice
from ....base.seams import load
from ..sharding import layout
from .base import Schedule, Setting

DEFAULT = "ring"  # the schedule that "auto" selects
SCHEDULES: dict[str, Schedule] = {}
# maps a name prefix to a function (name, registered schedules) that returns the schedule
READERS: dict[str, Callable[[str, Iterable[Schedule]], Schedule]] = {}


def register(schedule: Schedule) -> None:
    """Register a schedule so that configurations can select it by name.

    Call this function on every rank before creating any configuration.

    Raises:
        ConfigError: The name of the schedule or of one of its settings is already taken, or the schedule's axes are
            invalid.
    """
    names = [schedule.name, *(setting.name for setting in schedule.settings)]
    known = settings()
    if taken := [schedule.name] * (schedule.name in ("auto", *SCHEDULES)) + [n for n in names[1:] if n in known]:
        raise ConfigError(f"a schedule and its settings need names of their own; got {', '.join(taken)}, rename it")
    axes = {name for name, _ in schedule.axes(1, schedule.resolve(1, {}, None))}
    named = {*schedule.collective_axes, *schedule.ring_axes}
    if axes & {"ulysses", "data"} or not named <= axes:
        raise ConfigError(
            f"a schedule's axes must be neither ulysses nor data, and hold those of its collectives and its ring; got "
            f"{', '.join(sorted(axes))}, and {', '.join(sorted(named)) or 'none'} for {schedule.name}"
        )
    layout.register(*schedule.extra_layouts)
    SCHEDULES[schedule.name] = schedule


def remove(name: str) -> None:
    """Remove a schedule and its layouts.

    Raises:
        ConfigError: No schedule has this name.
    """
    check_choice("a schedule that is removed", name, SCHEDULES)
    layout.remove(*SCHEDULES.pop(name).extra_layouts)


def schedule(name: str) -> Schedule:
    """Return the schedule with this name.

    "auto" selects the default schedule. "file:PATH" loads a schedule from a file, which each process reads only once.

    Raises:
        ConfigError: No schedule has this name; the message suggests the closest match.
        PlanError: The plans in the file do not compute exact attention.
    """
    if isinstance(name, str) and any(map(name.startswith, READERS)):
        return _read(name)
    check_choice(f"{SECTION}.schedule", name, ("auto", *(f"{prefix}PATH" for prefix in READERS), *SCHEDULES))
    return SCHEDULES[DEFAULT if name == "auto" else name]


@functools.cache
def _read(name: str) -> Schedule:
    return next(read for prefix, read in READERS.items() if name.startswith(prefix))(name, SCHEDULES.values())


def settings() -> dict[str, tuple[Setting, Schedule]]:
    """Map the name of each schedule-specific setting to the setting and the schedule that it belongs to."""
    return {setting.name: (setting, schedule) for schedule in SCHEDULES.values() for setting in schedule.settings}


def schedules_in(modules: Iterable[ModuleType]) -> list[Schedule]:
    """Return the distinct schedules defined or imported in these modules, sorted by name."""
    schedules = {value for module in modules for value in vars(module).values() if isinstance(value, Schedule)}
    return sorted(schedules, key=lambda schedule: schedule.name)


_MODULES = [importlib.import_module(f".{file.name}", __name__) for file in pkgutil.iter_modules(__path__)]
for _schedule in schedules_in(_MODULES):
    register(_schedule)
load("schedules")


__all__ = ["SCHEDULES", "Schedule", "Setting", "register", "remove", "schedule", "settings"]
