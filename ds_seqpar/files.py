"""Reads files that a user gives. A file that is too large, too deep or no valid JSON is refused, and so is a value of a
wrong type or out of range. One sentence then names the file, the key and the value."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from .errors import ConfigError, did_you_mean

LARGEST_FILE = 2**22  # bytes: the largest configurations of models have some 100 KB
DEEPEST = 32  # objects and lists inside one another
LARGEST = 2**63 - 1  # whole number
SHOWN = 60  # characters of a value in a sentence
LONGEST = 200  # characters of a library's message in a sentence
Made = TypeVar("Made")


def write_text(path: str | os.PathLike[str], text: str, kind: str) -> None:
    """Writes a text file. kind: what it is for, as "a trace". Raises ConfigError for a file that cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{kind} needs a file that can be written; got {path}: {error}") from None


def read_text(path: str | os.PathLike[str], kind: str, form: str = "file") -> str:
    """The text of a file. kind: what it is for, as "the DeepSpeed configuration". Raises ConfigError for a file that
    cannot be read, is larger than `LARGEST_FILE`, or is not UTF-8."""
    try:
        with open(path, "rb") as file:
            found = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{kind} must be a readable {form}; {path}: {reason}") from None
    if len(found) > LARGEST_FILE:
        raise ConfigError(f"{kind} must have at most {LARGEST_FILE} bytes; {path} has more")
    try:
        return found.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{kind} must be UTF-8 text; {path}: {error.reason}") from None


def read_json(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """The object that a JSON file holds. Raises ConfigError as `read_text` and `parse_json` do, and for a file that
    holds no object."""
    content = parse_json(read_text(path, kind, "JSON file"), kind, str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{kind} must be a JSON object; {path} holds a {type(content).__name__}")
    return content


def parse_json(text: str, kind: str, place: str, or_text: bool = False) -> Any:
    """The value of a JSON text. place: where it is from; or_text: whether a text that is no JSON stands for itself.
    Raises ConfigError for a text that is not valid JSON, and for an object with a key twice. So it does for a number
    that is not finite or has more than 64 bits, and for more than `DEEPEST` objects and lists inside one another."""
    too_deep = f"{kind} must have at most {DEEPEST} objects and lists inside one another; {place} has more"
    try:
        content = json.loads(
            text, object_pairs_hook=_once, parse_int=_whole, parse_float=_finite, parse_constant=_NoNumber
        )
    except json.JSONDecodeError as error:
        if or_text:
            return text
        raise ConfigError(
            f"{kind} must be valid JSON; {place}, line {error.lineno} column {error.colno}: {error.msg}"
        ) from None
    except _Twice as error:
        raise ConfigError(
            f"{kind} must have each key once; {place} has {error} twice in one object, remove one"
        ) from None
    except RecursionError:
        raise ConfigError(too_deep) from None
    for key, value, depth in _walk(content):
        if depth > DEEPEST:
            raise ConfigError(too_deep)
        if isinstance(value, _NoNumber):
            raise ConfigError(
                f"{kind} must have finite numbers of at most 64 bits; {place} has {key or 'as a whole'}: {_cut(value)}"
            )
    return content


def call_library(library: str, place: str, content: Mapping[str, Any], make: Callable[[dict[str, Any]], Made]) -> Made:
    """make(content), for a function of a library. Raises ConfigError for a content that the library refuses; the
    sentence has the key that is to blame, its value, and the library's message."""
    with quiet():
        try:
            return make(copy.deepcopy(dict(content)))
        except ConfigError:
            raise
        except Exception as error:  # of any kind: libraries raise what comes of a wrong type
            found = refused_setting(content, functools.partial(_accepts, make))
            said = f"{type(error).__name__}: {_first_sentence(error)}"
    given = f'"{found[0]}": {shown(found[1])}' if found else "several of its settings"
    raise ConfigError(f"{place} must be one that {library} takes; it refuses {given} ({said})")


def refused_setting(content: Mapping[str, Any], accepts: Callable[[dict[str, Any]], bool]) -> tuple[str, Any] | None:
    """(key, value) of the first setting without which a refused content is accepted; the key has dots where it is
    inside objects. None where no single setting is to blame."""
    for key, value in content.items():
        if accepts({name: other for name, other in content.items() if name != key}):
            inside = refused_setting(value, _accepts_inside(content, key, accepts)) if isinstance(value, dict) else None
            return (f"{key}.{inside[0]}", inside[1]) if inside else (key, value)
    return None


def _accepts_inside(
    content: Mapping[str, Any], key: str, accepts: Callable[[dict[str, Any]], bool]
) -> Callable[[dict[str, Any]], bool]:
    return lambda value: accepts({**content, key: value})


def _accepts(make: Callable[[dict[str, Any]], Any], content: dict[str, Any]) -> bool:
    try:
        make(copy.deepcopy(content))
    except Exception:
        return False
    return True


def _first_sentence(error: Exception) -> str:
    """The first sentence of an error, without the title and the address that pydantic adds."""
    details = getattr(error, "errors", None)
    text = " ".join((details()[0]["msg"] if callable(details) else str(error)).split())
    return re.split(r"[.!?]\s+(?=[A-Z])", text)[0][:LONGEST]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A context without the warnings of libraries: some go to stdout, which a program may read."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def shown(value: Any) -> str:
    """A value as JSON, cut to a length that fits a sentence."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # of a dict that a program made
        text = f"a {type(value).__name__}"
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


@dataclasses.dataclass(frozen=True)
class JsonField:
    """A value that a user gave, with its place for errors. place: the file, as "machine ours"; key: with dots, "" for
    the whole file. Each method returns the value if it has the type that is asked for, and else raises ConfigError."""

    place: str
    value: Any
    key: str = ""

    def wrong(self, wanted: str) -> ConfigError:
        return ConfigError(f"{self.place}: {self.key or 'the file'} must be {wanted}; got {shown(self.value)}")

    def inner(self, key: str, value: Any) -> JsonField:
        return JsonField(self.place, value, f"{self.key}.{key}" if self.key else key)

    def object(self, fields: Sequence[str] = ()) -> dict[str, JsonField]:
        """The values of an object. fields: exactly the keys that it must have; (): any keys, but at least one."""
        where = f"{self.place}: {self.key or 'the file'}"
        if not isinstance(self.value, Mapping) or not self.value:
            raise self.wrong("an object")
        if fields and (missing := [field for field in fields if field not in self.value]):
            raise ConfigError(f"{where} needs {', '.join(fields)}; it has no {', '.join(missing)}")
        if fields and (unknown := [field for field in self.value if field not in fields]):
            raise ConfigError(
                f"{where} takes {', '.join(fields)}; got {unknown[0]!r:.{SHOWN}}{did_you_mean(str(unknown[0]), fields)}"
            )
        return {key: self.inner(str(key), value) for key, value in self.value.items()}

    def number(self, least: float = -math.inf, most: float = math.inf) -> float:
        """From `least` to `most`, and finite."""
        value = self.value
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < math.inf:
            raise self.wrong("a finite number" if math.isinf(least) else f"a number from {least:g}")
        if value > min(most, sys.float_info.max):
            raise self.wrong(f"a number of at most {min(most, sys.float_info.max):g}")
        return float(value)

    def count(self, least: int = 1, most: int = LARGEST) -> int:
        """A whole number from `least` to `most`."""
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < least:
            raise self.wrong(f"a whole number from {least}")
        if self.value > most:
            raise self.wrong(f"a whole number of at most {most}")
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        return self.value

    def like(self, default: Any) -> Any:
        """The value as the type of a default: true or false, a text, or a number from 0 on."""
        if isinstance(default, bool):
            return self.flag()
        return self.text() if isinstance(default, str) else type(default)(self.number(least=0, most=LARGEST))


class _NoNumber(str):
    """The text of a number that is not finite, or has more than 64 bits."""

    __slots__ = ()


class _Twice(Exception):
    """A key that an object has twice, as `shown` gives it."""


def _whole(text: str) -> int | str:
    return int(text) if len(text) <= 20 and abs(int(text)) <= LARGEST else _NoNumber(text)


def _finite(text: str) -> float | str:
    return value if math.isfinite(value := float(text)) else _NoNumber(text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(shown(key))
        found[key] = value
    return found


def _walk(content: Any) -> Iterator[tuple[str, Any, int]]:
    """(key with dots, value, depth) of everything, from the outside in."""
    level, depth = [("", content)], 0
    while level:
        below: list[tuple[str, Any]] = []
        for key, value in level:
            yield key, value, depth
            inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            below += [(f"{key}.{name}" if key else str(name), inside) for name, inside in inner]
        level, depth = below, depth + 1
