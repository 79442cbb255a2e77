"""The schedules. Every file and folder here makes one `Schedule` or a family of them, and is found by itself;
`register` takes others. A `Schedule` says all there is to know of it, its own layouts too; no other module spells its
name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType

from ...errors import SECTION, ConfigError, check_choice
from ..sharding import layout
from .base import Schedule, Setting

DEFAULT = "ring"  # what "auto" is
SCHEDULES: dict[str, Schedule] = {}


def register(schedule: Schedule) -> None:
    """Lets this rank choose the schedule by its name. Call it on every rank, before any configuration is made. Raises
    ConfigError where its name or that of a setting is taken."""
    names = [schedule.name, *(setting.name for setting in schedule.settings)]
    if taken := [schedule.name] * (schedule.name in ("auto", *SCHEDULES)) + [n for n in names[1:] if n in settings()]:
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
    """Takes a schedule off again. Raises ConfigError where there is none of this name."""
    check_choice("a schedule that is removed", name, SCHEDULES)
    layout.remove(*SCHEDULES.pop(name).extra_layouts)


def schedule(name: str) -> Schedule:
    """The schedule of this name, or "auto". Raises ConfigError, naming the nearest, where there is none."""
    check_choice(f"{SECTION}.schedule", name, ("auto", *SCHEDULES))
    return SCHEDULES[DEFAULT if name == "auto" else name]


def settings() -> dict[str, tuple[Setting, Schedule]]:
    """Name -> (setting, its schedule) for all settings that schedules have of their own."""
    return {setting.name: (setting, schedule) for schedule in SCHEDULES.values() for setting in schedule.settings}


def schedules_in(modules: Iterable[ModuleType]) -> list[Schedule]:
    """The schedules of these modules by name; one that a module imports from another is the same."""
    schedules = {value for module in modules for value in vars(module).values() if isinstance(value, Schedule)}
    return sorted(schedules, key=lambda one: one.name)


_MODULES = [importlib.import_module(f".{file.name}", __name__) for file in pkgutil.iter_modules(__path__)]
for _one in schedules_in(_MODULES):
    register(_one)


__all__ = ["SCHEDULES", "Schedule", "Setting", "register", "remove", "schedule", "settings"]
