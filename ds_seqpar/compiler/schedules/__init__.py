"""Schedules: one a file, or a family of them, or a folder, found by themselves; `register` takes others. Each says all
there is to know of it in a `Schedule`, its own layouts too; nobody else spells its name.
"""

from __future__ import annotations

import importlib
import pkgutil

from ...errors import SECTION, ConfigError, check_choice
from .. import layout
from .base import Schedule, Setting

DEFAULT = "ring"  # what "auto" is
SCHEDULES: dict[str, Schedule] = {}


def register(schedule: Schedule) -> None:
    """From now on the schedule can be chosen by its name, on this rank: do it on every one, before any configuration is
    made. Raises ConfigError where its name or that of a setting is taken."""
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
    layout.register(*schedule.own_layouts)
    SCHEDULES[schedule.name] = schedule


def remove(name: str) -> None:
    """Takes a schedule off again. Raises ConfigError where there is none of this name."""
    check_choice("a schedule that is removed", name, SCHEDULES)
    layout.remove(*SCHEDULES.pop(name).own_layouts)


def schedule(name: str) -> Schedule:
    """The schedule of this name, or "auto". Raises ConfigError, naming the nearest, where there is none."""
    check_choice(f"{SECTION}.schedule", name, ("auto", *SCHEDULES))
    return SCHEDULES[DEFAULT if name == "auto" else name]


def settings() -> dict[str, tuple[Setting, Schedule]]:
    """Name -> setting and the schedule that it belongs to, of all that schedules have of their own."""
    return {setting.name: (setting, schedule) for schedule in SCHEDULES.values() for setting in schedule.settings}


def _register_own() -> None:
    modules = [importlib.import_module(f".{module.name}", __name__) for module in pkgutil.iter_modules(__path__)]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Schedule)]
    for one in sorted(found, key=lambda one: one.name):
        register(one)


_register_own()


__all__ = ["SCHEDULES", "Schedule", "Setting", "register", "remove", "schedule", "settings"]
